"""Presets fit on their slices, by the compiler; benchmarks/presets.py compiles all of them."""

import importlib.util
import re

import pytest

from benchmarks.presets import SLICES, arguments
from MaxText.config import config_files
from tests import programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]


@pytest.mark.parametrize("name", ["gemma3-270m", "qwen3-0.6b", "olmo2-1b", "granite3.3-2b"])
def test_a_preset_compiles_for_its_slice(name, tmp_path, users_environment):
    done = programs.run(
        "train_compile.py", arguments(name), tmp_path, users_environment | {"XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stderr
    gigabytes = 32 if SLICES[name].startswith("v6e") else 95
    peak_mib = re.search(r"\npeak +([\d.,]+)", done.stdout)
    assert peak_mib is not None
    assert float(peak_mib[1].replace(",", "")) < gigabytes * 1024


def test_each_slice_is_of_a_preset():
    assert SLICES.keys() <= set(config_files.preset_names(config_files.MODELS))
