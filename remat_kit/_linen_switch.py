"""Switching the layers of a Linen model: a subclass of the model, and an interceptor while one of its calls runs.

The interceptor runs the layers through the lifted transform of `_linen_class.py`; nothing else of the model changes.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.linen import module as linen_module

from remat_kit._errors import RematError, RematWarning
from remat_kit._layers import Layers
from remat_kit._linen_class import public_methods, region_of, run_lifted, stand_in, under_way
from remat_kit._linen_layers import Switch, is_root, is_running, layer_call, note, running
from remat_kit._linen_lift import RematOptions, lift_remat
from remat_kit._pickling import by_recipe
from remat_kit._trace import marks

_ENTRIES = ("apply", "init_with_output")  # what a function in method= comes through, which is none of the model's own


def switch_class(cls: type[nn.Module], layers: Layers, options: RematOptions) -> type[nn.Module]:
    """Makes a subclass in whose calls layers are rematerialized; one that was made here before is replaced."""
    original = vars(cls).get("__rk_switched__", cls)
    switch = Switch(layers, options, original)
    namespace: dict[str, Any] = {"__rk_switched__": original, **by_recipe(switch_class, original, layers, options)}
    for method in sorted(public_methods(original)):
        namespace[method] = _switched(getattr(original, method), switch)
    for entry in _ENTRIES:
        namespace[entry] = nn.nowrap(_entered(getattr(original, entry), switch))
    return stand_in(original, original.__name__, namespace)


def _switched(fn: Callable, switch: Switch) -> Callable:
    @functools.wraps(fn)
    def switched(self, *args, **kwargs):
        if not isinstance(self, nn.Module) or self.scope is None:
            return fn(self, *args, **kwargs)
        with _on(switch, self.scope.path):
            out = fn(self, *args, **kwargs)
            if is_root(switch, self):
                _check(switch, type(self), fn.__name__)
        return out

    # Linen counts the compact methods of a class, and the original keeps its mark; a remat of this covers all of it.
    for mark in ("compact", "__rk_original__"):
        vars(switched).pop(mark, None)
    return switched


def _entered(fn: Callable, switch: Switch) -> Callable:
    @functools.wraps(fn)
    def entered(self, *args, **kwargs):
        with _on(switch, ()):
            return fn(self, *args, **kwargs)

    return entered


@contextlib.contextmanager
def _on(switch: Switch, root: tuple[str, ...]):
    with contextlib.ExitStack() as stack:
        if not is_running():
            stack.enter_context(nn.intercept_methods(_intercept))
        stack.enter_context(running(switch, root))
        yield


def _check(switch: Switch, cls: type[nn.Module], method: str) -> None:
    """Says what was not found: `__call__` is expected to meet every layer, another method only some."""
    if method == "__call__":
        switch.check()
    elif not switch.told and "__call__" not in public_methods(cls):
        try:
            switch.check()
        except RematError as error:
            switch.told = True
            warnings.warn(f"In {cls.__name__}.{method}: {error}", RematWarning, stacklevel=4)


def _intercept(next_fun: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    module = context.module
    if module.scope is None or context.method_name == "setup":
        return next_fun(*args, **kwargs)
    note(module, context.method_name)
    if under_way(module):
        return next_fun(*args, **kwargs)
    raw: Callable = context.orig_method.func  # type: ignore[attr-defined]
    with layer_call(module, context.method_name, raw, args, kwargs) as options:
        if options is None or not (options.policy.remat or options.block) or module.is_initializing():
            return next_fun(*args, **kwargs)
        owner = f"{type(module).__name__}.{context.method_name}"
        if next_fun is not context.orig_method and not marks.reading():
            raise RematError(
                f"{owner} is called under nn.intercept_methods that the model installs itself, which remat_layers"
                f" cannot pass on into the rematerialized region. Install it around the call of the model."
            )
        lift = functools.partial(lift_remat, options=options)
        return run_lifted(module, region_of(_on_a_copy(raw), owner), lift, args, kwargs)


def _on_a_copy(raw: Callable) -> Callable:
    """A method for a copy of a module whose call flax is already keeping account of.

    Through the managed method, interceptors and captured intermediates would see the call a second time.
    """

    @functools.wraps(raw)
    def run(self, *args, **kwargs):
        self._try_setup()
        linen_module._context.module_stack.append(self)  # the parent of the modules it creates
        try:
            return raw(self, *args, **kwargs)
        finally:
            linen_module._context.module_stack.pop()

    vars(run)["method_handler_wrapped"] = True  # else the lifted transform would manage it
    return run
