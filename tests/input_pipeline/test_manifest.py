"""The manifest: which split is missing and what to do, and what may not be read."""

import os
from pathlib import Path

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import check_files, find_split, read_manifest

from .small_data import write_data_set

DOCUMENTS = [np.arange(1, 9), np.arange(1, 5)]


@pytest.mark.parametrize(
    ("splits", "fraction", "split", "helps"),
    [
        (["train"], 0.0, "validation", True),
        (["train"], None, "validation", True),
        # Two documents and a fraction always give one: the source has splits of its own.
        (["train"], 0.01, "validation", False),
        (["train", "test"], 0.0, "validation", False),
        (["train", "validation"], 0.01, "test", False),
    ],
)
def test_preparing_again_is_advised_only_where_it_helps(tmp_path, splits, fraction, split, helps):
    manifest = write_data_set(tmp_path / "d", dict.fromkeys(splits, DOCUMENTS))
    options = {} if fraction is None else {"validation_fraction": fraction}
    manifest = manifest.model_copy(update={"options": options})
    there = ", ".join(sorted(splits))
    with pytest.raises(UserError, match=rf"does not exist .*splits there: {there}\)") as caught:
        find_split(manifest, str(tmp_path / "d"), split, "eval_split")
    assert ("prepare again with validation_fraction" in str(caught.value)) == helps
    named = " or ".join(f"eval_split={name}" for name in sorted(splits))
    assert (f"Set eval_split to one of them ({named}), or" in str(caught.value)) != helps


def test_one_document_is_too_few_for_two_splits(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": DOCUMENTS[:1]})
    manifest = manifest.model_copy(update={"options": {"validation_fraction": 0.5}})
    with pytest.raises(UserError, match="at least two documents"):
        find_split(manifest, str(tmp_path / "d"), "validation", "eval_split")


@pytest.mark.parametrize("function", ["stat", "open"])
def test_a_manifest_that_may_not_be_read_is_named(tmp_path, monkeypatch, function):
    write_data_set(tmp_path, {"train": DOCUMENTS})

    look = os.stat

    def denied(path, *arguments, **keys):
        if function == "stat" and not str(path).endswith("manifest.json"):
            return look(path, *arguments, **keys)
        raise PermissionError(13, "Permission denied", str(path))

    # chmod does not stop root.
    if function == "open":
        monkeypatch.setattr(Path, "read_text", denied)
    else:
        monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read \(Permission denied\)"):
        read_manifest(str(tmp_path))


def test_files_that_may_not_be_looked_at_are_named(tmp_path, monkeypatch):
    manifest = write_data_set(tmp_path, {"train": DOCUMENTS})
    name = manifest.splits["train"].files[0].name
    look = os.stat

    def denied(path, *arguments, **keys):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *arguments, **keys)

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(UserError, match=rf"{name} cannot be read \(Permission denied\)"):
        check_files(manifest, str(tmp_path), "train")
