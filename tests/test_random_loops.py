"""Random programs with loops, under random policies: no gradient differs and nothing crashes.

``python tests/test_random_loops.py 1000 --seed 1`` runs so many and prints what came of them; ``-m large`` of
pytest runs a thousand.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
import time
import traceback
import warnings

import hypothesis
import jax
import pytest
from hypothesis import strategies as st
from programs import OLD_REMAT3, Program, Step, policies, programs
from sameness import OLD_FAULTS, WAYS, applied, check_same, made_for, possibly_refused

import remat_kit as rk

FORMS = ("apply", "apply", "blocks", "remat")
_MOST_AT_ONCE = 100  # then JAX's caches are emptied: no two programs share what they compile


@dataclasses.dataclass
class Survey:
    """What came of many random programs."""

    seed: int
    compared: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: int = 0
    differing: list[str] = dataclasses.field(default_factory=list)
    crashed: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        ways = ", ".join(f"{n} {way}" for way, n in sorted(self.compared.items()))
        return (
            f"{self.compared.total()} random programs x policies on JAX {jax.__version__}"
            f"{' with jax_remat3' if jax.config.jax_remat3 else ''}, seed {self.seed}: {len(self.differing)} differing "
            f"gradients, {len(self.crashed)} crashes in {self.seconds:.0f} s ({ways}; besides, {self.refused} policies "
            "were refused for what the program does not have)"
        )

    def try_one(self, program: Program, policy: str, way: str, form: str) -> None:
        """Compares one program with and without a policy."""
        program = made_for(program, way)
        new = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rk.RematWarning)  # random rules are often ones that cannot help
            try:
                if form == "remat":
                    with possibly_refused():
                        jax.eval_shape(rk.remat(program.fn, policy=policy), *program.args())
                        new = rk.remat(program.fn, policy=policy)
                else:
                    new = applied(program, policy if form == "apply" else {"**": policy})
                if new is None:
                    self.refused += 1
                else:
                    check_same(program, new, way)
                    self.compared[way] += 1
            except Exception as e:
                if OLD_REMAT3 and any(fault in str(e) for fault in OLD_FAULTS):
                    return
                found = self.differing if isinstance(e, AssertionError) and new is not None else self.crashed
                self.compared[way] += 1
                found.append(f"{program!r}\n  {policy!r}, {way}, {form}\n{''.join(traceback.format_exception(e))}")


def survey(count: int, seed: int, depth: int = 2, longest: int = 4, ways: tuple[str, ...] = WAYS) -> Survey:
    """Compares so many random programs; refused policies do not count."""
    found = Survey(seed)
    start = time.perf_counter()
    part = 0
    while found.compared.total() < count:
        most = min(_MOST_AT_ONCE, count - found.compared.total())

        @hypothesis.seed(seed + 1000003 * part)
        @hypothesis.settings(
            max_examples=most,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(
            program=programs(depth, longest, loop=True),
            policy=policies(offload=False),
            way=st.sampled_from(ways),
            form=st.sampled_from(FORMS),
        )
        def compare(program: Program, policy: str, way: str, form: str) -> None:
            found.try_one(program, policy, way, form)

        compare()
        jax.clear_caches()
        part += 1
        found.seconds = time.perf_counter() - start
    return found


def check(found: Survey) -> None:
    print(f"\n{found}")
    assert not found.differing and not found.crashed, "\n\n".join([*found.differing, *found.crashed])


# Found by search: of loops with few carries kept, the gradient of a part was zero under a policy.
FOUND = [
    (
        (
            Step("scan_binomial", (6, 3, 6), (Step("where", (1, 2, 5)),)),
            Step("exp", (6, 6, 6)),
            Step("scan_binomial", (6, 1, 7), (Step("tanh", (1, 0, 6)),)),
        ),
        "save op=mul; recompute rest",
    ),
    (
        (
            Step("grad", (7, 2, 1), (Step("bent", (7, 5, 1)),)),
            Step("scan_binomial", (5, 2, 4), (Step("random", (1, 3, 7)), Step("flip", (4, 5, 4)))),
            Step("tanh", (1, 5, 1)),
        ),
        "recompute larger_than=12; recompute rest",
    ),
    (
        (
            Step("jit", (3, 7, 7), (Step("scan_binomial", (4, 6, 6), (Step("double", (3, 7, 1)),)),)),
            Step("scan", (5, 7, 6), (Step("add", (1, 3, 7)), Step("split", (7, 5, 0)))),
            Step("scan_binomial", (4, 6, 6), (Step("logistic", (1, 0, 1)),)),
        ),
        "save op=tanh; recompute rest",
    ),
]


@pytest.mark.parametrize(("steps", "policy"), FOUND)
def test_programs_that_were_wrong(steps, policy):
    found = Survey(0)
    for outputs in ((0,), (1,), (0, 2)):
        found.try_one(Program(steps, outputs), policy, "jit", "apply")
    check(found)


@pytest.mark.slow
def test_loops_change_nothing():
    check(survey(60, seed=6, depth=1, longest=1, ways=("jit", "jit", *WAYS)))  # the quickest way most often


@pytest.mark.large
def test_a_thousand_programs():
    check(survey(1000, seed=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    result = survey(asked.count, asked.seed)
    print("\n\n".join([*result.differing, *result.crashed, str(result)]))
    sys.exit(bool(result.differing or result.crashed))
