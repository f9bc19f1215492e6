"""`tf.train.Example` messages: the bytes of TensorFlow, and messages of other writers."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from MaxText.input_pipeline.formats import tf_example
from MaxText.input_pipeline.formats.tf_example import ExampleError

IDS = [0, 1, 127, 128, 16383, 16384, 50256, 2097151, 2097152, 2**31, 2**62, -1, -(2**63)]
SEVERAL = {
    "text": ["zwölf", b"", b"\xff\x00"],
    "a": np.array([0.5, -1.25, 3e38], np.float32),
    "input_ids": [5],
    "labels": [-100, 0],
}
# What tensorflow 2.21.0 writes, SerializeToString(deterministic=True).
GOLDEN = {
    "ids": (
        {"input_ids": IDS},
        "0a490a470a09696e7075745f696473123a1a380a3600017f8001ff7f808001d08803ffff7f80808001808080"
        "8008808080808080808040ffffffffffffffffff0180808080808080808001",
    ),
    "several": (
        SEVERAL,
        "0a600a150a01611210120e0a0c0000003f0000a0bfe6b1617f0a120a09696e7075745f69647312051a030a01"
        "050a190a066c6162656c73120f1a0d0a0b9cffffffffffffffff01000a180a047465787412100a0e0a067a77"
        "c3b66c660a000a02ff00",
    ),
    "text": ({"text": "hello"}, "0a130a110a047465787412090a070a0568656c6c6f"),
    "nothing": ({}, "0a00"),
}
# The same writer for Feature() without any list.
WITHOUT_A_LIST = bytes.fromhex("0a070a050a01781200")


@pytest.mark.parametrize("case", ["ids", "several", "text", "nothing"])
def test_the_bytes_are_those_of_tensorflow(case):
    features, golden = GOLDEN[case]
    assert tf_example.encode(features).hex() == golden


def test_empty_lists():
    record = tf_example.encode({"text": [], "floats": np.empty(0, np.float32)})
    assert record.hex() == "0a1a0a0c0a06666c6f617473120212000a0a0a047465787412021a00"
    features = tf_example.decode(record)
    assert isinstance(features["text"], np.ndarray)
    assert (features["text"].dtype, features["text"].shape) == (np.int64, (0,))
    assert isinstance(features["floats"], np.ndarray)
    assert (features["floats"].dtype, features["floats"].shape) == (np.float32, (0,))
    assert tf_example.int64_values(record, ["text"]).shape == (0,)
    assert tf_example.count_int64(record, ["text"]) == 0
    assert tf_example.decode(WITHOUT_A_LIST) == {"x": []}
    assert tf_example.int64_values(WITHOUT_A_LIST, ["x"]).tolist() == []
    assert tf_example.decode(b"") == {}


def test_decoding_returns_types_and_values():
    features = tf_example.decode(bytes.fromhex(GOLDEN["several"][1]))
    assert list(features) == ["a", "input_ids", "labels", "text"]
    assert features["text"] == ["zwölf".encode(), b"", b"\xff\x00"]
    np.testing.assert_array_equal(features["a"], np.array([0.5, -1.25, 3e38], np.float32))
    np.testing.assert_array_equal(features["labels"], np.array([-100, 0]))
    np.testing.assert_array_equal(
        tf_example.decode(bytes.fromhex(GOLDEN["ids"][1]))["input_ids"], np.array(IDS)
    )


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**28), max_size=50))
def test_any_integers_survive(ids):
    record = tf_example.encode({"ids": ids})
    values = tf_example.int64_values(record, ["ids"])
    assert values.dtype == np.int64
    assert values.tolist() == ids
    assert tf_example.count_int64(record, ["ids"]) == len(ids)
    assert tf_example.encode({"ids": np.array(ids, np.int64)}) == record


def test_the_first_name_that_is_there_counts():
    record = tf_example.encode({"text": [1, 2], "tokens": [3]})
    names = ["input_ids", "text", "tokens"]
    assert tf_example.int64_values(record, names).tolist() == [1, 2]
    assert tf_example.int64_values(record, names[::-1]).tolist() == [3]


@pytest.mark.parametrize("read", [tf_example.int64_values, tf_example.count_int64])
def test_missing_and_wrong_features_are_named_with_those_that_are_there(read):
    record = tf_example.encode({"text": "hello", "n": [1], "f": np.array([0.5], np.float32)})
    there = r"\(features there: f \(floats\), n \(integers\), text \(bytes\)\)"
    with pytest.raises(ExampleError, match=f"there is no feature a or b {there}"):
        read(record, ["a", "b"])
    with pytest.raises(ExampleError, match=f"feature text holds bytes, not integers {there}"):
        read(record, ["text"])


def delimited(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def example(*features: bytes) -> bytes:
    entries = [delimited(1, delimited(1, b"x") + delimited(2, feature)) for feature in features]
    return delimited(1, b"".join(entries))


def test_lists_that_are_not_packed_are_read():
    integers = delimited(3, bytes([8, 5, 8, 0x80, 1, 8, 0]))
    assert tf_example.int64_values(example(integers), ["x"]).tolist() == [5, 128, 0]
    assert tf_example.count_int64(example(integers), ["x"]) == 3
    mixed = delimited(3, bytes([8, 5]) + delimited(1, bytes([6, 7])))
    assert tf_example.int64_values(example(mixed), ["x"]).tolist() == [5, 6, 7]
    floats = delimited(2, b"\x0d" + np.float32(1.5).tobytes() + b"\x0d" + np.float32(-2).tobytes())
    np.testing.assert_array_equal(tf_example.decode(example(floats))["x"], [1.5, -2.0])


def test_unknown_fields_are_skipped():
    unknown = delimited(9, b"abc") + b"\x50\x07" + b"\x59" + b"8" * 8 + b"\x5d" + b"4444"
    feature = unknown + delimited(3, unknown + delimited(1, b"\x07")) + unknown
    entry = delimited(1, unknown + delimited(1, b"x") + delimited(2, feature))
    record = unknown + delimited(1, unknown + entry)
    assert tf_example.decode(record)["x"] == np.array([7])


def test_repeated_parts_merge_as_in_protobuf():
    one, two = delimited(3, delimited(1, b"\x01")), delimited(3, delimited(1, b"\x02"))
    # The last of two entries with one name; the pieces of one list; the last of two kinds.
    assert tf_example.int64_values(example(one, two), ["x"]).tolist() == [2]
    assert tf_example.int64_values(example(one + two), ["x"]).tolist() == [1, 2]
    text = delimited(1, delimited(1, b"t"))
    assert tf_example.decode(example(one + text)) == {"x": [b"t"]}


@pytest.mark.parametrize(
    "record",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"hello world",
        b"\xff" * 12,
        example(delimited(3, delimited(1, b"\x80"))),
        example(delimited(3, delimited(1, b"\x01\xff"))),
        example(delimited(3, delimited(1, b"\xff" * 10 + b"\x01"))),
        example(delimited(2, delimited(1, b"123"))),
        delimited(1, delimited(1, delimited(1, b"\xff"))),
    ],
    ids=range(9),
)
def test_other_bytes_are_refused(record):
    with pytest.raises(ExampleError, match=r"the record is no tf\.train\.Example"):
        tf_example.decode(record)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(record):
    try:
        features = tf_example.decode(record)
    except ExampleError:
        return
    assert isinstance(features, dict)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([2**63], OverflowError, "64 bits"),
        (np.array([2**63], np.uint64), OverflowError, "64 bits"),
        ([b"a", 1], TypeError, "feature 'x': bytes and numbers are mixed"),
        (np.zeros((2, 2), np.int32), TypeError, "shape"),
        (np.array(["a"]), TypeError, "neither integers nor floats"),
        ([None], TypeError, "neither numbers nor bytes"),
    ],
)
def test_values_of_no_kind_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        tf_example.encode({"x": value})


def test_tensorflow_agrees_both_ways():
    tensorflow = pytest.importorskip(
        "tensorflow", reason="compares with TensorFlow itself: pip install 'MaxText[tensorflow]'"
    )
    rng = np.random.default_rng(0)
    train = tensorflow.train
    for _ in range(30):
        ids = rng.integers(0, 2 ** rng.integers(1, 63), rng.integers(0, 100)) - rng.integers(0, 2)
        floats = rng.normal(size=rng.integers(0, 9)).astype(np.float32)
        texts = [rng.bytes(rng.integers(0, 300)) for _ in range(rng.integers(1, 4))]
        theirs = train.Example(
            features=train.Features(
                feature={
                    "text": train.Feature(bytes_list=train.BytesList(value=texts)),
                    "ids": train.Feature(int64_list=train.Int64List(value=ids)),
                    "ähnlich": train.Feature(float_list=train.FloatList(value=floats)),
                }
            )
        ).SerializeToString(deterministic=True)
        assert tf_example.encode({"text": texts, "ids": ids, "ähnlich": floats}) == theirs
        features = tf_example.decode(theirs)
        assert features["text"] == texts
        np.testing.assert_array_equal(features["ids"], ids)
        np.testing.assert_array_equal(features["ähnlich"], floats)
