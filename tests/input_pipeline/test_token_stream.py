"""Random access to the stream, across chunks, files, threads and processes."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.token_stream import TokenStream

from .small_data import random_documents, write_data_set


@pytest.mark.parametrize("vocab_size", [50_000, 70_000])
def test_any_range_equals_the_concatenated_documents(tmp_path, vocab_size):
    documents = random_documents(0, count=60, longest=90, vocab_size=vocab_size)
    manifest = write_data_set(tmp_path / "d", {"train": documents}, vocab_size)
    assert manifest.dtype == ("uint16" if vocab_size <= 65536 else "uint32")
    assert len(manifest.splits["train"].files) > 1
    whole = np.concatenate(documents)
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    assert len(stream) == whole.size
    np.testing.assert_array_equal(stream[:], whole)
    rng = np.random.default_rng(1)
    places = [tuple(sorted(rng.integers(0, whole.size + 1, 2))) for _ in range(50)]
    for (start, stop), piece in zip(places, stream.ranges(places), strict=True):
        assert piece.dtype == np.int32
        np.testing.assert_array_equal(piece, whole[start:stop])
    ends = np.cumsum([0, *map(len, documents)])
    np.testing.assert_array_equal(stream.document_offsets, ends)


def test_threads_and_pickled_copies_read_the_same(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(2, 100, 60)})
    stream = TokenStream(str(tmp_path / "d"), manifest, "train")
    whole = stream[:]
    copy = pickle.loads(pickle.dumps(stream))
    places = [(i, i + 100) for i in range(0, len(stream) - 100, 7)]
    with ThreadPoolExecutor(8) as threads:
        for (start, stop), piece in zip(
            places, threads.map(lambda place: copy[place[0] : place[1]], places), strict=True
        ):
            np.testing.assert_array_equal(piece, whole[start:stop])


def test_truncated_and_missing_files_are_named(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(3, 100, 60)})
    record = tmp_path / "d" / "train" / manifest.splits["train"].files[1].name
    content = record.read_bytes()
    record.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"{record.name} has {len(content) - 1} bytes"):
        TokenStream(str(tmp_path / "d"), manifest, "train")
    record.unlink()
    with pytest.raises(UserError, match=f"{record.name} is missing"):
        TokenStream(str(tmp_path / "d"), manifest, "train")


def test_flipped_bit_is_an_error_not_other_text(tmp_path):
    manifest = write_data_set(tmp_path / "d", {"train": random_documents(4, 100, 60)})
    record = tmp_path / "d" / "train" / manifest.splits["train"].files[0].name
    content = bytearray(record.read_bytes())
    content[len(content) // 2] ^= 4
    record.write_bytes(content)
    with pytest.raises(UserError, match=f"{record.name} is damaged"):
        TokenStream(str(tmp_path / "d"), manifest, "train")[:]


def test_offsets_of_another_data_set_are_refused(tmp_path):
    manifest = write_data_set(tmp_path / "a", {"train": random_documents(5, 10, 60)})
    write_data_set(tmp_path / "b", {"train": random_documents(6, 11, 60)})
    offsets = tmp_path / "b" / "train" / "document_offsets.npy"
    offsets.replace(tmp_path / "a" / "train" / "document_offsets.npy")
    stream = TokenStream(str(tmp_path / "a"), manifest, "train")
    with pytest.raises(UserError, match="11 documents"):
        _ = stream.document_offsets
