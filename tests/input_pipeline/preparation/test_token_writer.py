"""Part files become the files of a split, whatever the parts are."""

import hashlib
import itertools
import json

import numpy as np
import pytest
from array_record.python import array_record_module
from hypothesis import given, settings
from hypothesis import strategies as st

from MaxText.input_pipeline.manifest import unigram_entropy
from MaxText.input_pipeline.preparation.array_record_writer import ArrayRecordWriter
from MaxText.input_pipeline.preparation.part_files import PartWriter
from MaxText.input_pipeline.preparation.token_writer import SplitPlan, write_split


def write(folder, parts, vocab_size=1000, before=(), after=(), **plan):
    """Writes (ids, file, row) documents of several parts as one split."""
    parts_folder, split_folder = folder / "parts", folder / "split"
    parts_folder.mkdir(parents=True)
    split_folder.mkdir()
    written = []
    dtype = SplitPlan(parts_folder, (), split_folder, vocab_size).dtype
    for number, members in enumerate(parts):
        writer = PartWriter(parts_folder, f"{number}", dtype, before, after)
        try:
            for ids, file, row in members:
                writer.add(np.array(ids, np.uint32), 2 * len(ids), file, row)
            written.append(writer.finish())
        except AssertionError:
            writer.give_up()
            assert not any(path.name.startswith(f"{number}.") for path in parts_folder.iterdir())
            raise
    parts_with_documents = tuple(part for part in written if part.num_documents)
    plan = SplitPlan(parts_folder, parts_with_documents, split_folder, vocab_size, **plan)
    return split_folder, write_split(plan)


def read_records(path):
    reader = array_record_module.ArrayRecordReader(str(path), options="readahead_buffer_size:0")
    records = reader.read(0, reader.num_records())
    reader.close()
    return records


def test_array_record_files(tmp_path):
    ids = list(range(1, 24))
    parts = [[(ids[:5], "a", 0), (ids[5:6], "a", 3)], [], [(ids[6:], "b", 1)]]
    folder, entry = write(tmp_path, parts, chunk_length=4, records_per_file=2)
    assert [
        (file.name, file.num_records, file.num_tokens, file.num_bytes) for file in entry.files
    ] == [
        (
            f"tokens-0000{index}-of-00003.array_record",
            2,
            tokens,
            (folder / f"tokens-0000{index}-of-00003.array_record").stat().st_size,
        )
        for index, tokens in enumerate((8, 8, 7))
    ]
    records = [record for file in entry.files for record in read_records(folder / file.name)]
    assert [len(record) // 2 for record in records] == [4, 4, 4, 4, 4, 3]
    stored = b"".join(records)
    assert np.frombuffer(stored, "<u2").tolist() == ids
    assert entry.tokens_sha256 == hashlib.sha256(stored).hexdigest()
    offsets = np.load(folder / "document_offsets.npy")
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 5, 6, 23]
    assert entry.offsets_sha256 == hashlib.sha256(offsets.astype("<i8").tobytes()).hexdigest()
    rows = np.load(folder / "document_rows.npy")
    assert rows.dtype == np.int32
    assert rows.tolist() == [0, 3, 1]
    assert json.loads((folder / "source_files.json").read_text()) == [[0, "a"], [2, "b"]]
    assert (entry.num_tokens, entry.num_documents, entry.num_text_bytes) == (23, 3, 46)
    assert entry.largest_id == 23
    assert entry.unigram_entropy == pytest.approx(np.log(23), abs=1e-6)
    assert sorted(path.name for path in folder.iterdir()) == [
        "document_offsets.npy",
        "document_rows.npy",
        "source_files.json",
        *(file.name for file in entry.files),
    ]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_bin_files(tmp_path, vocab_size, dtype):
    ids = [0, vocab_size - 1, 7, 7, 7]
    folder, entry = write(
        tmp_path,
        [[(ids, "a", 2**31)]],
        vocab_size,
        file_format="bin",
        chunk_length=1,
        records_per_file=3,
    )
    assert [(file.name, file.num_records, file.num_tokens) for file in entry.files] == [
        ("tokens-00000-of-00002.bin", 3, 3),
        ("tokens-00001-of-00002.bin", 2, 2),
    ]
    stored = b"".join((folder / file.name).read_bytes() for file in entry.files)
    assert stored == np.array(ids, dtype).tobytes()
    assert np.load(folder / "document_rows.npy").tolist() == [2**31]
    counts = np.array([1, 1, 3])
    assert entry.unigram_entropy == pytest.approx(unigram_entropy(counts), abs=1e-6)


def test_ids_outside_the_vocabulary_are_our_fault(tmp_path):
    with pytest.raises(AssertionError, match="vocab_size"):
        write(tmp_path / "a", [[([1000], "a", 0)]])
    with pytest.raises(AssertionError, match="does not fit"):
        write(tmp_path / "b", [[([2**16], "a", 0)]])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    file_format=st.sampled_from(["array_record", "bin"]),
    chunk_length=st.integers(1, 7),
)
def test_parts_do_not_show(tmp_path_factory, lengths, cuts, file_format, chunk_length):
    rng = np.random.default_rng(len(lengths))
    members = [
        (rng.integers(3, 1000, length).tolist(), f"file {row // 3}", row % 3)
        for row, length in enumerate(lengths)
    ]
    bounds = [0, *sorted(min(cut, len(members)) for cut in cuts), len(members)]
    parts = [members[start:stop] for start, stop in itertools.pairwise(bounds)]
    written = [
        write(
            tmp_path_factory.mktemp("split"),
            chosen,
            before=(1,),
            after=(2,),
            file_format=file_format,
            chunk_length=chunk_length,
            records_per_file=3,
        )
        for chosen in ([members], parts)
    ]
    (whole, whole_entry), (pieces, pieces_entry) = written
    assert whole_entry == pieces_entry
    for path in whole.iterdir():
        assert path.read_bytes() == (pieces / path.name).read_bytes(), path.name
    assert whole_entry.num_tokens == sum(len(ids) + 2 for ids, _, _ in members)


def test_document_files_are_as_numpy_writes_them(tmp_path):
    parts = [[([1, 2], "a", 0), ([3], "a", 3)], [([4, 5, 6], "b", 2**31)]]
    folder, _ = write(tmp_path, parts)
    for name, array in (
        ("document_offsets.npy", np.array([0, 2, 3, 6], np.int64)),
        ("document_rows.npy", np.array([0, 3, 2**31], np.int64)),
    ):
        np.save(tmp_path / name, array)
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_an_array_record_on_a_full_disk_is_an_error_of_the_system(tmp_path):
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
        with pytest.raises(OSError, match=r"write\(\) failed"):
            write_file()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
