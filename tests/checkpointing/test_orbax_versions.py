"""Checkpoints pass between versions of Orbax: those of version 0 load, and tools load ours."""

import jax
import numpy as np
import orbax.checkpoint as orbax_0
import orbax.checkpoint.experimental.v1 as orbax_1
import pytest
from etils import epath

from MaxText.checkpointing import checkpoint_files, checkpoint_reader
from MaxText.checkpointing.checksums import array_checksums
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.conversion.weight_source import LazyCheckpointReader
from tests.checkpointing.small_state import (
    CONFIG,
    abstract,
    assert_bit_equal,
    fresh_state,
    on_host,
    start,
    update,
)
from tests.checkpointing.test_manager import save_steps


def save_with_version_0(folder, step, state, **format_keys):
    """Saves as this program did with Orbax's version 0, and as MaxText does."""
    items, position = checkpoint_reader.as_dict(state), {"step": step + 1}
    metadata = checkpoint_files.with_digests(
        checkpoint_metadata(CONFIG, state.params), position, array_checksums(items), step
    )
    handlers = orbax_0.handlers.DefaultCheckpointHandlerRegistry()
    arrays_handler = orbax_0.PyTreeCheckpointHandler(**format_keys)
    handlers.add("items", orbax_0.args.PyTreeSave, arrays_handler)
    for item in ("iter", "metadata"):
        handlers.add(item, orbax_0.args.JsonSave, orbax_0.JsonCheckpointHandler())
    with orbax_0.CheckpointManager(folder, handler_registry=handlers) as manager:
        arguments = orbax_0.args.Composite(
            items=orbax_0.args.PyTreeSave(items),
            iter=orbax_0.args.JsonSave(position),
            metadata=orbax_0.args.JsonSave(metadata),
        )
        manager.save(step, args=arguments, force=True)


@pytest.mark.parametrize(("use_ocdbt", "use_zarr3"), [(True, False), (False, False), (True, True)])
def test_a_run_of_version_0_goes_on(tmp_path, use_ocdbt, use_zarr3):
    state = update(fresh_state())
    kept = on_host(state)
    folder = tmp_path / "checkpoints"
    save_with_version_0(folder, 0, state, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    result, lines = start(tmp_path)
    assert not [line for line in lines if "WARNING:" in line]
    assert_bit_equal(result.state, kept)
    assert (result.first_step, result.position) == (1, {"step": 1})
    # The next checkpoint takes its place.
    checkpoints = CheckpointManager(folder, CheckpointingConfig(max_to_keep=1))
    state, later = save_steps(checkpoints, result.state, [1])
    assert checkpoints.steps() == [1]
    assert_bit_equal(checkpoints.restore(1, abstract(state)).state, later[1])


def test_arrays_of_version_0_alone(tmp_path):
    """A folder of arrays without a checkpoint around it, with leaves that are no arrays."""
    tree = {"params": {"wi": np.arange(6.0), "more": [np.ones(2), {"n": 3, "s": "x"}]}, "none": {}}
    with orbax_0.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "items", tree)
    arrays = LazyCheckpointReader(epath.Path(tmp_path / "items"))
    assert sorted(arrays.params) == ["more/0", "wi"]
    assert arrays.read("params/wi").tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays.read("params/more/0").tolist() == [1, 1]


def test_either_version_loads_what_is_saved(saved_run):
    folder, kept = saved_run
    step = folder / "checkpoints" / "4"
    described = orbax_1.metadata(step, checkpointable_name="items").metadata
    abstract_items = jax.tree.map(lambda _: np.ndarray, described)
    trees = [orbax_1.load(step, abstract_items, checkpointable_name="items")]
    to_host = jax.tree.map(lambda _: orbax_0.RestoreArgs(restore_type=np.ndarray), described)
    with orbax_0.PyTreeCheckpointer() as checkpointer:
        trees.append(checkpointer.restore(step / "items", restore_args=to_host))
    for tree in trees:
        wanted = kept[4].params["decoder"]["wi"]
        assert np.asarray(tree["params"]["decoder"]["wi"]).tobytes() == wanted.tobytes()
