"""Every kind of data set read from a bucket, also one that fails for a while, and written there."""

import re

import fsspec
import numpy as np
import pytest

from MaxText.config.data_sections import PreparationConfig
from MaxText.input_pipeline.document_sources.records import read_ids
from MaxText.input_pipeline.local_cache import Arrays
from MaxText.input_pipeline.prepare.prepare import prepare
from MaxText.input_pipeline.token_store import import_records
from MaxText.input_pipeline.token_store.manifest import read_manifest
from MaxText.storage.file_access import files_in
from tests.input_pipeline.faults import IN_PLACE, opened, undisturbed, write
from tests.input_pipeline.small_data import assert_same, contents, quiet, take
from tests.refusals import refused
from tests.storage.emulator import Fault

pytestmark = pytest.mark.usefixtures("clients", "no_waits")

KINDS = ("prepared_array_record", "prepared_bin", "megatron", "parquet", "tfrecord", "tar")


@pytest.fixture(params=KINDS)
def kept(request, tmp_path, bucket, emulator):
    """(kind, local folder, its copy in a bucket, keys)."""
    write(request.param, tmp_path / "set")
    upload(emulator, tmp_path / "set", f"{bucket}/set")
    keys = {"data_retry.delay": 0.0, "data_cache_dir": str(tmp_path / "cache")}
    return request.param, tmp_path / "set", f"{bucket}/set", keys


def upload(emulator, folder, url):
    for name, content in contents(folder).items():
        emulator.write(f"{url}/{name}", content)


def test_the_same_batches_as_from_a_disk(kept, tmp_path, bucket, emulator, monkeypatch):
    kind, folder, url, keys = kept
    expected = undisturbed(folder, keys)
    keys["data_cache_dir"] = f"{bucket}/cache/"
    # Hosts without a common disk.
    for host, step in (("a", 0), ("a", 7), ("b", 0), ("b", 7)):
        monkeypatch.setenv("HOME", str(tmp_path / host))
        before, lines = set(emulator.requests.items()), []
        iterator = opened(url, keys, lines.append)
        asked = dict(emulator.requests.items() - before)
        iterator.seek(step)
        assert_same(take(iterator, 20 - step), expected[step:])
        imports = (host, step) == ("a", 0) and kind not in IN_PLACE
        assert any(f"and {bucket}/cache/imported/" in line for line in lines) == imports
        if kind not in IN_PLACE and host == "b":
            read = rf"GET /download.*\.{kind.removeprefix('prepared_')}"
            assert sum(bool(re.fullmatch(read, name)) for name in asked) <= 1  # ids or text?
            assert sum(name.startswith("LIST") for name in asked) <= 4
    assert not [*(tmp_path / "b").rglob("*.bin")]


def test_a_bucket_that_fails_for_a_while(kept, emulator):
    kind, folder, url, keys = kept
    expected = undisturbed(folder, keys)
    # gcsfs tries 6 times; so the first tries of the run itself fail, too.
    lines = []
    with emulator.failing(Fault(503, times=20)):
        iterator = opened(url, keys, lines.append)
    assert any("could not be opened" in line for line in lines)
    if kind not in IN_PLACE:
        return
    lines.clear()
    first = [next(iterator)]
    faults = Fault(503, "GET /download", times=15), Fault(0, "GET /download", times=10)
    with emulator.failing(*faults):
        assert_same(first + take(iterator, 19), expected)


@pytest.mark.parametrize("kept", ["megatron"], indirect=True)
def test_a_bucket_that_fails_for_ever(kept, bucket, emulator):
    _, _, url, keys = kept
    keys["data_retry.attempts"] = 2
    iterator = opened(url, keys)
    with emulator.failing(Fault(503)):
        refused(r"after 3 tries .*set", take, iterator, 20)
        refused("after 3 tries", opened, url, keys)
    refused("no such file", opened, f"{bucket}/nothing", keys)
    refused("no such file", opened, "gs://no-such-bucket/set", keys)


@pytest.mark.parametrize("kept", ["array_record"], indirect=True)
def test_a_copy_is_that_of_the_file_that_is_there(kept, emulator):
    _, folder, url, keys = kept
    take(opened(url, keys), 1)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    upload(emulator, folder, url)
    refused("ids0.* at ", opened, url, keys | {"data_retry.attempts": 0})


@pytest.mark.parametrize("kept", ["tfrecord"], indirect=True)
def test_one_host_imports_and_the_others_read_it(kept, tmp_path, bucket, emulator):
    read = []

    def counted(path):
        read.append(path)
        return read_ids(path, "tfrecord")

    first, second = (
        import_records.RecordImport(files_in(kept[2]), counted, "", tmp_path / name, f"{bucket}/c")
        for name in "ab"
    )
    with emulator.failing(Fault(403, "GET /download.*set")):
        refused(f"^{bucket}/set/ids0.* cannot be read", first.run, quiet)
    with emulator.failing(Fault(403, "POST /upload")):
        refused(f"data_cache_dir={bucket}/c cannot be written", first.run, quiet)
    first.run(quiet)
    assert {path for path in read if "://" in path} == {file.path for file in first.files}
    read.clear()
    imported = second.run(quiet)
    assert read == []
    store = imported.store(Arrays(imported.folder))
    system = fsspec.filesystem("gs")
    content = system.cat(store.files[1])
    system.pipe(store.files[1], bytes([content[0] ^ 64]) + content[1:])
    refused(r"tokens-00001\.bin is damaged", store.read, np.array([0]), np.array([len(store)]))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"some words of {name}. " * 200)
    return PreparationConfig(prepare_source=str(tmp_path / "text"), tokenizer_type="byte")


@pytest.mark.parametrize(
    "form", ["bin", pytest.param("parquet", marks=pytest.mark.slow), "text_tfrecord"]
)
def test_prepared_there_as_here(text, tmp_path, bucket, emulator, form, monkeypatch):
    asked = text.model_copy(update={"prepare_output_format": form})
    prepare(asked, str(tmp_path / "here"), quiet)
    lines, cache = [], tmp_path / "cache"
    with emulator.failing(Fault(503, "POST /upload", times=4)):
        prepare(asked, f"{bucket}/there", lines.append, cache_dir=cache)
    system, path = fsspec.core.url_to_fs(f"{bucket}/there")
    system.get(path, str(tmp_path / "fetched"), recursive=True)
    assert contents(tmp_path / "fetched") == contents(tmp_path / "here")
    assert not [*(tmp_path / "cache" / "prepared").glob("*/*")]
    # The same again is kept, something else refused.
    prepare(asked, f"{bucket}/there", lines.append, cache_dir=cache)
    assert lines[-1].startswith(f"Kept {bucket}/there")
    other = asked.model_copy(update={"prepare_seed": 1})
    message = f"dataset_path={bucket}/there .*prepare_seed"
    refused(message, prepare, other, f"{bucket}/there", quiet, cache_dir=cache)
    emulator.write(f"{bucket}/with_others/holiday.jpg", b"x")
    refused(r"holiday\.jpg", prepare, asked, f"{bucket}/with_others", quiet, cache_dir=cache)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    refused("^/proc/nowhere/maxtext_data_cache cannot be ", prepare, asked, f"{bucket}/a", quiet)


def test_an_upload_that_fails_goes_on(text, tmp_path, bucket, emulator):
    cache = tmp_path / "cache"
    with emulator.failing(Fault(503, "POST /upload.*", skip=3)):
        refused("/there", prepare, text, f"{bucket}/there", quiet, cache_dir=cache)
    assert (names := emulator.names(bucket))
    assert "there/manifest.json" not in names
    lines = []
    prepare(text, f"{bucket}/there", lines.append, cache_dir=cache)
    assert any(line.startswith("Kept") for line in lines)
    (tmp_path / "manifest.json").write_text(emulator.read(f"{bucket}/there/manifest.json"))
    assert read_manifest(str(tmp_path)).splits["train"].num_tokens > 0
