"""What `remat_layers` of a Linen model asks for, while a call of the model runs: which layers, and how.

A run is one such call. Layers are numbered in it in the order in which they are first called, and what it met is
remembered for messages. How a layer is then rematerialized is the concern of `_linen_class.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import linen as nn

from remat_kit._flax_static import DeclaredStatic, resolve_static
from remat_kit._layers import Layers, Selector
from remat_kit._linen_lift import RematOptions
from remat_kit._policy import Policy

PLAIN = RematOptions(Policy(remat=False))  # for a layer that is passed over, or is part of another one


@dataclass(eq=False)
class Switch:
    """One `remat_layers`: what it asks for, and what its runs have met so far.

    Attributes:
        layers: which layers.
        options: how they are rematerialized.
        model: the class of the model as it was written.
        called: classes of modules inside the model -> their methods that were called.
        met: the selectors of the layers that were called.
        kinds: the classes of these layers.
        static: method -> those of its arguments that are declared static.
        told: whether a method other than `__call__` has warned.
    """

    layers: Layers
    options: RematOptions
    model: type[nn.Module]
    called: dict[str, set[str]] = field(default_factory=dict)
    met: set[Selector] = field(default_factory=set)
    kinds: set[type] = field(default_factory=set)
    static: dict[Callable, DeclaredStatic] = field(default_factory=dict)
    told: bool = False

    def check(self) -> None:
        """Raises RematError for what the runs so far had no use for."""
        self.layers.check_found(self.met, self.called, self.model.__name__)
        self.layers.check_kinds(self.kinds)

    def check_static(self, owner: str, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        if fn not in self.static:
            self.static[fn] = resolve_static({owner: fn}, (), self.layers.static_names(fn))[owner]
        self.static[fn].check(args, kwargs)


@dataclass(frozen=True)
class Run:
    """One call of the model: the path of its scope, and the numbers of the layers called so far."""

    switch: Switch
    root: tuple[str, ...]
    numbers: dict[tuple[type, tuple[str, ...]], int] = field(default_factory=dict)

    def is_of(self, module: nn.Module) -> bool:
        """Whether a bound module is the model. What shares its scope (`nn.share_scope`) is told apart by its class."""
        assert module.scope is not None
        return self.root == module.scope.path and isinstance(module, self.switch.model)


_runs: contextvars.ContextVar[tuple[Run, ...]] = contextvars.ContextVar("runs", default=())
_inside: contextvars.ContextVar[frozenset[Switch]] = contextvars.ContextVar("inside", default=frozenset())
# JAX's caches look at it, so that what `nn.jit` has traced without a switch does not serve with it.
_switches: Any = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def running(switch: Switch, root: tuple[str, ...]) -> Iterator[None]:
    """A call of the model. One switch does not run in itself: where it runs already, nothing changes."""
    runs = _runs.get()
    if any(run.switch is switch for run in runs):
        yield
        return
    runs = (*runs, Run(switch, root))
    token = _runs.set(runs)
    try:
        with _switches(tuple(run.switch for run in runs)):
            yield
    finally:
        _runs.reset(token)


def is_running() -> bool:
    """Whether a call of a switched model is under way."""
    return bool(_runs.get())


def is_root(switch: Switch, module: nn.Module) -> bool:
    """Whether a bound module is the model whose call is under way."""
    return any(run.switch is switch and run.is_of(module) for run in _runs.get())


def note(module: nn.Module, method: str) -> None:
    """Remembers for messages that a method was called."""
    for run in _runs.get():
        if not run.is_of(module):
            run.switch.called.setdefault(type(module).__name__, set()).add(method)


@contextlib.contextmanager
def layer_call(
    module: nn.Module, method: str, fn: Callable, args: tuple, kwargs: dict[str, Any]
) -> Iterator[RematOptions | None]:
    """A call of a method: yields how it is to be rematerialized, or None where no switch speaks of it.

    The switch of the outermost model decides. Layers that a layer calls belong to it.
    """
    assert module.scope is not None
    kind, path = type(module), module.scope.path
    names = {kind.__name__, vars(kind).get("__rk_layer__", kind.__name__)}
    for run in _runs.get():
        switch = run.switch
        found = switch.layers.selectors_of(kind, names) if method in switch.layers.methods else []
        if not found or run.is_of(module):
            continue
        switch.met.update(found)
        switch.kinds.add(kind)
        switch.check_static(f"{kind.__name__}.{method}", fn, args, kwargs)
        if switch in _inside.get():
            yield PLAIN
            return
        number = run.numbers.setdefault((kind, path), len(run.numbers))
        token = _inside.set(_inside.get() | {switch})
        try:
            yield PLAIN if number % switch.layers.every else switch.options
        finally:
            _inside.reset(token)
        return
    yield None
