"""Wrong types and values at every public function: each gets an error in our words, never one from inside JAX or Flax.

The wrong uses are lines of ``bad_inputs.txt``. ``python tests/test_bad_inputs.py`` prints the table of them and of
their messages, and so does pytest with ``-s``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np  # noqa: F401
import pytest
from flax import linen as nn
from flax import nnx

import remat_kit as rk
from remat_kit import _cli

USES = [
    line
    for line in (Path(__file__).with_name("bad_inputs.txt")).read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
# What Python says of a call that a function does not take, and of an operator.
BINDING = re.compile(
    r"\(\) (missing \d+ required|takes (no|from|\d+)|got an unexpected keyword|got multiple values)"
    r"|unsupported operand type\(s\) for \|: .*'Policy'"
)
PROGRAMS = """
import jax.numpy as jnp

value = 3

def ok(): return lambda w: jnp.sum(jnp.sin(w)), (jnp.ones(3),)
def not_scalar(): return lambda w: w, (jnp.ones(3),)
def raises(): raise ValueError("\\x1b[31m[bold]boom[/bold]\\nsecond line")
def raising(): return lambda w: 1 / 0, (jnp.ones(3),)
def three(): return 3
def exits(): raise SystemExit(0)
def kw(): return lambda w: w.sum(), (jnp.ones(3),), {3: 4}
def rec(): return rec()
def missing(): return lambda w, x: w.sum(), (jnp.ones(3),)
"""


class Opaque:
    pass


class Block(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.width)(x)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x, x, x


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block(name="a")(Block(name="b")(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.d = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.d(x)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.b = NnxBlock(rngs)

    def __call__(self, x):
        return self.b(x)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


def vector(w, x):
    return jnp.tanh(x @ w)


def step(c, x):
    return c, x


@functools.cache
def names() -> dict[str, Any]:
    """What the lines of the table speak of."""
    x, w = jnp.ones((4, 3)), jnp.ones((3, 3))
    given = {"x": x, "w": w, "key": jax.random.key(0), "plan": rk.plan(loss, w, x, target=None, budget="1MiB")}
    return {**globals(), **given, "folder": tempfile.gettempdir(), "missing": "no/such/folder/plan.json"}


@contextlib.contextmanager
def programs() -> Iterator[None]:
    """A current folder with programs of a user's."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my_programs.py").write_text(PROGRAMS)
        Path(folder, "my_syntax.py").write_text("def (\n")
        Path(folder, "broken.json").write_text('{"schema": 1')
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.path[:] = [p for p in sys.path if p != folder]
            sys.modules.pop("my_programs", None)


def command(line: str) -> str:
    """The error that the command prints for wrong arguments."""
    out, err = io.StringIO(), io.StringIO()
    with programs(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = _cli.main(shlex.split(line))
        except SystemExit as e:  # argparse
            status = e.code
    said = err.getvalue()
    assert status == 2 and not out.getvalue(), f"status {status}: {out.getvalue()[:200]}"
    assert "error: " in said and "Traceback" not in said
    return said[said.index("error: ") + len("error: ") :].strip()


def message(use: str) -> str:
    """The message that a wrong use gets; fails where it gets none, or another one than it should."""
    if use.startswith("$"):
        return command(use[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = eval(use, names())  # noqa: S307
        except rk.RematError as e:
            return str(e)
        except TypeError as e:
            if BINDING.search(str(e)):
                return str(e)
            raise
    raise AssertionError(f"{use} is taken: {made!r:.200}")


@pytest.mark.parametrize("use", USES)
def test_wrong_use_is_told_in_our_words(use):
    said = message(use)
    print(f"\n{use}\n    {said}")
    assert 10 < len(said) < 2000
    assert not re.search(r"jax\._src|flax/|site-packages|Traceback", said)
    assert "\x1b" not in said


# What is not ours to say: errors of the user's own function, and of JAX for functions of a loop that do not fit.
THEIRS = [
    ("rk.trace(lambda w: 1 / 0, w)", ZeroDivisionError, "division"),
    ("rk.remat(lambda w: {}[w.ndim])(w)", KeyError, "2"),
    ('rk.residuals(loss, "w", x)', TypeError, "'str'"),
    ("rk.apply(lambda w: bool(w.sum()), 'full')(w)", jax.errors.TracerBoolConversionError, "boolean"),
    ("rk.max_batch(lambda n: 1 / 0)", ZeroDivisionError, "division"),
    ("rk.scan(step, w)", ValueError, "length"),
    ("rk.scan(step, w, x, length=3)", ValueError, "length"),
    ("rk.scan(step, w, [x, w])", ValueError, "leading axis"),
    ("rk.scan(lambda c, x: c, w, x, segments=2)", TypeError, "pair"),
    ("rk.scan(lambda c, x: (c[0], x), w, x, segments='binomial')", TypeError, "equal types"),
    ("rk.while_loop(lambda c: c, lambda c: c, w, max_steps=3)", TypeError, "boolean scalar"),
    ("rk.while_loop(lambda c: True, lambda c: c[0], w, max_steps=3)", TypeError, "equal types"),
    ("rk.sequential([jnp.sin, lambda x: x.nope], w)", AttributeError, "nope"),
    ("rk.linen.remat(Block)()(x)", Exception, "unbound"),
]


@pytest.mark.parametrize(("use", "kind", "words"), THEIRS)
def test_errors_of_others_stay_what_they_are(use, kind, words):
    with pytest.raises(kind, match=words) as caught:
        eval(use, names())  # noqa: S307
    assert not isinstance(caught.value, rk.RematError)


def test_every_public_function_is_in_the_table():
    used = {found[0] for use in USES if (found := re.match(r"[\w.]+", use))}
    functions = {f"rk.{name}" for name in dir(rk) if callable(getattr(rk, name)) and name[0].islower()}
    functions |= {f"rk.zoo.{name}" for name in rk.zoo.names()} | {f"rk.linen.{n}" for n in rk.linen.__all__}
    functions |= {f"rk.nnx.{name}" for name in rk.nnx.__all__} | {f"rk.testing.{n}" for n in rk.testing.__all__}
    functions -= {"rk.checkpoint", "rk.checkpoint_name"}  # an alias, and JAX's own
    assert functions <= used, functions - used


if __name__ == "__main__":
    for line in USES:
        try:
            answer = message(line)
        except Exception as e:
            answer = f"!!! {''.join(traceback.format_exception_only(e)).strip()}"
        print(f"{line}\n{textwrap.indent(answer, '    ')}", flush=True)
