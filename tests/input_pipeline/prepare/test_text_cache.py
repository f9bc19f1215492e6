"""Raw text is tokenized when it is first read, and never again."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.prepare.prepare import tokenize_to_cache
from MaxText.input_pipeline.token_store.manifest import read_manifest
from tests.refusals import refused

from .small_corpus import documents


def opened(files, tmp_path, lines=None, **keys):
    preparation = PreparationConfig(**{"tokenizer_path": "bytes"} | keys)
    log = [].append if lines is None else lines.append
    return tokenize_to_cache([str(file) for file in files], preparation, tmp_path / "cache", log)


@pytest.fixture
def files(tmp_path):
    # Names with characters that mean something in lists and patterns.
    paths = [tmp_path / "b,c [1].jsonl", tmp_path / "a.jsonl"]
    for number, path in enumerate(paths):
        rows = [{"text": f"row {row} of {number}", "body": "other"} for row in range(20)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def test_text_becomes_a_dataset_once(files, tmp_path):
    lines = []
    with ThreadPoolExecutor(3) as threads:
        (folder,) = set(threads.map(lambda _: opened(files, tmp_path, lines), range(3)))
    assert sum(line.startswith("Wrote") for line in lines) == 1
    assert [path.name for path in (tmp_path / "cache" / "text").iterdir()] == [folder.name]
    manifest = read_manifest(str(folder))
    assert (manifest.format, list(manifest.splits)) == ("bin", ["train"])
    texts = [bytes(ids[:-1]).decode() for ids in documents(folder, "train")]
    assert texts == [f"row {row} of {number}" for number in range(2) for row in range(20)]
    assert str(tmp_path) not in manifest.source.description
    lines.clear()
    assert opened(files, tmp_path, lines) == folder
    assert lines == []


def test_whatever_decides_about_ids_has_its_own_folder(files, tmp_path):
    folders = {
        opened(files, tmp_path),
        opened(files[::-1], tmp_path),
        opened(files[:1], tmp_path),
        opened(files, tmp_path, add_bos=True),
        opened(files, tmp_path, add_eos=False),
        opened(files, tmp_path, text_field="body"),
    }
    os.utime(files[0], (1, 1))
    folders.add(opened(files, tmp_path))
    assert len(folders) == 7


def test_remote_and_missing_files_and_no_tokenizer(files, tmp_path):
    with fsspec.open("memory://text_cache/a.jsonl", "w") as file:
        file.write('{"text": "far away"}\n')
    keys = {"tokenizer_path": "", "tokenizer_type": "byte"}
    folder = opened(["memory://text_cache/a.jsonl"], tmp_path, **keys)
    assert [bytes(ids[:-1]) for ids in documents(folder, "train")] == [b"far away"]
    refused(r"a\.jsonl .*tokenizer_path", opened, files[1:], tmp_path, tokenizer_path="")
    refused(r"gone\.jsonl", opened, [tmp_path / "gone.jsonl"], tmp_path)
