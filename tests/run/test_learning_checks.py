"""Warnings of runs that cannot learn."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.config.training_sections import ScheduleConfig
from MaxText.layers.batch import Batch
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.run.learning_checks import LearningChecks, first_batch_reasons, zero_rate_reason
from MaxText.training.schedule import learning_rate_schedule

SPECS = {
    "embed": ParamSpec((8, 4), jnp.float32, ("vocab", "embed"), 1),
    "layers/mlp": ParamSpec((3, 4, 4), jnp.float32, ("layers", "embed", "mlp"), 1),
    "layers/experts": ParamSpec((3, 2, 4), jnp.float32, ("layers", "exp", "mlp"), 1),
}


class Sharding:
    replicated = None

    def jit(self, function, out_shardings):
        return jax.jit(function)


def checks_of(first_step=0, last_step=99, **keys):
    warnings = []

    def emit(kind, *, step, reason):
        assert kind == "warning"
        warnings.append(reason)

    config = load_config(dataset_type="synthetic", **keys)
    setup = types.SimpleNamespace(model=types.SimpleNamespace(parameters=SPECS))
    checks = LearningChecks(
        config, setup, Sharding(), emit, first_step=first_step, last_step=last_step
    )
    return checks, warnings


def metrics(**changes):
    return {
        "loss": 3.0,
        "total_weights": 64.0,
        "grad_norm": 1.0,
        "update_norm": 0.1,
        "param_norm": 10.0,
        "learning_rate": 1e-2,
        "num_skipped": 0,
        "skipped": 0,
    } | changes


def state_of(seen=()):
    """A state of Adam whose moments are not 0 at `seen`, pairs of a parameter and an index."""
    zeros = {
        "embed": np.zeros((8, 4)),
        "layers": {"mlp": np.zeros((3, 4, 4)), "experts": np.zeros((3, 2, 4))},
    }
    moments = jax.tree.map(np.copy, zeros)
    for name, index in seen:
        leaf = moments
        for part in name.split("/"):
            leaf = leaf[part]
        leaf[index] = 1e-30
    return types.SimpleNamespace(params=zeros, opt_state=[{"count": 3}, {"mu": moments}])


ALL_SEEN = [(name, ...) for name in SPECS]


def run_of(reports, state=None, **keys):
    """The warnings of a run with these metrics at each report."""
    checks, warnings = checks_of(last_step=len(reports) - 1, **keys)
    for step, report in enumerate(reports):
        checks.observe(step, metrics(**report))
    checks.finish(state or state_of(ALL_SEEN))
    return warnings


def learning(count=10):
    return [{"loss": 5.0 - 0.1 * step} for step in range(count)]


def test_a_run_that_learns_has_no_warning():
    assert run_of(learning()) == []
    assert run_of([]) == []
    # The first update of a warm-up is 0; a skipped step or a batch of padding is no trend.
    changes = {1: {"update_norm": 0.0, "learning_rate": 0.0}, 3: {"skipped": 1}, 5: {"loss": 0.0}}
    assert run_of([report | changes.get(step, {}) for step, report in enumerate(learning())]) == []


@pytest.mark.parametrize(
    ("report", "keys", "said"),
    [
        ({"total_weights": 0.0, "loss": 0.0, "grad_norm": 0.0}, {}, "no step had a target token"),
        ({"total_weights": 0.0}, {"mlm_training": True}, "mlm.mask_prob=0.15"),
        ({"grad_norm": 0.0, "update_norm": 0.0}, {}, "the gradient was exactly 0"),
        ({"grad_norm": 0.0}, {}, "weight decay alone changed"),
        ({"grad_norm": 0.0, "update_norm": 0.0}, {"dropout_rate": 0.99}, "dropout_rate=0.99"),
        ({"loss": 5.545}, {}, "the loss was exactly 5.545"),
        (
            {"update_norm": 0.0},
            {"learning_rate_overrides": [[".*", 0.0]]},
            r"overrides freeze \.\*",
        ),
        ({"update_norm": 0.0}, {}, "all updates were exactly 0"),
        ({"update_norm": 0.0, "learning_rate": 0.0}, {"learning_rate": 0}, "learning_rate=0"),
        ({"update_norm": 0.0, "learning_rate": 0.0}, {}, "the learning rate was 0"),
        ({"update_norm": 1e-9}, {"learning_rate": 1e-9}, "rounded away.*learning_rate=1e-09"),
        ({"update_norm": 5e-7}, {}, "the model is the one it started with"),
        ({"update_norm": 0.01}, {"weight_dtype": "bfloat16"}, "bfloat16 can resolve"),
        (
            {"update_norm": 1e-3 * 10.0 / (1 - 1e-3)},
            {"gradient_clipping_threshold": 1e-20},
            "weight decay alone.*gradient_clipping_threshold=1e-20",
        ),
        ({"skipped": 1, "num_skipped": 5}, {}, "every reported step was skipped"),
    ],
)
def test_one_warning_with_the_first_cause(report, keys, said):
    is_constant = "loss" in report
    reports = [
        row | report if is_constant or "total_weights" in report else report | row
        for row in learning(9)
    ]
    (warning,) = run_of(reports, **keys)
    assert re.search(said, warning)


def test_what_holds_for_the_first_reports_is_said_early_and_once():
    checks, warnings = checks_of()
    for step in range(7):
        checks.observe(step, metrics(grad_norm=0.0, update_norm=0.0))
    assert not warnings
    checks.observe(7, metrics(grad_norm=0.0, update_norm=0.0))
    assert len(warnings) == 1
    checks.observe(8, metrics(grad_norm=0.0, update_norm=0.0))
    checks.finish(state_of())
    assert len(warnings) == 1


def test_parameters_whose_gradient_was_always_0():
    checks, warnings = checks_of()
    assert not checks.gradients_due(15)
    for step in range(17):
        checks.observe(step, metrics(loss=5.0 - step))
    assert checks.gradients_due(16)
    checks.check_gradients(state_of([("layers/mlp", (slice(0, 2), 1, 1)), ("layers/experts", ...)]))
    (warning,) = warnings
    assert "embed, layers/mlp (layers 2)." in warning
    assert not checks.gradients_due(17)
    checks.finish(state_of(ALL_SEEN))
    assert len(warnings) == 1


def test_experts_without_a_token_count_at_the_end():
    seen = [("embed", ...), ("layers/mlp", ...), ("layers/experts", (slice(None), 0))]
    checks, warnings = checks_of()
    checks.observe(0, metrics())
    checks.check_gradients(state_of(seen))
    assert not warnings
    checks.finish(state_of(seen))
    (warning,) = warnings
    assert "layers/experts: 3 of 6" in warning


def batch_of(tokens, weights=None):
    tokens = np.asarray(tokens)
    weights = np.ones(tokens.shape) if weights is None else np.asarray(weights)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:])


def test_the_first_batch():
    random = np.random.default_rng(0).integers(0, 50, (4, 9))
    assert first_batch_reasons(batch_of(random), is_repeated=False) == []
    (reason,) = first_batch_reasons(batch_of(random), is_repeated=True)
    assert "reuse_example_batch" in reason
    (reason,) = first_batch_reasons(batch_of(np.full((4, 9), 7)), is_repeated=False)
    assert "token id 7" in reason
    (reason,) = first_batch_reasons(batch_of([random[0]] * 4), is_repeated=False)
    assert "1 distinct" in reason
    # Sequences of padding do not count; targets without weight neither.
    padded = np.concatenate([random, np.zeros((8, 9), int)])
    weights = (np.arange(12) < 4)[:, None] * np.ones(9)
    assert first_batch_reasons(batch_of(padded, weights), is_repeated=False) == []
    assert first_batch_reasons(batch_of(random, np.zeros((4, 9))), is_repeated=False) == []


@pytest.mark.parametrize("kind", ["cosine", "linear", "polynomial", "wsd", "constant"])
@pytest.mark.parametrize("after", ["zero", "final"])
@pytest.mark.parametrize(("length", "warmup"), [(10, 0), (10, 3), (5, 1)])
def test_steps_with_learning_rate_0_are_those_of_the_schedule(kind, after, length, warmup):
    config = ScheduleConfig(
        learning_rate=1.0,
        lr_schedule_type=kind,
        learning_rate_schedule_steps=length,
        warmup_steps=warmup,
        **{"learning_rate_decay.after": after},
    )
    schedule = learning_rate_schedule(config)
    rates = [float(schedule(step)) for step in range(16)]
    for first in range(1, 16):
        for last in range(first, 16):
            reason = zero_rate_reason(config, first, last)
            part = rates[first : last + 1]
            assert bool(reason) == (0 in part), (first, last)
            assert ("every step" in reason) == (max(part) == 0)
    assert bool(zero_rate_reason(config, 0, 0)) == (rates[0] == 0)
