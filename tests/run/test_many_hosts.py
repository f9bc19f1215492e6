"""Requests to storage at the start of one host, next to a few and to thousands of others."""

import contextlib
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.training_sections import CheckpointingConfig, MeshConfig
from MaxText.cost.abstract_step import FakeDevice
from MaxText.hardware.peak_flops import peak_flops
from MaxText.parallelism.device_mesh import mesh_sizes
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.runtime.watchdog import Watchdog
from MaxText.storage.run_folder import create_run_folder
from tests.checkpointing.small_state import fresh_state, update
from tests.input_pipeline.small_data import data_keys, open_train, random_documents, write_data_set
from tests.runtime.coordinator import Coordinator

CHIPS_PER_HOST, HOSTS_PER_SLICE = 4, 50
_requests: list[str] | None = None


def _record(event, arguments):
    if _requests is not None and event.startswith(("open", "os.")) and arguments:
        _requests.append(f"{event} {arguments[0]}")


sys.addaudithook(_record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with two checkpoints, and its data."""
    folder = tmp_path_factory.mktemp("hosts")
    write_data_set(folder / "data", {"train": random_documents(0, 400, 50)})
    checkpoints = CheckpointManager(folder / "run" / "checkpoints", CheckpointingConfig())
    state = fresh_state()
    for step in range(2):
        state = update(state)
        checkpoints.save(step, state, {"step": step + 1}, {"step": step})
    checkpoints.wait()
    return folder


def requests_of(folder, index: int, count: int, monkeypatch) -> int:
    """The requests of process `index` of `count` before its first step."""
    global _requests
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    devices = [
        FakeDevice(i, "tpu", "TPU v5", i // CHIPS_PER_HOST, i // (CHIPS_PER_HOST * HOSTS_PER_SLICE))
        for i in range(count * CHIPS_PER_HOST)
    ]
    _requests = []
    run_folder = create_run_folder(str(folder / "run"))
    with contextlib.closing(Watchdog(600, index, count, store=Coordinator()).start()):
        checkpoints = CheckpointManager(run_folder / "checkpoints", CheckpointingConfig())
        assert [checkpoints.stored(step).metadata.values for step in checkpoints.steps_to_resume()]
        peak_flops(mock.Mock(device_kind="TPU v5"))
        section = MeshConfig(dcn_data_parallelism=-1, ici_fsdp_parallelism=-1)
        mesh = Mesh(np.array(devices).reshape(mesh_sizes(section, devices).total), MESH_AXES)
        part, parts = ShardingPlan(mesh, section.logical_axis_rules).batch_slice()
        assert (part, parts) == (index, count)
        opened = open_train(data_keys(folder / "data"), count, part, parts)
        with contextlib.closing(opened) as batches:
            assert next(batches).tokens_BT.shape[0] == 1
    found, _requests = [one for one in _requests if str(folder) in one], None
    # Of token files, as many are read ahead as the time allows.
    return len([one for one in found if "/tokens-" not in one])


def test_requests_do_not_grow_with_hosts(folder, monkeypatch):
    # The first one creates the run folder.
    _, few, many = (requests_of(folder, 37, count, monkeypatch) for count in (50, 50, 2500))
    assert few > 5
    assert many == few
