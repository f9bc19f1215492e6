"""Damaged checkpoints: found, and never trained from."""

import gc
import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.checkpointing import description, layout, reading
from MaxText.checkpointing.manager import Checkpoints
from MaxText.checkpointing.matching import checkpoint_metadata
from MaxText.checkpointing.starting_point import restore_or_initialize
from MaxText.configuration.training_sections import Checkpoint
from MaxText.conversion.stored_arrays import StoredArrays
from MaxText.errors import UserError
from tests.checkpointing.small_state import (
    CONFIG,
    abstract,
    assert_bit_equal,
    fresh_state,
    on_host,
    update,
)

# Where one array fails, Orbax drops the reads of the others when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of steps 0 and 1: (its folder, host copies by step)."""
    run = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(run / "checkpoints", Checkpoint())
    state, kept = fresh_state(), {}
    for step in range(2):
        state = update(state)
        kept[step] = on_host(state)
        metadata = checkpoint_metadata(CONFIG, state.params)
        checkpoints.save(step, state, {"step": step + 1, "seed": 5}, metadata)
    checkpoints.close()
    return run, kept


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "run")


def abstract_state():
    return abstract(fresh_state())


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def ways_to_damage(data, chance):
    """Contents of a damaged file; None for one that is gone."""
    place = chance.randrange(len(data))
    flipped, hole = bytearray(data), bytearray(data)
    flipped[place] ^= 1 << chance.randrange(8)
    hole[place : place + 64] = bytes(len(hole[place : place + 64]))
    return [bytes(flipped), data[:place], bytes(hole), b"", None]


def check_random_damage(run, kept, seed, times):
    """Each file damaged in every way: what is restored is what was saved, or nothing is."""
    chance, outcomes = random.Random(seed), {"as saved": 0, "unreadable": 0}
    checkpoints = Checkpoints(run / "checkpoints", Checkpoint())
    for path in times * files_of(run / "checkpoints" / "1"):
        data = path.read_bytes()
        for damaged in ways_to_damage(data, chance):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            try:
                state, position, metadata = checkpoints.restore(
                    1, abstract_state(), CONFIG, lambda line: None
                )
            except description.Unreadable:
                outcomes["unreadable"] += 1
            else:
                assert_bit_equal(state, kept)
                assert position == {"step": 2, "seed": 5}
                assert metadata == checkpoint_metadata(CONFIG, kept.params)
                outcomes["as saved"] += 1
        path.write_bytes(data)
    return outcomes


def test_a_state_comes_back_as_it_was_or_not_at_all(run, saved):
    outcomes = check_random_damage(run, saved[1][1], seed=0, times=1)
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_state_comes_back_as_it_was_or_not_at_all_more_often(run, saved, seed):
    check_random_damage(run, saved[1][1], seed, times=8)


@pytest.fixture
def silently_damaged(run, saved, tmp_path):
    """Step 1 with one bit of an array flipped in a way that Orbax reads without complaint.

    A flipped bit on disk often is of this kind, but where it lies differs from save to save.
    """
    state, name = jax.tree.map(jnp.asarray, saved[1][1]), "token_embedder"
    array = np.array(state.params[name])
    array.view(np.uint32)[3, 5] ^= 1 << 20
    state.params[name] = jnp.asarray(array)
    checkpoints = Checkpoints(tmp_path / "flipped", Checkpoint())
    checkpoints.save(1, state, None, {})
    checkpoints.close()
    items = run / "checkpoints" / "1" / "items"
    shutil.rmtree(items)
    (tmp_path / "flipped" / "1" / "items").rename(items)
    return run, name


def start(run, section=None, state=None, folder=None):
    lines, state = [], abstract_state() if state is None else state
    checkpoints = Checkpoints((folder or run) / "checkpoints", Checkpoint())
    result = restore_or_initialize(
        checkpoints, section or Checkpoint(), state, fresh_state, CONFIG, lines.append
    )
    return result, "\n".join(lines)


def test_a_flipped_bit_that_orbax_does_not_see_falls_back(silently_damaged, saved, tmp_path):
    run, name = silently_damaged
    result, text = start(run)
    assert result.first_step == 1
    assert_bit_equal(result.state, saved[1][0])
    assert f"cannot be read; trying the one before it. step 1: params/{name}: float32[" in text
    for key in ("load_full_state_path", "load_parameters_path"):
        with pytest.raises(UserError, match=rf"{key}: .*params/{name}: float32"):
            start(run, Checkpoint(**{key: str(run)}), folder=tmp_path / "new")


def test_a_cast_does_not_hide_a_flipped_bit(silently_damaged, monkeypatch):
    run, name = silently_damaged
    state = abstract_state()
    halved = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), state.params
    )
    stored = layout.find(str(run / "checkpoints" / "1"), "test")
    monkeypatch.setattr(reading, "_CAST_BYTES", 16)  # each array by itself
    with pytest.raises(description.Unreadable, match=f"params/{name}"):
        reading.read_params(stored, halved, CONFIG, lambda line: None)


def test_arrays_read_one_by_one_are_verified(silently_damaged):
    run, name = silently_damaged
    arrays = StoredArrays(layout.find(str(run / "checkpoints" / "1"), "test").items)
    with pytest.raises(UserError, match=rf"params/{name}: its checksum .*\n.*older step"):
        arrays.read(f"params/{name}")
    assert arrays.read("params/decoder/scale").shape == (8,)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("iter", '"seed": 5', '"seed": 7'),
        ("iter", '"step": 2', '"step": 3'),
        ("metadata", '"base_emb_dim": 8', '"base_emb_dim": 9'),
        ("metadata", '"schema_version": 1', '"schema_version": 9'),
        ("metadata", "float32[3,16,8] ", "float32[3,16,9] "),
    ],
)
def test_another_digit_in_the_json_files_falls_back(run, saved, file, old, new):
    path = run / "checkpoints" / "1" / file / "metadata"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    result, _ = start(run)
    assert_bit_equal(result.state, saved[1][0])
    assert result.position == {"step": 1, "seed": 5}


def test_spaces_and_order_in_json_files_mean_nothing(run, saved):
    for file in ("iter", "metadata"):
        path = run / "checkpoints" / "1" / file / "metadata"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(content.items())), indent=2))
    result, _ = start(run)
    assert_bit_equal(result.state, saved[1][1])


@pytest.mark.parametrize("lost", ["iter", "metadata", "items", "items/d"])
def test_a_half_written_folder_falls_back(run, saved, lost):
    shutil.rmtree(run / "checkpoints" / "1" / lost)
    result, _ = start(run)
    assert_bit_equal(result.state, saved[1][0])


def test_a_checkpoint_without_checksums_is_taken_and_told(run, saved, tmp_path):
    path = run / "checkpoints" / "1" / "metadata" / "metadata"
    content = json.loads(path.read_text())
    del content["integrity"]
    path.write_text(json.dumps(content))
    result, text = start(run)
    assert_bit_equal(result.state, saved[1][1])
    assert text.count("without checksums: what was read is not verified") == 1
    assert "without checksums" not in start(saved[0])[1]


def test_a_damaged_list_of_good_ones_is_told(run, saved):
    (run / "checkpoints" / "good.json").write_text('{"good": [0]')
    lines = []
    checkpoints = Checkpoints(run / "checkpoints", Checkpoint(), 3, lines.append)
    assert checkpoints.latest_good() is None
    assert "good.json CANNOT BE READ" in lines[0]
