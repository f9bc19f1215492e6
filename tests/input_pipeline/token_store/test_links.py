"""Data sets of links, and under names with characters of patterns, lists and weights."""

import numpy as np
import pytest

from tests.input_pipeline.small_data import data_keys, open_train, write_data_set
from tests.input_pipeline.token_store import token_files

DOCUMENTS = token_files.documents(0, (40, 7, 19, 33), 200)
WRITERS = {
    "a.parquet": token_files.write_parquet,
    "a.arrow": token_files.write_arrow,
    "a.tfrecord": token_files.write_tfrecord,
    "a.array_record": token_files.write_array_record,
    "a.tar": token_files.write_tar,
}


def all_tokens(location, cache) -> list[int]:
    store = token_files.open_data(location, cache).store
    return store.read(np.array([0]), np.array([len(store)])).tolist()


@pytest.mark.parametrize("name", WRITERS)
def test_records_are_read_through_links_and_once(tmp_path, name):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).touch()
    WRITERS[name](tmp_path / "blobs" / name, DOCUMENTS)
    expected = np.concatenate(DOCUMENTS).tolist()
    for number, targets in enumerate((["blobs"], ["blobs", "blobs"])):
        folder = tmp_path / f"snapshot{number}"
        (folder / "deep").mkdir(parents=True)
        for place, target in zip((folder / "deep", folder), targets, strict=False):
            (place / f"{number}-{name}").symlink_to(tmp_path / target / name)
        assert all_tokens(folder, tmp_path / "cache") == expected
        assert all_tokens(f"{folder}/**/*-a.*", tmp_path / "cache") == expected


def test_a_prepared_data_set_of_links(tmp_path):
    write_data_set(tmp_path / "d", {"train": [*DOCUMENTS]}, vocab_size=200)
    (tmp_path / "links" / "train").mkdir(parents=True)
    for path in (tmp_path / "d").rglob("*"):
        if path.is_file():
            (tmp_path / "links" / path.relative_to(tmp_path / "d")).symlink_to(path)
    expected = all_tokens(tmp_path / "d", tmp_path / "c")
    assert all_tokens(tmp_path / "links", tmp_path / "c") == expected


@pytest.mark.parametrize("name", ["a,1", "a;b", "[1]", "{x,y}", "back\\slash", "ü 漢", " led"])
def test_data_sets_under_any_name(tmp_path, name):
    write_data_set(tmp_path / name, {"train": [*DOCUMENTS]}, vocab_size=200)
    write_data_set(tmp_path / "other", {"train": [*DOCUMENTS]}, vocab_size=200)
    token_files.write_megatron(tmp_path / f"{name}-m", DOCUMENTS)
    locations = [name, f"{name},0.5;{tmp_path}/other,0.5", f"{name}-m.idx", f"{name}-m.bin"]
    if ";" not in name:  # the common beginning of two names is no name itself
        locations.append(f"{name}-m")
    for location in locations:
        keys = data_keys(f"{tmp_path}/{location}", data_cache_dir=str(tmp_path / "c"))
        batches = open_train(keys, 1)
        assert len(batches.opened) == 1 + location.endswith("other,0.5")


def test_megatron_parts_of_a_name_with_brackets(tmp_path):
    token_files.write_megatron(tmp_path / "m[1]{2}", DOCUMENTS)
    whole = tmp_path / "m[1]{2}.bin"
    content = whole.read_bytes()
    whole.unlink()
    for number, part in enumerate((content[:32], content[32:])):
        (tmp_path / f"m[1]{{2}}-0000{number}-of-00002.bin").write_bytes(part)
    assert (
        all_tokens(tmp_path / "m[1]{2}.idx", tmp_path / "c") == np.concatenate(DOCUMENTS).tolist()
    )
