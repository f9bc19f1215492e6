"""Windows against a slow, plain definition, and the counts that must hold over an epoch."""

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.rows.mixture import draws
from MaxText.input_pipeline.rows.packing import PackedDocuments, pack_group_rows
from MaxText.input_pipeline.rows.sample_index import SampleWindows
from MaxText.input_pipeline.rows.windows import (
    EMPTY,
    Cutting,
    DocumentWindows,
    PackedWindows,
    StitchedWindows,
)
from MaxText.input_pipeline.streams.bad_record import BadRecord
from MaxText.input_pipeline.streams.megatron_order import GptNeoxOrder
from MaxText.input_pipeline.streams.token_data import TokenData
from MaxText.input_pipeline.streams.token_stream import TokenStream

from ..small_data import numbered_documents, random_documents, write_data_set

FILLER = 0


class InMemory:
    """A stream of known documents."""

    def __init__(self, documents):
        self._tokens = np.concatenate([*documents, np.zeros(0, int)]).astype(np.int32)
        self.document_offsets = np.cumsum([0, *map(len, documents)])

    def __len__(self):
        return len(self._tokens)

    def ranges(self, places):
        return [self._tokens[start:stop].copy() for start, stop in places]

    def document_name(self, document):
        return f"document {document}"


class Gathering(InMemory):
    """One that gives whole rows by one call."""

    def gather(self, starts, length):
        return self._tokens[starts[:, None] + np.arange(length)]


def as_data(stream, **facts) -> TokenData:
    return TokenData(stream, "", "f", filler_id=FILLER, **facts)


def stored(folder, documents) -> TokenData:
    manifest = write_data_set(folder, {"train": documents})
    return as_data(TokenStream(str(folder), manifest, "train"))


def read_all(windows, **arguments):
    return windows.read(np.arange(len(windows)), np.zeros(len(windows), np.uint64), **arguments)


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


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", ["stored", InMemory, Gathering])
@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 7), (2, 16), (3, 64), (4, 1000)])
def test_packed_windows_equal_the_plain_definition(tmp_path, seed, length, kind, apart):
    documents = random_documents(seed, count=25, longest=40)
    data = stored(tmp_path / "d", documents) if kind == "stored" else as_data(kind(documents))
    windows = PackedWindows(data, Cutting(length, attend_across_documents=not apart))
    rows = read_all(windows)
    # Without the last window, which is filled up, rows can be gathered.
    whole = windows.read(np.arange(len(windows) - 1), np.zeros(len(windows) - 1, np.uint64))
    for window in range(len(windows)):
        plain = plain_packed(documents, window, length, apart)
        assert set(rows) == set(plain)
        for name, values in plain.items():
            np.testing.assert_array_equal(rows[name][window], values, err_msg=f"{window} {name}")
            if window < len(windows) - 1:
                np.testing.assert_array_equal(whole[name][window], values)


SIZES = [1, 2, 10, 11, 12, 1, 100, 9, 50, 51, 1]


def cut(kind, documents, length, tmp_path):
    data, cutting = as_data(InMemory(documents)), Cutting(length)
    if kind in ("first_fit", "best_fit"):
        return PackedDocuments(data, cutting, kind == "best_fit", tmp_path)
    return {"packed": PackedWindows, "single": DocumentWindows}[kind](data, cutting)


@pytest.mark.parametrize("kind", ["packed", "single", "first_fit", "best_fit"])
@pytest.mark.parametrize("length", [3, 10, 50])
def test_each_token_but_the_first_of_its_document_is_a_target_once(tmp_path, kind, length):
    documents = numbered_documents(SIZES)
    rows = read_all(cut(kind, documents, length, tmp_path))
    counted = rows["targets"][rows["weights"] == 1]
    expected = np.concatenate([document[1:] for document in documents])
    np.testing.assert_array_equal(np.sort(counted), expected)
    # The token before each counted target is the one before it in the same document.
    np.testing.assert_array_equal(rows["tokens"][rows["weights"] == 1], counted - 1)


def test_without_mask_the_next_document_counts_too():
    documents = numbered_documents([5, 1, 9, 4])
    windows = PackedWindows(as_data(InMemory(documents)), Cutting(4, attend_across_documents=True))
    rows = read_all(windows)
    np.testing.assert_array_equal(rows["targets"][rows["weights"] == 1], np.arange(2, 20))
    assert "positions" not in rows
    assert "segments" not in rows


@pytest.mark.parametrize("length", [4, 16])
def test_document_windows_hold_one_document_each(tmp_path, length):
    documents = numbered_documents([1, 2, 16, 17, 18, 5, 40])
    windows = cut("single", documents, length, tmp_path)
    assert len(windows) == sum(-(-(len(document) - 1) // length) for document in documents)
    assert not windows.has_documents
    windows.has_documents = True
    rows = read_all(windows)
    for row in range(len(windows)):
        real = rows["segments"][row] > 0
        assert rows["segments"][row].max() == 1
        ids = rows["tokens"][row][real]
        assert sum(np.isin(ids, document).all() for document in documents) == 1
        np.testing.assert_array_equal(rows["positions"][row][real], np.arange(real.sum()))
        assert (rows["tokens"][row][~real] == FILLER).all()


def test_truncated_documents_give_one_row_each():
    documents = numbered_documents([1, 2, 9, 40])
    windows = DocumentWindows(as_data(InMemory(documents)), Cutting(8, truncate=True))
    rows = read_all(windows)
    assert rows["tokens"][:, 0].tolist() == [2, 4, 13]
    assert rows["weights"].sum(axis=1).tolist() == [1, 8, 8]


@pytest.mark.parametrize("kind", ["packed", "first_fit", "best_fit"])
def test_packed_rows_contain_the_documents_as_unpacked_ones_do(tmp_path, kind):
    documents = random_documents(7, count=30, longest=8)

    def pairs(windows):
        rows = read_all(windows)
        counts = rows["weights"] == 1
        return sorted(zip(rows["tokens"][counts], rows["targets"][counts], strict=True))

    packed, single = (cut(name, documents, 16, tmp_path) for name in (kind, "single"))
    assert pairs(packed) == pairs(single)
    assert len(packed) < len(single)


def test_positions_stay_below_the_window_length(tmp_path):
    windows = cut("packed", numbered_documents([100]), 8, tmp_path)
    assert read_all(windows)["positions"].max() == 7


def test_empty_rows_count_nowhere(tmp_path):
    windows = cut("packed", numbered_documents([30]), 8, tmp_path)
    rows = windows.read(np.array([0, EMPTY, 1]), np.zeros(3, np.uint64))
    for name in ("weights", "segments", "positions"):
        assert not rows[name][1].any()
    assert rows["weights"][[0, 2]].all()


@pytest.mark.parametrize("kind", ["first_fit", "best_fit"])
def test_whole_documents_fill_rows_with_segments_of_their_own(tmp_path, kind):
    documents = numbered_documents([5, 4, 6, 3, 30])
    windows = cut(kind, documents, 10, tmp_path)
    rows = read_all(windows)
    # Places needed: 4, 3, 5, 2 and 9 after two full windows. First fit: 4+3+2, 5, 9; so is best
    # fit, as the row of 4+3 is fuller than that of 5.
    assert rows["tokens"].tolist() == [
        [1, 2, 3, 4, 6, 7, 8, 16, 17, FILLER],
        [10, 11, 12, 13, 14, *[FILLER] * 5],
        [*range(39, 48), FILLER],
        list(range(19, 29)),
        list(range(29, 39)),
    ]
    assert rows["targets"][0].tolist() == [2, 3, 4, 5, 7, 8, 9, 17, 18, FILLER]
    assert rows["weights"][0].tolist() == [1.0] * 9 + [0.0]
    assert rows["segments"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3, 0]
    assert rows["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]
    assert windows.origin(0, 0) == [(0, 0, 5), (1, 0, 4), (3, 0, 3)]


def plain_fit(sizes, length, best):
    free, rows = [], []
    for size in sizes:
        fitting = [row for row, space in enumerate(free) if space >= size]
        if not fitting:
            free.append(length)
            fitting = [len(free) - 1]
        row = min(fitting, key=lambda r: (free[r], r)) if best else fitting[0]
        free[row] -= size
        rows.append(row)
    return rows


@pytest.mark.parametrize("best", [False, True])
def test_fit_equals_the_plain_algorithm(best):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 33, (20, 60)).astype(np.int32)
    rows = pack_group_rows(sizes, 32, best)
    for group in range(20):
        assert rows[group].tolist() == plain_fit(sizes[group].tolist(), 32, best)


def test_plan_is_kept_and_used_again(tmp_path, monkeypatch):
    from MaxText.input_pipeline.rows import packing

    monkeypatch.setattr(packing, "_KEPT_FROM", 1)
    documents = random_documents(3, count=40, longest=30)
    first = cut("first_fit", documents, 16, tmp_path)
    monkeypatch.setattr(packing, "_plan", None)
    again = cut("first_fit", documents, 16, tmp_path)
    np.testing.assert_array_equal(read_all(first)["tokens"], read_all(again)["tokens"])


def test_a_plan_is_used_for_the_same_documents_only(tmp_path, monkeypatch):
    from MaxText.input_pipeline.rows import packing

    monkeypatch.setattr(packing, "_KEPT_FROM", 1)
    # Data of one fingerprint, as that of InMemory always is.
    for sizes in ([3, 20, 9], [9, 3, 20]):
        documents = numbered_documents(sizes)
        rows = read_all(cut("first_fit", documents, 16, tmp_path))
        counted = np.sort(rows["targets"][rows["weights"] == 1])
        expected = np.concatenate([document[1:] for document in documents])
        np.testing.assert_array_equal(counted, expected)


def test_a_plan_that_another_process_made_or_damaged_is_no_error(tmp_path, monkeypatch):
    from MaxText.input_pipeline.rows import packing

    monkeypatch.setattr(packing, "_KEPT_FROM", 1)
    documents = random_documents(3, count=40, longest=30)
    first = read_all(cut("first_fit", documents, 16, tmp_path))["tokens"]
    (folder,) = tmp_path.glob("packing-*")
    (folder / "starts.npy").write_bytes(b"")
    np.testing.assert_array_equal(
        first, read_all(cut("first_fit", documents, 16, tmp_path))["tokens"]
    )
    assert list(tmp_path.iterdir()) == [folder]


def test_a_plan_that_cannot_be_kept_names_the_key(tmp_path, monkeypatch):
    from MaxText.input_pipeline.rows import packing

    monkeypatch.setattr(packing, "_KEPT_FROM", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data_cache_dir=.*file cannot be written"):
        cut("first_fit", random_documents(3, count=9, longest=30), 16, tmp_path / "file")


def test_empty_documents_change_nothing():
    documents = numbered_documents([5, 6, 18])
    empty = np.empty(0, int)
    with_empty = [empty, documents[0], empty, documents[1], empty, empty, documents[2], empty]
    plain = read_all(PackedWindows(as_data(InMemory(documents)), Cutting(8)))
    rows = read_all(PackedWindows(as_data(InMemory(with_empty)), Cutting(8)))
    for name, values in plain.items():
        np.testing.assert_array_equal(rows[name], values, err_msg=name)
    stitched = StitchedWindows(as_data(InMemory(with_empty)), Cutting(8), stitch=1, random=True)
    assert read_all(stitched)["weights"].sum(axis=1).tolist() == [0, 4, 0, 5, 0, 0, 8, 0]


def test_segments_of_rows_that_are_one_sequence_show_filling_only(tmp_path):
    documents = numbered_documents([5, 6, 4])
    windows = PackedDocuments(
        as_data(InMemory(documents)), Cutting(10, True), best_fit=False, cache_dir=tmp_path
    )
    windows.has_documents = True
    rows = read_all(windows)
    assert rows["segments"].tolist() == [[1] * 9 + [0], [1] * 3 + [0] * 7]
    assert rows["positions"].tolist() == [[*range(9), 0], [0, 1, 2] + [0] * 7]
    assert rows["weights"].tolist() == rows["segments"].tolist()


def test_stitched_windows_begin_evenly_in_joined_documents():
    documents = numbered_documents([10, 12, 9, 7, 3])
    windows = StitchedWindows(as_data(InMemory(documents)), Cutting(8), stitch=2, random=True)
    assert len(windows) == 3
    numbers = draws(0, np.arange(14_000))
    rows = windows.read(np.zeros(14_000, np.int64), numbers)
    # 22 tokens, rows of 8 + 1: begin at 0..13.
    counts = np.bincount(rows["tokens"][:, 0] - 1, minlength=14)
    assert counts.size == 14
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 34.5  # 13 degrees of freedom, p = 0.001
    # Too little text for a whole window: all of it, filled up.
    last = windows.read(np.array([2]), numbers[:1])
    assert last["tokens"].tolist() == [[39, 40, 41, *[FILLER] * 5]]
    fixed = StitchedWindows(as_data(InMemory(documents)), Cutting(8), stitch=2, random=False)
    assert read_all(fixed)["tokens"][:, 0].tolist() == [1, 23, 39]


@pytest.mark.parametrize("attend_across", [True, False])
def test_samples_in_gpt_neox_order_are_documents_laid_end_to_end(attend_across):
    documents = numbered_documents([5, 9, 1, 7, 12])
    windows = SampleWindows(as_data(InMemory(documents)), Cutting(4, attend_across), seed=1234)
    order = GptNeoxOrder(np.cumsum([0, 5, 9, 1, 7, 12]), 4, 1234)
    assert len(windows) == len(order) == 33 // 4
    rows = read_all(windows)
    ids = np.concatenate(documents)
    for sample in range(len(order)):
        row = np.concatenate([ids[start:stop] for start, stop in order.pieces(sample)])
        assert rows["tokens"][sample].tolist() == row[:-1].tolist()
        follows = row[1:] == row[:-1] + 1
        assert rows["targets"][sample].tolist() == row[1:].tolist()
        if attend_across:
            assert rows["weights"][sample].all()
            continue
        # Numbers go up by one inside a document; 4 documents begin after another one.
        begins = np.isin(row[1:], [document[0] for document in documents])
        assert rows["weights"][sample].tolist() == (~begins).astype(float).tolist()
        assert (follows | begins).all()
        segments = 1 + np.cumsum(np.append(False, begins[:-1]))
        assert rows["segments"][sample].tolist() == segments.tolist()


def test_labels_are_the_targets():
    records = [np.array([7, 8, 9, 0]), np.array([5, 6])]
    labels = [np.array([8, -100, 0, -100]), np.array([6, 1])]
    data = as_data(InMemory(records), labels=InMemory(labels), rows=True)
    rows = read_all(DocumentWindows(data, Cutting(4)))
    assert rows["tokens"].tolist() == [[7, 8, 9, 0], [5, 6, FILLER, FILLER]]
    assert rows["targets"].tolist() == [[8, 0, 0, 0], [6, 1, FILLER, FILLER]]
    assert rows["weights"].tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]


def test_targets_with_id_zero_can_be_left_out():
    data = as_data(InMemory([np.array([3, 0, 4, 0, 0, 5])]))
    counting = read_all(PackedWindows(data, Cutting(5)))["weights"]
    without = read_all(PackedWindows(data, Cutting(5, zero_loss=False)))["weights"]
    assert counting.tolist() == [[1, 1, 1, 1, 1]]
    assert without.tolist() == [[0, 1, 0, 0, 1]]


class Damaged(InMemory):
    """Tokens 20..24 cannot be read."""

    def ranges(self, places):
        for start, stop in places:
            if start < 25 and stop > 20:
                raise BadRecord("file", 20, "does not match its checksum")
        return super().ranges(places)


def test_a_bad_record_costs_its_row_only():
    windows = PackedWindows(as_data(Damaged(numbered_documents([41]))), Cutting(10))
    with pytest.raises(BadRecord, match="file at byte 20: does not match"):
        read_all(windows)
    seen = []
    rows = read_all(windows, on_bad=seen.append)
    # Row 1 ends with token 20 as a target.
    assert rows["weights"].sum(axis=1).tolist() == [10, 0, 0, 10]
    assert (rows["segments"].max(axis=1) > 0).tolist() == [True, False, False, True]
    assert [problem.offset for problem in seen] == [20, 20]
