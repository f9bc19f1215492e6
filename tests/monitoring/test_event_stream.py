"""The records of a run: nothing doubled, nothing missing, whatever happened before."""

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.configuration.training_sections import Monitoring
from MaxText.monitoring.event_stream import EventStream, open_stream
from MaxText.monitoring.events import PHASES, REPEATED
from MaxText.monitoring.json_lines import read_rows
from MaxText.monitoring.sinks.terminal import Terminal
from MaxText.monitoring.step_line import EvaluationReport, StepReport


def report(step, loss=2.0):
    metrics = {"loss": loss, "lm_loss": loss, "total_weights": 64.0, "grad_norm": jnp.float32(1.5)}
    return StepReport(step, 0.5, metrics, tokens_per_device=64, tflops_per_device=0.25)


def emit_step(stream, step, loss=2.0):
    shown = report(step, loss)
    stream.emit("step", step=step, seconds=0.5, report=shown, updates=1, **shown.row())


def opened(folder, first_step=0, run_name="tiny", config=None, lines=None, **keys):
    show = (lines if lines is not None else []).append
    return open_stream(
        folder, Monitoring(**keys), run_name, config or {}, first_step=first_step,
        terminal=Terminal(10, show),
    )  # fmt: skip


def record(folder, steps, first_step=0, **keys):
    """An attempt of a run that reports these steps."""
    stream = opened(folder, first_step, **keys)
    stream.emit("resume" if first_step else "start", step=first_step, num_parameters=1234)
    for step in steps:
        emit_step(stream, step)
    return stream


def events(folder, kind=None):
    return [row for row in read_rows(folder / "events.jsonl") if kind in (None, row["event"])]


def test_each_event_has_time_kind_phase_and_attempt(tmp_path):
    stream = record(tmp_path, [0])
    with stream.timed("checkpoint", step=0) as facts:
        facts["bytes"] = np.int64(7)
    stream.close()
    start, step, checkpoint = events(tmp_path)
    assert [start["phase"], step["phase"], checkpoint["phase"]] == [
        "start_up", "train", "checkpoint",
    ]  # fmt: skip
    assert start["time"] > 1.7e9
    assert {row["attempt"] for row in (start, step, checkpoint)} == {0}
    assert (step["step"], step["seconds"], step["learning/loss"]) == (0, 0.5, 2.0)
    assert checkpoint["bytes"] == 7
    assert checkpoint["seconds"] >= 0
    assert set(REPEATED) < set(PHASES)


def test_one_event_feeds_terminal_rows_and_tensorboard_alike(tmp_path):
    lines = []
    stream = opened(tmp_path, lines=lines)
    emit_step(stream, 0, loss=1.25)
    stream.close()
    stream.close()
    (event,), (metrics,) = events(tmp_path), read_rows(tmp_path / "metrics.jsonl")
    assert lines[0].startswith("completed step: 0, seconds: 0.500, ")
    assert "loss: 1.250" in lines[0]
    assert metrics["run_name"] == "tiny"
    assert metrics["learning/grad_norm"] == 1.5
    assert metrics["perf/per_device_tflops_per_sec"] == 0.5
    assert metrics["perf/per_device_tokens_per_sec"] == 128
    tags = {name: value for name, value in metrics.items() if "/" in name}
    assert {name: value for name, value in event.items() if "/" in name} == tags
    assert tensorboard_values(tmp_path)["learning/loss"] == 1.25


def test_a_failed_block_is_no_event(tmp_path):
    stream = opened(tmp_path)
    with pytest.raises(ValueError, match="no room"), stream.timed("checkpoint", step=0):
        raise ValueError("no room")
    stream.close()
    assert not events(tmp_path)


def test_rows_are_on_disk_before_any_flush(tmp_path):
    stream = record(tmp_path, range(3), log_period=100)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for row in events(tmp_path, "step")] == [0, 1, 2]
    stream.close()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_resuming_drops_later_rows_and_a_cut_line(tmp_path, name):
    record(tmp_path, range(6)).close()
    with open(tmp_path / name, "a") as file:
        file.write('{"step": 6, "run_na')
    record(tmp_path, range(4, 8), first_step=4).close()
    rows = read_rows(tmp_path / name)
    steps = [row["step"] for row in rows if row.get("event", "step") == "step"]
    assert steps == list(range(8))
    assert all(json.loads(line) for line in (tmp_path / name).read_text().splitlines())


def test_what_is_done_again_is_told_as_lost(tmp_path):
    first = record(tmp_path, range(6))
    first.emit("checkpoint", step=3, seconds=0.25)
    first.emit("evaluation", step=5, seconds=2.0)
    first.close()
    second = record(tmp_path, range(4, 6), first_step=4)
    assert second.lost == {"steps": 2, "seconds": {"train": 1.0, "evaluation": 2.0}}
    second.close()
    assert [row["event"] for row in events(tmp_path)] == [
        "start", "step", "step", "step", "step", "checkpoint", "resume", "step", "step",
    ]  # fmt: skip
    assert [row["attempt"] for row in events(tmp_path, "step")] == [0, 0, 0, 0, 1, 1]
    third = record(tmp_path, [], first_step=6)
    assert third.lost == {"steps": 0, "seconds": {}}
    third.close()
    assert events(tmp_path)[-1]["attempt"] == 2


def test_starting_again_from_scratch_leaves_no_old_rows(tmp_path):
    record(tmp_path, range(3)).close()
    record(tmp_path, range(2)).close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [row["step"] for row in events(tmp_path, "step")] == [0, 1]


def test_tensorboard_hides_step_0_of_a_run_that_was_killed(tmp_path):
    record(tmp_path, range(1)).close()
    starts = [event for event in tensorboard_events(tmp_path) if event.session_log.status == 1]
    assert [event.step for event in starts] == [0]


def test_a_shared_metrics_file_keeps_the_rows_of_other_runs(tmp_path):
    shared = str(tmp_path / "shared.jsonl")
    first = record(tmp_path / "a", range(2), metrics_file=shared)
    first.flush()
    with open(shared, "a") as file:
        file.write('{"step": 6, "run_na')  # of a run that was killed
    record(tmp_path / "b", [0], metrics_file=shared, run_name="other").close()
    record(tmp_path / "b", [0], metrics_file=shared, run_name="other").close()  # a restart
    emit_step(first, 2)  # goes on
    first.close()
    assert [(row["run_name"], row["step"]) for row in read_rows(shared)] == [
        ("tiny", 0),
        ("tiny", 1),
        ("other", 0),
        ("other", 0),
        ("tiny", 2),
    ]


def test_metrics_have_the_time_and_the_validation_loss(tmp_path):
    stream = opened(tmp_path)
    emit_step(stream, 0)
    stream.emit("evaluation", step=0, seconds=1.0, **{"eval/avg_loss": 4.5, "progress/tokens": 3})
    emit_step(stream, 1)
    stream.close()
    again = record(tmp_path, [], first_step=2)
    again.emit("evaluation", step=1, seconds=1.0, **{"eval/avg_loss": 4.4})  # that was due
    again.close()
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert abs(first["time"] - time.time()) < 60
    assert first["learning/loss"] == second["learning/loss"]
    assert first["eval/avg_loss"] == 4.5
    assert second["eval/avg_loss"] == 4.4
    assert "progress/tokens" not in first


def test_numbers_that_json_has_not_become_null(tmp_path):
    stream = opened(tmp_path)
    emit_step(stream, 0, loss=float("nan"))
    emit_step(stream, 1, loss=1000.0)
    stream.close()
    for name in ("metrics.jsonl", "events.jsonl"):
        first, second = read_rows(tmp_path / name)
        assert first["learning/loss"] is None
        assert second["learning/perplexity"] is None
        assert "NaN" not in (tmp_path / name).read_text()


class Counting:
    """A sink that counts what it is asked."""

    def __init__(self):
        self.written, self.flushed = 0, 0

    def write(self, event):
        self.written += 1

    def flush(self):
        self.flushed += 1

    def close(self):
        pass


def test_flushed_every_log_period_and_at_events_that_matter():
    sink = Counting()
    stream = EventStream([sink], flush_every=10)
    for step in range(25):
        emit_step(stream, step)
    assert (sink.written, sink.flushed) == (25, 2)
    for kind in ("resume", "checkpoint", "stop"):
        stream.emit(kind)
    assert sink.flushed == 5


def tensorboard_events(folder):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").iterdir()
    data, found = path.read_bytes(), []
    while data:  # TFRecord: length, its checksum, bytes, their checksum
        length = int.from_bytes(data[:8], "little")
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def tensorboard_summaries(folder):
    return [event.summary for event in tensorboard_events(folder)]


def tensorboard_values(folder):
    return {
        value.tag: value.simple_value
        for summary in tensorboard_summaries(folder)
        for value in summary.value
    }


def test_tensorboard_gets_scalars_texts_hyperparameters_and_evaluations(tmp_path):
    stream = opened(tmp_path, config={"learning_rate": 0.001}, log_period=1)
    stream.emit("start", step=0, num_parameters=1234)
    assert not (tmp_path / "tensorboard").exists()  # nothing before the first step
    emit_step(stream, 0)
    shown = EvaluationReport(0, 200.0, 100.0, 2, 0.1)
    stream.emit("evaluation", step=0, seconds=0.1, report=shown, **shown.row())
    stream.close()
    tags = tensorboard_values(tmp_path)
    assert {"learning/loss", "eval/avg_loss", "perf/step_time_seconds"} <= set(tags)
    assert any(tag.startswith("num_model_parameters") for tag in tags)
    assert any(tag.startswith("learning_rate") for tag in tags)
    assert any(tag.startswith("_hparams_/") for tag in tags)
    assert events(tmp_path, "evaluation")[0]["eval/avg_loss"] == 2.0


def test_tensorboard_can_be_switched_off(tmp_path):
    record(tmp_path, [0], enable_tensorboard=False).close()
    assert not (tmp_path / "tensorboard").exists()
