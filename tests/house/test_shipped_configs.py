"""Every YAML file in configs/ is a configuration that loads."""

import os

import pytest

from MaxText.configuration.loading import configure, load
from tests.house.sources import REPOSITORY

CONFIGS = REPOSITORY / "configs"
# Files in these folders are chosen by a key, by name.
CHOSEN_BY = {"models": "model_name", "decoder_blocks": "decoder_block"}


@pytest.fixture(autouse=True)
def _no_keys_from_the_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("M_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yml")), ids=lambda path: path.relative_to(CONFIGS).as_posix()
)
def test_it_loads(path):
    folder = path.relative_to(CONFIGS).parts[0]
    if folder in CHOSEN_BY:
        configure(**{CHOSEN_BY[folder]: path.stem})
    else:
        # Sweeps and stages are checked by tests/comparison.
        load([str(path)], for_compare=True)
