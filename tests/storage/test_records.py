"""metrics.jsonl and events.jsonl in a bucket: written in segments, cut back, read as one file."""

import time

import pytest

from MaxText.monitoring.json_lines import JsonlFile, read_rows, stream_rows
from MaxText.storage.paths import parse_path

pytestmark = pytest.mark.usefixtures("clients", "no_waits")


@pytest.fixture
def file(bucket):
    return parse_path(f"{bucket}/run/metrics.jsonl", "base_output_directory")


def write(file, steps, keep=lambda row: True, segment_bytes=200):
    rows = JsonlFile(file, keep, segment_bytes)
    for step in steps:
        rows.append({"step": step})
        if step % 5 == 4:
            rows.flush()
    return rows


def steps(file):
    found = [row["step"] for row in read_rows(file)]
    assert found == [row["step"] for row in stream_rows(file)]
    return found


def test_a_long_run_writes_segments_and_no_row_twice(file, bucket, emulator):
    write(file, range(100)).close()
    assert steps(file) == [*range(100)]
    names = emulator.names(f"{bucket}/run/")
    assert sorted(names)[:2] == ["run/metrics.1.jsonl", "run/metrics.2.jsonl"]
    assert max(len(emulator.read(f"{bucket}/{name}")) for name in names) < 300


@pytest.mark.parametrize("first", [58, 3, 0], ids=["in the newest segment", "older", "all"])
def test_a_restart_or_rollback_removes_rows_of_older_segments(file, first):
    write(file, range(60)).close()
    rows = write(file, range(first, first + 9), keep=lambda row: row["step"] < first)
    rows.flush()
    rows.wait_durable(time.monotonic() + 60)
    assert steps(file) == [*range(first + 9)]
    rows.truncate(lambda row: row["step"] < first)
    rows.append({"step": first})
    rows.close()
    assert steps(file) == [*range(first + 1)]


def test_the_one_object_of_earlier_versions_is_gone_on_with(file, bucket, emulator):
    old = b"".join(b'{"step": %d}\n' % step for step in range(50))
    emulator.write(f"{bucket}/run/metrics.jsonl", old)
    write(file, range(50, 55)).close()
    assert steps(file) == [*range(55)]


def test_fields_are_added_to_the_newest_row_also_after_a_restart(file):
    rows = write(file, range(4))
    rows.amend({"loss": 2.5})
    rows.close()
    rows = write(file, [])
    rows.amend({"more": 1})
    rows.close()
    assert read_rows(file)[-1] == {"step": 3, "loss": 2.5, "more": 1}
    assert steps(file) == [*range(4)]
    rows = write(file, range(4, 10), segment_bytes=40)
    assert rows.newest == {}  # that of a full segment is not at hand
    rows.close()
