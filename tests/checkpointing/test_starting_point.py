"""What a run starts from, and what it says when that is not possible."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.training_sections import Checkpoint
from MaxText.errors import UserError
from MaxText.training.state import TrainState
from tests.checkpointing.small_state import (
    CONFIG,
    abstract,
    assert_bit_equal,
    fresh_state,
    on_host,
    optimizer,
    update,
)


@pytest.fixture
def other_run(tmp_path):
    """A finished run with checkpoints of steps 0, 2 and 4: (run folder, host copies by step)."""
    run = tmp_path / "other"
    checkpoints = Checkpoints(run / "checkpoints", Checkpoint())
    state, kept = fresh_state(seed=1), {}
    for step in range(5):
        state = update(state)
        if step % 2 == 0:
            kept[step] = on_host(state)
            metadata = checkpoint_metadata(CONFIG, state.params)
            checkpoints.save(step, state, {"step": step + 1}, metadata)
    checkpoints.close()
    return run, kept


def start(folder, section=None, state=None, config=CONFIG, initialize=None):
    """Starts a run with checkpoints in `folder`: (Start, printed lines)."""
    section = section or Checkpoint()
    state = fresh_state() if state is None else state
    lines = []
    checkpoints = Checkpoints(folder / "checkpoints", section)
    result = restore_or_initialize(
        checkpoints, section, abstract(state), initialize or (lambda: state), config, lines.append
    )
    return result, lines


def never():
    raise AssertionError("initialized although a whole state is restored")


def file_tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def truncate(step_folder):
    for path in (step_folder / "items").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            os.truncate(path, path.stat().st_size // 2)


def test_scratch(tmp_path):
    state = fresh_state()
    result, lines = start(tmp_path / "new", state=state)
    assert result.state is state
    assert (result.first_step, result.position, result.how) == (0, None, "scratch")
    assert not result.metadata
    assert next(line for line in lines if "taken" in line).lstrip().startswith("4. scratch")


def test_own_newest_checkpoint_comes_first(tmp_path, other_run):
    run, kept = other_run
    section = Checkpoint(load_parameters_path=str(run))
    result, lines = start(run, section, initialize=never, config={**CONFIG, "steps": 20})
    assert_bit_equal(result.state, kept[4])
    assert (result.first_step, result.position) == (5, {"step": 5})
    assert result.metadata["config"]["steps"] == 10
    assert (result.how, result.stored_step) == ("resume", 4)
    assert result.changes == {"steps": ("10", "20")}
    text = "\n".join(lines)
    assert "step 4 in" in text
    assert "ignored: this run has its own checkpoint" in text
    assert "steps: 10 -> 20" in text
    assert "mlp_activations" not in text  # a tuple here, a list on disk: no difference


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/2", "checkpoints/2/items"])
def test_load_full_state_path(tmp_path, other_run, place):
    run, kept = other_run
    step = 2 if "2" in place else 4
    section = Checkpoint(load_full_state_path=str(run / place))
    result, _ = start(tmp_path / "new", section, initialize=never)
    assert_bit_equal(result.state, kept[step])
    assert (result.first_step, result.position) == (step + 1, {"step": step + 1})


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/2", "checkpoints/2/items"])
def test_load_parameters_path(tmp_path, other_run, place):
    run, kept = other_run
    step = 2 if "2" in place else 4
    section = Checkpoint(load_parameters_path=str(run / place))
    result, _ = start(tmp_path / "new", section)
    fresh = on_host(fresh_state())
    assert_bit_equal(result.state, TrainState(fresh.step, kept[step].params, fresh.opt_state))
    assert (result.first_step, result.position) == (0, None)


def test_parameters_load_into_a_run_with_another_optimizer(tmp_path, other_run):
    run, kept = other_run
    params = fresh_state().params
    state = TrainState(jnp.int32(0), params, optax.sgd(0.1, momentum=0.9).init(params))
    section = Checkpoint(load_parameters_path=str(run))
    result, _ = start(tmp_path / "new", section, state=state)
    for got, wanted in zip(
        jax.tree.leaves(result.state.params), jax.tree.leaves(kept[4].params), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_moved_items_without_neighbours(tmp_path, other_run):
    run, kept = other_run
    (run / "checkpoints" / "2" / "items").rename(tmp_path / "moved")
    section = Checkpoint(load_full_state_path=str(tmp_path / "moved"))
    result, lines = start(tmp_path / "new", section)
    assert_bit_equal(result.state, kept[2])
    assert (result.first_step, result.position, result.stored_step) == (3, None, None)
    assert not result.metadata
    assert any("no data position" in line for line in lines)


def test_missing_path_lists_the_steps_that_exist(tmp_path, other_run):
    run, _ = other_run
    section = Checkpoint(load_parameters_path=str(run / "checkpoints" / "3"))
    with pytest.raises(UserError) as caught:
        start(tmp_path / "new", section)
    message = str(caught.value)
    assert "load_parameters_path" in message
    assert "does not exist" in message
    assert "0, 2, 4" in message


def test_both_paths_are_refused(tmp_path):
    section = Checkpoint(load_parameters_path="a", load_full_state_path="b")
    with pytest.raises(UserError, match="clear one"):
        start(tmp_path, section)


def test_a_truncated_newest_checkpoint_falls_back_loudly(other_run):
    run, kept = other_run
    truncate(run / "checkpoints" / "4")
    before = file_tree(run)
    result, lines = start(run, initialize=never)
    assert_bit_equal(result.state, kept[2])
    assert result.first_step == 3
    assert any(
        "warning: a checkpoint cannot be read" in line and "step 4" in line for line in lines
    )
    assert file_tree(run) == before


@pytest.mark.parametrize("lost", ["items/_METADATA", "iter/metadata", "items/manifest.ocdbt"])
def test_a_lost_file_falls_back(other_run, lost):
    run, kept = other_run
    (run / "checkpoints" / "4" / lost).unlink()
    result, _ = start(run, initialize=never)
    assert_bit_equal(result.state, kept[2])


def test_no_readable_checkpoint_is_an_error_and_not_a_new_run(other_run):
    run, _ = other_run
    for step in (0, 2, 4):
        truncate(run / "checkpoints" / str(step))
    before = file_tree(run)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read") as caught:
        start(run, initialize=never)
    assert str(caught.value).count("step ") >= 3
    assert file_tree(run) == before


def test_a_given_path_is_never_replaced_by_an_older_step(tmp_path, other_run):
    run, _ = other_run
    truncate(run / "checkpoints" / "4")
    for key in ("load_full_state_path", "load_parameters_path"):
        with pytest.raises(UserError, match=f"{key}.*cannot be read"):
            start(tmp_path / "new", Checkpoint(**{key: str(run)}))


@pytest.mark.parametrize("key", ["", "load_full_state_path", "load_parameters_path"])
def test_another_shape_is_told_with_the_key_responsible(tmp_path, other_run, key):
    run, _ = other_run
    before = file_tree(run)
    section = Checkpoint(**{key: str(run)}) if key else Checkpoint()
    folder = tmp_path / "new" if key else run
    with pytest.raises(UserError) as caught:
        start(folder, section, fresh_state(width=4), config={**CONFIG, "base_emb_dim": 4})
    message = str(caught.value)
    assert (
        "other shape params/decoder/wi: stored float32[3,16,8], wanted float32[3,16,4]" in message
    )
    assert "base_emb_dim: 8 -> 4" in message
    # Another run_name is no way out where the new run is told to begin with the same weights.
    other = "load other weights" if key else "start another run_name"
    assert message.endswith(f"Set them back, or {other}.")
    assert file_tree(run) == before


def test_another_optimizer_is_told_with_the_key_responsible(other_run):
    run, _ = other_run
    params = fresh_state().params
    state = TrainState(jnp.int32(0), params, optax.sgd(0.1, momentum=0.9).init(params))
    with pytest.raises(UserError, match=r"opt_type: .*adamw.* -> .*sgd") as caught:
        start(run, state=state, config={**CONFIG, "opt_type": "sgd"})
    assert "missing     opt_state/0/trace/token_embedder" in str(caught.value)
    assert "extra       opt_state/1/0/mu/decoder/wi" in str(caught.value)


def test_floating_formats_are_cast_and_told(other_run):
    run, kept = other_run
    state = fresh_state()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    result, lines = start(run, state=TrainState(state.step, params, state.opt_state))
    assert any("2 arrays of params are cast on load: float32 -> bfloat16" in x for x in lines)
    got, wanted = result.state.params["token_embedder"], kept[4].params["token_embedder"]
    np.testing.assert_array_equal(got, wanted.astype(jnp.bfloat16))


def test_masked_and_empty_optimizer_states_come_back(tmp_path):
    params = fresh_state().params
    labels = {"decoder": {"wi": "a", "scale": "b"}, "token_embedder": "a"}
    transform = optax.chain(
        optax.identity(),
        optax.partition({"a": optimizer, "b": optax.set_to_zero()}, labels),
        optax.scale_by_schedule(lambda count: 1.0),
    )
    state = TrainState(jnp.int32(1), params, transform.init(params))
    checkpoints = Checkpoints(tmp_path / "checkpoints", Checkpoint())
    checkpoints.save(0, state, None, checkpoint_metadata(CONFIG, params))
    checkpoints.close()
    result, _ = start(tmp_path, state=state, initialize=never)
    assert_bit_equal(result.state, on_host(state))


def test_a_newer_schema_is_refused(tmp_path):
    state = update(fresh_state())
    checkpoints = Checkpoints(tmp_path / "checkpoints", Checkpoint())
    checkpoints.save(0, state, None, {"schema_version": 10_000})
    checkpoints.close()
    with pytest.raises(UserError, match="newer version"):
        start(tmp_path, state=state)


def test_switched_off_checkpointing_ignores_own_ones(other_run):
    run, _ = other_run
    result, lines = start(run, Checkpoint(enable_checkpointing=False))
    assert result.source == "scratch"
    assert any("enable_checkpointing is false" in line for line in lines)
