import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.input_pipeline.preparation.strided_windows import rows_of_windows, strided_windows

BOS, EOS, PAD, IGNORED = 101, 102, 0, -100


def windows_of(sizes: list[int], **keys) -> list[tuple[int, int]]:
    """Start and stop of each window, relative to its document, of documents of these sizes."""
    offsets = np.cumsum([0, *sizes])
    found = strided_windows(offsets, **keys)
    begins = offsets[np.searchsorted(offsets, found.starts_W, side="right") - 1]
    return list(
        zip((found.starts_W - begins).tolist(), (found.stops_W - begins).tolist(), strict=True)
    )


def test_the_document_that_jax_lm_was_run_on():
    # Document 10..32 with its fourth token 0; minimum 8, maximum 12, stride 5. Recorded there:
    #   input 101 10 11 12 0 14..20, mask 0 at the token 0, labels 10 11 12 -100 14..20 102
    #   input 101 15..25, labels 15..25 102
    #   input 101 20..30, labels 20..30 102
    #   input 101 25..32 102 0 0, labels 25..32 102 -100 -100 -100
    content = np.arange(10, 33, dtype=np.int32)
    content[3] = 0
    document = np.concatenate([[BOS], content, [EOS]]).astype(np.int32)
    found = strided_windows(np.array([0, document.size]), 8, 12, 5)
    assert (found.dropped_documents, found.dropped_tokens) == (0, 0)
    pieces = [document[a:b] for a, b in zip(found.starts_W, found.stops_W, strict=True)]
    rows = rows_of_windows(pieces, 12, PAD, IGNORED)
    inputs, mask, labels = (rows[name] for name in ("input_ids", "attention_mask", "labels"))

    # As there: the same 12 inputs in the first window, but for the 0, which counts here.
    assert inputs[0].tolist() == [BOS, 10, 11, 12, 0, *range(14, 21)]
    assert mask[0].tolist() == [1] * 12
    # The last label is the next token: the document does not end there.
    assert labels[0].tolist() == [10, 11, 12, 0, *range(14, 22)]
    # The same place of the document, which begins with its own token instead of a second BOS.
    assert inputs[1].tolist() == [14, *range(15, 26)]
    assert labels[1].tolist() == [*range(15, 27)]
    assert inputs[2].tolist() == [19, *range(20, 31)]
    assert labels[2].tolist() == [*range(20, 32)]
    # The document's end: EOS and padding as there.
    assert inputs[3].tolist() == [24, *range(25, 33), EOS, PAD, PAD]
    assert mask[3].tolist() == [1] * 10 + [0] * 2
    assert labels[3].tolist() == [*range(25, 33), EOS, *[IGNORED] * 3]
    assert len(pieces) == 4
    assert {name: array.dtype for name, array in rows.items()} == {
        "input_ids": np.int32,
        "attention_mask": np.int8,
        "labels": np.int32,
    }


@pytest.mark.parametrize(
    ("size", "there", "here"),
    # `there`: tokens of the pieces that jax_lm keeps of a document of `size` tokens, between BOS
    # and EOS. `here`: tokens of our windows of the same document with BOS and EOS.
    [
        (6, [], []),
        (7, [7], [9]),
        (11, [11], [13]),
        # There a second piece follows of which six tokens repeat: here it holds the end of text
        # too, which the first window cannot reach.
        (12, [11, 7], [13, 9]),
        (13, [11, 8], [13, 10]),
        (16, [11, 11], [13, 13]),
        (17, [11, 11, 7], [13, 13, 9]),
        (21, [11] * 3, [13] * 3),
        (22, [11, 11, 11, 7], [13, 13, 13, 9]),
    ],
)
def test_lengths_that_jax_lm_keeps(size, there, here):
    found = windows_of([size + 2], min_length=8, max_length=12, stride=5)
    assert [stop - start for start, stop in found] == here
    assert [start for start, _ in found] == [5 * i for i in range(len(there))]


def test_a_window_inside_the_one_before_is_left_out():
    # Starts 0, 4, 8; that at 8 would hold tokens 8..10 of 11, all in the window from 4 on.
    assert windows_of([11], min_length=2, max_length=6, stride=4) == [(0, 7), (4, 11)]
    assert windows_of([12], min_length=2, max_length=6, stride=4) == [(0, 7), (4, 11), (8, 12)]


def test_what_is_too_short_is_counted():
    sizes = [4, 5, 12, 1, 9]
    found = strided_windows(np.cumsum([0, *sizes]), min_length=4, max_length=6, stride=5)
    # 4 tokens have 3 labels. Of 12 tokens, 0..6 and 5..11 are windows. Of 9, 0..6 is one, and
    # 5..8 is too short, so tokens 7 and 8 are lost.
    assert found.starts_W.tolist() == [4, 9, 14, 22]
    assert found.stops_W.tolist() == [9, 16, 21, 29]
    assert found.dropped_documents == 2
    assert found.dropped_tokens == 4 + 1 + 2


def test_no_documents():
    found = strided_windows(np.array([0]), 1, 4, 2)
    assert found.starts_W.size == 0
    assert (found.dropped_documents, found.dropped_tokens) == (0, 0)
    assert rows_of_windows([], 4, PAD, IGNORED)["labels"].shape == (0, 4)


def test_a_stride_of_the_length_makes_every_label_once():
    assert windows_of([10, 2, 1], min_length=1, max_length=4, stride=4) == [
        (0, 5),
        (4, 9),
        (8, 10),
        (0, 2),
    ]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    first=st.integers(0, 1000),
    min_length=st.integers(1, 9),
    more=st.integers(0, 9),
    stride=st.integers(1, 18),
)
def test_windows_follow_their_definition(sizes, first, min_length, more, stride):
    max_length = min_length + more
    stride = min(stride, max_length)
    offsets = first + np.cumsum([0, *sizes])
    expected, documents, covered = [], 0, set()
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        start, last_stop = begin, begin
        before = len(expected)
        while start < end and last_stop < end:
            last_stop = min(start + max_length + 1, end)
            if last_stop - start > min_length:
                expected.append((start, last_stop))
                covered.update(range(start, last_stop))
            start += stride
        documents += len(expected) == before
    found = strided_windows(offsets, min_length, max_length, stride)
    assert list(zip(found.starts_W.tolist(), found.stops_W.tolist(), strict=True)) == expected
    assert found.dropped_documents == documents
    assert found.dropped_tokens + len(covered) == sum(sizes)
