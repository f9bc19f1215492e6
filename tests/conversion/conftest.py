"""Fixtures of the tests of conversion."""

import pytest


@pytest.fixture(autouse=True)
def _one_run_name(monkeypatch):
    """Configurations are compared whole; names that are made up are never alike."""
    monkeypatch.setenv("JOBSET_NAME", "run")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder where relative paths lead."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
