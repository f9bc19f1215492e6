"""A run folder has one owner, and a dead owner holds nothing."""

import signal
import socket

import pytest
from etils import epath

from MaxText.checkpointing import run_lock
from MaxText.errors import UserError
from tests.parallelism.child_programs import ended, started, wait_for

HOLDER = """
    import sys, time
    from etils import epath
    from MaxText.checkpointing import run_lock

    run_lock.hold(epath.Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(run_lock, "_SECONDS_FOR_AN_OLD_OWNER", 0.0)


def test_a_second_process_is_refused_until_the_first_one_is_dead(tmp_path):
    with started(HOLDER, str(tmp_path)) as holder:
        wait_for(holder, "held")
        who = f"process {holder.pid} on {socket.gethostname()}, started 2"
        with pytest.raises(UserError, match=who):
            run_lock.hold(epath.Path(tmp_path))
        holder.send_signal(signal.SIGKILL)
        assert ended(holder)[0] == -signal.SIGKILL
    with started(HOLDER, str(tmp_path)) as next_holder:
        wait_for(next_holder, "held")


def test_a_damaged_lock_file_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff{")
    with started(HOLDER, str(tmp_path)) as holder:
        wait_for(holder, "held")
        (tmp_path / ".lock").write_bytes(b"\xff{")
        with pytest.raises(UserError, match="in use by another process"):
            run_lock.hold(epath.Path(tmp_path))
