"""No environment variable of the machine may reach the configurations under test."""

import os

import pytest

from tests.comparison import small_comparison


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("M_") or name == "JOBSET_NAME":
            monkeypatch.delenv(name)


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Two small configurations, a.yml and b.yml, in the working folder."""
    monkeypatch.chdir(tmp_path)
    small_comparison.write_configs(tmp_path)
    return tmp_path
