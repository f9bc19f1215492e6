"""Reporting to W&B: no step twice and none missing, and no run that suffers from it."""

import dataclasses
import importlib.machinery
import json
import math
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from MaxText.configuration.training_sections import Monitoring
from MaxText.errors import UserError
from MaxText.monitoring.event_stream import open_stream
from MaxText.monitoring.events import Event
from MaxText.monitoring.sinks import background
from MaxText.monitoring.sinks.background import Background
from MaxText.monitoring.sinks.event_file import EventFile
from MaxText.monitoring.sinks.offline_history import RowNumbers, history_steps, records
from MaxText.monitoring.sinks.weights_and_biases import WeightsAndBiases

REPOSITORY = Path(__file__).resolve().parents[2]

# One attempt of a run: its folder, its first step, the step after its last one, and the blocks of
# W&B's file after which it is killed; 0 lets it end. A block is 32 KiB, some 7 steps.
ATTEMPT = """
import os, pathlib, signal, sys, time
sys.path.insert(0, sys.argv[1])
from etils import epath
from MaxText.configuration.training_sections import Monitoring
from MaxText.monitoring.event_stream import open_stream
from MaxText.monitoring.events import Event
from MaxText.monitoring.sinks.background import Background
from MaxText.monitoring.sinks.event_file import EventFile
from MaxText.monitoring.sinks.weights_and_biases import WeightsAndBiases

folder, (first, end, blocks) = epath.Path(sys.argv[2]), map(int, sys.argv[3:])
monitoring = Monitoring(enable_wandb=True, wandb_mode="offline")
files = pathlib.Path(folder / "wandb")
size = lambda: sum(file.stat().st_size for file in files.glob("offline-run-*/*.wandb"))
before = size()
config = {"steps": end, "mlp_activations": ("silu", "linear"), "decoder_block": "llama2"}
wandb = WeightsAndBiases(monitoring, folder, "tiny", config, first)
sinks = [Background(wandb, "Weights & Biases"), EventFile(folder, first)]

def emit(kind, step, **facts):
    for sink in sinks:
        sink.write(Event(kind, 1.8e9 + step, step=step, seconds=0.5, facts=facts))

emit("resume" if first else "start", first, num_parameters=1234, lineage=[])
for step in range(first, end):
    padding = {f"perf/number_{i}": i / 7 for i in range(60)}
    emit("step", step, **{"learning/loss": 1 / (step + 1), "updates": 1, **padding})
    if step % 10 == 9:
        emit("evaluation", step, **{"eval/avg_loss": 2 / (step + 1)})
if blocks:
    while size() < before + blocks * 2**15:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
emit("stop", end - 1, reason="completed")
for sink in sinks:
    sink.close()
"""


def attempt(folder, environment, first, end, blocks):
    numbers = map(str, (first, end, blocks))
    command = [sys.executable, "-c", ATTEMPT, REPOSITORY, folder, *numbers]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def offline_records(folder):
    """The records of every attempt's file, oldest attempt first."""
    files = (folder / "wandb").glob("offline-run-*/*.wandb")
    return [list(records(file)) for file in sorted(files, key=lambda file: file.stat().st_ctime)]


def rows_of(attempt_records):
    """(step, numbers by tag) of the history among records."""
    return [
        (
            record.history.step.num,
            {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            },
        )
        for record in attempt_records
        if record.HasField("history")
    ]


@pytest.mark.slow
def test_killed_and_restarted_offline_every_step_is_there_once(tmp_path, users_environment):
    environment = users_environment | {"WANDB_API_KEY": "k" * 40, "SOME_TOKEN": "do-not-tell"}
    killed = attempt(tmp_path, environment, 0, 60, blocks=1)
    assert (killed.returncode, killed.stdout, killed.stderr) == (-signal.SIGKILL, "", "")
    (first,) = offline_records(tmp_path)
    had = [step for step, _ in rows_of(first)]
    assert 0 < len(had) < 60  # so the next attempt has to send some of them again
    killed = attempt(tmp_path, environment, 60, 250, blocks=12)
    assert killed.returncode == -signal.SIGKILL
    had = [step for part in offline_records(tmp_path) for step, _ in rows_of(part)]
    assert 62 < max(had) < 249  # so the next attempt does some of them again
    done = attempt(tmp_path, environment, 62, 260, blocks=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    attempts = offline_records(tmp_path)
    assert len(attempts) == 3
    rows = [row for part in attempts for row in rows_of(part)]
    assert [step for step, _ in rows] == list(range(260))
    assert [numbers["learning/loss"] for _, numbers in rows] == [1 / (s + 1) for s in range(260)]
    assert [numbers["_timestamp"] for _, numbers in rows] == [1.8e9 + s for s in range(260)]
    evaluated = {step: n["eval/avg_loss"] for step, n in rows if "eval/avg_loss" in n}
    assert evaluated == {step: 2 / (step + 1) for step in range(9, 260, 10)}
    assert not any("updates" in numbers for _, numbers in rows)

    state = json.loads((tmp_path / "wandb.json").read_text())
    assert state["last_step"] == 259
    axes = {
        record.metric.name or record.metric.glob_name: record.metric.step_metric
        for record in attempts[-1]
        if record.HasField("metric")
    }
    assert axes["*"] == "step"
    assert [numbers["step"] for _, numbers in rows] == list(range(260))
    runs = [record.run for part in attempts for record in part if record.HasField("run")]
    assert {run.run_id for run in runs} == {state["id"]}
    assert {(run.project, run.display_name, *run.tags) for run in runs} == {
        ("maxtext", "tiny", "llama2")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[-1].config.update}
    assert config.pop("_wandb") is not None
    assert config == {
        "steps": 260,
        "mlp_activations": ["silu", "linear"],
        "decoder_block": "llama2",
    }
    summary = {
        item.key or item.nested_key[0]: item.value_json
        for record in attempts[-1]
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert summary["num_parameters"] == "1234"
    assert summary["stop"] == '"completed"'
    assert "lineage" not in summary
    (ending,) = [record.exit for record in attempts[-1] if record.HasField("exit")]
    assert ending.exit_code == 0
    for file in (path for path in (tmp_path / "wandb").rglob("*") if path.is_file()):
        assert b"do-not-tell" not in file.read_bytes()
        assert b"kkkkkkkk" not in file.read_bytes()

    whole = max((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda f: f.stat().st_size)
    steps = history_steps(whole)
    for share in (0.3, 0.5, 0.7):  # what a crash of the machine may leave
        cut = tmp_path / "cut.wandb"
        cut.write_bytes(whole.read_bytes()[: int(share * whole.stat().st_size)])
        found = history_steps(cut)
        assert found == steps[: len(found)]
        assert abs(len(found) / len(steps) - share) < 0.05


class Server:
    """Stands for the module wandb and what its server keeps of one run."""

    def __init__(self, steps=()):
        self.steps = list(steps)
        self.rows = []
        self.axes = {}
        self.summary = {}
        self.arguments = {}
        self.exit_code = None
        self.failure = None
        self.finishing = threading.Event()
        self.finishing.set()

    @property
    def starting_step(self):
        return max(self.steps, default=-1) + 1

    def init(self, **arguments):
        self.arguments = arguments
        if self.failure:
            raise self.failure
        return self

    def log(self, numbers, step):
        assert numbers["_timestamp"] > 0
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.rows.append((numbers["step"], numbers.get("learning/loss")))

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    @property
    def charted(self):
        """The value that a chart ends with at each step."""
        return dict(self.rows)

    def finish(self, exit_code):
        self.finishing.wait()
        self.exit_code = exit_code


@pytest.fixture
def server(monkeypatch):
    server = Server()
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="a test")
    module.__dict__.update(init=server.init, setup=dict, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return server


class Kept:
    """A terminal that nobody looks at."""

    def write(self, event):
        pass

    def flush(self):
        pass

    close = flush


def sink(folder, first_step=0, **keys):
    monitoring = Monitoring(enable_wandb=True, **keys)
    wandb = WeightsAndBiases(monitoring, epath.Path(folder), "tiny", {"steps": 9}, first_step)
    return Background(wandb, "Weights & Biases", remedy=wandb.remedy)


def step(number, loss=2.0):
    return Event("step", 1.8e9, step=number, facts={"learning/loss": loss})


def test_a_restart_online_sends_what_the_server_lacks(tmp_path, server):
    events = EventFile(epath.Path(tmp_path), 0)
    for number in range(8):
        events.write(step(number))
    events.close()
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    server.steps = [0, 1, 2]
    resumed = sink(tmp_path, first_step=6, wandb_entity="us")
    for number in range(6, 9):
        resumed.write(step(number))
    resumed.close()
    assert server.steps == list(range(9))
    assert server.arguments["resume"] == "allow"
    assert server.arguments["entity"] == "us"
    assert server.exit_code == 1  # nobody said that the run was completed


def test_what_the_server_has_is_not_sent_again(tmp_path, server, monkeypatch):
    server.steps = list(range(8))
    sent = []
    monkeypatch.setattr(server, "log", lambda numbers, step: sent.append(step))
    resumed = sink(tmp_path, first_step=6)
    for number in range(6, 10):
        resumed.write(step(number))
    resumed.close()
    assert sent == [8, 9]


def after(number):
    """A step done after a rewind."""
    return dataclasses.replace(step(number, loss=1.0), time=1.8e9 + 9)


def rewind(to, number, **facts):
    return Event("rewind", 1.8e9, step=to, facts={"to": to, "number": number, **facts})


def recorded(folder, server, first_step, *events):
    """An attempt with these events, as the run would record them too."""
    sinks = [sink(folder, first_step), EventFile(epath.Path(folder), first_step)]
    for event in events:
        for each in sinks:
            each.write(event)
    for each in sinks:
        each.close()
    return server.charted


def test_where_the_run_goes_back_the_later_value_is_charted(tmp_path, server):
    first = [step(number, loss=9.0) for number in range(8)]
    again = [after(number) for number in range(5, 10)]
    charted = recorded(tmp_path, server, 0, *first, rewind(5, 1), *again)
    assert charted == {**dict.fromkeys(range(5), 9.0), **dict.fromkeys(range(5, 10), 1.0)}
    assert server.axes == {"step": None, "*": "step"}
    assert server.steps == list(range(13))
    # A restart from before it repeats what is there, and what W&B has lost of it is sent.
    server.steps, server.rows = server.steps[:-2], server.rows[:-2]
    repeated = [rewind(5, 1, again=True), *[step(number, loss=9.0) for number in range(4, 5)]]
    charted = recorded(tmp_path, server, 4, *repeated, *again, after(10))
    assert [number for number, _ in server.rows] == [*range(8), *range(5, 11)]
    assert charted[10] == 1.0
    # One after it finds the right rows, too.
    server.steps, server.rows = server.steps[:-4], server.rows[:-4]
    recorded(tmp_path, server, 10, after(10), after(11))
    assert [number for number, _ in server.rows] == [*range(8), *range(5, 12)]


@pytest.mark.parametrize("first_step", [5, 7])
def test_a_rewind_of_which_wandb_never_heard(tmp_path, server, first_step):
    recorded(tmp_path, server, 0, *[step(number, loss=9.0) for number in range(8)])
    missed = EventFile(epath.Path(tmp_path), 8)  # W&B is still connecting, and then all is killed
    missed.write(rewind(5, 1))
    late = [after(number) for number in (5, 6)]
    for event in late:
        missed.write(event)
    missed.close()
    told = [rewind(5, 1, again=True), *late] if first_step == 5 else []
    charted = recorded(tmp_path, server, first_step, *told, step(7, loss=1.0))
    assert charted == {**dict.fromkeys(range(5), 9.0), **dict.fromkeys(range(5, 8), 1.0)}


def test_another_configuration_is_charted_where_it_began(tmp_path, server):
    recorded(tmp_path, server, 0, *[step(number, loss=9.0) for number in range(8)])
    change = Event("config_change", 1.8e9, step=6, facts={"changes": {}})
    charted = recorded(tmp_path, server, 6, change, *[step(n, loss=1.0) for n in range(6, 9)])
    assert charted == {**dict.fromkeys(range(6), 9.0), **dict.fromkeys(range(6, 9), 1.0)}


@pytest.mark.parametrize(
    ("shifts", "next_row", "lacking"),
    [
        ([[0, 0]], 7, 7),
        ([[0, 0], [5, 3]], 12, 9),
        ([[0, 0], [5, 3]], 7, 5),
        ([[0, 0], [5, 3]], 4, 4),
        ([[0, 0], [5, 3], [4, 6]], 9, 4),
        ([[0, 0], [5, 3], [7, 6]], 9, 6),
    ],
)
def test_the_first_step_that_is_lacking(shifts, next_row, lacking):
    assert RowNumbers(shifts, next_row).lacking == lacking


@pytest.mark.parametrize(("first_step", "same"), [(0, False), (2, True)])
def test_only_a_start_from_scratch_is_a_new_run(tmp_path, server, first_step, same):
    ids = []
    for first in (0, first_step):
        run = sink(tmp_path, first)
        run.write(step(first))
        run.close()
        ids.append(server.arguments["id"])
        server.steps.clear()
    assert (ids[0] == ids[1]) == same


def test_a_start_that_did_no_step_keeps_its_id(tmp_path, server):
    sink(tmp_path).close()
    first = server.arguments["id"]
    sink(tmp_path).close()
    assert server.arguments["id"] == first


def test_numbers_of_any_kind(tmp_path, server, monkeypatch):
    sent = []
    monkeypatch.setattr(server, "log", lambda numbers, step: sent.append(numbers))
    facts = {"learning/loss": np.float32(0.5), "learning/grad_norm": None, "updates": 1}
    run = sink(tmp_path)
    run.write(Event("step", 1.8e9, step=0, facts=facts))
    run.write(step(1, loss=math.nan))
    run.close()
    assert sent[0] == {"learning/loss": 0.5, "step": 0, "_timestamp": 1.8e9}
    assert type(sent[0]["learning/loss"]) is float
    assert math.isnan(sent[1]["learning/loss"])


def test_a_failure_is_one_line_and_the_run_goes_on(tmp_path, server, capsys):
    server.failure = ConnectionError("no route to the server.\nmany more lines")
    run = sink(tmp_path)
    for number in range(3):
        run.write(step(number))
        run.flush()
    run.close()
    run.close()
    run.write(step(3))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: Weights & Biases gets nothing more: no route to the server. ")
    assert server.steps == []


def test_the_end_of_a_run_waits_for_so_long_only(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setattr(background, "SECONDS_TO_CLOSE", 0.05)
    server.finishing.clear()
    run = sink(tmp_path)
    run.write(Event("stop", 1.8e9, facts={"reason": "completed"}))
    run.close()
    assert "still busy" in capsys.readouterr().err
    server.finishing.set()
    for thread in threading.enumerate():
        if thread.name == "Weights & Biases":
            thread.join()
    assert server.exit_code == 0


def test_without_the_package_the_user_is_told(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match=r"enable_wandb=true needs .* pip install '\.\[wandb\]'"):
        sink(tmp_path)
    # A folder of that name, such as W&B leaves behind, is not the package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="not installed"):
        sink(tmp_path)


def test_disabled_does_nothing(tmp_path, server):
    monitoring = Monitoring(enable_wandb=True, wandb_mode="disabled", enable_tensorboard=False)
    stream = open_stream(tmp_path, monitoring, "tiny", {}, first_step=0, terminal=Kept())
    stream.emit("stop", reason="completed")
    stream.close()
    assert not server.arguments
    assert not list(tmp_path.glob("wandb*"))
