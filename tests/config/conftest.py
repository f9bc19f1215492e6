"""No environment variable of the machine may reach the configurations under test."""

import os

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("M_") or name in ("JOBSET_NAME", "HARDWARE"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file of the given text and returns its path as text."""

    def write_file(text: str, name: str = "config.yml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file
