"""Reporting to W&B: no step missing, the last row of each valid, and no run that suffers."""

import importlib.machinery
import json
import os
import signal
import struct
import sys
import time
import types
from pathlib import Path

import pytest
from etils import epath

from MaxText.config.training_sections import MonitoringConfig, WandbConfig
from MaxText.monitoring.event_stream import open_stream
from MaxText.monitoring.events import Event
from MaxText.monitoring.json_lines import EventFile
from MaxText.monitoring.sinks.background import BackgroundSink
from MaxText.monitoring.sinks.weights_and_biases import WandbSink
from MaxText.monitoring.step_line import Terminal
from tests.programs import ended, started


def offline_files(folder):
    return [*Path(folder).glob("wandb/offline-run-*/*.wandb")]


def attempt(folder, first, end, blocks):
    """Steps of a run offline, in a process of its own.

    It is killed after so many blocks of W&B's file (32 KiB, some 7 steps); 0 lets it end.
    """
    folder = epath.Path(folder)

    def size():
        return sum(file.stat().st_size for file in offline_files(folder))

    before = size()
    config = {"steps": end, "mlp_activations": ("silu", "linear")}
    wandb = WandbSink(WandbConfig(mode="offline"), folder, "tiny", config, first)
    sinks = [BackgroundSink(wandb, "Weights & Biases"), EventFile(folder, first)]

    def emit(kind, step, **fields):
        for sink in sinks:
            sink.write(Event(kind, 1.8e9 + step, step=step, seconds=0.5, fields=fields))

    emit("resume" if first else "start", first, num_parameters=1234, lineage=[])
    padding = {f"perf/number_{i}": i / 7 for i in range(60)}
    for step in range(first, end):
        losses = dict.fromkeys(("learning/loss", "learning/lm_loss"), 1 / (step + 1))
        emit("step", step, **losses, updates=1, **padding)
    while blocks:
        time.sleep(0.01)
        if size() >= before + blocks * 2**15:
            os.kill(os.getpid(), signal.SIGKILL)
    emit("sample", end - 1, text="Once <b>")
    emit("stop", end - 1, reason="completed")
    for sink in sinks:
        sink.close()


def records(file):
    """The complete `Record` messages of W&B's log in LevelDB's format, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    record, place = b"", 7  # after W&B's header
    with file.open("rb") as stream:
        while block := stream.read(2**15):
            while place + 7 <= len(block):
                _, length, kind = struct.unpack_from("<IHB", block, place)
                chunk = block[place + 7 : place + 7 + length]
                place += 7 + length
                record = chunk if kind in (1, 2) else record + chunk  # whole, first
                if kind in (1, 4) and len(chunk) == length:  # whole, last
                    yield wandb_internal_pb2.Record.FromString(record)
            place = 0


def values_of(items):
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def offline_records(folder):
    """The records of every attempt's file, oldest attempt first."""
    files = sorted(offline_files(folder), key=lambda file: file.stat().st_ctime)
    return [list(records(file)) for file in files]


def rows_of(attempts):
    """(step, numbers by tag) of the history of attempts."""
    return [
        (record.history.step.num, values_of(record.history.item))
        for attempt in attempts
        for record in attempt
        if record.HasField("history")
    ]


@pytest.mark.slow
def test_killed_and_restarted_offline_every_step_is_there(tmp_path):
    environment = {"WANDB_API_KEY": "k" * 40, "SOME_TOKEN": "do-not-tell"}

    def done(first, end, blocks):
        """Exit code of an attempt, what it printed, and W&B's rows of steps then."""
        arguments = (str(tmp_path), first, end, blocks)
        program = f"from {__name__} import attempt\nattempt{arguments}"
        with started(program, environment=environment) as process:
            code, printed = ended(process)
        had = {numbers["step"] for _, numbers in rows_of(offline_records(tmp_path))}
        return code, printed, had

    code, printed, had = done(0, 150, blocks=5)
    assert (code, printed) == (-signal.SIGKILL, "")
    assert 22 < max(had) < 149  # so the next attempt sends some again that it does not do again
    assert done(149, 160, blocks=0) == (0, "", set(range(160)))

    attempts = offline_records(tmp_path)
    rows = rows_of(attempts)
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers))  # as `wandb sync` needs them
    losses = {row["step"]: row["learning/loss"] for _, row in rows if "learning/loss" in row}
    assert losses == {step: 1 / (step + 1) for step in range(160)}
    assert "sample" in rows[-1][1]
    (sample,) = (tmp_path / "wandb").rglob("*.html")
    assert "<pre>Once &lt;b&gt;</pre>" in sample.read_text()
    runs = [record.run for part in attempts for record in part if record.HasField("run")]
    assert len({run.run_id for run in runs}) == 1
    config = values_of(runs[-1].config.update)
    assert (config["steps"], config["mlp_activations"]) == (160, ["silu", "linear"])
    endings = [record.exit.exit_code for record in attempts[-1] if record.HasField("exit")]
    assert endings == [0]
    for file in (path for path in (tmp_path / "wandb").rglob("*") if path.is_file()):
        assert b"do-not-tell" not in file.read_bytes()
        assert b"kkkkkkkk" not in file.read_bytes()


class Server:
    """Stands for the module wandb and what its server keeps of one run."""

    def __init__(self):
        self.steps, self.rows = [], []
        self.axes, self.summary, self.arguments, self.exit_code = {}, {}, {}, None

    @property
    def starting_step(self):
        return max(self.steps, default=-1) + 1

    def init(self, **arguments):
        self.arguments = arguments
        return self

    def log(self, numbers, step):
        assert numbers["_timestamp"] > 0
        assert step >= self.starting_step
        self.steps.append(step)
        self.rows.append((numbers["step"], numbers.get("learning/loss")))

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def server(monkeypatch):
    server = Server()
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="a test")
    module.__dict__.update(init=server.init, setup=dict, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return server


def write(sink, events):
    for event in events:
        sink.write(event)
    sink.close()


def send(folder, first_step, *events, **keys):
    """An attempt with these events in W&B."""
    wandb = WandbSink(WandbConfig(**keys), epath.Path(folder), "tiny", {"steps": 9}, first_step)
    write(BackgroundSink(wandb, "Weights & Biases", remedy=wandb.remedy), events)


def record(folder, first_step, *events):
    """An attempt that is only in events.jsonl."""
    write(EventFile(epath.Path(folder), first_step), events)


def step(number, loss=9.0):
    return Event("step", 1.8e9 + 100 * number, step=number, fields={"learning/loss": loss})


def after(number):
    """A step done after a rollback."""
    return Event("step", 1.9e9 + number, step=number, fields={"learning/loss": 1.0})


def rolled_back(to):
    return Event("rollback", 1.9e9, step=to, fields={"restored_step": to})


def test_a_restart_sends_what_may_be_missing(tmp_path, server):
    record(tmp_path, 0, *map(step, range(8)))
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    server.steps = [0, 1, 2]
    send(tmp_path, 6, *map(step, range(6, 9)), entity="us")
    assert [number for number, _ in server.rows] == list(range(9))
    assert (server.arguments["resume"], server.arguments["entity"]) == ("allow", "us")
    assert server.exit_code == 1  # no event says that the run was completed
    # What has arrived is not sent again, except by the run itself.
    server.rows.clear()
    send(tmp_path, 7, *map(step, (7, 8)), Event("stop", 2e9, fields={"reason": "completed"}))
    assert [number for number, _ in server.rows] == [7, 8]
    assert server.exit_code == 0


def test_what_was_handed_over_since_the_flush_before_the_last_is_sent_again(tmp_path, server):
    sink = WandbSink(WandbConfig(), epath.Path(tmp_path), "tiny", {}, 0)
    for number in range(6):
        sink.write(step(number))
        if number in (1, 3):
            sink.flush()
    record(tmp_path, 0, *map(step, range(6)))
    server.rows.clear()
    send(tmp_path, 6, step(6))
    assert [number for number, _ in server.rows] == [1, 2, 3, 4, 5, 6]  # 1 may have been under way


@pytest.mark.parametrize("first_step", [5, 7])
def test_where_the_run_rolls_back_the_later_value_is_last(tmp_path, server, first_step):
    send(tmp_path, 0, *map(step, range(8)))
    record(tmp_path, 0, *map(step, range(8)))
    # W&B is still connecting, and then all is killed.
    record(tmp_path, 8, rolled_back(5), after(5), after(6))
    send(tmp_path, first_step, *map(after, range(first_step, 9)))
    # A chart ends with the last value of each step.
    assert dict(server.rows) == dict.fromkeys(range(5), 9.0) | dict.fromkeys(range(5, 9), 1.0)
    assert server.axes == {"step": None, "*": "step"}


def test_only_a_start_from_scratch_after_steps_is_a_new_run(tmp_path, server):
    ids = []
    for first, events in ((0, []), (0, [step(0)]), (2, [step(2)]), (0, [])):
        send(tmp_path, first, *events)
        ids.append(server.arguments["id"])
        server.steps.clear()
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_disabled_does_nothing(tmp_path, server):
    monitoring = MonitoringConfig(
        enable_wandb=True, **{"wandb.mode": "disabled"}, enable_tensorboard=False
    )
    stream = open_stream(tmp_path, monitoring, "tiny", {}, first_step=0, terminal=Terminal(1))
    stream.emit("stop", reason="completed")
    stream.close()
    assert not server.arguments
    assert not list(tmp_path.glob("wandb*"))
