"""No environment variable of the machine may reach the configurations under test."""

import os
import sys

import pytest

from MaxText.comparison import comparing, running
from tests.comparison import small_comparison


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("M_") or name == "JOBSET_NAME":
            monkeypatch.delenv(name)


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Small configurations, a.yml, b.yml and c.yml, in the working folder."""
    monkeypatch.chdir(tmp_path)
    small_comparison.write_configs(tmp_path)
    return tmp_path


@pytest.fixture
def trained(configs, monkeypatch):
    """Names of the configurations that were trained, in order; nothing of it uses jax's devices."""
    program = configs / "stand_in.py"
    program.write_text(small_comparison.STAND_IN)
    names: list[str] = []

    def command(config):
        names.append("/".join(config.with_suffix("").parts[-2:]))
        return [sys.executable, str(program), str(config)]

    monkeypatch.setattr(running, "train_command", command)
    monkeypatch.setattr(comparing, "_keep_to_cpu", lambda: None)
    monkeypatch.setattr(comparing.child_processes, "count_devices", lambda hardware: 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    return names
