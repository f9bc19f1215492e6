"""Files of tokens, damaged at random: an error, or a record that is passed over; where a format has
checksums never other tokens than were written."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store import store
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.hostile.files import damaged
from tests.input_pipeline import small_data
from tests.input_pipeline.prepare.small_corpus import byte_options, made, write_texts
from tests.input_pipeline.token_store import token_files
from tests.refusals import refused

VOCAB_SIZE = 3000
DOCUMENTS = token_files.documents(0, (40, 7, 19, 1, 64, 33, 12, 25, 50, 3), VOCAB_SIZE)
DAMAGES = 40


def _megatron(path: Path, documents: list[np.ndarray]) -> None:
    token_files.write_megatron(path.with_suffix(""), documents)


def _prepared(path: Path, documents: list[np.ndarray]) -> None:
    folder = path.parent if path.name == "manifest.json" else path.parent.parent
    file_format = "array_record" if path.suffix == ".array_record" else "bin"
    keys = {"vocab_size": VOCAB_SIZE, "file_format": file_format}
    small_data.write_data_set(folder, {"train": [*documents]}, **keys)


# Name of what is damaged, and how all of it is written. Parquet is written with checksums of its
# pages; what torch.save writes has those of zip. An index and a manifest have none, and must fit
# the data exactly.
_CHECKED = {
    "a.tfrecord": token_files.write_tfrecord,
    "a.tfrecord.gz": token_files.write_compressed_tfrecord,
    "a.array_record": token_files.write_array_record,
    "a.idx": _megatron,
    "train/tokens-00000.array_record": _prepared,
    "train/tokens-00000.bin": _prepared,
    "manifest.json": _prepared,
    "train/document_offsets.npy": _prepared,
    "a.parquet": token_files.write_parquet,
    "torch.tar": token_files.write_torch_tar,
}
# Ids that were changed into other ids cannot be told from those that were written.
_UNCHECKED = {
    "a.bin": _megatron,
    "stream.arrow": token_files.write_arrow,
    "file.arrow": lambda path, documents: token_files.write_arrow(path, documents, False),
    "a.tar": token_files.write_tar,
}


def _read(folder: Path, cache: Path, skip: bool) -> tuple[list[np.ndarray | None], str]:
    """Documents, None for each that cannot be read, and what an error or a note says."""
    bad = "skip" if skip else "fail"
    found: list[np.ndarray | None] = []
    try:
        tokens = token_files.open_data(folder, cache, **{"bad_records.action": bad})
        offsets = tokens.store.document_offsets
    except UserError as error:
        return [], str(error)
    for start, stop in itertools.pairwise(offsets):
        try:
            found.append(tokens.store.read(np.array([start]), np.array([stop])))
        except UserError:
            found.append(None)
    return found, "; ".join(tokens.skipped)


def _damaged(tmp_path: Path, name: str, write: Callable[[Path, list[np.ndarray]], None]):
    """Folders with one damaged file each."""
    whole = tmp_path / "whole"
    if write is not _prepared:
        whole.mkdir()
    write(whole / name, DOCUMENTS)
    before = (whole / name).read_bytes()
    for number, (after, _) in enumerate(damaged(name, before, DAMAGES)):
        if after != before:
            folder = tmp_path / str(number)
            shutil.copytree(whole, folder)
            (folder / name).write_bytes(after)
            yield folder


@pytest.mark.parametrize("name", [*_CHECKED, *_UNCHECKED])
def test_damage_is_an_error_or_skips_documents(tmp_path, name):
    checked = name in _CHECKED
    written, noticed = {ids.tobytes() for ids in DOCUMENTS}, 0
    for number, folder in enumerate(_damaged(tmp_path, name, {**_CHECKED, **_UNCHECKED}[name])):
        skip = not checked or number % 2 == 0
        documents, error = _read(folder, tmp_path / "cache", skip)
        whole = [ids for ids in documents if ids is not None]
        for ids in whole:
            assert ids.tobytes() in written or not checked, folder
            assert ids.dtype == np.int32
            assert ids.min(initial=0) >= 0
        # Damage of what no program reads, such as padding, changes nothing.
        noticed += bool(error) or (checked and len(whole) < len(DOCUMENTS))
        if not skip and not error:
            assert len(documents) == len(DOCUMENTS), f"{folder}: no error for lost documents"
    # A file that is shorter or longer than it was is always noticed.
    assert noticed >= DAMAGES // (3 if checked else 4)


def _use_all(folder: Path, cache: Path) -> None:
    """Opens a prepared data set, and reads all that a run, an inspection and a prompt read."""
    store._read_source_files.cache_clear()
    tokens = token_files.open_data(folder, cache)
    offsets = tokens.store.document_offsets
    for document, (start, stop) in enumerate(itertools.pairwise(offsets)):
        tokens.store.read(np.array([start]), np.array([stop]))
        tokens.store.document_name(document)
    _ = tokens.store.file_of_document
    load_tokenizer(folder)


_FILES = (
    "manifest.json",
    "tokenizer_config.json",
    "train/document_offsets.npy",
    "train/document_rows.npy",
    "train/source_files.json",
    "train/tokens-000000.bin",
    "train/tokens_running_crc32c.npy",
)


@pytest.mark.parametrize("name", _FILES)
def test_each_file_of_a_prepared_data_set(tmp_path, name):
    write_texts(tmp_path / "text", 12)
    keys = byte_options(tmp_path / "text", validation_fraction=0.0)
    made(keys, tmp_path / "whole")
    content = (tmp_path / "whole" / name).read_bytes()
    draw = random.Random(name)
    damages = [b"", content[: len(content) // 2], content[:-1], bytes(len(content)), None]
    for number in range(25):
        flipped = bytearray(content)
        # Half of them in the header.
        flipped[draw.randrange(min(len(content), 128) if number % 2 else len(content))] ^= (
            1 << draw.randrange(8)
        )
        damages.append(bytes(flipped))
    num_noticed = 0
    for number, damage in enumerate(damages):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        (folder / name).unlink()
        if damage is not None:
            (folder / name).write_bytes(damage)
        try:
            _use_all(folder, tmp_path / "cache")
        except UserError as error:
            num_noticed += 1
            assert str(folder) in str(error) or name == "manifest.json"  # noqa: PT017
    is_verified = name.endswith((".bin", "offsets.npy", "crc32c.npy"))
    # A data set may be without its checksums. Their header has spare bytes.
    assert num_noticed >= (len(damages) - 5 if is_verified else 4)


def test_a_flipped_bit_of_the_document_offsets_is_refused(tmp_path):
    write_texts(tmp_path / "text", 12)
    made(byte_options(tmp_path / "text", validation_fraction=0.0), tmp_path / "d")
    path = tmp_path / "d" / "train" / "document_offsets.npy"
    content = path.read_bytes()
    data = len(content) - 8 * 13
    for place in range(data, len(content), 5):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        refused(r"document_offsets\.npy", token_files.open_data, tmp_path / "d", tmp_path / "c")
    path.write_bytes(content)
    token_files.open_data(tmp_path / "d", tmp_path / "c")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"tokenizer": {"vocab_size": -1}}, "vocab_size"),
        ({"tokenizer": {"eos_id": 2**40}}, "eos_id"),
        ({"splits": {"train": {"num_tokens": -5}}}, "num_tokens"),
        ({"splits": {"train": {"num_documents": 10**30}}}, "num_documents"),
    ],
)
def test_impossible_numbers_in_a_manifest(tmp_path, entries, message):
    write_texts(tmp_path / "text", 12)
    made(byte_options(tmp_path / "text"), tmp_path / "d")
    path = tmp_path / "d" / "manifest.json"
    contents = json.loads(path.read_text())
    _update(contents, entries)
    path.write_text(json.dumps(contents))
    refused(message, token_files.open_data, tmp_path / "d", tmp_path / "c")


def _update(contents: dict, entries: dict) -> None:
    for name, value in entries.items():
        if isinstance(value, dict):
            _update(contents[name], value)
        else:
            contents[name] = value
