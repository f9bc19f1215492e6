"""Programs of clouds and schedulers that are none."""

import os

import pytest

from tests.launching.stand_ins import StandIn


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a stand-in for the program of a name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda name: StandIn(folder, name)
