"""Damaged checkpoints are found and never trained from; failing storage is not damage."""

import dataclasses
import errno
import gc
import json
import os
import random
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.checkpoint_reader import CheckpointReader
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.conversion.weight_source import LazyCheckpointReader
from MaxText.errors import UserError
from MaxText.run.restore import restore_or_initialize
from MaxText.storage.errors import ObjectStoreError
from tests.checkpointing.small_state import CONFIG, abstract, assert_bit_equal, fresh_state, start
from tests.checkpointing.test_manager import save_steps
from tests.input_pipeline.small_data import contents

# Where one array fails, Orbax drops the reads of the others when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def little_to_look_at():
    """What earlier tests made is not looked through after each of these."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


def restored(run):
    """State, position and metadata of step 4."""
    checkpoints = CheckpointManager(run / "checkpoints", CheckpointingConfig())
    return checkpoints.restore(4, abstract(fresh_state()), CONFIG, lambda line: None)


# --- Damaged files ----------------------------------------------------------------------------


def ways_to_damage(data, chance, number):
    """Contents of a damaged file, up to 5; None for one that is gone."""
    if not data:  # the file by which Orbax knows its checkpoints
        return [None]
    place = chance.randrange(len(data))
    flipped, hole = bytearray(data), bytearray(data)
    flipped[place] ^= 1 << chance.randrange(8)
    hole[place : place + 64] = bytes(len(hole[place : place + 64]))
    others = chance.sample([data[:place], bytes(hole), b"", None], number - 1)
    return [bytes(flipped), *others]


@pytest.mark.parametrize("number", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_random_damage_of_every_file(run, kept, number):
    """What is restored is what was saved, or nothing is."""
    chance, outcomes = random.Random(0), {"as saved": 0, "unreadable": 0}
    for path in sorted(path for path in (run / "checkpoints/4").rglob("*") if path.is_file()):
        data = path.read_bytes()
        for damaged in ways_to_damage(data, chance, number):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            try:
                state, position, metadata = restored(run)
            except checkpoint_files.CheckpointCorruptedError:
                outcomes["unreadable"] += 1
            else:
                assert_bit_equal(state, kept[4])
                assert position == {"step": 5, "seed": 5}
                assert metadata == checkpoint_metadata(CONFIG, kept[4].params)
                outcomes["as saved"] += 1
        path.write_bytes(data)
    for name in ("items/d", "items", "iter", "metadata"):
        folder = (run / "checkpoints/4" / name).rename(run / "away")
        with pytest.raises(checkpoint_files.CheckpointCorruptedError):
            restored(run)
        folder.rename(run / "checkpoints/4" / name)
    assert min(outcomes.values()) > number, outcomes


def test_a_flipped_bit_in_the_name_of_the_checksums(run):
    path = run / "checkpoints/4/metadata/metadata"
    path.write_text(path.read_text().replace('"integrity"', '"integrits"'))
    with pytest.raises(
        checkpoint_files.CheckpointCorruptedError, match="not the metadata of a checkpoint"
    ):
        restored(run)


def test_truncated_arrays(run, kept, tmp_path):
    for path in (run / "checkpoints" / "4" / "items").rglob("d/*"):
        os.truncate(path, path.stat().st_size // 2)
    before = contents(run)
    result, lines = start(run)
    assert_bit_equal(result.state, kept[2])
    assert "step 4" in next(line for line in lines if "WARNING:" in line)
    # A path that the user names is never replaced by an older step.
    with pytest.raises(UserError, match=r"^load_full_state_path"):
        start(tmp_path / "new", CheckpointingConfig(load_full_state_path=str(run)))
    assert contents(run) == before
    # With no readable checkpoint there is an error, and no new run.
    for step in ("0", "2"):
        (run / "checkpoints" / step / "iter" / "metadata").write_text("{")
    with pytest.raises(UserError) as caught:
        start(run)
    assert all(f"step {step}: " in str(caught.value) for step in (0, 2, 4))


@pytest.mark.parametrize("piece", ["items", "iter", "metadata", "items/manifest.ocdbt", "items/d"])
def test_a_checkpoint_that_lost_pieces_is_named(run, kept, piece):
    """The run resumes from an older one, and says which file made it do so."""
    path = run / "checkpoints/4" / piece
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    result, lines = start(run)
    assert_bit_equal(result.state, kept[2])
    (warning,) = [line for line in lines if "WARNING:" in line]
    assert "step 4: " in warning
    if "/" not in piece:
        assert f"checkpoints/4/{piece}" in warning
        assert "missing" in warning
    # It is set aside at the next save, like other damage.
    checkpoints = CheckpointManager(run / "checkpoints", CheckpointingConfig())
    assert checkpoints.try_restore(4, abstract(fresh_state()), CONFIG, print).restored is None
    checkpoints.resume_from(2)
    save_steps(checkpoints, checkpoints.restore(2, abstract(fresh_state()))[0], [3, 4])
    assert checkpoints.steps() == [0, 2, 3, 4]
    assert (run / "checkpoints/4.unreadable").exists()


def test_a_run_whose_only_checkpoint_lost_its_arrays_does_not_start_from_scratch(run):
    for step in (0, 2):
        shutil.rmtree(run / "checkpoints" / str(step))
    shutil.rmtree(run / "checkpoints/4/items")
    with pytest.raises(UserError, match=r"step 4: .*checkpoints/4/items is missing"):
        start(run)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ("4/metadata", "2/metadata"),
        ("4/iter", "2/iter"),
        ("4/metadata", "2/iter"),
        ("4/metadata", "4/iter"),
        ("4/iter", "4/metadata"),
        ("4/items", "2/items"),
    ],
)
def test_files_of_another_checkpoint_are_refused(run, kept, target, source):
    """As when a user copies files from one step to another."""
    shutil.rmtree(run / "checkpoints" / target)
    shutil.copytree(run / "checkpoints" / source, run / "checkpoints" / target)
    result, lines = start(run)
    assert_bit_equal(result.state, kept[2])
    (warning,) = [line for line in lines if "WARNING:" in line]
    assert "step 4: " in warning


def test_spaces_and_the_order_of_keys_in_json_files_mean_nothing(run, kept):
    for name in ("iter", "metadata"):
        path = run / "checkpoints" / "4" / name / "metadata"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(content.items())), indent=2))
    state, position, metadata = restored(run)
    assert_bit_equal(state, kept[4])
    assert position == {"step": 5, "seed": 5}
    assert metadata == checkpoint_metadata(CONFIG, kept[4].params)


def test_metadata_of_another_step_with_the_same_arrays_are_refused(tmp_path):
    """As after a skipped step: checksums of arrays alone do not tell the two apart."""
    checkpoints = CheckpointManager(tmp_path / "checkpoints", CheckpointingConfig())
    state = fresh_state()
    for step in (0, 1):
        state = dataclasses.replace(state, step=jnp.int32(step + 1))
        checkpoints.save(step, state, None, checkpoint_metadata(CONFIG, state.params))
    checkpoints.wait()
    folder = tmp_path / "checkpoints"
    values = json.loads((folder / "0/metadata/metadata").read_text())
    wanted = json.loads((folder / "1/metadata/metadata").read_text())
    assert values["integrity"]["step"] == 0
    # All but the step is that of the other checkpoint.
    arrays = wanted["integrity"]["arrays"]
    text = json.dumps(checkpoint_files.with_digests(values, {}, arrays, step=0))
    (folder / "1/metadata/metadata").write_text(text)
    _, lines = start(tmp_path, state=state)
    assert "belongs to the checkpoint of step 0" in "\n".join(lines)


@pytest.fixture
def silently_damaged(run, tmp_path):
    """Step 4 with one bit of an array flipped in a way that Orbax reads without complaint.

    A flipped bit on disk often is of this kind, but where it lies differs from save to save.
    """
    name, (state, _, _) = "token_embedder", restored(run)
    array = np.array(state.params[name])
    array.view(np.uint32)[3, 5] ^= 1 << 20
    state.params[name] = jnp.asarray(array)
    checkpoints = CheckpointManager(tmp_path / "flipped", CheckpointingConfig())
    checkpoints.save(4, state, None, {})
    checkpoints.wait()
    items = run / "checkpoints" / "4" / "items"
    shutil.rmtree(items)
    (tmp_path / "flipped" / "4" / "items").rename(items)
    return run, name


def test_a_flipped_bit_that_orbax_does_not_see(silently_damaged, kept, tmp_path):
    run, name = silently_damaged
    result, lines = start(run)
    assert result.first_step == 3
    assert_bit_equal(result.state, kept[2])
    assert f"step 4: params/{name}: float32[" in "\n".join(lines)
    for key in ("load_full_state_path", "load_parameters_path"):
        with pytest.raises(UserError, match=rf"{key}: .*params/{name}: float32"):
            start(tmp_path / "new", CheckpointingConfig(**{key: str(run)}))
    # Arrays that are cast, and arrays that are read one by one.
    stored = checkpoint_files.resolve_checkpoint(str(run / "checkpoints" / "4"), "test")
    halved = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), fresh_state().params
    )
    with pytest.raises(checkpoint_files.CheckpointCorruptedError, match=f"params/{name}"):
        CheckpointReader(stored, CONFIG, lambda line: None).restore_params(halved)
    arrays = LazyCheckpointReader(stored.items)
    with pytest.raises(UserError, match=f"params/{name}: "):
        arrays.read(f"params/{name}")
    assert arrays.read("params/decoder/scale").shape == (8,)


# --- Storage that fails -----------------------------------------------------------------------


def os_error(number):
    return OSError(number, os.strerror(number))


OUTAGES = [
    os_error(errno.ESTALE),
    os_error(errno.EMFILE),
    os_error(errno.EACCES),
    ValueError('INTERNAL: Error reading "d/1": [OS error 5: EIO Input/output error]'),
]
DAMAGE = [
    os_error(errno.ENOENT),
    ValueError("DATA_LOSS: Error decoding chunk"),
    ValueError("NOT_FOUND: [OS error 2: ENOENT No such file or directory]"),
]


@pytest.fixture
def failing(monkeypatch):
    """Makes Orbax fail with some errors first; gives what is left of them."""
    load = ocp.handlers.PyTreeHandler.load

    def fail(errors):
        async def sometimes(*args):
            if waiting:
                raise waiting.pop(0)
            return await load(*args)

        waiting = list(errors)
        monkeypatch.setattr(ocp.handlers.PyTreeHandler, "load", sometimes)
        return waiting

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return fail


@pytest.mark.parametrize("error", OUTAGES, ids=str)
def test_storage_that_fails_is_asked_again_and_then_ends_the_program(saved_run, failing, error):
    checkpoints = CheckpointManager(saved_run[0] / "checkpoints", CheckpointingConfig())
    failing([error] * 9)
    wanted = abstract(fresh_state())
    with pytest.raises(ObjectStoreError):
        restore_or_initialize(
            checkpoints, CheckpointingConfig(), wanted, pytest.fail, CONFIG, log=print
        )
    assert checkpoints.steps_to_resume() == [4, 2, 0]
    left = failing([error, error])
    assert start(saved_run[0])[0].first_step == 5
    assert left == []


@pytest.mark.parametrize("error", DAMAGE, ids=str)
def test_damage_is_not_read_again(failing, saved_run, error):
    left = failing([error, None])
    stored = checkpoint_files.resolve_checkpoint(str(saved_run[0]), "test")
    with pytest.raises(checkpoint_files.CheckpointCorruptedError):
        CheckpointReader(stored, CONFIG, print).restore_params(abstract(fresh_state()).params)
    assert left == [None]
