"""What a run starts from, and what it says when that is not possible."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.run.restore import RestoreResult, scale_lines
from MaxText.training.state import TrainState
from tests.checkpointing.small_state import (
    CONFIG,
    assert_bit_equal,
    fresh_state,
    on_host,
    optimizer,
    start,
    update,
)
from tests.refusals import refused


def with_sgd():
    params = fresh_state().params
    return TrainState(jnp.int32(0), params, optax.sgd(0.1, momentum=0.9).init(params))


def test_scratch(tmp_path, saved_run):
    state = fresh_state()
    result, lines = start(tmp_path / "new", state=state)
    assert result.state is state
    assert (result.first_step, result.position, result.how) == (0, None, "scratch")
    assert not result.metadata
    assert any("scratch" in line for line in lines if "taken" in line)
    # A run without checkpointing ignores its own ones.
    result, lines = start(saved_run[0], CheckpointingConfig(enable_checkpointing=False))
    assert result.source == "scratch"
    assert any("enable_checkpointing" in line for line in lines)


def test_own_newest_checkpoint_comes_first(saved_run):
    run, kept = saved_run
    section = CheckpointingConfig(load_parameters_path=str(run))
    result, lines = start(run, section, initialize=pytest.fail, config={**CONFIG, "steps": 20})
    assert_bit_equal(result.state, kept[4])
    assert (result.first_step, result.position) == (5, {"step": 5, "seed": 5})
    assert result.metadata["config"]["steps"] == 10
    assert (result.how, result.stored_step) == ("resume", 4)
    # mlp_activations is a tuple here and a list on disk: no difference.
    assert result.changes == {"steps": ("10", "20")}
    assert "  steps: 10 -> 20" in lines
    assert any("load_parameters_path" in line and "ignored" in line for line in lines)
    assert not any(line.startswith("warning: ") for line in lines)


def test_an_ignored_path_without_weights_is_a_warning(saved_run, tmp_path):
    for key in ("load_parameters_path", "load_full_state_path"):
        section = CheckpointingConfig(**{key: str(tmp_path)})
        result, lines = start(saved_run[0], section)
        assert result.how == "resume"
        (warning,) = [line for line in lines if line.startswith("warning: ")]
        assert f"{key}={tmp_path} is ignored, and could not be loaded" in warning


@pytest.mark.parametrize(
    ("place", "step"),
    [("", 4), ("checkpoints", 4), ("checkpoints/2", 2), ("checkpoints/2/items", 2)],
)
def test_given_paths(tmp_path, saved_run, place, step):
    run, kept = saved_run
    section = CheckpointingConfig(load_full_state_path=str(run / place))
    result, _ = start(tmp_path / "new", section, initialize=pytest.fail)
    assert_bit_equal(result.state, kept[step])
    assert (result.first_step, result.position["step"]) == (step + 1, step + 1)
    # Of the parameters alone, whatever the optimizer is.
    section = CheckpointingConfig(load_parameters_path=str(run / place))
    state = with_sgd()
    expected = TrainState(state.step, kept[step].params, on_host(state).opt_state)
    result, _ = start(tmp_path / "new", section, state)
    assert_bit_equal(result.state, expected)
    assert (result.first_step, result.position) == (0, None)


def test_refused_paths(tmp_path, saved_run):
    section = CheckpointingConfig(load_parameters_path=str(saved_run[0] / "checkpoints" / "3"))
    refused(r"(?s)^load_parameters_path.* 0, 2, 4", start, tmp_path / "new", section)
    checkpoints = CheckpointManager(tmp_path / "newer" / "checkpoints", CheckpointingConfig())
    checkpoints.save(0, update(fresh_state()), None, {"schema_version": 10_000})
    checkpoints.wait()
    refused("schema 10000", start, tmp_path / "newer")


@pytest.mark.parametrize("key", ["", "load_full_state_path", "load_parameters_path"])
def test_another_shape(tmp_path, run, key, told):
    section = CheckpointingConfig(**{key: str(run)}) if key else CheckpointingConfig()
    folder = tmp_path / "new" if key else run
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    with pytest.raises(UserError) as caught:
        start(folder, section, fresh_state(width=4), config={**CONFIG, "base_emb_dim": 4})
    # Another run_name does not help where the new run begins with the same weights.
    told(caught.value)
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("*")) == before


def test_another_optimizer(saved_run):
    with pytest.raises(UserError, match=r"opt_type: .*adamw.* -> .*sgd") as caught:
        start(saved_run[0], state=with_sgd(), config={**CONFIG, "opt_type": "sgd"})
    assert "missing     opt_state/0/trace/token_embedder" in str(caught.value)
    assert "extra       opt_state/1/0/mu/decoder/wi" in str(caught.value)


def test_floating_formats_are_cast(saved_run):
    run, kept = saved_run
    state = fresh_state()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    result, lines = start(run, state=TrainState(state.step, params, state.opt_state))
    assert any("float32 -> bfloat16" in line for line in lines)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), kept[4].params)
    jax.tree.map(np.testing.assert_array_equal, result.state.params, expected)


def test_masked_and_empty_optimizer_states_come_back(tmp_path):
    params = fresh_state().params
    labels = {"decoder": {"wi": "a", "scale": "b"}, "token_embedder": "a"}
    transform = optax.chain(
        optax.identity(),
        optax.partition({"a": optimizer, "b": optax.set_to_zero()}, labels),
        optax.scale_by_schedule(lambda count: 1.0),
    )
    state = TrainState(jnp.int32(1), params, transform.init(params))
    checkpoints = CheckpointManager(tmp_path / "checkpoints", CheckpointingConfig())
    checkpoints.save(0, state, None, checkpoint_metadata(CONFIG, params))
    checkpoints.wait()
    result, _ = start(tmp_path, state=state, initialize=pytest.fail)
    assert_bit_equal(result.state, on_host(state))


@pytest.mark.parametrize("how", ["resume", "full_state", "parameters", "growth"])
def test_only_the_training_itself_goes_on_with_recorded_progress(how):
    # The loss of a run that only takes parameters begins anew, and so may be above the other's.
    recorded = {"loss_trend": {"first": 1.0}, "rollbacks": 2, "evaluation_is_due": True}
    restored = RestoreResult(
        state=None, first_step=0, position=None, source="", how=how, metadata=recorded
    )
    assert restored.progress == (recorded if how in ("resume", "full_state") else {})


@pytest.mark.parametrize(
    ("num_processes", "batch_size", "expected"),
    [
        (4, 12, ""),
        (3, 12, "Going on with 3 processes: 4 before, as the checkpoint of step 7 says; global"),
        (4, 9, "WARNING: the global batch is now 9 sequences, and was 12 when"),
    ],
    ids=["as before", "fewer processes", "another batch"],
)
def test_another_number_of_processes_or_batch_is_told(num_processes, batch_size, expected):
    recorded = {"num_processes": 4, "global_batch_size": 12}
    restored = RestoreResult(
        state=None,
        first_step=8,
        position=None,
        source="",
        how="resume",
        metadata=recorded,
        stored_step=7,
    )
    schedule = BatchSchedule.constant(batch_size, 32)
    lines = scale_lines(restored, schedule, num_processes)
    assert len(lines) == bool(expected)
    assert "".join(lines).startswith(expected)
    # A run that only takes parameters has a batch of its own.
    assert scale_lines(restored._replace(how="parameters"), schedule, num_processes) == []
