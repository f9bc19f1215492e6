import glob
import importlib.util

import pytest


@pytest.fixture
def chips(monkeypatch):
    """The device files of TPU chips that this machine seems to have, at first none."""
    found = []
    monkeypatch.setattr(glob, "glob", lambda pattern: list(found))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return found
