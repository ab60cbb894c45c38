"""What programs are compiled for and how: the options that `measure`, `compare` and `max_batch` share."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._apply import Policies
from remat_kit._errors import RematError
from remat_kit._options import check_flags
from remat_kit._target.step import Step, gradient_step, step_as_written
from remat_kit._target.target import Target
from remat_kit._target.target import target as as_target


@dataclasses.dataclass(frozen=True)
class Setting:
    """What programs are compiled for, and how.

    Attributes:
      target: the devices.
      options: XLA's debug options by name.
      timeout: seconds that a compiler in a process of its own may take.
      keep_barriers: whether the options tell the CPU's compiler to keep recomputation apart.
      grad, argnums, has_aux: what of a function is compiled.
    """

    target: Target
    options: Mapping[str, Any]
    timeout: float
    keep_barriers: bool
    grad: bool
    argnums: int | Sequence[int]
    has_aux: bool

    @classmethod
    def of(
        cls,
        target: str | Target,
        *,
        timeout: float,
        grad: bool,
        argnums: int | Sequence[int],
        has_aux: bool,
        compiler_options: Mapping[str, Any] | None,
        time: bool = False,
        keep_barriers: bool = False,
    ) -> Setting:
        """Reads the options of `measure`.

        Raises:
          RematError: for an unknown target, timing on one that is not attached, barriers on another than the CPU, and
            options that would have no effect.
        """
        check_flags(grad=grad, has_aux=has_aux, time=time, keep_barriers=keep_barriers)
        where = as_target(target)
        if time and not where.attached:
            raise RematError(
                f"time=True runs the step, but {where} is not attached. Leave it out (the roofline is reported), or "
                "measure on target='local'."
            )
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
            raise RematError(f"timeout is a number of seconds, got {timeout!r}.")
        if not isinstance(compiler_options or {}, Mapping):
            raise RematError(f"compiler_options map XLA's names to values, got {compiler_options!r:.80}")
        options = dict(compiler_options or {})
        for name, value in options.items():
            if not isinstance(name, str) or not isinstance(value, (str, bool, int, float)):
                raise RematError(
                    f"compiler_options map XLA's names to texts, bools or numbers, got {name!r}: {value!r}."
                )
        if not grad and (argnums != 0 or has_aux):
            raise RematError("argnums and has_aux say how a loss is differentiated; with grad=False nothing is.")
        if keep_barriers:
            if where.platform != "cpu":
                raise RematError(f"keep_barriers=True is for the CPU's compiler; {where} keeps them by itself.")
            passes = "xla_disable_hlo_passes"
            flags = re.findall(rf"--{passes}=([^\s'\"]*)", os.environ.get("XLA_FLAGS", ""))
            options[passes] = ",".join(dict.fromkeys([*flags, *_listed(options.get(passes)), _BARRIER_PASS]))
        return cls(where, options, float(min(timeout, _LONGEST)), keep_barriers, grad, argnums, has_aux)

    def step(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policies) -> Step:
        """Lowers the step that is compiled of a function under a policy."""
        if self.grad:
            return gradient_step(fun, args, kwargs, policy, self.argnums, self.has_aux, self.target)
        return step_as_written(fun, args, kwargs, policy, self.target)


_LONGEST = 10**6  # seconds; what timers take
_BARRIER_PASS = "cse_barrier_expander"


def _listed(value: Any) -> list[str]:
    return [str(value)] if value else []
