"""All rules of `lint`, by code."""

from __future__ import annotations

from remat_kit._verify.rule import Rule
from remat_kit._verify.rules import compiled, effects, names, placement, recomputation, worth

RULES: dict[str, Rule] = {
    r.code: r
    for r in (
        names.unknown_name,
        names.idle_name,
        names.shared_name,
        placement.whole_loss,
        placement.around_scan,
        placement.nested,
        placement.last_block,
        recomputation.ignored_policy,
        names.hidden_name,
        recomputation.kernel_again,
        recomputation.batched_products,
        placement.prevent_cse,
        compiled.merged,
        compiled.offload_dropped,
        recomputation.masks,
        recomputation.routing,
        recomputation.collectives,
        effects.repeated_callback,
        effects.refused_callback,
        effects.written_twice,
        effects.leaked,
        worth.carries,
        worth.cheap,
        worth.dear,
        names.named_too_late,
        compiled.no_effect,
    )
}
