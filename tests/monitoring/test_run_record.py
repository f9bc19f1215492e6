"""Reading a run: each step stands there once, or one message says why it cannot be read."""

import json
import math

import pytest

from MaxText.errors import UserError
from MaxText.monitoring.run_record import read_run
from tests.monitoring.report.run_files import RunFiles, completed, eventful


def test_a_completed_run(tmp_path):
    record = read_run(completed(tmp_path / "first"))
    assert record.name == "first"
    assert record.state == "completed"
    assert [row["step"] for row in record.steps] == list(range(400))
    assert [row["step"] for row in record.evaluations] == list(range(49, 400, 50))
    assert record.final_loss == record.evaluations[-1]["eval/avg_loss"]
    assert record.last_step == 399
    assert record.tokens == 400 * 16_384
    assert record.config["emb_dim"] == 384
    assert {row["event"] for row in record.marks} >= {"start", "compile", "checkpoint", "stop"}


def test_killed_resumed_and_rewound_each_step_stands_once(tmp_path):
    record = read_run(eventful(tmp_path / "run"))
    assert record.state == "diverged"
    assert [row["step"] for row in record.steps] == list(range(320))
    assert record.steps[-1]["learning/lm_loss"] is None
    assert [attempt.number for attempt in record.goodput.attempts] == [0, 1]
    # The newest start speaks for the run.
    assert record.facts["event"] == "resume"


def test_a_step_that_stands_twice_counts_as_the_later_one(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 10)
    run.steps(6, 12, marked="again")
    record = read_run(run.write())
    assert [row["step"] for row in record.steps] == list(range(12))
    assert [row["step"] for row in record.steps if "marked" in row] == list(range(6, 12))
    assert record.goodput.seconds["lost"] == pytest.approx(
        sum(row["seconds"] for row in run.rows if row["event"] == "step" and row["step"] >= 6)
        - sum(row["seconds"] for row in record.steps[6:])
    )


def test_a_half_written_last_line_is_left_out(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 5)
    row = json.dumps({**run.rows[-1], "step": 5})
    record = read_run(run.write(cut=row[: len(row) // 2]))
    assert record.last_step == 4


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
def test_the_state(tmp_path, old, reason, state):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 3)
    if reason:
        run.add("stop", 0.1, 2, reason=reason)
    assert read_run(run.write(old=old)).state == state


def test_the_end_of_an_earlier_attempt_is_not_the_end_of_the_run(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 3)
    run.add("stop", 0.1, 2, reason="interrupted")
    run.kill_and_resume(3, down=60)
    assert read_run(run.write(old=False)).state == "running"


def test_a_run_is_alive_while_it_is_silent_for_as_long_as_its_steps_take(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.add("step", 900.0, 0, updates=1, data_seconds=0.0)
    # An hour of silence is less than five such steps.
    assert read_run(run.write(old=True)).state == "running"


def test_without_evaluation_and_configuration(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    record = read_run(run.write())
    assert record.final_loss is None
    assert record.last_step is None
    assert record.config == {}
    assert record.tokens == 0


def test_what_ancestors_have_spent_is_kept_apart(tmp_path):
    run = RunFiles(tmp_path / "run")
    ancestors = [
        {"run_name": "a", "folder": "a", "step": 9, "how": "parameters", "tokens": 1e6, "flops": 2},
        {"run_name": "b", "folder": "b", "step": 9, "how": "parameters", "tokens": 3e6, "flops": 5},
    ]
    run.start(lineage=ancestors)
    run.steps(0, 2)
    record = read_run(run.write())
    assert record.tokens == 2 * 16_384
    # Tokens of an ancestor already include those of its own.
    assert record.inherited_tokens == 3e6
    assert record.inherited_flops == 5


def test_mistakes_are_one_message(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        read_run(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no events\.jsonl"):
        read_run(tmp_path / "empty")
    file = tmp_path / "empty" / "events.jsonl"
    file.write_text("")
    with pytest.raises(UserError, match="0 whole rows and none of them is a start"):
        read_run(tmp_path / "empty")
    file.write_text('{"time": 1.0, "phase": "start", "step": 0}\n')
    with pytest.raises(UserError, match="row 1 has event=None, attempt=None"):
        read_run(tmp_path / "empty")
    row = '{"time": 1.0, "event": "step", "phase": "train", "attempt": 0, "step": 0, %s}\n'
    file.write_text(row % '"seconds": "1", "learning/loss": [2.5], "learning/lm_loss": null')
    with pytest.raises(UserError, match=r"row 1 has seconds='1', learning/loss=\[2\.5\]\."):
        read_run(tmp_path / "empty")
    file.write_bytes(b"\x89PNG")
    with pytest.raises(UserError, match="0 whole rows and none of them is a start"):
        read_run(tmp_path / "empty")
    completed(tmp_path / "run")
    (tmp_path / "run" / "config.yml").write_text("steps: [1,\n")
    with pytest.raises(UserError, match=r"config\.yml is not valid YAML"):
        read_run(tmp_path / "run")
    (tmp_path / "run" / "config.yml").write_text("just words\n")
    with pytest.raises(UserError, match="holds no keys"):
        read_run(tmp_path / "run")


def test_a_loss_that_is_no_number_stays_none(tmp_path):
    run = RunFiles(tmp_path / "run")
    run.start()
    run.steps(0, 5, nan_at=3)
    run.evaluate(4, None)
    record = read_run(run.write())
    assert record.steps[3]["learning/lm_loss"] is None
    assert record.final_loss is None
    assert all(math.isfinite(row["time"]) for row in record.steps)
