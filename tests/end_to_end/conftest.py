"""Runs that the tests here share: one text, one configuration, compiled programs, a whole run."""

import json
import os
import random

import pytest

from benchmarks import fault_injection
from tests import programs


class Runs(fault_injection.FaultInjection):
    """Starts train.py as benchmarks/fault_injection.py configures it in one folder, `place`."""

    def __init__(self, place, compiled):
        users = {name: value for name, value in os.environ.items() if not name.startswith("M_")}
        environment = users | {"JAX_PLATFORMS": "cpu"}
        super().__init__(place, environment, random.getrandbits(32), popen=programs.popen)
        self.place, self.compiled = place, compiled

    def command(self, run_name, *arguments):
        folders = f"data_cache_dir={self.place}/data_cache", f"jax_cache_dir={self.compiled}"
        return super().command(run_name, *folders, *arguments)

    def complete(self, run_name, *arguments, code=0):
        run = self.start(run_name, *arguments)
        assert run.end() == code, run.output
        assert "Traceback" not in run.output
        return run.output

    def rows(self, run_name, name="metrics.jsonl"):
        return [json.loads(row) for row in (self.folder(run_name) / name).read_text().splitlines()]

    def events(self, run_name, *kinds):
        return [row for row in self.rows(run_name, "events.jsonl") if row["event"] in kinds]

    def has_happened(self, run_name, kind, times=1):
        """Whether an event of a run that goes on is in its file; its output may come later."""
        path = self.folder(run_name) / "events.jsonl"
        return path.exists() and path.read_text().count(f'"event": "{kind}"') >= times

    def arrays(self, run_name, step):
        arrays = fault_injection.arrays_of(self.folder(run_name), step)
        return {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture(scope="session")
def runs(tmp_path_factory, compilation_cache):
    return Runs(tmp_path_factory.mktemp("runs"), compilation_cache)


@pytest.fixture(scope="session")
def whole(runs):
    """Folder and output of a run that nothing disturbs, with all that a run shows and leaves."""
    shown = "sample_tokens=8 loss_curve=true enable_tensorboard=true log_config=true"
    return runs.folder("whole"), runs.complete("whole", *shown.split())
