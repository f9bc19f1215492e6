"""The records of a run: nothing twice, nothing missing, whatever happened before."""

import json
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import list_session_groups
from tensorboard.plugins.hparams.api_pb2 import ListSessionGroupsRequest
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from MaxText.config.loading import load_config
from MaxText.config.schema import flatten
from MaxText.config.training_sections import MonitoringConfig
from MaxText.monitoring.event_stream import open_stream
from MaxText.monitoring.events import MAIN_KEYS, PHASES, REPEATED
from MaxText.monitoring.json_lines import read_rows
from MaxText.monitoring.profiler import memory_row
from MaxText.monitoring.step_line import EvaluationReport, Terminal, step_row


def emit_step(stream, step, loss=2.0, **more):
    metrics = {"loss": loss, "lm_loss": loss, "total_weights": 64.0, "grad_norm": jnp.float32(1.5)}
    row = step_row(metrics, 0.5, tokens=64, tflops=0.25)
    stream.emit("step", step=step, seconds=0.5, updates=1, **row | more)


def opened(folder, first_step=0, run_name="tiny", config=None, log=lambda line: None, **keys):
    monitoring = MonitoringConfig(**{"enable_tensorboard": False} | keys)
    terminal = Terminal(10, log)
    return open_stream(
        folder, monitoring, run_name, config or {}, first_step=first_step, terminal=terminal
    )


def record(folder, steps, first_step=0, **keys):
    """An attempt of a run that reports these steps."""
    stream = opened(folder, first_step, **keys)
    stream.emit("resume" if first_step else "start", step=first_step, num_parameters=1234)
    for step in steps:
        emit_step(stream, step)
    return stream


def events(folder, kind=None):
    return [row for row in read_rows(folder / "events.jsonl") if kind in (None, row["event"])]


def steps_of(path):
    return [row["step"] for row in read_rows(path) if row.get("event", "step") == "step"]


def tensorboard_of(folder):
    """What TensorBoard reads of a run."""
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def values(board, tag):
    return [(event.step, event.value) for event in board.Scalars(tag)]


def content(board, tag):
    return board.Tensors(tag)[-1].tensor_proto.string_val[0]


def test_each_event_reaches_every_place(tmp_path):
    lines = []
    keys = {"config": {"learning_rate": 0.001}, "log_period": 1, "enable_tensorboard": True}
    stream = opened(tmp_path, log=lines.append, **keys)
    stream.emit("start", step=0, num_parameters=1234)
    assert not (tmp_path / "tensorboard").exists()  # nothing before the first step
    emit_step(stream, 0, loss=1.25)
    with stream.timed("checkpoint", step=0) as fields:
        fields["bytes"] = np.int64(7)
    with pytest.raises(ValueError), stream.timed("checkpoint", step=0):  # noqa: PT011
        raise ValueError
    shown = EvaluationReport(0, 200.0, 100.0, 2, 0.1)
    stream.emit("evaluation", step=0, seconds=0.1, **shown.row())
    stream.close()
    stream.close()

    start, step, checkpoint, evaluation = rows = events(tmp_path)
    assert [row["phase"] for row in rows] == ["startup", "train", "checkpoint", "evaluation"]
    assert start["time"] > 1.7e9
    assert {row["restart"] for row in rows} == {0}
    assert (step["step"], step["seconds"], step["learning/loss"]) == (0, 0.5, 1.25)
    assert checkpoint["bytes"] == 7
    assert checkpoint["seconds"] >= 0
    assert evaluation["eval/avg_loss"] == 2.0
    assert set(REPEATED) < set(PHASES)

    assert lines[0].startswith("completed step: 0, seconds: 0.500, ")
    (metrics,) = read_rows(tmp_path / "metrics.jsonl")
    assert (metrics["run_name"], metrics["learning/grad_norm"]) == ("tiny", 1.5)
    speeds = [metrics[f"perf/per_device_{what}_per_sec"] for what in ("tflops", "tokens")]
    assert speeds == [0.5, 128]
    tags = {name for name in step if "/" in name}
    assert {name: metrics[name] for name in tags} == {name: step[name] for name in tags}
    board = tensorboard_of(tmp_path)
    logged = step | evaluation
    assert {tag: values(board, tag) for tag in board.Tags()["scalars"]} == {
        tag: [(0, pytest.approx(logged[tag]))] for tag in logged if "/" in tag
    }


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_resuming_drops_later_rows_and_a_cut_line(tmp_path, name):
    stream = record(tmp_path, range(6), log_period=100)
    assert steps_of(tmp_path / name) == list(range(6))  # before any flush
    stream.close()
    with open(tmp_path / name, "a") as file:
        file.write('{"step": 6, "run_na')
    record(tmp_path, range(4, 8), first_step=4).close()
    assert steps_of(tmp_path / name) == list(range(8))
    assert all(json.loads(line) for line in (tmp_path / name).read_text().splitlines())
    record(tmp_path, range(2)).close()  # again from scratch
    assert steps_of(tmp_path / name) == [0, 1]


def test_what_is_done_again_is_recorded_as_lost(tmp_path):
    first = record(tmp_path, range(6))
    first.emit("checkpoint", step=3, seconds=0.25)
    first.emit("evaluation", step=5, seconds=2.0)
    first.close()
    second = record(tmp_path, range(4, 6), first_step=4)
    assert second.lost == {"steps": 2, "seconds": {"train": 1.0, "evaluation": 2.0}}
    second.close()
    assert [row["event"] for row in events(tmp_path)] == [
        "start",
        "step",
        "step",
        "step",
        "step",
        "checkpoint",
        "resume",
        "step",
        "step",
    ]
    assert [row["restart"] for row in events(tmp_path, "step")] == [0, 0, 0, 0, 1, 1]
    third = record(tmp_path, [], first_step=6)
    assert third.lost == {"steps": 0, "seconds": {}}
    third.close()
    assert events(tmp_path)[-1]["restart"] == 2
    assert not (tmp_path / "tensorboard").exists()  # switched off


@pytest.mark.parametrize("first_step", [0, 2])
def test_tensorboard_hides_what_a_killed_run_repeats(tmp_path, first_step, monkeypatch):
    record(tmp_path, range(4), enable_tensorboard=True).close()
    now = time.time  # files are named by the second
    monkeypatch.setattr(time, "time", lambda: now() + 1)
    record(tmp_path, range(first_step, 6), first_step, enable_tensorboard=True).close()
    steps = [step for step, _ in values(tensorboard_of(tmp_path), "learning/loss")]
    assert steps == list(range(6))


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
    emit_step(stream, 1, loss=1000.0)
    stream.close()
    again = record(tmp_path, [], first_step=2)
    again.emit("evaluation", step=1, seconds=1.0, **{"eval/avg_loss": 4.4})  # that was due
    emit_step(again, 2, loss=float("nan"))
    again.close()
    first, second, third = read_rows(tmp_path / "metrics.jsonl")
    assert abs(first["time"] - time.time()) < 60
    assert (first["learning/loss"], first["eval/avg_loss"]) == (2.0, 4.5)
    assert second["eval/avg_loss"] == 4.4
    assert "progress/tokens" not in first
    # Numbers that JSON does not have.
    assert second["learning/perplexity"] is None
    assert third["learning/loss"] is None


def test_tensorboard_has_the_configuration_charts_and_samples(tmp_path):
    config = flatten(load_config("quickstart.yml", log_layer_metrics=True))
    stream = record(tmp_path, [], config=config, enable_tensorboard=True)
    metrics = {"loss": 3.5, "lm_loss": 3.5, "total_weights": 64.0, "grad_norm/layer_10": 0.5}
    stream.emit("step", step=0, **step_row(metrics, 0.5, 64, 0.25), **memory_row())
    stream.emit("evaluation", step=0, **{"eval/avg_loss": 4.5, "eval/lm_loss": 4.5})
    stream.emit("sample", step=0, text="# A sample\n</pre>")
    stream.close()
    board = tensorboard_of(tmp_path)
    tags = board.PluginTagToContent("text")
    shown = {tag.removesuffix("/text_summary"): content(board, tag).decode() for tag in tags}
    assert shown.keys() == {"config", "num_model_parameters", "sample"}
    assert shown["num_model_parameters"] == "1,234"
    assert shown["sample"] == "    # A sample\n    </pre>"  # code in Markdown
    lines = {line.strip() for line in shown["config"].splitlines()}
    assert {f"steps: {config['steps']}", "decoder_block: llama2"} <= lines
    # Charts of several tags, each of which exists.
    layout = Layout.FromString(content(board, "custom_scalars__config__"))
    charts = {
        (category.title, chart.title): [
            sum(bool(re.match(pattern, tag)) for tag in board.Tags()["scalars"])
            for pattern in chart.multiline.tag
        ]
        for category in layout.category
        for chart in category.chart
    }
    assert charts == {
        ("loss", "training and validation"): [1, 1],
        ("memory", "in use and peak, GiB"): [2],
        ("grad_norm by layer", "all layers"): [1],
        ("param_norm by layer", "all layers"): [0],
        ("update_ratio by layer", "all layers"): [0],
        ("attention_entropy by layer", "all layers"): [0],
        ("attention_max_logit by layer", "all layers"): [0],
        ("moe_max_load_ratio by layer", "all layers"): [0],
    }
    # The columns of HParams.
    found = {
        tag: HParamsPluginData.FromString(content)
        for tag, content in board.PluginTagToContent("hparams").items()
    }
    experiment = found["_hparams_/experiment"].experiment
    assert [info.name for info in experiment.hparam_infos] == [*MAIN_KEYS]
    assert len(MAIN_KEYS) <= 20
    assert [info.name.tag for info in experiment.metric_infos] == ["eval/avg_loss", "learning/loss"]
    chosen = found["_hparams_/session_start_info"].session_start_info.hparams
    assert chosen["steps"].number_value == config["steps"]
    assert chosen["opt_type"].string_value == config["opt_type"]


def hparams_of(board):
    return {
        tag.removeprefix("_hparams_/"): HParamsPluginData.FromString(content)
        for tag, content in board.PluginTagToContent("hparams").items()
    }


def test_tensorboard_has_the_progress_once_per_step(tmp_path, monkeypatch):
    """Also if a resumed run makes up for an evaluation of the last step."""
    stream = record(tmp_path, [], enable_tensorboard=True)
    for step in range(4):
        progress = {"progress/tokens": 64.0 * step, "progress/flops": 1.0 * step}
        emit_step(stream, step, **progress)
        if step == 1:
            stream.emit("evaluation", step=step, **{"eval/avg_loss": 4.5} | progress)
    stream.close()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1)
    again = record(tmp_path, [], first_step=4, enable_tensorboard=True)
    again.emit("evaluation", step=3, **{"eval/avg_loss": 4.4, "progress/tokens": 192.0})
    again.close()
    board = tensorboard_of(tmp_path)
    for tag in ("progress/tokens", "progress/flops"):
        assert [step for step, _ in values(board, tag)] == [0, 1, 2, 3]
    assert [step for step, _ in values(board, "eval/avg_loss")] == [1, 3]


@pytest.mark.parametrize(
    ("reason", "status"), [("completed", 1), ("diverged", 2), ("error", 2), ("preempted", None)]
)
def test_hparams_have_changed_keys_resolved_values_and_the_end(tmp_path, reason, status):
    config = flatten(load_config("quickstart.yml", dtype="auto"))
    stream = opened(tmp_path, config=config, enable_tensorboard=True)
    changed = {"block_arrangement": "parallel", "run_name": "x", "steps": "400"}
    stream.emit("start", changed_keys=changed, resolved_keys={"dtype": "float32"})
    emit_step(stream, 0)
    stream.emit("stop", reason=reason)
    stream.close()
    pages = hparams_of(tensorboard_of(tmp_path))
    names = [info.name for info in pages["experiment"].experiment.hparam_infos]
    assert names == [*MAIN_KEYS, "block_arrangement"]
    chosen = pages["session_start_info"].session_start_info.hparams
    assert chosen["dtype"].string_value == "float32"
    assert chosen["block_arrangement"].string_value == config["block_arrangement"]
    assert chosen["learning_rate"].number_value == config["learning_rate"]
    assert ("session_end_info" in pages) == (status is not None)
    if status is not None:
        assert pages["session_end_info"].session_end_info.status == status


def test_tensorboard_lists_the_run_on_its_hparams_page(tmp_path):
    """As its own server reads the folder."""
    config = flatten(load_config("quickstart.yml"))
    stream = record(tmp_path, range(3), config=config, enable_tensorboard=True)
    stream.emit("evaluation", step=2, **{"eval/avg_loss": 4.5})
    stream.emit("stop", reason="completed")
    stream.close()
    folder = str(tmp_path / "tensorboard")
    runs = EventMultiplexer().AddRunsFromDirectory(folder)
    runs.Reload()
    provider = MultiplexerDataProvider(runs, folder)
    server = TBContext(logdir=folder, multiplexer=runs, data_provider=provider)
    request = ListSessionGroupsRequest(slice_size=10, allowed_statuses=[1])
    handler = list_session_groups.Handler(RequestContext(), Context(server), "", request)
    (group,) = handler.run().session_groups
    assert group.hparams["learning_rate"].number_value == config["learning_rate"]
    metrics = {metric.name.tag: metric.value for metric in group.metric_values}
    assert metrics == {"eval/avg_loss": 4.5, "learning/loss": 2.0}
