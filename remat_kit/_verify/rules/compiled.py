"""Rules on what the compiler makes of remat. They compile, and run only where a target is given."""

from __future__ import annotations

from collections.abc import Iterator

from remat_kit._target.effect import offload_findings
from remat_kit._verify.finding import Hit, Where
from remat_kit._verify.rule import rule
from remat_kit._verify.subject import Subject

_MOST = 0.5  # see `_target.effect`
_NOTHING = 0.05


@rule(
    "RK013",
    "recomputation merged by the compiler",
    "The compiler may drop the barriers around recomputation and take the values of the forward pass: then nothing is "
    "computed again, and nothing is saved. The CPU's compiler does so outside loops.",
)
def merged(s: Subject) -> Iterator[Hit]:
    """Fewer matrix products than the program repeats."""
    m = s.measurement
    effect = m.effect
    if effect is not None and effect.flops is not None and effect.counted_flops > 0:
        if effect.flops < _MOST * effect.counted_flops:
            yield Hit(
                _first(s),
                f"the program compiled for {m.platform} repeats hardly any of the matrix products that remat repeats.",
                {"repeated_in_the_program_flops": effect.counted_flops, "compiled_flops": max(effect.flops, 0)},
                "On a CPU measure with keep_barriers=True to see what an accelerator would do; else set "
                "prevent_cse=True, or rematerialize the body of a scan.",
            )


@rule(
    "RK014",
    "offload dropped",
    "A backend without a memory of its own, or an operation that it cannot move, keeps on the device what the policy "
    "offloads.",
)
def offload_dropped(s: Subject) -> Iterator[Hit]:
    """Offloaded values that the compiled program does not have in host memory."""
    m = s.measurement
    for sentence in offload_findings(m):
        wanted = 0 if m.residuals is None else m.residuals.host_bytes
        yield Hit(
            _first(s),
            sentence,
            {"offloaded_bytes": wanted, "compiled_host_bytes": m.host_bytes or 0},
            "Offload block inputs ('offload name=block_input') or values by name, on a TPU or GPU.",
        )


@rule(
    "RK026",
    "remat that does not lower the peak",
    "Fewer bytes are kept, and as many are in use at the worst moment: the peak is made elsewhere, or by the "
    "recomputation itself.",
)
def no_effect(s: Subject) -> Iterator[Hit]:
    """A compiled peak that hardly differs from that without remat."""
    m = s.measurement
    effect = m.effect
    if effect is None or effect.peak_bytes is None or effect.predicted_bytes is None or m.devices != 1:
        return
    if effect.predicted_bytes > 0 and effect.peak_bytes < _NOTHING * effect.predicted_bytes:
        yield Hit(
            _first(s),
            f"the compiled peak on {m.platform} is {'higher' if effect.peak_bytes < 0 else 'the same'} with remat.",
            {
                "fewer_residuals_bytes": effect.predicted_bytes,
                "compiled_peak_bytes": m.peak_bytes,
                "without_remat_bytes": m.peak_bytes + effect.peak_bytes,
            },
            "Look at the largest buffers at the peak (print(rk.measure(...))), and rematerialize smaller blocks.",
        )


def _first(s: Subject) -> Where:
    return s.place(s.regions[0].chain)
