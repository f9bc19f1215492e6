"""The sample order of GPT-NeoX, against its definition written out token by token."""

import numpy as np
import pytest

from MaxText.errors import UserError
from MaxText.input_pipeline.streams.megatron_order import GptNeoxOrder, document_range


def defined_samples(
    documents: list[list[int]], length: int, seed: int, num_samples: int | None
) -> list[list[int]]:
    """The samples as GPT-NeoX defines them: shuffle documents of all epochs, join, cut, shuffle."""
    tokens = sum(map(len, documents))
    epochs = 1
    while num_samples is not None and (epochs * tokens - 1) // length < num_samples:
        epochs += 1
    random = np.random.RandomState(seed)
    order = np.array([*range(len(documents))] * epochs, np.int32)
    random.shuffle(order)
    flat = [token for document in order for token in documents[document]]
    samples = [flat[start : start + length + 1] for start in range(0, len(flat) - length, length)]
    visited = np.arange(len(samples), dtype=np.uint32)
    random.shuffle(visited)
    return [samples[sample] for sample in visited]


@pytest.mark.parametrize("seed", [0, 1234])
@pytest.mark.parametrize("num_samples", [None, 1, 40, 200])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_samples_are_those_of_the_definition(seed, num_samples, length):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 30, 50)  # documents without tokens among them
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.arange(offsets[-1])
    documents = [tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(50)]
    order = GptNeoxOrder(offsets, length, seed, num_samples)
    expected = defined_samples(documents, length, seed, num_samples)
    assert len(order) == len(expected)
    for sample, ids in enumerate(expected):
        pieces = order.pieces(sample)
        assert all(start < stop for start, stop in pieces)
        assert [int(t) for start, stop in pieces for t in tokens[start:stop]] == ids


def test_a_known_order():
    # numpy's RandomState(7) puts the documents in order 2, 1, 0: tokens 9..12, 4..8, 0..3. It then
    # visits the samples of 3 + 1 tokens in order 3, 1, 0, 2.
    order = GptNeoxOrder(np.array([0, 4, 9, 13]), 3, seed=7)
    assert [order.pieces(sample) for sample in range(4)] == [
        [(0, 4)],
        [(12, 13), (4, 7)],
        [(9, 13)],
        [(6, 9), (0, 1)],
    ]


def test_one_part_of_the_documents():
    offsets = np.array([0, 10, 20, 30, 40])
    order = GptNeoxOrder(offsets, 4, 0, documents=(1, 3))
    touched = {
        token for sample in range(len(order)) for start, stop in order.pieces(sample)
        for token in range(start, stop)
    }  # fmt: skip
    assert touched <= set(range(10, 30))
    assert len(touched) == 17  # 4 samples of 4 tokens, and the last one's target


@pytest.mark.parametrize(
    ("split", "total", "expected"),
    [
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("969,30,1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("1", 5, [(0, 5), (5, 5), (5, 5)]),
        ("90/5/5", 200, [(0, 180), (180, 190), (190, 200)]),
        ("1,1,1", 10, [(0, 4), (4, 7), (7, 10)]),
        # Rounding to even makes 2 + 2 + 0 of 5: the ends move by one.
        ("1,1", 5, [(0, 3), (3, 5), (5, 5)]),
    ],
)
def test_division_of_the_documents(split, total, expected):
    assert [document_range(split, part, total) for part in range(3)] == expected


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2,3"])
def test_no_division(split):
    with pytest.raises(UserError, match="is no division of a data set"):
        document_range(split, 0, 10)


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 1], [0, 4]])
def test_too_few_tokens(offsets):
    with pytest.raises(UserError, match="too few for a sample of 5"):
        GptNeoxOrder(np.array(offsets), 4, 0)
