"""Checks of prepared data before a run: manifest, files, splits and vocabulary."""

import os
from unittest import mock

import pytest

from MaxText.config.loading import load
from MaxText.input_pipeline import data_sources as sources
from tests.input_pipeline.small_data import denying, numbered_documents, write_data_set
from tests.programs import run
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path):
    write_data_set(tmp_path / "d", {"train": numbered_documents([30] * 40)})
    return tmp_path / "d"


def check(path, *arguments):
    sources.check_sources(load([f"dataset_path={path}", *arguments]).config)


def test_valid_data(folder):
    check(folder, "vocab_size=50000")
    check(folder, "vocab_size=10", "dataset_type=synthetic")
    check("gs://bucket/data", "vocab_size=10")  # buckets are not asked


@pytest.mark.parametrize(
    ("damage", "arguments", "message"),
    [
        (lambda d: (d / "manifest.json").write_text("{"), [], r"manifest\.json.*damaged"),
        (lambda d: (d / "manifest.json").write_text('{"schema_version": 99}'), [], "version 99"),
        (lambda d: next(d.rglob("*.bin")).unlink(), [], r"\.bin cannot be read \(No such file"),
        (None, ["vocab_size=10"], "vocab_size=10"),
        (None, ["eval_interval=5"], "validation"),
    ],
)
def test_invalid_data(folder, damage, arguments, message):
    if damage:
        damage(folder)
    refused(message, check, folder, "vocab_size=50000", *arguments)


def test_files_that_cannot_be_read_now(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", denying(os.stat, ".bin"))
        refused(r"\.bin.*Permission denied", check, folder, "vocab_size=50000")
    # What may pass is left to the loader.
    error = OSError(5, "Input/output error")
    monkeypatch.setattr(sources, "open_token_data", mock.Mock(side_effect=error))
    check(folder, "vocab_size=50000")


def test_checked_before_devices_are_looked_for(tmp_path, users_environment):
    arguments = ["dataset_path=nowhere", "run_name=a", "hardware=tpu"]
    result = run("train.py", arguments, tmp_path, users_environment)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: dataset_path=nowhere")
