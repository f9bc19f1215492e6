"""Reading a run: each step stands there once, or one message says why it cannot be read."""

import math

import pytest

from MaxText.errors import UserError
from MaxText.monitoring.run_record import read_run
from tests.monitoring.report.run_files import RunFiles, completed


def test_a_completed_run(completed_run):
    record = read_run(completed_run)
    assert (record.name, record.state) == ("a", "completed")
    assert [row["step"] for row in record.steps] == list(range(400))
    assert [row["step"] for row in record.evaluations] == list(range(49, 400, 50))
    assert record.final_loss == record.evaluations[-1]["eval/avg_loss"]
    assert (record.last_step, record.tokens) == (399, 400 * 16_384)
    assert record.config["emb_dim"] == 384
    assert {row["event"] for row in record.marks} >= {"start", "compile", "checkpoint", "stop"}


def test_killed_resumed_and_rewound_each_step_stands_once(eventful_run):
    record = read_run(eventful_run)
    assert record.state == "diverged"
    assert [row["step"] for row in record.steps] == list(range(320))
    assert record.steps[-1]["learning/lm_loss"] is None
    assert all(math.isfinite(row["time"]) for row in record.steps)
    assert [attempt.number for attempt in record.goodput.attempts] == [0, 1]
    # The newest start speaks for the run.
    assert record.facts["event"] == "resume"


def test_a_step_that_stands_twice_counts_as_the_later_one(run):
    run.steps(0, 10)
    run.steps(6, 12, marked="again")
    record = read_run(run.write())
    assert [row["step"] for row in record.steps] == list(range(12))
    assert [row["step"] for row in record.steps if "marked" in row] == list(range(6, 12))
    assert record.goodput.seconds["lost"] == pytest.approx(
        sum(row["seconds"] for row in run.rows if row["event"] == "step" and row["step"] >= 6)
        - sum(row["seconds"] for row in record.steps[6:])
    )


def test_a_half_written_last_line_is_left_out(run):
    run.steps(0, 5)
    assert read_run(run.write(cut='{"event": "step", "ste')).last_step == 4


@pytest.mark.parametrize(
    ("old", "reason", "state"),
    [
        (False, None, "running"), (True, None, "killed"), (False, "interrupted", "interrupted"),
        (True, "completed", "completed"), (True, "something new", "error"),
    ],
)  # fmt: skip
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


ROW = b'{"time": 1.0, "event": "step", "phase": "train", "attempt": 0, "step": 0, "seconds": "1"}\n'


@pytest.mark.parametrize(
    ("content", "message"), [(b"\x89PNG", "0 whole rows"), (ROW, r"row 1 .*seconds='1'")]
)
def test_rows_that_are_none(tmp_path, content, message):
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)


def test_mistakes_are_one_message(tmp_path):
    with pytest.raises(UserError, match="none"):
        read_run(tmp_path / "none")
    with pytest.raises(UserError, match=r"events\.jsonl"):
        read_run(tmp_path)
    completed(tmp_path / "run")
    for text in ("steps: [1,\n", "just words\n"):
        (tmp_path / "run" / "config.yml").write_text(text)
        with pytest.raises(UserError, match=r"config\.yml"):
            read_run(tmp_path / "run")
