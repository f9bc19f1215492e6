"""What prepare_data.py wrote: its versions, names of documents, and damage."""

import json
from pathlib import Path

import numpy as np
import pytest

from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    OFFSETS_NAME,
    ROWS_NAME,
    SOURCE_FILES_NAME,
)
from MaxText.input_pipeline.token_store.store import TokenStore
from tests.input_pipeline.small_data import random_documents, write_data_set
from tests.input_pipeline.token_store.token_files import open_data
from tests.refusals import refused


@pytest.fixture
def prepared(tmp_path):
    """Five documents in a folder: its manifest and its split."""
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(5, 5, 60)})
    return manifest, tmp_path / "d" / "train"


def store_of(manifest, split: Path) -> TokenStore:
    """The split as the manifest, which may differ from the one on disk, says."""
    (split.parent / MANIFEST_NAME).write_text(manifest.to_json())
    return open_data(split.parent, split.parent.parent / "cache").store


@pytest.mark.parametrize("version", [1, 3])
def test_sets_of_another_version_are_refused(prepared, version):
    manifest, split = prepared
    other = manifest.model_copy(update={"schema_version": version})
    refused(rf"schema_version {version}; this program reads 2", store_of, other, split)


@pytest.mark.parametrize("file_format", ["bin", "array_record"])
def test_documents_without_names_have_numbers(tmp_path, file_format):
    documents, split = random_documents(5, 5, 60), tmp_path / "d" / "train"
    manifest = write_data_set(tmp_path / "d", {"train": documents}, file_format=file_format)
    for name in (ROWS_NAME, SOURCE_FILES_NAME):
        (split / name).unlink()
    store = store_of(manifest, split)
    whole = np.concatenate(documents)
    np.testing.assert_array_equal(store.read(np.array([0]), np.array([len(whole)])), whole)
    assert store.document_name(3) == "document 3"
    assert store.file_of_document is None


def test_offsets_of_another_data_set_are_refused(tmp_path, prepared):
    manifest, split = prepared
    write_data_set(tmp_path / "b", {"train": random_documents(6, 11, 60)})
    (tmp_path / "b" / "train" / OFFSETS_NAME).replace(split / OFFSETS_NAME)
    refused("11 documents", store_of, manifest, split)
    (split / OFFSETS_NAME).write_bytes(b"")
    refused(OFFSETS_NAME, store_of, manifest, split)


def test_documents_are_named_by_file_and_row(prepared):
    manifest, split = prepared
    np.save(split / ROWS_NAME, np.array([0, 2, 3, 0, 7], np.int32))
    (split / SOURCE_FILES_NAME).write_text(json.dumps([[0, "a.jsonl"], [3, "b.jsonl"]]))
    store = store_of(manifest, split)
    names = [store.document_name(document) for document in range(5)]
    assert names == [
        "a.jsonl, row 0",
        "a.jsonl, row 2",
        "a.jsonl, row 3",
        "b.jsonl, row 0",
        "b.jsonl, row 7",
    ]
    assert store.file_of_document is not None
    assert store.file_of_document.tolist() == [0, 3, 5]
