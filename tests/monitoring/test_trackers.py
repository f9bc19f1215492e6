"""Reporting to Trackio and MLflow: local by default, no step missing, and one run over restarts.

Stand-ins take the place of the packages; they accept what trackio 0.43 and mlflow 3.17 accept.
"""

import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

import pytest

from MaxText.config.training_sections import MonitoringConfig
from MaxText.errors import UserError
from MaxText.monitoring.event_stream import open_stream
from MaxText.monitoring.sinks.tracker import check_packages
from MaxText.monitoring.step_line import Terminal, step_row


class Trackio:
    """Stands for the module trackio and its database of one project."""

    def __init__(self):
        self.rows, self.arguments, self.finished = [], [], 0
        self.utils = types.SimpleNamespace(TRACKIO_DIR=None)
        self.Markdown = str

    def init(self, *, resume, **arguments):
        self.arguments.append(arguments | {"resume": resume})
        if resume == "never":
            self.rows.clear()
        return self

    def log(self, metrics, step):
        assert not {"project", "run", "timestamp", "step", "time", "metrics"} & metrics.keys()
        self.rows.append((step, metrics))

    def finish(self):
        self.finished += 1


class Mlflow:
    """Stands for the module mlflow and its store."""

    def __init__(self):
        self.uris, self.experiments, self.runs = [], {}, {}
        self.entities = types.ModuleType("mlflow.entities")
        self.entities.__dict__.update(
            Metric=lambda key, value, timestamp, step: (step, key, value, timestamp),
            Param=lambda key, value: (key, value),
            RunTag=lambda key, value: (key, value),
        )

    def MlflowClient(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name, artifact_location):
        self.experiments[name] = types.SimpleNamespace(experiment_id=name, at=artifact_location)
        return name

    def create_run(self, experiment_id, run_name):
        run_id = str(len(self.runs))
        self.runs[run_id] = {"params": {}, "tags": {}, "metrics": [], "texts": {}, "status": ""}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        assert len(params) <= 100
        assert len(metrics) <= 1000
        run = self.runs[run_id]
        for name, value in params:
            assert run["params"].setdefault(name, value) == value  # MLflow refuses another value
        run["tags"] |= dict(tags)
        run["metrics"] += metrics

    def log_text(self, run_id, text, artifact_file):
        self.runs[run_id]["texts"][artifact_file] = text

    def set_terminated(self, run_id, status):
        self.runs[run_id]["status"] = status


def installed(monkeypatch, name, stand_in):
    """Makes a stand-in the module of a name."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="a test")
    names = [attribute for attribute in dir(stand_in) if not attribute.startswith("__")]
    module.__dict__.update({attribute: getattr(stand_in, attribute) for attribute in names})
    monkeypatch.setitem(sys.modules, name, module)
    return stand_in


@pytest.fixture
def trackio(monkeypatch, tmp_path):
    for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.setenv(name, "elsewhere")
    stand_in = Trackio()
    stand_in.utils.TRACKIO_DIR = tmp_path / "trackio"
    return installed(monkeypatch, "trackio", stand_in)


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    stand_in = installed(monkeypatch, "mlflow", Mlflow())
    monkeypatch.setitem(sys.modules, "mlflow.entities", stand_in.entities)
    return stand_in


def start(folder, steps, *, first=0, reason="completed", **keys):
    """A start of a run in <folder>/tiny that does some steps."""
    run = folder / "tiny"
    run.mkdir(exist_ok=True)
    monitoring = MonitoringConfig(enable_tensorboard=False, **keys)
    # More keys than MLflow takes in one request, and a value that is no text.
    config = {"steps": 9, "mlp_activations": ("silu",)} | {f"key_{i}": i for i in range(150)}
    stream = open_stream(
        run, monitoring, "tiny", config, first_step=first, terminal=Terminal(9, lambda line: None)
    )
    stream.emit("resume" if first else "start", step=first, num_parameters=12, lineage=[])
    for step in steps:
        metrics = {"loss": 1.0 / (step + 1), "total_weights": 8.0}
        row = step_row(metrics, seconds=1.0, tokens=8.0, tflops=0.1)
        stream.emit("step", step=step, updates=1, **row)
    stream.emit("evaluation", step=steps[-1], **{"eval/avg_loss": 2.0})
    stream.emit("sample", step=steps[-1], text="Once")
    stream.emit("stop", reason=reason)
    stream.close()
    return run


def test_trackio_gets_each_step_in_a_folder_next_to_the_runs(tmp_path, trackio, capfd):
    start(tmp_path, range(3), reason="preempted", enable_trackio=True)
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
    assert not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys()
    first = trackio.arguments[0]
    assert (first["project"], first["name"], first["space_id"]) == ("maxtext", "tiny", None)
    assert (first["resume"], first["config"]["steps"]) == ("never", 9)
    losses = [(step, row["learning/loss"]) for step, row in trackio.rows if "learning/loss" in row]
    assert losses == [(0, 1.0), (1, 1 / 2), (2, 1 / 3)]
    assert (2, {"eval/avg_loss": 2.0}) in trackio.rows
    assert trackio.rows[-1][0] == 2
    assert "Once" in trackio.rows[-1][1]["sample"]
    start(tmp_path, range(3, 5), first=3, enable_trackio=True)
    assert trackio.arguments[1]["resume"] == "allow"
    assert {step for step, row in trackio.rows if "learning/loss" in row} == set(range(5))
    start(tmp_path, range(2), enable_trackio=True)  # from scratch: another run
    assert trackio.arguments[2]["resume"] == "never"
    assert trackio.finished == 3
    assert "disabled" not in capfd.readouterr().err


def test_trackio_in_another_folder_of_the_process_is_said(tmp_path, trackio, capfd):
    trackio.utils.TRACKIO_DIR = Path("/elsewhere")
    start(tmp_path, range(2), enable_trackio=True)
    printed = capfd.readouterr().err
    assert "warning: Trackio disabled after an error: this process already writes to" in printed
    assert not trackio.rows


def test_a_row_that_never_arrived_is_sent_by_the_next_start(tmp_path, trackio, mlflow):
    keys = {"enable_trackio": True, "enable_mlflow": True}
    start(tmp_path, range(4), reason="preempted", **keys)
    for name in ("trackio.json", "mlflow.json"):
        state = tmp_path / "tiny" / name  # as a killed start leaves it
        state.write_text(json.dumps(json.loads(state.read_text()) | {"time": 0.0}))
    trackio.rows.clear()
    mlflow.runs["0"]["metrics"].clear()
    start(tmp_path, range(4, 6), first=4, **keys)
    sent = {step for step, row in trackio.rows if "learning/loss" in row}
    assert sent == set(range(6))
    assert {step for step, *_ in mlflow.runs["0"]["metrics"]} == set(range(6))


def test_mlflow_gets_the_run_in_a_database_next_to_the_runs(tmp_path, mlflow, capfd):
    start(tmp_path, range(3), reason="preempted", enable_mlflow=True)
    assert mlflow.uris == [f"sqlite:///{tmp_path / 'mlflow.db'}"]
    assert mlflow.experiments["maxtext"].at == str(tmp_path / "mlflow_artifacts")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    run = mlflow.runs["0"]
    assert run["status"] == "KILLED"
    assert (run["params"]["steps"], len(run["params"])) == ("9", 152)
    assert run["params"]["mlp_activations"] == "[silu]"
    assert run["tags"]["num_parameters"] == "12"
    assert run["texts"] == {"samples/2.txt": "Once"}
    losses = [(step, value) for step, name, value, _ in run["metrics"] if name == "learning/loss"]
    assert losses == [(0, 1.0), (1, 1 / 2), (2, 1 / 3)]
    start(tmp_path, range(3, 5), first=3, enable_mlflow=True)
    assert list(mlflow.runs) == ["0"]
    assert run["status"] == "FINISHED"
    start(tmp_path, range(2), reason="diverged", enable_mlflow=True)
    assert mlflow.runs["1"]["status"] == "FAILED"
    assert "disabled" not in capfd.readouterr().err


def test_keys_name_the_destination(tmp_path, trackio, mlflow):
    trackio.utils.TRACKIO_DIR = tmp_path / "database"
    keys = {
        "trackio": {"project": "p", "folder": str(tmp_path / "database"), "space_id": "me/space"},
        "mlflow": {"experiment": "e", "tracking_uri": "http://server"},
    }
    start(tmp_path, range(1), enable_trackio=True, enable_mlflow=True, **keys)
    arguments = trackio.arguments[0]
    assert (arguments["project"], arguments["space_id"]) == ("p", "me/space")
    assert mlflow.uris == ["http://server"]
    assert mlflow.experiments["e"].at is None  # the server's own place


@pytest.mark.parametrize("name", ["trackio", "mlflow", "wandb"])
def test_without_the_package_the_user_is_told_how_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.delitem(sys.modules, name, raising=False)
    # A folder of that name, such as W&B leaves behind, is not the package.
    (tmp_path / name).mkdir()
    for path in ([], [str(tmp_path)]):
        monkeypatch.setattr(sys, "path", path)
        check_packages(MonitoringConfig())
        with pytest.raises(UserError, match=rf"enable_{name}=true .*pip install '\.\[{name}\]'"):
            check_packages(MonitoringConfig(**{f"enable_{name}": True}))
