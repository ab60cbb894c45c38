"""plan: from a budget of memory to the cheapest plan that the compiled program keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _adapters, _limits, _loss, _reports
from remat_kit._errors import RematError, RematWarning
from remat_kit._options import check_flags
from remat_kit._plan import calibrate, describe
from remat_kit._plan.calibrate import Line, Trial
from remat_kit._plan.names import NamesProblem
from remat_kit._plan.plan import Attempt, Measured, Plan
from remat_kit._plan.problem import Problem, Selection
from remat_kit._plan.rates import Rates
from remat_kit._plan.stages import stages
from remat_kit._policy import Policy
from remat_kit._progress import say
from remat_kit._quiet import quiet
from remat_kit._rules import Action
from remat_kit._target.budget import budget_bytes
from remat_kit._target.compile import TIMEOUT
from remat_kit._target.figures import measured
from remat_kit._target.measurement import Measurement
from remat_kit._target.setting import Setting
from remat_kit._target.target import Target
from remat_kit._trace import jaxprs
from remat_kit._units import format_bytes


def plan(
    fun: Callable[..., Any],
    *args: Any,
    budget: int | float | str | None = None,
    target: str | Target | None = "local",
    actions: Sequence[str] = ("save", "recompute", "offload"),
    minimize: str = "time",
    compiles: int = 4,
    names_only: bool = False,
    split: bool | float = False,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    keep_barriers: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
    progress: bool | None = None,
    **kwargs: Any,
) -> Plan:
    """Chooses what each block of a loss saves, offloads and recomputes, so that its gradient keeps within a budget.

    For each block a mixed integer program gives the cheapest way to keep within some bytes; a knapsack over the blocks
    chooses among these; what is compiled corrects the predicted peak, and the next choice is made with it.

    Args:
      fun: a loss, as `jax.grad` takes it.
      *args, **kwargs: its arguments, real or abstract (nothing is allocated for `jax.ShapeDtypeStruct`).
      budget: the peak to keep within on one device: bytes, ``"14GiB"``, or a share of the target's memory such as
        ``0.9``; all of it by default.
      target: what `remat_kit.target` takes. None plans for the predicted peak alone: nothing is compiled then, and a
        budget in bytes is needed.
      actions: what may be done with a value; recomputing always may. Values are offloaded only as far as the transfers
        hide behind the block's own computation by the speed of the chip's link to its host.
      minimize: ``"time"``, by the roofline of the target's chip, or ``"flops"``.
      compiles: the most programs to compile; 0 relies on the prediction.
      names_only: choose among the checkpoint names that the program has, one policy for all blocks.
      split: whether scans may be run in two parts with different treatments, which fills a budget better but keeps
        slices of the parameters, about one copy of them. A number is the least gain that is worth it, as a share of the
        whole step's cost.
      argnums, has_aux, keep_barriers, compiler_options, timeout: as in `measure`.
      progress: whether to say on standard error what is done; on a terminal by default.

    Returns:
      A `Plan`, which `apply` takes as a policy. If no plan keeps within the budget it is the one with the smallest
      peak, and its `within` is False.

    Raises:
      RematError: as `measure` does; for a budget, an action or a setting that cannot be read.
    """
    session = Session.open(
        fun, args, kwargs, target=target, actions=actions, minimize=minimize, names_only=names_only, split=split,
        argnums=argnums, has_aux=has_aux, keep_barriers=keep_barriers, compiler_options=compiler_options,
        timeout=timeout, progress=progress,
    )  # fmt: skip
    return session.plan(budget, count_of(compiles))


def count_of(compiles: Any) -> int:
    """A number of programs to compile, checked."""
    if not isinstance(compiles, int) or isinstance(compiles, bool) or not 0 <= compiles <= _MOST_COMPILES:
        raise RematError(f"compiles is a number of programs from 0 to {_MOST_COMPILES}, got {compiles!r}.")
    return compiles


_MOST_COMPILES = 1000
_EVERY_ACTION = {"save", "recompute", "offload"}
_DOUBT = 0.2  # seconds before the compiler has fused anything


class Session:
    """One loss being planned for: its problem, and what was compiled so far."""

    def __init__(self, problem: Problem | NamesProblem, info: _Info, compiled: Callable[[Plan], Measurement]) -> None:
        self.problem, self.info = problem, info
        self._compiled = compiled
        self.trials: list[Trial[Measurement]] = []
        self.chosen: Trial[Measurement] | None = None  # what the last plan was made of

    @classmethod
    def open(
        cls,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        target: str | Target | None = "local",
        actions: Sequence[str] = ("save", "recompute", "offload"),
        minimize: str = "time",
        names_only: bool = False,
        split: bool | float = False,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        keep_barriers: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
        timeout: float = TIMEOUT,
        progress: bool | None = None,
    ) -> Session:
        """Traces the loss and opens its blocks."""
        check_flags(names_only=names_only)
        if minimize not in ("time", "flops"):
            raise RematError(f"minimize is 'time' or 'flops', got {minimize!r}.")
        if not isinstance(split, bool) and not (isinstance(split, float) and 0 <= split < 1):
            raise RematError(f"split is True, False or a share of the step such as 0.02, got {split!r}.")
        if split is not False and names_only:
            raise RematError("with names_only=True all blocks have one policy, so that no scan is split.")
        allowed = _actions(actions)
        setting = None
        if target is not None:
            setting = Setting.of(
                target, timeout=timeout, grad=True, argnums=argnums, has_aux=has_aux,
                compiler_options=compiler_options, keep_barriers=keep_barriers,
            )  # fmt: skip
        elif compiler_options or keep_barriers:
            raise RematError(
                "compiler_options and keep_barriers are for a compiler; with target=None nothing is compiled."
            )
        rates = Rates.of(setting.target if setting is not None else None)
        notes: list[str] = []
        if Action.OFFLOAD in allowed and not rates.host_bandwidth:
            allowed -= {Action.OFFLOAD}
            if Action.SAVE not in allowed:
                raise RematError("offloading needs a target with memory apart from its host's, such as 'tpu:v5e'.")
            if set(actions) != _EVERY_ACTION:  # asked for, and not just left as it is by default
                notes.append("nothing is offloaded: the target has no memory apart from its host's.")
        say("tracing", progress)
        with _adapters.adapted(fun, args, kwargs) as call:
            loss = _loss.read(call, None, argnums, has_aux)
            local = _reports.device_bytes(call)
            avals = [v.aval for v in jaxprs.opened(loss.traced.jaxpr).invars]
            sizes = [local.get(i, jaxprs.nbytes(a)) for i, a in enumerate(avals)]
            whole = sum(map(jaxprs.nbytes, avals))
            share = sum(sizes) / whole if whole else 1.0
            program = _reports.differentiable(lambda: stages(loss, sizes, rates, by_name=names_only))
        if Action.OFFLOAD in allowed and any(_refuses_offload(s.block) for s in program.stages):
            allowed -= {Action.OFFLOAD}
            notes.append("jax_remat3 of this JAX ignores offloading, so nothing is offloaded.")
        say("solving", progress)
        values = frozenset(a.value for a in allowed)
        if names_only:
            problem = NamesProblem(program, rates, minimize, values)
        else:
            gain = None if split is False else 0.0 if split is True else split
            problem = Problem(program, rates, minimize, values, split=gain)
        info = _Info(setting, minimize, tuple(a.value for a in Action if a in allowed), rates, notes, progress, share)

        def compiled(made: Plan) -> Measurement:
            assert setting is not None
            say(f"compiling for {setting.target}: predicted {format_bytes(made.predicted.corrected_bytes)}", progress)
            with quiet(RematWarning):
                return measured(setting.step(fun, args, kwargs, made), setting)

        return cls(problem, info, compiled)

    @property
    def line(self) -> Line:
        """What was learnt so far of how compiled peaks follow predicted ones."""
        return self.start.through(self.trials)

    @property
    def start(self) -> Line:
        """How compiled peaks follow predicted ones before any trial."""
        return Line(self.problem.fixed_bytes, self.info.share)

    def plan(self, budget: int | float | str | None, compiles: int) -> Plan:
        """The cheapest plan within a budget."""
        setting = self.info.setting
        if setting is None:
            allowed = budget_bytes(budget, None)
        else:
            allowed = budget_bytes(budget, setting.target)
        if allowed is None:
            whose = f"the memory of {setting.target} is not known" if setting is not None else "there is no target"
            raise RematError(f"{whose}: pass a budget in bytes, such as budget='14GiB'.")
        if setting is None or compiles == 0:
            found = self.problem.solve(self.line.predicted(allowed)) or self.problem.least()
            return self.made(found, allowed, None)
        before = len(self.trials)
        problem = self.problem
        self.trials, best = calibrate.search(
            solve=problem.solve,
            least=problem.least,
            cheapest=problem.cheapest().key,
            compiled=lambda s: self._peak(s, allowed),
            budget=allowed,
            compiles=compiles,
            line=self.start,
            cost=self.cost,
            known=self.trials,
            rivals=() if problem.by_name else tuple(problem.presets.values()),
            doubt=_DOUBT if self.info.minimize == "time" else 0.0,
        )
        if best is None:
            best = min(self.trials, key=lambda t: t.peak)
        self.chosen = best
        return self.made(best.selection, allowed, best.found, self.trials[before:])

    def compiled(self, selection: Selection) -> Trial[Measurement]:
        """Compiles a selection, for what it says of the next ones too."""
        trial = next((t for t in self.trials if t.selection.key == selection.key), None)
        if trial is None:
            peak, m = self._peak(selection, 0)
            trial = Trial(selection, peak, m)
            self.trials.append(trial)
        return trial

    def cost(self, selection: Selection, m: Measurement) -> float:
        """What is minimized of a compiled selection: the roofline's seconds of the compiled program, or FLOPs."""
        if m.fits is False and m.roofline_seconds is None:
            return float("inf")
        if self.info.minimize == "time":
            return m.roofline_seconds if m.roofline_seconds is not None else selection.cost
        return float(m.flops)

    def _peak(self, selection: Selection, budget: int) -> tuple[int, Measurement]:
        m = self._compiled(self.made(selection, budget, None))
        return m.peak_bytes, m

    def made(
        self, selection: Selection, budget: int, m: Measurement | None, attempts: Sequence[Trial[Measurement]] = ()
    ) -> Plan:
        """The plan of a selection."""
        predicted = describe.predicted(self.problem, selection, self.line)
        peak = m.peak_bytes if m is not None else predicted.corrected_bytes
        info = self.info
        bound = selection.bound
        if bound is None:  # a preset's, or one of names
            bound = min(selection.cost, self.problem.bound(selection.peak))
        return Plan(
            blocks=describe.blocks(self.problem, selection),
            budget_bytes=budget,
            target=info.setting.target.spec if info.setting is not None else "",
            minimize=info.minimize,
            actions=info.actions,
            names_only=isinstance(self.problem, NamesProblem),
            predicted=predicted,
            measured=None if m is None else _measured(m),
            bound=bound,
            attempts=tuple(Attempt(t.selection.peak, t.peak, t.selection.cost, t.peak <= budget) for t in attempts),
            rivals=describe.rivals(self.problem, self.line, budget),
            rates=info.rates.source,
            within=peak <= budget,
            notes=(*info.notes, *describe.notes(self.problem)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Info:
    """What a session was asked for, and the share of the arguments that one device holds."""

    setting: Setting | None
    minimize: str
    actions: tuple[str, ...]
    rates: Rates
    notes: list[str]
    progress: bool | None
    share: float


def _actions(actions: Sequence[str]) -> set[Action]:
    if isinstance(actions, str) or not isinstance(actions, (Sequence, set, frozenset)):
        raise RematError(f"actions are several of {', '.join(Action)}, got {actions!r:.80}.")
    return {Action(a) for a in actions} | {Action.RECOMPUTE}


def _refuses_offload(block: Any) -> bool:
    try:
        _limits.check(Policy(rest=Action.OFFLOAD), block.owner)
    except RematError:
        return True
    return False


def _measured(m: Measurement) -> Measured:
    return Measured(
        peak_bytes=m.peak_bytes,
        temp_bytes=m.temp_bytes,
        argument_bytes=m.argument_bytes,
        output_bytes=m.output_bytes,
        host_bytes=m.host_bytes or 0,
        flops=m.flops,
        seconds=m.roofline_seconds,
    )
