"""Folders of runs that tests only read."""

import pytest

from tests.reports.run_files import RunFiles, completed, eventful


@pytest.fixture(scope="session")
def completed_run(tmp_path_factory):
    """The folder a, of a run from start to end."""
    return completed(tmp_path_factory.mktemp("completed") / "a")


@pytest.fixture(scope="session")
def eventful_run(tmp_path_factory):
    """The folder b, of a run that was killed, rolled back and diverged."""
    return eventful(tmp_path_factory.mktemp("eventful") / "b")


@pytest.fixture
def run(tmp_path):
    """A run that has started, in 6 s, and compiled, in 9 s."""
    run = RunFiles(tmp_path / "run")
    run.start()
    return run
