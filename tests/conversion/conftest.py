"""Fixtures of the tests of conversion."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder where relative paths lead."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
