"""The files of a run: nothing doubled, nothing missing, whatever happened before."""

import json

import jax.numpy as jnp
import numpy as np

from MaxText.configuration.training_sections import Monitoring
from MaxText.monitoring.json_lines import JsonLines, read_rows
from MaxText.monitoring.recorder import Recorder
from MaxText.monitoring.step_line import EvaluationReport, StepReport


def report(step, loss=2.0):
    metrics = {"loss": loss, "lm_loss": loss, "total_weights": 64.0, "grad_norm": jnp.float32(1.5)}
    return StepReport(step, 0.5, metrics, tokens_per_device=64, tflops_per_device=0.25)


def record(folder, steps, first_step=0, **keys):
    recorder = Recorder(folder, Monitoring(**keys), "tiny", first_step=first_step)
    for step in steps:
        recorder.step(report(step))
    return recorder


def test_rows_carry_maxtext_tags(tmp_path):
    recorder = record(tmp_path, [0])
    recorder.close()
    recorder.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 0
    assert row["run_name"] == "tiny"
    assert row["learning/grad_norm"] == 1.5
    assert row["perf/per_device_tflops_per_sec"] == 0.5
    assert row["perf/per_device_tokens_per_sec"] == 128


def test_rows_are_on_disk_before_any_flush(tmp_path):
    recorder = record(tmp_path, range(3), log_period=100)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    recorder.close()


def test_resuming_drops_later_rows_and_a_cut_line(tmp_path):
    record(tmp_path, range(6)).close()
    metrics = tmp_path / "metrics.jsonl"
    with open(metrics, "a") as file:
        file.write('{"step": 6, "run_na')
    record(tmp_path, range(4, 8), first_step=4).close()
    assert [row["step"] for row in read_rows(metrics)] == list(range(8))
    assert all(json.loads(line) for line in metrics.read_text().splitlines())


def test_starting_again_from_scratch_leaves_no_old_rows(tmp_path):
    record(tmp_path, range(3)).close()
    record(tmp_path, range(2)).close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_shared_metrics_file_keeps_the_rows_of_other_runs(tmp_path):
    shared = str(tmp_path / "shared.jsonl")
    record(tmp_path / "a", range(2), metrics_file=shared).close()
    other = Recorder(tmp_path / "b", Monitoring(metrics_file=shared), "other")
    other.step(report(0))
    other.close()
    assert [(row["run_name"], row["step"]) for row in read_rows(shared)] == [
        ("tiny", 0),
        ("tiny", 1),
        ("other", 0),
    ]


def test_events_of_all_attempts_stay(tmp_path):
    for first_step in (0, 4):
        recorder = record(tmp_path, [], first_step=first_step)
        recorder.start({"steps": 10}, 1234)
        recorder.event("checkpoint", step=first_step, seconds=np.float32(0.5))
        recorder.close()
    rows = read_rows(tmp_path / "events.jsonl")
    assert [row["phase"] for row in rows] == ["start", "checkpoint", "resume", "checkpoint"]
    assert rows[0]["time"] > 1.7e9
    assert rows[1]["seconds"] == 0.5
    assert rows[0]["num_parameters"] == 1234


def test_numbers_that_json_has_not_become_null(tmp_path):
    recorder = record(tmp_path, [])
    recorder.step(report(0, loss=float("nan")))
    recorder.step(report(1, loss=1000.0))
    recorder.close()
    first, second = read_rows(tmp_path / "metrics.jsonl")
    assert first["learning/loss"] is None
    assert second["learning/perplexity"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_gets_scalars_texts_and_evaluations(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    recorder = record(tmp_path, [], log_period=1)
    recorder.start({"learning_rate": 0.001}, 1234)
    assert not (tmp_path / "tensorboard").exists()  # nothing before the first step
    recorder.step(report(0))
    recorder.evaluation(EvaluationReport(0, 200.0, 100.0, 2, 0.1))
    recorder.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, tags = path.read_bytes(), set()
    while data:  # TFRecord: length, its checksum, bytes, their checksum
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        tags |= {value.tag for value in event.summary.value}
        data = data[16 + length :]
    assert {"learning/loss", "eval/avg_loss", "perf/step_time_seconds"} <= tags
    assert any(tag.startswith("num_model_parameters") for tag in tags)
    assert any(tag.startswith("learning_rate") for tag in tags)
    assert read_rows(tmp_path / "events.jsonl")[1]["eval/avg_loss"] == 2.0


def test_tensorboard_can_be_switched_off(tmp_path):
    record(tmp_path, [0], enable_tensorboard=False).close()
    assert not (tmp_path / "tensorboard").exists()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    recorder = record(tmp_path / "run", range(3))
    recorder.start({}, 1)
    recorder.evaluation(EvaluationReport(0, 1.0, 1.0, 1, 0.1))
    recorder.close()
    assert not (tmp_path / "run").exists()


def test_object_stores_get_the_whole_file_at_each_flush(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "rows.jsonl", lambda row: True)
    lines.append({"a": 1})
    lines.close()

    class Store(JsonLines):
        """Behaves as on gs://, with files of this machine."""

        def _is_object_store(self):
            return True

    store = Store(tmp_path / "rows.jsonl", lambda row: True)
    store.append({"a": 2})
    assert len(read_rows(store.path)) == 1
    store.flush()
    assert [row["a"] for row in read_rows(store.path)] == [1, 2]
    store.append({"a": 3})
    store.close()
    store.close()
    assert [row["a"] for row in read_rows(store.path)] == [1, 2, 3]
