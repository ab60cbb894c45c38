"""remat: the decorator for functions, and `override`, which exchanges the policies of marked blocks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_kit._errors import RematError, RematWarning, near_matches
from remat_kit._globs import matches
from remat_kit._naming import check_supported
from remat_kit._policy import Policy, policy as as_policy
from remat_kit._rewrite import block_function, refuse_writes
from remat_kit._trace import jaxprs, marks
from remat_kit._trace.inputs import SLOT, Result, Spec, StaticArguments, split

FULL = Policy()


def remat(
    fun_or_policy: Any = None,
    /,
    *,
    policy: Any = None,
    prevent_cse: bool | Sequence[Any] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    block: str | None = None,
) -> Any:
    """Makes a function recompute its intermediates in the backward pass instead of keeping them.

    A drop-in for `jax.checkpoint` with policies by name. Used as ``@remat``, ``@remat("dots")``,
    ``remat(fun, policy=...)`` or ``@remat(policy=..., ...)``.

    Leaves of the arguments and of the result that are neither arrays nor numbers are static. Flags that the
    function branches on are declared with `static_argnums` or `static_argnames`; they may then be passed by
    position, by keyword or left at their defaults.

    Args:
      fun_or_policy: the function, or the policy for a decorator.
      policy: a preset name, a text, a `Policy` or one of JAX's policies; None means ``"full"`` (recompute
        everything), ``"none"`` calls the function without remat. A policy that JAX has goes to
        `jax.checkpoint` as it is; every other goes through checkpoint names.
      prevent_cse: as in `jax.checkpoint`. None chooses by context: off inside the body of a scan or while
        loop, where XLA cannot merge the recomputation with the forward pass, else on.
      static_argnums, static_argnames: static arguments, as in `jax.jit`.
      block: a name for reports, `apply` and `override`.

    Returns:
      A function with the signature of `fun`, or a decorator. On a class it binds as methods do; ``self`` is static.

    Raises:
      UnknownPolicyError, RematError: at once, for a policy that cannot be read or a static argument that the
        function does not take; when called, for a name that the function does not have, and for a function
        that writes to a mutable reference.
    """
    given = None if fun_or_policy is None or _is_policy(fun_or_policy) else fun_or_policy
    if given is None:
        if fun_or_policy is not None and policy is not None:
            raise RematError(f"two policies were given: {fun_or_policy!r} and policy={policy!r}. Give one of them.")
        chosen = fun_or_policy if policy is None else policy
        chosen = FULL if chosen is None else as_policy(chosen)
        return functools.partial(
            remat,
            policy=chosen,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            block=block,
        )
    if not callable(given):
        raise RematError(f"remat takes a function or a policy, got {type(given).__name__}: {given!r:.80}")
    if inspect.isclass(given):
        raise RematError(
            f"remat takes a function, got the class {given.__name__}. For Flax modules use rk.linen.remat or rk.nnx.remat."
        )
    if block is not None and not isinstance(block, str):
        raise RematError(f"block= names the block for reports and override; got {block!r}.")
    return _wrap(
        given,
        FULL if policy is None else as_policy(policy),
        prevent_cse,
        StaticArguments.of(given, static_argnums, static_argnames),
        block,
    )


checkpoint = remat


def _is_policy(x: Any) -> bool:
    return isinstance(x, str | Policy)


def _wrap(
    fun: Callable[..., Any], written: Policy, prevent_cse: Any, static: StaticArguments, block: str | None
) -> Callable[..., Any]:
    @functools.wraps(fun)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        chosen = overridden(block, written)
        if not chosen.remat:
            with _marked(block):
                return fun(*args, **kwargs)
        wrapped_args, wrapped_kwargs = static.wrap(fun, args, kwargs)
        leaves, spec = split((wrapped_args, wrapped_kwargs))
        flags = _cse_flags(prevent_cse, wrapped_args, wrapped_kwargs, spec)
        with _marked(block):
            out = _run(fun, spec, leaves, chosen, flags)
        return out.merge()

    return rematerialized


def _marked(block: str | None) -> Any:
    return contextlib.nullcontext() if block is None else marks.mark(block)


def _run(fun: Callable[..., Any], spec: Spec, leaves: list[Any], chosen: Policy, flags: Any) -> Result:
    check_supported(chosen)
    inner = _inner(fun, spec)
    native = chosen.as_jax()
    if native is not None and not chosen.name_globs and not any(map(_is_ref, leaves)):
        return jax.checkpoint(inner, policy=native, prevent_cse=flags)(*leaves)
    # Names have to be looked up, or values named: the function is traced first.
    from remat_kit._apply import check_names

    jaxpr, out = jax.make_jaxpr(inner, return_shape=True)(*leaves)
    check_names(jaxpr, [chosen])
    consts = jaxprs.constants(jaxpr)
    program = jaxprs.without_constants(jaxpr)
    if not isinstance(flags, bool):
        flags = (*(False for _ in consts), *flags)
    results = block_function(program, chosen, prevent_cse=flags)(*consts, *leaves)
    return Result(results, out.spec)


def _is_ref(x: Any) -> bool:
    return jaxprs.is_ref(jaxprs.aval_of(x))


def _cse_flags(prevent_cse: Any, args: Any, kwargs: Any, spec: Spec) -> Any:
    """`prevent_cse` for the dynamic leaves: a bool, or one for each leaf where a prefix was given."""
    if prevent_cse is None:
        return not jaxprs.in_loop_body()
    if isinstance(prevent_cse, bool):
        return prevent_cse
    if not isinstance(prevent_cse, Sequence):
        raise TypeError(f"prevent_cse must be a bool or tuple of bools, got {type(prevent_cse)=}")
    target = (args, kwargs) if kwargs else args
    flags = jax.tree.leaves(jax.tree.broadcast(tuple(prevent_cse), target))
    return tuple(f for f, s in zip(flags, spec.static, strict=True) if s is SLOT)


# One inner function for each way of splitting the arguments, as long as the function lives: JAX caches traces by it.
_inners: weakref.WeakKeyDictionary[Any, dict[Spec, Callable[..., Result]]] = weakref.WeakKeyDictionary()


def _inner(fun: Callable[..., Any], spec: Spec) -> Callable[..., Result]:
    try:
        known = _inners.setdefault(fun, {})
        found = known.get(spec)
        alive = weakref.ref(fun)
    except TypeError:  # cannot be hashed or weakly referenced
        return _make_inner(lambda: fun, fun, spec)
    if found is None:
        found = known[spec] = _make_inner(alive, fun, spec)
    return found


def _make_inner(get: Callable[[], Any], fun: Any, spec: Spec) -> Callable[..., Result]:
    def inner(*leaves: Any) -> Result:
        args, kwargs = spec.merge(leaves)
        out = Result.of(get()(*args, **kwargs))
        refuse_writes(jaxprs.writes_being_traced())
        return out

    inner.__name__ = getattr(fun, "__name__", "function")
    inner.__qualname__ = getattr(fun, "__qualname__", inner.__name__)
    return inner


# Override ------------------------------------------------------------------------------------------

_overrides = jax.make_user_context(default_value=None)
_matched: set[tuple[Any, str]] = set()


@contextlib.contextmanager
def override(policies: Mapping[str, Any]) -> Iterator[None]:
    """Exchanges the policies of marked blocks (``@rk.remat(block="mlp")``) for what is traced inside.

    JAX's caches see it: a function compiled before is traced again. Overrides nest, the inner one wins.

    Args:
      policies: policies by globs on block names; the first match wins, ``"none"`` removes remat.

    Raises:
      RematError: for anything but a mapping of strings to policies.

    Warns:
      RematWarning: on leaving, for a glob that no marked block matched.
    """
    if not isinstance(policies, Mapping) or not policies:
        raise RematError(f"override takes a mapping of block globs to policies, got {policies!r}.")
    items = []
    for glob, p in policies.items():
        if not isinstance(glob, str) or not glob:
            raise RematError(f"override: blocks are named by strings, got {glob!r}.")
        items.append((glob, as_policy(p)))
    outer = _overrides.value or ()
    value = (*items, *outer)
    with _overrides(value):
        yield
    for glob, _ in items:
        if (value, glob) not in _matched:
            known = sorted(_known)
            warnings.warn(
                f"override: no marked block matched {glob!r}. Marked blocks so far: "
                f"{', '.join(known) or 'none'}.{near_matches(glob, known)}",
                RematWarning,
                stacklevel=3,
            )


_known: set[str] = set()


def overridden(block: str | None, written: Policy) -> Policy:
    """The policy in force for a marked block: the first override that matches its name, else its own."""
    if block is None:
        return written
    _known.add(block)
    value = _overrides.value or ()
    for glob, p in value:
        if matches(glob, block, "/"):
            _matched.add((value, glob))
            return p
    return written
