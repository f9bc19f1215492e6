"""One process prepares a data set, the others wait."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from MaxText.input_pipeline.preparation import building_lock

HOLDER = """
import sys, time
from pathlib import Path
from MaxText.input_pipeline.preparation.building_lock import hold
with hold(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / ".d.lock"


def test_the_file_names_its_holder_and_goes_away(lock):
    with building_lock.hold(lock, pytest.fail):
        assert json.loads(lock.read_text()) == [socket.gethostname(), os.getpid()]
    assert not lock.exists()


def test_released_after_an_error(lock):
    with pytest.raises(RuntimeError, match="broken"), building_lock.hold(lock, pytest.fail):
        raise RuntimeError("broken")
    assert not lock.exists()


def test_many_at_once_work_one_after_the_other(lock):
    inside, most, done = [], [], []

    def work(number):
        with building_lock.hold(lock, lambda line: None):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.005)
            inside.remove(number)
            done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert most == [1, 1, 1, 1]
    assert not lock.exists()


def test_waits_for_a_living_process_and_not_for_a_dead_one(lock):
    lines = []
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        kill = threading.Timer(0.3, process.kill)
        kill.start()
        with building_lock.hold(lock, lines.append):
            assert process.wait() != 0
        kill.join()
    assert lines == [
        f"Waiting for process {process.pid} on {socket.gethostname()}, which prepares the same "
        "data set"
    ]


def test_another_machine_holds_it_while_it_gives_signs_of_life(lock, monkeypatch):
    monkeypatch.setattr(building_lock, "_POLL_SECONDS", 0.01)
    lock.write_text(json.dumps(["elsewhere", 5]))
    lines = []

    def show(line):
        lines.append(line)
        os.utime(lock, (0, 0))

    with building_lock.hold(lock, show):
        assert json.loads(lock.read_text())[0] == socket.gethostname()
    assert lines == ["Waiting for process 5 on elsewhere, which prepares the same data set"]


def test_a_file_that_names_nobody_is_taken(lock):
    lock.write_text("{half")
    with building_lock.hold(lock, pytest.fail):
        pass
    assert not lock.exists()


def test_file_systems_without_locks(lock, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(building_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(building_lock.fcntl, "flock", no_locks)
    monkeypatch.setattr(building_lock, "_POLL_SECONDS", 0.01)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock.write_text(json.dumps([socket.gethostname(), process.pid]))
    lines = []

    def show(line):
        lines.append(line)
        process.communicate(b"\n")

    with building_lock.hold(lock, show):
        pass
    assert len(lines) == 1
