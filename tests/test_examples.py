"""The examples in their short form: the trainings train, remat changes what is kept, what fits is said to fit, and a
plan keeps within its budget."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def runs():
    """Returns a function that runs an example once and gives its result; a training's: without and with remat."""
    done = {}

    def get(name, *options):
        if name not in done:
            spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
            sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
            try:
                spec.loader.exec_module(module)
                done[name] = module.main(["--small", *options])
            finally:
                del sys.modules[name]
        return done[name]

    return get


@pytest.mark.parametrize("name", ["train_gpt", "train_vit"])
def test_remat_leaves_the_loss_curve_as_it_was(runs, name):
    plain, remat = runs(name)
    assert len(plain.losses) == len(remat.losses) >= 100
    np.testing.assert_allclose(remat.losses, plain.losses, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(remat.losses[:5], plain.losses[:5], rtol=1e-5)


@pytest.mark.parametrize("name", ["train_gpt", "train_vit"])
def test_remat_keeps_fewer_residuals(runs, name):
    plain, remat = runs(name)
    assert 0 < remat.residual_bytes < plain.residual_bytes / 2
    assert 0 < remat.temp_bytes <= plain.temp_bytes
    assert plain.temp_bytes < plain.total_bytes


def test_compiled_memory_falls_where_layers_are_scanned(runs):
    plain, remat = runs("train_gpt")
    assert remat.temp_bytes < 0.8 * plain.temp_bytes


def test_gpt_learns_more_than_the_frequency_of_characters(runs):
    from pydoc_data.topics import topics

    counts = np.bincount(np.frombuffer("".join(topics.values()).encode("ascii", "ignore"), np.uint8))
    share = counts[counts > 0] / counts.sum()
    for run in runs("train_gpt"):
        assert run.losses[-10:].mean() < run.losses[:10].mean() - 1
        assert run.val_loss < -(share * np.log(share)).sum() - 0.3
        assert run.val_accuracy > share.max() + 0.04
        assert len(run.sample) == 60 and run.sample.isascii()


def test_vit_tells_digits_apart(runs):
    for run in runs("train_vit"):
        assert run.losses[-10:].mean() < run.losses[:10].mean() / 3
        assert run.val_accuracy > 0.6 and run.test_accuracy > 0.6  # by chance: 0.1


def test_will_it_fit_finds_a_policy_and_the_largest_batch_that_fit(runs):
    answer = runs("will_it_fit", "--target", "cpu")
    table = answer.policies
    rows = {row.name: row for row in table.rows}
    assert rows.keys() == {"none", "full", "dots"}
    assert not rows["none"].within and rows["full"].within and rows[table.best].within
    assert rows["full"].measurement.peak_bytes < rows["none"].measurement.peak_bytes

    largest = answer.largest
    assert largest.batch >= 4 and largest.next_batch == largest.batch + 1
    assert largest.measurement.peak_bytes <= largest.budget_bytes < largest.next_measurement.peak_bytes


def test_will_it_fit_measures_the_whole_step_with_donation(runs):
    answer = runs("will_it_fit", "--target", "cpu")
    gradient, step = answer.policies[answer.policies.best], answer.step
    assert step.alias_bytes > 2.9 * gradient.output_bytes  # parameters and both moments of Adam
    assert step.argument_bytes > 2.9 * gradient.output_bytes
    assert step.peak_bytes <= answer.largest.budget_bytes


def test_a_plan_trains_as_the_model_does_without_it_within_its_budget(runs):
    answer = runs("plan_to_a_budget")
    plan, plain, planned = answer.plan, answer.plain, answer.planned
    np.testing.assert_allclose(planned.losses, plain.losses, rtol=1e-4)
    assert plain.losses[-1] < 0.8 * plain.losses[0]
    assert plan.within and plan.measured.peak_bytes <= plan.budget_bytes < answer.without.peak_bytes / 2
    assert 0 < plan.predicted.recompute_flops < plan.predicted.flops / 4  # less than the forward pass again
    # The whole step holds Adam's moments too; what the plan saves of the gradient's peak it saves of the step's.
    assert planned.peak_bytes < 0.6 * plain.peak_bytes
