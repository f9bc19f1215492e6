"""Reading a run: each step stands there once, and the parts of its time add up to all of it."""

import math
import sys

import pytest

from MaxText.monitoring.events import provenance
from MaxText.monitoring.goodput import PARTS
from MaxText.monitoring.run_record import read_run
from tests.refusals import refused
from tests.reports.run_files import RunFiles, completed


def test_a_completed_run(completed_run):
    record = read_run(completed_run)
    assert (record.name, record.state) == ("a", "completed")
    assert [row["step"] for row in record.steps] == list(range(400))
    assert [row["step"] for row in record.evaluations] == list(range(49, 400, 50))
    assert record.final_loss == record.evaluations[-1]["eval/avg_loss"]
    assert (record.last_step, record.tokens) == (399, 400 * 16_384)
    assert record.config["emb_dim"] == 384
    assert {row["event"] for row in record.events} >= {"start", "compile", "checkpoint", "stop"}


def test_killed_resumed_and_rolled_back_each_step_stands_once(eventful_run):
    record = read_run(eventful_run)
    assert record.state == "diverged"
    assert [row["step"] for row in record.steps] == list(range(320))
    assert record.steps[-1]["learning/lm_loss"] is None
    assert all(math.isfinite(row["time"]) for row in record.steps)
    assert [attempt.number for attempt in record.goodput.attempts] == [0, 1]
    # The newest start speaks for the run.
    assert record.facts["event"] == "resume"


def test_a_step_that_stands_twice_counts_as_the_later_one_and_half_a_line_not_at_all(run):
    run.steps(0, 10)
    run.steps(6, 12, marked="again")
    record = read_run(run.write(cut='{"event": "step", "ste'))
    assert [row["step"] for row in record.steps] == list(range(12))
    assert [row["step"] for row in record.steps if "marked" in row] == list(range(6, 12))
    assert record.goodput.seconds["lost"] == pytest.approx(
        sum(row["seconds"] for row in run.rows if row["event"] == "step" and row["step"] >= 6)
        - sum(row["seconds"] for row in record.steps[6:])
    )


@pytest.mark.parametrize(
    ("old", "reason", "state"),
    [
        (False, None, "running"),
        (True, None, "killed"),
        (False, "interrupted", "interrupted"),
        (True, "completed", "completed"),
        (True, "something new", "error"),
    ],
)
def test_the_state(run, old, reason, state):
    run.steps(0, 3)
    if reason:
        run.add("stop", 0.1, 2, reason=reason)
    assert read_run(run.write(old=old)).state == state
    # The end of an earlier attempt is not the end of the run.
    run.kill_and_resume(3, down=60)
    assert read_run(run.write(old=False)).state == "running"


def test_a_run_is_alive_while_it_is_silent_for_as_long_as_its_steps_take(run):
    run.add("step", 900.0, 0, updates=1, data_seconds=0.0)
    # An hour of silence is less than five such steps.
    assert read_run(run.write(old=True)).state == "running"


def test_what_ancestors_have_spent_is_kept_apart(tmp_path):
    run = RunFiles(tmp_path / "run")
    old = {"run_name": "a", "folder": "a", "step": 9, "how": "parameters"}
    run.start(lineage=[old | {"tokens": 1e6, "flops": 2}, old | {"tokens": 3e6, "flops": 5}])
    run.steps(0, 2)
    record = read_run(run.write())
    assert record.tokens == 2 * 16_384
    # Tokens of an ancestor already include those of its own.
    assert (record.inherited_tokens, record.inherited_flops) == (3e6, 5)


ROW = b'{"time": 1.0, "event": "step", "phase": "train", "restart": 0, "step": 0, "seconds": "1"}\n'


@pytest.mark.parametrize(
    ("content", "message"), [(b"\x89PNG", "0 complete rows"), (ROW, r"row 1 .*seconds='1'")]
)
def test_rows_that_are_none(tmp_path, content, message):
    (tmp_path / "events.jsonl").write_bytes(content)
    refused(message, read_run, tmp_path)


def test_mistakes_are_one_message(tmp_path):
    refused("none", read_run, tmp_path / "none")
    refused(r"events\.jsonl", read_run, tmp_path)
    completed(tmp_path / "run")
    merges = "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 40))
    for text in ("steps: [1,\n", "just words\n", f"x: {'[' * 50_000}\n", f"m0: &m0 {{}}\n{merges}"):
        (tmp_path / "run" / "config.yml").write_text(text)
        refused(r"config\.yml", read_run, tmp_path / "run")


def train(run, first, end):
    for step in range(first, end):
        run.add("step", 1.0, step, updates=1, data_seconds=0.0)


def goodput_of(run):
    return read_run(run.write()).goodput


def test_parts_add_up_to_the_whole_time(completed_run, eventful_run):
    for record in (read_run(completed_run), read_run(eventful_run)):
        goodput = record.goodput
        assert set(goodput.seconds) == set(PARTS)
        assert sum(goodput.share(part) for part in PARTS) == pytest.approx(1)
        last = max(row["time"] for row in (*record.events, *record.steps))
        elapsed = pytest.approx(last - goodput.attempts[0].launched)
        assert goodput.running_seconds + goodput.down_seconds == elapsed
        # Times are stored in milliseconds, durations are not.
        running = sum(attempt.seconds for attempt in goodput.attempts)
        assert running == pytest.approx(goodput.running_seconds, abs=0.01)


def test_each_part(run):
    run.add("step", 10.0, 0, updates=10, data_seconds=2.0)
    run.add("evaluation", 3.0, 0)
    run.now += 4  # no event says what this was
    run.add("checkpoint", 1.0, 0)
    run.add("sample", 0.5, 0, text="x")
    run.add("stop", 0.25, 0, reason="completed")
    expected = {"useful": 8.0, "data_wait": 2.0, "startup": 6.0, "compile": 9.0, "other": 4.0}
    expected |= {"evaluation": 3.0, "checkpoint": 1.0, "lost": 0.0, "shutdown": 0.75}
    assert goodput_of(run).seconds == pytest.approx(expected)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_kill_loses_work_and_the_pause_is_no_running_time(run, interrupted):
    train(run, 0, 10)
    if interrupted:
        run.add("stop", 0.5, None, reason="interrupted")
        stop = run.rows.pop()
    run.kill_and_resume(6, down=100.0)
    if interrupted:
        run.rows.insert(-2, stop)
    train(run, 6, 10)
    goodput = goodput_of(run)
    assert goodput.seconds["lost"] == pytest.approx(4)
    assert goodput.seconds["useful"] == pytest.approx(10)
    assert goodput.seconds["other"] == pytest.approx(0, abs=1e-6)
    assert goodput.down_seconds == pytest.approx(100)
    assert goodput.running_seconds == pytest.approx(25 + 15 + 4 + 0.5 * interrupted)
    first, _ = goodput.attempts
    assert first.seconds == pytest.approx(25 + 0.5 * interrupted)


def test_work_lost_over_two_attempts(run):
    train(run, 0, 10)
    run.kill_and_resume(10, down=50.0)
    train(run, 10, 13)
    # The newest checkpoint was unreadable: this one resumes before the second attempt.
    run.kill_and_resume(5, down=70.0)
    goodput = goodput_of(run)
    assert goodput.seconds["lost"] == pytest.approx(8)
    assert goodput.seconds["useful"] == pytest.approx(5)
    assert goodput.down_seconds == pytest.approx(120)
    assert goodput.seconds["other"] == pytest.approx(0, abs=1e-6)


def test_skipped_and_rolled_back_steps_are_lost(run):
    # A record that was skipped costs no step.
    run.add("record_skipped", 0.0, 3, reason="part.txt:7 is not UTF-8", count=1)
    run.add("step", 10.0, 9, updates=10, data_seconds=0.0)
    seconds = goodput_of(run).seconds
    assert (seconds["lost"], seconds["useful"]) == (0, pytest.approx(10))
    run.add("step_skipped", 0.0, 12, reason="gradient norm", count=1)
    run.add("step_skipped", 0.0, 15, reason="gradient norm", count=1)
    run.add("step", 20.0, 19, updates=10, data_seconds=0.0)
    assert goodput_of(run).seconds["lost"] == pytest.approx(2 * 2.0)
    run.add("rollback", 0.0, 19, restored_step=10, reason="loss")
    seconds = goodput_of(run).seconds
    # All ten are done again, the two among them.
    assert (seconds["lost"], seconds["useful"]) == (pytest.approx(20), pytest.approx(10))


def test_provenance_names_command_code_packages_and_host(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "prompt=a b"])
    found = provenance()
    assert found["command"] == "python train.py 'prompt=a b'"
    assert {"python", "jax", "flax"} <= found["packages"].keys()
    assert found["host"]
    assert found["commit"] == "" or len(found["commit"].partition("-")[0]) == 40
