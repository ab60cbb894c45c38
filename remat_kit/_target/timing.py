"""Running a compiled step on attached devices and timing it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._errors import RematError
from remat_kit._target.measurement import Timing
from remat_kit._target.step import Step

_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
_WARM_UP = 2
_STEPS = (5, 50)  # at least, at most
_SECONDS = 2.0  # more steps are timed until this has passed


def time_step(step: Step, executable: Any, device: Any) -> Timing:
    """Runs a compiled step again and again: warmed up, each run waited for.

    Args:
      step: what was compiled; its abstract arguments are filled.
      executable: the `jax.stages.Compiled` that it was compiled to.
      device: the one whose allocator is asked for its peak.

    Raises:
      RematError: if the step fails.
    """
    infos, treedef = jax.tree.flatten(step.lowered.args_info)
    seconds: list[float] = []
    try:
        pairs = zip(step.given, step.placed, strict=True)
        values = [_filled(given, getattr(placed, "sharding", None), i) for i, (given, placed) in enumerate(pairs)]

        def once() -> float:
            fresh = [jnp.copy(x) if info.donated else x for x, info in zip(values, infos, strict=True)]
            a, k = jax.tree.unflatten(treedef, jax.block_until_ready(fresh))
            start = time.perf_counter()
            jax.block_until_ready(executable(*a, **k))
            return time.perf_counter() - start

        for _ in range(_WARM_UP):
            once()
        while len(seconds) < _STEPS[0] or (sum(seconds) < _SECONDS and len(seconds) < _STEPS[1]):
            seconds.append(once())
    except Exception as e:  # the step is the user's, and its devices may be full
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise RematError(f"the step failed when it was run for timing: {reason[:400]}") from e
    low, median, high = statistics.quantiles(seconds, n=4)
    return Timing(median, low, high, len(seconds), _peak_of(device))


def _filled(x: Any, sharding: Any, seed: int) -> Any:
    """An array on its devices; for an abstract one random numbers, zeros where they may be positions."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        value = x
    elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, x)
        value = jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=_KEYS[str(x.dtype)])
    elif jnp.issubdtype(x.dtype, jnp.inexact):
        value = np.random.default_rng(seed).standard_normal(x.shape, np.float32).astype(x.dtype)
    else:
        value = jnp.zeros(x.shape, x.dtype)
    return jax.device_put(value, sharding)


def _peak_of(device: Any) -> int | None:
    """The allocator's high-water mark, since the process began."""
    stats: Mapping[str, int] | None = device.memory_stats()
    return (stats or {}).get("peak_bytes_in_use")
