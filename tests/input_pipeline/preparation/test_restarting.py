"""A preparation that is killed goes on, and gives the bytes that it would have given."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation import building, preparing, unit_encoding
from MaxText.input_pipeline.preparation.preparing import prepare

from .small_corpus import byte_options, contents, cut_small, quiet, write_texts

REPOSITORY = Path(__file__).resolve().parents[3]

# Kills itself at each forced write in turn, and finishes in another process each time. Forks are
# cheap here: this program has started no threads.
KILLED_EVERYWHERE = """
import functools, os, signal, sys
from MaxText.configuration.data_sections import Preparation
from MaxText.input_pipeline.preparation import preparing
preparing.open_corpus = functools.partial(preparing.open_corpus, unit_bytes=1500)
source, target = sys.argv[1:]
keys = Preparation(prepare_source=source, tokenizer_path="bytes", prepare_num_workers=1)

def work(folder, moment):
    if (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [moment]
    def fsync(descriptor):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = fsync
    lines = []
    preparing.prepare(keys, folder, lines.append)
    going_on = [line for line in lines if line.startswith("Going on")]
    print(folder, going_on, flush=True)
    os._exit(0)

moment = 1
while True:
    folder = f"{target}/{moment}"
    code = work(folder, moment)
    assert code in (0, -signal.SIGKILL), code
    if code == 0:
        break
    assert not os.path.exists(folder) or os.path.exists(folder + "/manifest.json")
    if not os.path.exists(folder):
        # Killed once more while it goes on, then left alone.
        work(folder, 4)
        assert work(folder, 0) == 0
    moment += 1
print("moments", moment)
"""


def test_killed_at_any_moment(tmp_path):
    write_texts(tmp_path / "text", count=12)
    (tmp_path / "made").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED_EVERYWHERE, str(tmp_path / "text"), str(tmp_path / "made")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    moments = int(last.split()[1])
    assert moments > 20
    expected = contents(tmp_path / "made" / str(moments))
    assert len(expected) > 8
    for moment in range(1, moments):
        assert contents(tmp_path / "made" / str(moment)) == expected, moment
    assert sum("parts were finished before" in line for line in lines) > 10
    leftovers = [path.name for path in (tmp_path / "made").iterdir() if path.name[0] == "."]
    # One that is killed after its last step leaves these for the next that asks.
    assert len(leftovers) <= 4, leftovers


PROGRAM = """
import sys
from MaxText.configuration.data_sections import Preparation
from MaxText.input_pipeline.preparation import building, preparing
building.Workers.for_corpus = lambda self, *arguments: (2, 1)
source, target = sys.argv[1:]
if __name__ == "__main__":
    keys = Preparation(prepare_source=source, tokenizer_path="bytes")
    preparing.prepare(keys, target, lambda line: None)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(f"line {number} of words\n" * 60_000)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", str(tmp_path / "text"), str(tmp_path / "d")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    parts = tmp_path / ".d.preparing" / "parts"
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        while not list(parts.glob("*.json")) and process.poll() is None:
            time.sleep(0.01)
        workers = _children(process.pid)
        process.send_signal(signal.SIGKILL)
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.01)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    prepare(byte_options(tmp_path / "text"), str(tmp_path / "whole"), quiet)
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")
    assert not (tmp_path / ".d.preparing").exists()


def _children(process: int) -> list[int]:
    if not Path("/proc/self/task").exists():
        pytest.skip("the processes of another process are listed on Linux only")
    listed = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A preparation that failed after its second unit; makes units of about one text."""
    write_texts(tmp_path / "text", count=6)
    cut_small(monkeypatch, 600)
    encode = unit_encoding.encode_unit

    def fail_later(encoding, job, advance):
        if job.number == 2:
            raise OSError(28, "No space left on device")
        return encode(encoding, job, advance)

    lines = []
    with monkeypatch.context() as context:
        context.setattr(building, "encode_unit", fail_later)
        with pytest.raises(UserError, match=r"d cannot be written \(No space left on device\)"):
            prepare(byte_options(tmp_path / "text"), str(tmp_path / "d"), lines.append)
    assert lines[-1].startswith("Finished parts are kept in ")
    return tmp_path


def prepared_alike(folder, **keys):
    """Prepares into `d`, where something was begun, and compares with a fresh preparation."""
    lines = []
    prepare(byte_options(folder / "text", **keys), str(folder / "d"), lines.append)
    prepare(byte_options(folder / "text", **keys), str(folder / "fresh"), quiet)
    assert contents(folder / "d") == contents(folder / "fresh")
    assert not (folder / ".d.preparing").exists()
    return lines


def test_finished_units_are_kept(interrupted, monkeypatch):
    encoded = []
    encode = unit_encoding._encode

    def count(encoding, job, advance):
        encoded.append(job.number)
        return encode(encoding, job, advance)

    monkeypatch.setattr(unit_encoding, "_encode", count)
    lines = []
    prepare(byte_options(interrupted / "text"), str(interrupted / "d"), lines.append)
    # The last number is that of the document that is moved into the empty validation split.
    assert sorted(encoded[:-1]) == [2, 3, 4, 5]
    assert lines[0] == "Going on: 2 of 6 parts were finished before"


def test_units_of_changed_text_are_not_kept(interrupted):
    path = interrupted / "text" / "001.txt"
    path.write_bytes(path.read_bytes().swapcase())
    assert prepared_alike(interrupted)[0] == "Going on: 2 of 6 parts were finished before"


def test_units_with_damaged_files_are_not_kept(interrupted):
    parts = interrupted / ".d.preparing" / "parts"
    (parts / "000000-train.tokens").write_bytes(b"12")
    (parts / "000001.json").write_bytes(b"{")
    (parts / "000003-train.tokens.0123.writing").write_bytes(b"left by a killed process")
    assert not any(line.startswith("Going on") for line in prepared_alike(interrupted))


def test_another_request_begins_anew(interrupted):
    lines = prepared_alike(interrupted, add_bos=True)
    assert lines[0].startswith("Deleting ")
    assert not any(line.startswith("Going on") for line in lines)


def test_a_mistake_in_the_text_costs_only_its_unit(interrupted, monkeypatch):
    # Mistakes in the first half million characters are found before anything is encoded.
    monkeypatch.setattr(preparing, "_COMPARED_CHARACTERS", 1)
    path = interrupted / "text" / "005.txt"
    text = path.read_bytes()
    path.write_bytes(text[:50] + b"\xff" + text[51:])
    with pytest.raises(UserError, match=r"005\.txt is not UTF-8"):
        prepare(byte_options(interrupted / "text"), str(interrupted / "d"), quiet)
    path.write_bytes(text)
    assert prepared_alike(interrupted)[0] == "Going on: 5 of 6 parts were finished before"
