"""What a reader of a residual report must know besides the figures: one sentence each."""

from __future__ import annotations

from typing import Any

import jax

from remat_kit._trace import jaxprs, recomputed
from remat_kit._trace.levels import Level, walk
from remat_kit._trace.linearized import Linearized
from remat_kit._trace.report import Kind


def notes(
    entries: Any, lin: Linearized, written: Any, rules: Any, blocks: Any, removed: Any, replaced: Any, sharded: bool
) -> tuple[str, ...]:
    """All notes on one report.

    Args:
      entries: what was found to be kept.
      lin: the differentiated program.
      written: the program as written, closed.
      rules: the policies applied, or None.
      blocks: the blocks that they were applied to.
      sharded: whether any argument is spread over devices.
      removed, replaced: paths of existing regions that gave way, or whose policy was replaced.
    """
    found: list[str] = _sharded(entries, sharded)
    if rules is not None and [c.kind for c in blocks] == ["whole"] and rules.policies[0].is_full:
        found.append(
            "The program is one block. Remat of a whole program saves little: the backward pass starts by computing "
            "all of it again."
        )
    if replaced:
        found.append(f"The policy replaces that of existing jax.checkpoint regions: {_list(replaced)}.")
    if removed:
        found.append(f"Blocks do not nest; these existing jax.checkpoint regions gave way: {_list(removed)}.")
    found += _batched_products(written, rules)
    found += _rerun_rules(lin)
    return tuple(found)


def _sharded(entries: Any, sharded: bool) -> list[str]:
    """Under automatic sharding, only XLA knows where intermediates lie."""
    kept = [e.entry for e in entries if e.entry.action in (Kind.SAVED, Kind.OFFLOADED)]
    if sharded and any(e.bytes == e.global_bytes for e in kept):
        return [
            "Arguments are sharded, but how XLA shards the intermediates is not known before compilation: "
            "their bytes are those of whole arrays, except where a type or shard_map says more."
        ]
    return []


def _list(paths: Any) -> str:
    shown = list(paths)[:6]
    return ", ".join(shown) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")


def _batched_products(written: Any, rules: Any) -> list[str]:
    """Matrix products that a rule on products without batch dimensions passes over."""
    if rules is None:
        regions = [jaxprs.remat_region(e) for _, e in walk(Level(written))]
        native = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        programs = [Level(r.jaxpr) for r in regions if r is not None and r.policy is native]
    else:
        asks = [r for p in rules.policies for r in p.rules if r.selector.batch_dims is False]
        programs = [Level(written)] if asks else []
    found = [
        e
        for program in programs
        for _, e in walk(program)
        if e.primitive.name == "dot_general" and any(map(len, e.params["dimension_numbers"][1]))
    ]
    if not found:
        return []
    file, line, _ = jaxprs.source_line(found[0])
    return [
        f"Matrix products with batch dimensions, {len(found)} of them (the first at {file.rsplit('/', 1)[-1]}:{line}), "
        "are not kept by a rule for products without them: attention scores, MoE experts, or products under vmap. "
        "The preset 'matmuls' keeps these too."
    ]


def _rerun_rules(lin: Linearized) -> list[str]:
    """Forward rules of custom_vjp functions that run again in the backward pass, and what would prevent it."""
    out = []
    remedy = "'save op=custom_vjp_call' keeps all of them."
    if jaxprs.remat3():
        remedy = "jax_remat3 keeps nothing of such rules; the classic implementation can ('save op=custom_vjp_call')."
    for rule in recomputed.forward_rules(lin):
        file, line, _ = jaxprs.source_line(lin.tagged.origins[rule.tag].eqn)
        out.append(
            f"The forward rule of the custom_vjp call at {file.rsplit('/', 1)[-1]}:{line} runs again in the backward "
            f"pass: its residuals {', '.join(rule.types)} are not covered by the policy. {remedy}"
        )
    return out
