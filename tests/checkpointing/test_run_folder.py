"""The folder of a run: writable or refused, owned by one process, and full of other files."""

import json
import os
import signal
import socket

import pytest
from etils import epath

from MaxText.errors import UserError
from MaxText.storage.atomic import atomic_write_text
from MaxText.storage.run_folder import create_run_folder, lock_run_folder, unlock_run_folder
from tests.programs import ended, started, wait_for
from tests.refusals import refused


def test_it_is_created_and_probed(tmp_path):
    folder = create_run_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    refused(r"file/run.*base_output_directory", create_run_folder, tmp_path / "file" / "run")


def test_small_files_are_on_disk_before_they_replace_others(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr("os.fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr("os.replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    path = epath.Path(tmp_path / "file")
    atomic_write_text(path, "text")
    assert calls == ["fsync", "replace", "fsync"]
    assert path.read_text() == "text"


# --- Its lock ---------------------------------------------------------------------------------

HOLDER = """
    import sys, time
    from etils import epath
    from MaxText.storage.run_folder import lock_run_folder

    lock_run_folder(epath.Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
"""


def test_it_has_one_owner_at_a_time_until_that_is_dead(tmp_path):
    lock = tmp_path / ".lock"
    lock.write_bytes(b"\xff{")  # damage does not matter
    with started(HOLDER, str(tmp_path)) as holder:
        wait_for(holder, "held")
        assert json.loads(lock.read_text())["process"] == holder.pid
        with pytest.raises(UserError, match=f"process {holder.pid} on {socket.gethostname()}"):
            lock_run_folder(epath.Path(tmp_path), timeout=0)
        lock.write_bytes(b"\xff{")
        refused("another process", lock_run_folder, epath.Path(tmp_path), timeout=0)
        holder.send_signal(signal.SIGKILL)
        assert ended(holder)[0] == -signal.SIGKILL
    lock_run_folder(epath.Path(tmp_path), timeout=0)
    refused(f"process {os.getpid()} on", lock_run_folder, epath.Path(tmp_path), timeout=0)
    unlock_run_folder()
    lock_run_folder(epath.Path(tmp_path), timeout=0)
    unlock_run_folder()


# --- A full disk ------------------------------------------------------------------------------

FULL = """
    import re, resource, sys
    from MaxText.storage.run_folder import create_run_folder
    from MaxText.errors import UserError
    folder = create_run_folder(sys.argv[1])
    from jax._src import xla_bridge
    # jax.distributed.initialize, which comes later, refuses once a backend is up.
    assert not xla_bridge.backends_are_initialized()
    from MaxText.checkpointing.manager import CheckpointManager
    from MaxText.config.training_sections import CheckpointingConfig
    from tests.checkpointing.small_state import abstract, assert_bit_equal, fresh_state
    from tests.checkpointing.small_state import on_host, update

    def fill(is_full):
        limit = 10_000 if is_full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    def tell(kind, text):
        print(kind, re.search(r"the checkpoint of step (\\d+)", str(text))[1], flush=True)

    section = CheckpointingConfig(async_checkpointing=sys.argv[2] == "async", max_to_keep=1)
    warn = lambda x: tell("warning", x)
    checkpoints = CheckpointManager(folder / "checkpoints", section, log=warn)
    state, kept = fresh_state(rows=1000), {}
    for step in range(6):
        state = update(state)
        fill(step in (1, 4, 5))
        kept[step] = on_host(state)
        try:
            checkpoints.save(step, state, {"step": step + 1}, {})
            checkpoints.last_healthy()  # waits
        except UserError as error:
            tell("stopped", error)
    print(checkpoints.steps())
    again = CheckpointManager(folder / "checkpoints", section)
    assert_bit_equal(again.restore(3, abstract(state))[0], kept[3])
    fill(False)
    again.resume_from(3)
    print(again.save(6, update(state), None, {}))
    again.wait()
    print(sorted(path.name for path in (folder / "checkpoints").iterdir()))
"""


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_full_disk(tmp_path, mode):
    """A save that fails is a warning, the second in a row stops; the last checkpoint stays.

    Nothing else is printed, whatever Orbax's threads would print. A limit of file sizes stands in
    for a full disk.
    """
    with started(FULL, str(tmp_path), mode) as process:
        code, output = ended(process)
    assert code == 0, output
    expected = ["warning 1", "warning 4", "stopped 5", "[3]", "True", "['6', 'healthy.json']"]
    assert output.splitlines() == expected
