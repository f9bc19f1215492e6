"""Part files become the files of a split, whatever the parts are."""

import hashlib
import itertools
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from array_record.python import array_record_module
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.input_pipeline.preparation.array_record_writer import ArrayRecordWriter
from MaxText.input_pipeline.preparation.part_files import PartWriter
from MaxText.input_pipeline.preparation.token_writer import (
    SplitPlan,
    narrowest_dtype,
    write_split,
)


def write(folder, parts, vocab_size, **plan):
    """Writes (ids, file, row) documents of several parts, between ids 1 and 2, as one split."""
    parts_folder, split_folder = folder / "parts", folder / "split"
    for path in (parts_folder, split_folder):
        path.mkdir(parents=True)
    written = []
    dtype = np.dtype(narrowest_dtype(vocab_size))
    for number, members in enumerate(parts):
        writer = PartWriter(parts_folder, f"{number}", dtype, (1,), (2,))
        for ids, file, row in members:
            writer.add(np.array(ids, np.uint32), 2 * len(ids), file, row)
        written.append(writer.finish())
    filled = tuple(part for part in written if part.num_documents)
    return split_folder, write_split(
        SplitPlan(parts_folder, filled, split_folder, vocab_size, dtype, **plan)
    )


def stored_bytes(path):
    if path.suffix == ".bin":
        return [path.read_bytes()]
    reader = array_record_module.ArrayRecordReader(str(path), options="readahead_buffer_size:0")
    records = reader.read(0, reader.num_records())
    reader.close()
    return records


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    file_format=st.sampled_from(["array_record", "bin"]), chunk_length=st.integers(1, 7),
    vocab_size=st.sampled_from([65536, 65537]), first_row=st.sampled_from([0, 2**31]),
)  # fmt: skip
def test_files_of_a_split(lengths, cuts, file_format, chunk_length, vocab_size, first_row):
    rng = np.random.default_rng(len(lengths))
    members = [
        (rng.integers(3, vocab_size, length).tolist(), f"file {row // 3}", first_row + row % 3)
        for row, length in enumerate(lengths)
    ]
    bounds = [0, *sorted(min(cut, len(members)) for cut in cuts), len(members)]
    parts = [members[start:stop] for start, stop in itertools.pairwise(bounds)]
    plan = {"file_format": file_format, "chunk_length": chunk_length, "records_per_file": 3}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # most of the time
        folder, entry = write(Path(name, "whole"), [members], vocab_size, **plan)
        other, other_entry = write(Path(name, "parts"), parts, vocab_size, **plan)
        assert entry == other_entry
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert files == {path.name: path.read_bytes() for path in other.iterdir()}

        expected = [id_ for ids, _, _ in members for id_ in (1, *ids, 2)]
        dtype = "<u2" if vocab_size == 65536 else "<u4"
        stored = b""
        for index, file in enumerate(entry.files):
            name = f"tokens-{index:05d}-of-{len(entry.files):05d}.{file_format}"
            assert (file.name, file.num_bytes) == (name, len(files[name]))
            records = stored_bytes(folder / name)
            if file_format == "array_record":
                assert file.num_records == len(records)
            stored += b"".join(records)
            is_last = index == len(entry.files) - 1
            assert file.num_tokens == min(3 * chunk_length, len(expected)) or is_last
        assert stored == np.array(expected, dtype).tobytes()
        assert entry.tokens_sha256 == hashlib.sha256(stored).hexdigest()
        ends = np.cumsum([0, *(length + 2 for length in lengths)])
        assert entry.offsets_sha256 == hashlib.sha256(ends.astype("<i8").tobytes()).hexdigest()
        rows = np.array([row for _, _, row in members], np.int64 if first_row else np.int32)
        for array, file in ((ends, "document_offsets.npy"), (rows, "document_rows.npy")):
            np.save(folder / "expected.npy", array)
            assert files[file] == (folder / "expected.npy").read_bytes()
        sources = [[at, f"file {at // 3}"] for at in range(0, len(members), 3)]
        assert json.loads(files["source_files.json"]) == sources
        assert (entry.num_tokens, entry.num_documents) == (len(expected), len(members))
        assert (entry.num_text_bytes, entry.largest_id) == (2 * sum(lengths), max(expected))
        shares = np.unique(expected, return_counts=True)[1] / len(expected)
        assert entry.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)


def test_array_record_on_a_full_disk(tmp_path):
    # A file cannot grow beyond the limit, as if the disk were full there.
    resource = pytest.importorskip("resource", reason="limits of processes are of Unix")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_file():
        writer = ArrayRecordWriter(tmp_path / "a.array_record")
        try:
            for number in range(10):
                writer.write(np.random.default_rng(number).bytes(100_000))
        finally:
            writer.close()

    write_file()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"write\(\)"):
            write_file()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
