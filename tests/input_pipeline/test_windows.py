"""Windows against a slow, plain definition, and the counts that must hold over an epoch."""

import numpy as np
import pytest

from MaxText.input_pipeline.token_stream import TokenStream
from MaxText.input_pipeline.windows import EMPTY, DocumentWindows, PackedWindows

from .small_data import numbered_documents, random_documents, write_data_set

FILLER = 0


def open_stream(folder, documents) -> TokenStream:
    manifest = write_data_set(folder, {"train": documents})
    return TokenStream(str(folder), manifest, "train")


def plain_packed(documents, window, length, document_mask):
    """One packed window by loops over single tokens."""
    tokens = [(int(t), d) for d, document in enumerate(documents) for t in document]
    row = {name: [0] * length for name in ("tokens", "targets", "weights", "positions", "segments")}
    place, segment = 0, 1
    for t in range(length):
        at = window * length + t
        if at >= len(tokens):
            continue
        if t and tokens[at][1] != tokens[at - 1][1]:
            place, segment = 0, segment + 1
        row["tokens"][t] = tokens[at][0]
        row["positions"][t], row["segments"][t] = place, segment
        place += 1
        if at + 1 < len(tokens):
            row["targets"][t] = tokens[at + 1][0]
            row["weights"][t] = int(not document_mask or tokens[at][1] == tokens[at + 1][1])
    if not document_mask:
        del row["positions"], row["segments"]
    return row


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 7), (2, 16), (3, 64), (4, 1000)])
def test_packed_windows_equal_the_plain_definition(tmp_path, seed, length, document_mask):
    documents = random_documents(seed, count=25, longest=40)
    windows = PackedWindows(open_stream(tmp_path / "d", documents), length, document_mask, FILLER)
    rows = windows.read(range(len(windows)))
    for window in range(len(windows)):
        plain = plain_packed(documents, window, length, document_mask)
        assert set(rows) == set(plain)
        for name, values in plain.items():
            np.testing.assert_array_equal(rows[name][window], values, err_msg=f"{window} {name}")


@pytest.mark.parametrize("cut", [PackedWindows, DocumentWindows])
@pytest.mark.parametrize("length", [3, 10, 50])
def test_each_token_but_the_first_of_its_document_is_a_target_once(tmp_path, cut, length):
    sizes = [1, 2, 10, 11, 12, 1, 100, 9, 50, 51, 1]
    documents = numbered_documents(sizes)
    windows = cut(open_stream(tmp_path / "d", documents), length, True, FILLER)
    rows = windows.read(range(len(windows)))
    counted = rows["targets"][rows["weights"] == 1]
    expected = np.concatenate([document[1:] for document in documents])
    np.testing.assert_array_equal(np.sort(counted), expected)
    # The token before each counted target is the one before it in the same document.
    np.testing.assert_array_equal(rows["tokens"][rows["weights"] == 1], counted - 1)


def test_without_mask_the_next_document_counts_too(tmp_path):
    documents = numbered_documents([5, 1, 9, 4])
    windows = PackedWindows(open_stream(tmp_path / "d", documents), 4, False, FILLER)
    rows = windows.read(range(len(windows)))
    np.testing.assert_array_equal(rows["targets"][rows["weights"] == 1], np.arange(2, 20))
    assert "positions" not in rows
    assert "segments" not in rows


@pytest.mark.parametrize("length", [4, 16])
def test_document_windows_hold_one_document_each(tmp_path, length):
    documents = numbered_documents([1, 2, 16, 17, 18, 5, 40])
    windows = DocumentWindows(open_stream(tmp_path / "d", documents), length, True, FILLER)
    assert len(windows) == sum(-(-(len(document) - 1) // length) for document in documents)
    rows = windows.read(range(len(windows)))
    for row in range(len(windows)):
        real = rows["segments"][row] > 0
        assert rows["segments"][row].max() == 1
        ids = rows["tokens"][row][real]
        assert sum(np.isin(ids, document).all() for document in documents) == 1
        np.testing.assert_array_equal(rows["positions"][row][real], np.arange(real.sum()))
        assert (rows["tokens"][row][~real] == FILLER).all()


def test_packed_rows_contain_the_documents_as_unpacked_ones_do(tmp_path):
    documents = random_documents(7, count=30, longest=8)
    stream = open_stream(tmp_path / "d", documents)

    def pairs(rows):
        counts = rows["weights"] == 1
        return sorted(zip(rows["tokens"][counts], rows["targets"][counts], strict=True))

    packed = PackedWindows(stream, 16, True, FILLER)
    single = DocumentWindows(stream, 16, True, FILLER)
    assert pairs(packed.read(range(len(packed)))) == pairs(single.read(range(len(single))))


def test_positions_stay_below_the_window_length(tmp_path):
    windows = PackedWindows(open_stream(tmp_path / "d", numbered_documents([100])), 8, True, FILLER)
    assert windows.read(range(len(windows)))["positions"].max() == 7


def test_empty_rows_count_nowhere(tmp_path):
    stream = open_stream(tmp_path / "d", numbered_documents([30]))
    rows = PackedWindows(stream, 8, True, FILLER).read([0, EMPTY, 1])
    for name in ("weights", "segments", "positions"):
        assert not rows[name][1].any()
    assert rows["weights"][[0, 2]].all()
