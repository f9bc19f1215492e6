"""Streams over flat files: any range, rows at once, several files, and files that change."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.streams import flat_stream
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.flat_stream import FlatFile, FlatStream


def written(folder, sizes, dtype="<u2", url=None):
    """A stream of files of these sizes, and all its ids."""
    ids = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, sum(sizes)).astype(dtype)
    files, first = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"tokens-{number}.bin"
        ids[first : first + size].tofile(path)
        name = str(path)
        if url:
            name = f"{url}/{number}.bin"
            with fsspec.open(name, "wb") as file:
                file.write(path.read_bytes())
        files.append(FlatFile(name, first))
        first += size
    offsets = np.array([0, first // 3, first // 2, first], np.int64)
    return FlatStream(files, np.dtype(dtype), offsets), ids


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "u1"])
@pytest.mark.parametrize("sizes", [[500], [100, 0, 7, 393]])
def test_any_range_and_any_rows(tmp_path, sizes, dtype):
    stream, ids = written(tmp_path, sizes, dtype)
    assert len(stream) == 500
    expected = ids.astype(np.int32)
    rng = np.random.default_rng(1)
    places = [tuple(sorted(rng.integers(0, 501, 2).tolist())) for _ in range(50)]
    places += [(0, 500), (0, 0), (500, 500)]
    for stream_or_copy in (stream, pickle.loads(pickle.dumps(stream))):
        for (start, stop), piece in zip(places, stream_or_copy.ranges(places), strict=True):
            assert piece.dtype == np.int32
            np.testing.assert_array_equal(piece, expected[start:stop])
        for length in (1, 16, 100, 500):
            starts = rng.integers(0, 501 - length, 40)
            rows = stream_or_copy.gather(starts, length)
            assert rows.dtype == np.int32
            np.testing.assert_array_equal(
                rows, np.stack([expected[start : start + length] for start in starts])
            )
    assert stream.gather(np.empty(0, np.int64), 8).shape == (0, 8)
    assert stream.ranges([]) == []


def test_what_is_read_can_be_changed(tmp_path):
    stream, ids = written(tmp_path, [20], "<i4")
    stream.ranges([(0, 5)])[0][:] = 0
    np.testing.assert_array_equal(stream.ranges([(0, 5)])[0], ids[:5])


@pytest.mark.parametrize("sizes", [[64], [10, 54]])
def test_remote_files(tmp_path, sizes):
    url = f"memory://flat-{tmp_path.name}"
    stream, ids = written(tmp_path, sizes, url=url)
    np.testing.assert_array_equal(stream.ranges([(3, 60)])[0], ids[3:60])
    np.testing.assert_array_equal(
        stream.gather(np.array([0, 5, 50]), 14), np.stack([ids[i : i + 14] for i in (0, 5, 50)])
    )
    fsspec.filesystem("memory").rm(f"{url}/0.bin")
    with pytest.raises(BadRecord, match=r"0\.bin at byte 4: the file cannot be read"):
        stream.ranges([(2, 5)])


def test_threads_and_more_files_than_are_kept_open(tmp_path, monkeypatch):
    monkeypatch.setattr(flat_stream, "_MOST_MAPPED", 2)
    stream, ids = written(tmp_path, [25] * 20)
    with ThreadPoolExecutor(8) as threads:
        starts = [(i * 37) % 480 for i in range(200)]
        for start, piece in zip(
            starts, threads.map(lambda s: stream.ranges([(s, s + 20)])[0], starts), strict=True
        ):
            np.testing.assert_array_equal(piece, ids[start : start + 20])
    assert len(stream._maps) == 2


def test_a_file_of_another_size_is_refused_before_reading(tmp_path):
    written(tmp_path, [30])
    path = tmp_path / "tokens-0.bin"
    with pytest.raises(UserError, match=r"has 60 bytes, where its 31 tokens take 62"):
        FlatStream([FlatFile(str(path), 0)], np.dtype("<u2"), np.array([0, 31]))
    path.unlink()
    with pytest.raises(UserError, match=r"tokens-0\.bin cannot be read"):
        FlatStream([FlatFile(str(path), 0)], np.dtype("<u2"), np.array([0, 30]))


def test_a_file_that_vanished_or_shrank_is_a_bad_record(tmp_path):
    stream, _ = written(tmp_path, [30, 30])
    os.truncate(tmp_path / "tokens-0.bin", 20)
    with pytest.raises(BadRecord, match="has 10 tokens where 30 were at first"):
        stream.ranges([(0, 1)])
    (tmp_path / "tokens-1.bin").unlink()
    with pytest.raises(BadRecord, match=r"tokens-1\.bin at byte 20: the file cannot be read"):
        stream.gather(np.array([40]), 4)


@pytest.mark.parametrize("sizes", [[3000], [1000, 2000]])
def test_a_file_that_shrinks_while_it_is_mapped_is_a_bad_record(tmp_path, sizes):
    stream, ids = written(tmp_path, sizes)
    np.testing.assert_array_equal(stream.gather(np.array([2900]), 9), [ids[2900:2909]])
    os.truncate(tmp_path / f"tokens-{len(sizes) - 1}.bin", 10)
    cut = f"the file was cut short: it ends after 10 of {2 * sizes[-1]} bytes"
    message = f"at byte {2 * (2900 - 3000 + sizes[-1])}: {cut}"
    for _ in range(2):  # it stays one
        with pytest.raises(BadRecord, match=message):
            stream.gather(np.array([2900]), 9)
        with pytest.raises(BadRecord, match=message):
            stream.ranges([(2900, 2909)])
    if len(sizes) > 1:  # other files are read as before
        np.testing.assert_array_equal(stream.ranges([(0, 1000)])[0], ids[:1000])
        with pytest.raises(BadRecord, match=f"at byte 0: {cut}"):
            stream.gather(np.array([998]), 4)


def test_a_file_that_is_replaced_while_it_is_mapped_is_read_on(tmp_path):
    stream, ids = written(tmp_path, [30])
    stream.ranges([(0, 30)])
    (tmp_path / "tokens-0.bin").unlink()
    (tmp_path / "tokens-0.bin").write_bytes(b"12")
    np.testing.assert_array_equal(stream.ranges([(0, 30)])[0], ids)


def test_no_pieces_need_no_file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))
    stream = FlatStream([FlatFile(str(path), 0)], np.dtype("<u2"), np.array([0, 4]))
    path.unlink()
    assert stream.ranges([]) == []


def test_names_of_documents(tmp_path):
    stream, _ = written(tmp_path, [50, 50])
    assert stream.document_name(0) == "tokens-0.bin, document 0"
    assert stream.document_name(2) == "tokens-1.bin, document 2"


def test_an_empty_stream(tmp_path):
    (tmp_path / "x.bin").touch()
    stream = FlatStream([FlatFile(str(tmp_path / "x.bin"), 0)], np.dtype("<u2"), np.array([0]))
    assert len(stream) == 0
    assert stream.ranges([(0, 0)])[0].shape == (0,)
