"""remat (= checkpoint): the decorator for functions, a stand-in for `jax.checkpoint` with policies by name."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from remat_kit import _adapters, _limits
from remat_kit._errors import OptionError, RematError, RematWarning
from remat_kit._matching import check_names, warn_unmatched
from remat_kit._naming import TOP
from remat_kit._override import Wanted, in_force
from remat_kit._policy import Policy
from remat_kit._policy_jax import from_jax
from remat_kit._rewrite import check_effects, region_function
from remat_kit._static_args import StaticArguments, name_of
from remat_kit._trace import jaxprs, marks
from remat_kit._trace.inputs import holds_tracer, is_dynamic, reusable, seal, statics, unseal


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
      fun_or_policy: the function, or the policy for a decorator (a preset name, a text or a `Policy`).
      policy: a preset name, a text, a `Policy` or one of JAX's policies; None means ``"full"`` (recompute
        everything), ``"none"`` calls the function without remat. A policy that JAX has goes to
        `jax.checkpoint` as it is; every other goes through checkpoint names.
      prevent_cse: as in `jax.checkpoint`. None chooses by context: off inside the body of a scan or while
        loop, where XLA cannot merge the recomputation with the forward pass, else on.
      static_argnums, static_argnames: static arguments, as in `jax.jit`.
      block: a name for reports, `apply` and `override`.

    Returns:
      A function with the signature of `fun`, or a decorator. On a class it binds as methods do; ``self`` is
      static unless it is a pytree.

    Raises:
      UnknownPolicyError, RematError: at once, for a policy that cannot be read, a static argument that the
        function does not take, and for what is no function (classes, generators, coroutines, Flax modules). When
        called, for a name that the function does not have, a function that writes to a mutable reference, and
        Flax modules whose state would be lost.

    Warns:
      RematWarning: when called, for a name in one of JAX's own policies that the function does not have, and for what
        the remat implementation in force ignores.
    """
    given = fun_or_policy
    if isinstance(given, (str, Policy)):
        if policy is not None:
            raise RematError(f"two policies were given: {given!r} and policy={policy!r}. Give one of them.")
        given, policy = None, given
    check_options(prevent_cse, block, by_argument=True)
    wanted = Wanted.of(policy)

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        _check_function(fun)
        return _wrap(fun, wanted, prevent_cse, StaticArguments.of(fun, static_argnums, static_argnames), block)

    return decorate if given is None else decorate(given)


checkpoint = remat


def check_options(prevent_cse: Any, block: Any, *, by_argument: bool = False) -> None:
    """Refuses a `prevent_cse` or a `block` of the wrong type.

    Args:
      by_argument: whether `prevent_cse` may be a tree prefix of the arguments, with a bool for each.
    """
    flags = jax.tree.leaves(prevent_cse) if by_argument and isinstance(prevent_cse, (tuple, list)) else [prevent_cse]
    if prevent_cse is not None and not all(isinstance(flag, bool) for flag in flags):
        several = ", or a tuple of bools with one for each argument" if by_argument else ""
        raise OptionError(f"prevent_cse= is True, False or None (by context){several}; got {prevent_cse!r}.")
    if block is not None and not (isinstance(block, str) and block):
        raise OptionError(f"block= names the block for reports and override; got {block!r}.")


def _check_function(fun: Any) -> None:
    if isinstance(fun, (staticmethod, classmethod)):
        raise RematError(f"remat goes below @{type(fun).__name__}, next to the function.")
    if not callable(fun):
        raise RematError(f"remat takes a function or a policy, got {type(fun).__name__}: {fun!r:.80}")
    if inspect.isclass(fun):
        raise RematError(
            f"remat takes a function, got the class {fun.__name__}. For Flax modules use rk.linen.remat "
            "or rk.nnx.remat."
        )
    if inspect.iscoroutinefunction(fun) or inspect.isgeneratorfunction(fun) or inspect.isasyncgenfunction(fun):
        raise RematError(f"remat takes a function that returns arrays; {name_of(fun)} is a coroutine or generator.")
    if from_jax(fun) is not None:
        raise RematError(f"{name_of(fun)} is one of JAX's policies, not a function: write remat(policy=...).")
    _adapters.refuse_modules(name_of(fun), (getattr(fun, "__self__", fun),))


def _wrap(
    fun: Callable[..., Any], written: Wanted, prevent_cse: Any, static: StaticArguments, block: str | None
) -> Callable[..., Any]:
    @functools.wraps(fun)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        wanted = in_force(block, written)
        with contextlib.nullcontext() if block is None else marks.mark(block):
            if not wanted.policy.remat:
                return fun(*args, **kwargs)
            _adapters.refuse_modules(name_of(fun), (args, kwargs))
            flags = _cse_flags(prevent_cse, static.positions(fun, args, kwargs), bool(kwargs))
            sealed = seal(static.seal(fun, args, kwargs))
            _check_prefix(flags, sealed if kwargs else sealed[0], prevent_cse)
            out = _run(fun, wanted, flags, prevent_cse, *sealed)
            result = unseal(out)
            for s in statics((sealed, out)):
                s.release()
            return result

    return rematerialized


def _cse_flags(prevent_cse: Any, static: frozenset[int], keywords: bool) -> Any:
    """What `jax.checkpoint` is given: a bool, or a tree prefix of the arguments with the static ones filled in."""
    if prevent_cse is None:
        return not jaxprs.in_loop_body()
    if not isinstance(prevent_cse, Sequence) or not static:
        return prevent_cse
    if keywords:  # a prefix of (args, kwargs)
        first, *rest = prevent_cse
        return (_cse_flags(first, static, False), *rest)
    flags = list(prevent_cse)
    for i in sorted(static):
        flags.insert(i, True)
    return tuple(flags)


def _check_prefix(flags: Any, args: Any, asked: Any) -> None:
    """Refuses bools for single arguments that the arguments of a call do not match."""
    if isinstance(flags, bool):
        return
    try:
        jax.tree.broadcast(flags, args)
    except ValueError:
        raise RematError(
            f"prevent_cse={asked!r} does not fit the call: give one bool for all, or one for each argument that is "
            "not static (a pair of those and a dict of keywords, where there are keywords)."
        ) from None


def _run(fun: Any, wanted: Wanted, flags: Any, asked_flags: Any, args: Any, kwargs: Any) -> Any:
    """Traces the function to one `jax.checkpoint` region, checks it, and binds it: as it is, or with values named."""
    policy = wanted.policy
    native = policy.as_jax()
    region = _Region.of(fun) if reusable((args, kwargs)) else _Region(fun)
    checkpointed = jax.checkpoint(region, policy=native, prevent_cse=flags)
    # Only a reading leaves the marks of module calls, which paths are made of.
    by_path = any(rule.selector.path for rule in policy.rules)
    with marks.read() if by_path else contextlib.nullcontext(), _adapters.state_errors(name_of(fun)):
        jaxpr, out = jax.make_jaxpr(checkpointed, return_shape=True)(*args, **kwargs)
    (eqn,) = jaxprs.opened(jaxpr).eqns
    traced = jaxprs.remat_region(eqn)
    assert traced is not None
    check_effects(traced.jaxpr)
    _limits.check(policy, traced.jaxpr, chosen_cse=asked_flags not in (None, True))
    try:
        check_names(traced.jaxpr, [policy])
    except RematError as error:
        if wanted.strict:
            raise
        warnings.warn(f"{error} As in JAX, it has no effect.", RematWarning, stacklevel=3)
    operands = [*jaxprs.constants(jaxpr), *jax.tree.leaves((args, kwargs))]
    if native is None:
        warn_unmatched([(policy, traced.jaxpr, TOP)])
        plain = by_path and not marks.reading()
        bound = region_function(traced.jaxpr, policy, prevent_cse=traced.prevent_cse, plain=plain)
    else:
        program = jaxprs.subprogram(jaxpr, [eqn], jaxprs.inputs(jaxpr), jaxprs.opened(jaxpr).outvars)
        bound = jaxprs.as_function(program)
    with _limits.refusals_said():
        results = bound(*operands)
    return jax.tree.unflatten(jax.tree.structure(out), results)


class _Region:
    """A function as JAX traces it, from sealed arguments to a sealed result.

    JAX caches traces by it, so there is one for each function, as long as the function lives. It holds the function
    weakly: what JAX's caches keep alive must not keep alive the function and all that it closes over.
    """

    def __init__(self, fun: Callable[..., Any]):
        try:
            self._fun: Callable[[], Any] = weakref.ref(fun)
        except TypeError:
            self._fun = lambda: fun
        self.__name__ = getattr(fun, "__name__", "function")
        self.__qualname__ = getattr(fun, "__qualname__", self.__name__)
        self.reusable = True

    @classmethod
    def of(cls, fun: Callable[..., Any]) -> _Region:
        """The region of a function; a new one where its traces cannot serve later calls."""
        try:
            known = _regions.get(fun)
            if known is None or known.__wrapped__ is not fun or not known.reusable:
                known = _regions[fun] = cls(fun)
            return known
        except TypeError:  # the function cannot be hashed or weakly referenced
            return cls(fun)

    @property
    def __wrapped__(self) -> Any:
        return self._fun()  # JAX reads the function's name, place and signature here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unseal((args, kwargs))
        out = self._fun()(*args, **kwargs)
        for leaf in jax.tree.leaves(out):
            if not is_dynamic(leaf) and holds_tracer(leaf):
                raise RematError(
                    f"{self.__qualname__} returns a {type(leaf).__name__} with arrays inside, which is no pytree: "
                    "they cannot leave the rematerialized function. Register it as one "
                    "(jax.tree_util.register_dataclass), or return the arrays."
                )
        out = seal(out)
        self.reusable = self.reusable and reusable(out)
        return out


_regions: weakref.WeakKeyDictionary[Any, _Region] = weakref.WeakKeyDictionary()
