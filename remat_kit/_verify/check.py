"""check: is a function the same with and without remat, is it pure, and does remat do anything?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remat_kit import _adapters, _loss, _reports
from remat_kit._apply import Policies
from remat_kit._errors import RematError
from remat_kit._loss import Loss
from remat_kit._numbers import whole
from remat_kit._rewrite import without_regions
from remat_kit._trace import inputs, jaxprs, survey, tracing
from remat_kit._units import format_bytes
from remat_kit._verify import derivatives as modes
from remat_kit._verify import purity, random_values, running
from remat_kit._verify.reference import Reference, check_name
from remat_kit._verify.result import Check, Compared, Derivative


def check(
    fun: Callable[..., Any],
    *args: Any,
    policy: Policies = None,
    plan: Policies = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    derivatives: str | Sequence[str] = modes.DERIVATIVES,
    reference: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Check:
    """Runs a function with and without remat and compares everything that comes out.

    Compared are the loss, the auxiliary output, the new state of NNX modules and the gradient, then forward mode and
    Hessian-vector products, each compiled, on the same values. Arrays are the same if no entry differs by more than
    eight roundings of the largest one (in the coarsest type of 16 bits or more that the program computes in), plus
    eight times what a random change of the arguments' last bits does to it. The function is traced twice and run twice
    to see whether it is one of its arguments only. Modules and references given to it are left as they are.

    Args:
      fun: a loss, as `jax.grad` takes it.
      *args, **kwargs: its arguments: arrays, pytrees of them, NNX modules. Abstract ones (`jax.ShapeDtypeStruct`) are
        given random values: normal floats, integers 0 and 1.
      policy: as `apply` takes it; None compares the function as written with itself without its `jax.checkpoint`
        regions.
      plan: a plan; the same as ``policy=plan``.
      argnums, has_aux: as in `jax.grad`. Leaves of these arguments that are no floating or complex numbers are skipped.
      derivatives: which to compare, of "reverse", "forward", "forward_over_reverse" and "reverse_over_reverse" (the
        last two are Hessian-vector products). One that the function without remat does not have is named as
        unsupported; one that only the function with remat lacks is a failure.
      reference: "float64" or "float32" runs the function at arguments cast up as well, and shows how far off both
        are. What differs is a failure then only if remat is more than twice as far off.
      rtol, atol: passes where no entry differs by more than ``atol + rtol * largest entry``, in place of what is
        derived.
      seed: of random values and vectors.

    Returns:
      A `Check`: print it, test its truth, call ``.raise_for_failures()``.

    Raises:
      RematError: as `residuals` does; for a function that fails when it is run; for options that are none.
    """
    _check_options(policy, plan, rtol, atol, seed)
    check_name(reference)
    asked = modes.chosen(derivatives)
    policy = policy if plan is None else plan
    reading: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "allow_int": True}
    with _adapters.adapted(fun, args, kwargs) as call:
        given, spec = inputs.split((call.args, call.kwargs))
        if any(map(jaxprs.is_tracer, given)):
            raise RematError("check runs the function, and so takes no traced values: call it outside jax.jit.")
        leaves = random_values.fill(given, seed)
        a, k = spec.merge(leaves)
        loss = _loss.read(dataclasses.replace(call, args=a, kwargs=k), policy, **reading)
        subject, plain = modes.Subject.of(loss), without_regions(loss.traced.jaxpr)
        made_up = tuple(n for n, x in zip(subject.labels, given, strict=True) if random_values.is_abstract(x))
        notes: list[str] = []
        if made_up and not _finite(plain, subject, leaves):
            positive = random_values.fill(given, seed, positive=True)
            if _finite(plain, subject, positive):
                leaves = positive
                notes.append("The loss is not finite on normal numbers: the values that were made up are all positive.")
        wider = _reference(loss.call, leaves, reading, plain, reference, notes)
        pair = running.Pair(subject, plain, loss.jaxpr, leaves, seed, wider, rtol, atol)

        def trace() -> tracing.Traced:
            with _adapters.adapted(fun, args, kwargs) as anew:
                return tracing.trace(anew.fun, *spec.merge(leaves))

        impurities = purity.impurities(fun, loss.traced, trace)
        found: list[Derivative] = []
        compared: list[Compared] = []
        for name in asked:
            derivative, arrays, unsteady = pair.compare(name)
            found.append(derivative)
            compared += arrays
            impurities += unsteady if not impurities else []
        before, after, host = _kept(loss, plain)
    regions = _regions(loss.jaxpr)
    notes = [*_effect(regions, before, after, host, policy), *notes, *_vacuous(compared, bool(made_up))]
    return Check(
        policy=loss.policy,
        blocks=() if loss.applied is None else tuple(c.path for c, _ in loss.applied.blocks),
        compared=tuple(compared),
        derivatives=tuple(found),
        impurities=tuple(impurities),
        findings=tuple(notes),
        regions=regions,
        bytes_before=before,
        bytes_after=after,
        host_bytes=host,
        made_up=made_up,
        skipped=_skipped(loss, argnums),
        seed=seed,
        reference=None if wider is None else reference,
    )


def _check_options(policy: Any, plan: Any, rtol: Any, atol: Any, seed: Any) -> None:
    if policy is not None and plan is not None:
        raise RematError("check takes policy= or plan=, not both.")
    for name, x in (("rtol", rtol), ("atol", atol)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 <= x < float("inf")):
            raise RematError(f"{name}= is a number, zero or greater; got {x!r:.80}.")
    if whole(seed) is None or seed < 0:
        raise RematError(f"seed= is a whole number, zero or greater; got {seed!r:.80}.")


def _reference(
    call: _adapters.Call, leaves: Sequence[Any], reading: dict[str, Any], plain: Any, name: str | None, notes: list[str]
) -> Reference | None:
    """The loss in a wider type; where it has none, a note says why."""
    if name is None:
        return None
    try:
        return Reference.of(call, leaves, reading, plain, name)
    except RematError as error:
        notes.append(f"There is no reference: {error}.")
        return None


def _finite(plain: Any, subject: modes.Subject, leaves: Sequence[Any]) -> bool:
    which = subject.outputs.index(True)
    executable = running.compiled(lambda xs, _: [jaxprs.evaluate(plain, *xs)[which]], leaves, [])
    out = running.run(executable, leaves, [], running.references(subject, plain, leaves))
    return bool(np.all(np.isfinite(np.asarray(out[0]))))


def _kept(loss: Loss, plain: Any) -> tuple[int | None, int | None, int]:
    """Residual bytes on the device without and with remat, and on the host; None without reverse mode."""
    try:
        before = _reports.report(dataclasses.replace(loss, jaxpr=plain, rules=None, applied=None))
    except RematError:
        return None, None, 0
    try:
        after = _reports.report(loss)
    except Exception:  # what JAX raises is said of the derivative
        return before.total_bytes, None, 0
    return before.total_bytes, after.total_bytes, after.host_bytes


def _regions(jaxpr: Any) -> int:
    return sum(jaxprs.remat_region(e) is not None for p in survey.programs(jaxpr) for e in p.eqns)


def _skipped(loss: Loss, argnums: int | Sequence[int]) -> tuple[str, ...]:
    wanted = {i % len(loss.call.args) for i in ([argnums] if isinstance(argnums, int) else argnums)}
    traced = loss.traced
    triples = zip(traced.labels, traced.argnums, loss.differentiated, strict=True)
    return tuple(label for label, position, mine in triples if position in wanted and not mine)


def _effect(regions: int, before: int | None, after: int | None, host: int, policy: Any) -> list[str]:
    """What remat does to what is kept, where that is nothing."""
    if not regions:
        if policy is not None:
            return ["Nothing is rematerialized: under the policy no block is left with remat."]
        return [
            "Nothing is rematerialized: the function has no jax.checkpoint region, and was compared with itself. Give "
            "a policy= to check one. (Loops of rk.scan that keep few states have no region: they are as written.)"
        ]
    if before is None or after is None or after + host < before:
        return []
    if after > before:
        return [f"Remat keeps more than no remat: {format_bytes(after)} against {format_bytes(before)} (predicted)."]
    return [f"Remat saves nothing: {format_bytes(before)} are kept with and without it (predicted)."]


def _vacuous(compared: Sequence[Compared], made_up: bool) -> list[str]:
    """Where a comparison says little: values that are not numbers, gradients that vanish, too much sensitivity."""
    found = []
    hint = " Give real arguments in place of those that were made up." if made_up else ""
    gradients = [c for c in compared if c.kind == "gradient"]
    if gradients and all(c.size == 0 for c in gradients):
        found.append(f"All gradients are zero, or not finite, on these values: nothing was compared.{hint}")
    largest = max((c.size for c in gradients), default=0.0)
    blunt = [c for c in gradients if c.tolerance > c.size / 4 and 100 * c.size >= largest > 0]
    if blunt:
        found.append(
            f"{blunt[0].title[0].upper()}{blunt[0].title[1:]} is so sensitive to rounding that differences below "
            f"{blunt[0].tolerance / blunt[0].size:.0%} of it cannot be told from it.{hint}"
        )
    return found
