"""A preparation that is interrupted and run again ends with the bytes of an unbroken one."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.prepare import runners, token_shards
from tests import programs
from tests.house.sources import REPOSITORY
from tests.input_pipeline.small_data import contents
from tests.programs import ended, started

from .small_corpus import byte_options, made, split_small, swap_case, write_texts

# Kills itself at every STRIDE-th fsync, later once more, and finishes in a third process.
KILLED = """
import functools, json, os, signal, sys
from pathlib import Path
from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.prepare import prepare as preparing

source, target, keys, first, stride = sys.argv[1:]
preparing.open_corpus = functools.partial(preparing.open_corpus, shard_bytes=1000)
preparation = PreparationConfig(prepare_source=source, prepare_num_workers=1, **json.loads(keys))
has_records = preparation.prepare_output_format in preparing.FILE_LISTS
manifest = "records_manifest.json" if has_records else "manifest.json"

def work(folder, moment):
    if (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [moment]
    def fsync(descriptor):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = fsync
    preparing.prepare(preparation, str(folder), functools.partial(print, flush=True))
    os._exit(0)

moment = int(first)
while (code := work(folder := Path(target, str(moment)), moment)) != 0:
    assert code == -signal.SIGKILL, code
    assert not folder.exists() or (folder / manifest).exists()
    work(folder, 4)
    assert work(folder, 0) == 0
    moment += int(stride)
"""


def start(folder, program, *arguments, **keywords):
    (folder / "program.py").write_text(program)
    return programs.popen(
        [sys.executable, str(folder / "program.py"), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
        **keywords,
    )


@pytest.mark.parametrize(
    ("keys", "first", "stride"),
    [
        ({"tokenizer_path": "bytes"}, 1, 5),
        pytest.param(
            {"tokenizer_path": "bytes", "prepare_output_format": "tfrecord"},
            40,
            5,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"prepare_output_format": "text_tfrecord", "validation_fraction": 0.3},
            1,
            4,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tokens", "token records", "text_tfrecord"],
)
def test_killed_at_any_moment(tmp_path, keys, first, stride):
    write_texts(tmp_path / "text", count=6)
    (tmp_path / "made").mkdir()
    shards = {} if keys == {"tokenizer_path": "bytes"} else {"records.num_shards": 4}
    keys = json.dumps(keys | shards)
    arguments = str(tmp_path / "text"), str(tmp_path / "made"), keys, str(first), str(stride)
    with started(KILLED, *arguments, options=["-u"]) as process:
        code, output = ended(process)
    assert code == 0, output
    folders = {path.name: contents(path) for path in (tmp_path / "made").glob("[!.]*")}
    expected = folders.pop(max(folders, key=int))
    assert len(expected) >= 4
    assert len(folders) >= 3
    for moment, result in folders.items():
        assert result == expected, moment
    assert output.count("Resuming: ") >= len(folders) - 2


WORKERS = """
import functools, sys, time
from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.prepare import process_pool, runners
from MaxText.input_pipeline.prepare import prepare as preparing
encode = runners.tokenize_shard
def encode_then_wait(*arguments):
    encode(*arguments)
    time.sleep(60)
runners.tokenize_shard = encode_then_wait
process_pool._BYTES_PER_PROCESS = 1
preparing.open_corpus = functools.partial(preparing.open_corpus, shard_bytes=600)
if __name__ == "__main__":
    keys = PreparationConfig(
        prepare_source=sys.argv[1], tokenizer_path="bytes", prepare_num_workers=2
    )
    preparing.prepare(keys, sys.argv[2], lambda line: None)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux lists processes of others")
def test_workers_end_with_a_killed_parent(tmp_path, monkeypatch):
    write_texts(tmp_path / "text", count=6)
    parts = tmp_path / ".d.preparing" / "data_set"
    with start(tmp_path, WORKERS, tmp_path / "text", tmp_path / "d") as process:
        while not list(parts.rglob("tokens-*.bin")) and process.poll() is None:
            time.sleep(0.01)
        listed = Path(f"/proc/{process.pid}/task").glob("*/children")
        workers = [int(child) for path in listed for child in path.read_text().split()]
        process.kill()
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.01)
    split_small(monkeypatch, 600)
    made(byte_options(tmp_path / "text"), tmp_path / "d")
    made(byte_options(tmp_path / "text"), tmp_path / "whole")
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")
    assert not (tmp_path / ".d.preparing").exists()


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A preparation that failed after its second unit; makes units of about one text."""
    write_texts(tmp_path / "text", count=6)
    split_small(monkeypatch, 600)

    def fail_later(tokenization, shard):
        if shard.number == 2:
            raise OSError(28, "No space left on device")
        return token_shards.tokenize_shard(tokenization, shard)

    with monkeypatch.context() as context:
        context.setattr(runners, "tokenize_shard", fail_later)
        with pytest.raises(UserError, match=r"d .*No space left on device"):
            made(byte_options(tmp_path / "text"), tmp_path / "d")

    return tmp_path


@pytest.mark.parametrize(
    ("change", "keys", "first_line"),
    [
        (lambda folder: None, {}, "Resuming: 2 of 6 "),
        (lambda folder: swap_case(folder / "text" / "001.txt"), {}, "Deleting "),
        (lambda folder: None, {"add_bos": True}, "Deleting "),
    ],
)
def test_finished_units_are_kept_where_nothing_changed(interrupted, change, keys, first_line):
    change(interrupted)
    lines = []
    source = interrupted / "text"
    made(byte_options(source, **keys), interrupted / "d", lines.append)
    made(byte_options(source, **keys), interrupted / "fresh")
    assert contents(interrupted / "d") == contents(interrupted / "fresh")
    assert not (interrupted / ".d.preparing").exists()
    assert lines[0].startswith(first_line)
