"""Rules on side effects: what runs twice, what fails under differentiation, what leaks."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from remat_kit._trace import jaxprs, tracing
from remat_kit._trace.recomputed import Again
from remat_kit._verify.finding import Hit, Where
from remat_kit._verify.purity import leaks
from remat_kit._verify.regions import chain_of
from remat_kit._verify.rule import rule
from remat_kit._verify.subject import Subject, Unavailable

_REPEATED = {
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "pure_callback": "jax.pure_callback",
}


@rule(
    "RK018",
    "callback that runs twice",
    "Recomputation calls the host again: prints appear twice, and a pure callback is waited for twice.",
)
def repeated_callback(s: Subject) -> Iterator[Hit]:
    """Debug callbacks and pure callbacks among what is computed again."""
    lines: dict[tuple[str, int], list[Again]] = {}
    for x in s.again:
        if jaxprs.op_of(x.eqn) in _REPEATED:
            where = s.origin(s.lin, x.chain)
            lines.setdefault((where.file, where.line), []).append(x)
    for group in lines.values():
        yield Hit(
            s.first(group),
            f"{_REPEATED[jaxprs.op_of(group[0].eqn)]} is in a region, and runs again in the backward pass.",
            {"repeated_calls": sum(x.level.trips for x in group)},
            "Move it out of the region, or keep what a pure callback returns by name.",
        )


@rule(
    "RK019",
    "io_callback that cannot be differentiated",
    "JAX refuses to differentiate a region with an io_callback, since its effect would be repeated.",
)
def refused_callback(s: Subject) -> Iterator[Hit]:
    """`io_callback` in regions."""
    lines: dict[tuple[str, int], tuple[Where, int]] = {}
    for r in s.regions:
        for level, eqn in r.inside:
            if jaxprs.op_of(eqn) == "io_callback":
                where = s.place((*r.chain, *chain_of(level), eqn))
                first, calls = lines.get((where.file, where.line), (where, 0))
                lines[where.file, where.line] = first, calls + r.level.trips * level.trips
    for where, calls in lines.values():
        yield Hit(
            where,
            "jax.experimental.io_callback is in a region.",
            {"calls_in_a_forward_pass": calls},
            "Move it out of the region; or use jax.debug.callback for what may run twice, jax.pure_callback for what "
            "has no side effects.",
        )


@rule(
    "RK020",
    "mutable reference written twice",
    "Recomputation writes again: what is counted is counted twice, without any error.",
)
def written_twice(s: Subject) -> Iterator[Hit]:
    """Regions that write to a mutable reference."""
    for r in s.regions:
        if written := jaxprs.writes(r.body):
            yield Hit(
                s.place(r.chain),
                f"the region writes to {', '.join(written)}.",
                {"references": len(written)},
                "Return the value instead, and write it outside the region.",
            )


@rule(
    "RK021",
    "tracer leaked through a side effect",
    "Python code that keeps a value of a traced function (in a list, an attribute, a global) keeps a tracer, which is "
    "no value and fails when it is used; under remat it may be one of another trace each time.",
)
def leaked(s: Subject) -> Iterator[Hit]:
    """Traces the function once more and looks for what is left of it."""
    advice = "Return the value instead of keeping it: as an auxiliary output, with sow, or in NNX state."
    try:
        with leaks(s.call.fun) as found:
            tracing.trace(lambda *args, **kwargs: s.call.fun(*args, **kwargs), s.call.args, s.call.kwargs)
    except jax.errors.UnexpectedTracerError:
        yield Hit(Where(), "a traced value outlives the function: it is used in a second call.", {}, advice)
    except Exception as error:
        reason = str(error).splitlines()[0][:300]
        raise Unavailable(f"the function cannot be traced a second time: {reason}") from error
    else:
        for where in found:
            yield Hit(Where(), f"a traced value outlives the function{where}.", {}, advice)
