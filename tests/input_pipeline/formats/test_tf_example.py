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


@pytest.mark.parametrize(("features", "golden"), GOLDEN.values(), ids=GOLDEN)
def test_bytes_are_those_of_tensorflow(features, golden):
    assert tf_example.encode(features).hex() == golden


def test_empty_lists():
    record = tf_example.encode({"text": [], "floats": np.empty(0, np.float32)})
    assert record.hex() == "0a1a0a0c0a06666c6f617473120212000a0a0a047465787412021a00"
    features = tf_example.decode(record)
    for name, dtype in (("text", np.int64), ("floats", np.float32)):
        values = features[name]
        assert isinstance(values, np.ndarray)
        assert (values.dtype, values.shape) == (dtype, (0,))
    assert tf_example.int64_values(record, ["text"]).shape == (0,)
    assert tf_example.decode(WITHOUT_A_LIST) == {"x": []}
    assert tf_example.int64_values(WITHOUT_A_LIST, ["x"]).tolist() == []
    assert tf_example.decode(b"") == {}


NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**28), max_size=50)
VALUES = (
    NUMBERS.map(lambda values: np.array(values, np.int64))
    | st.lists(st.floats(width=32, allow_nan=False)).map(
        lambda floats: np.array(floats, np.float32)
    )
    | st.lists(st.binary(max_size=9), min_size=1)
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.dictionaries(st.text(min_size=1, max_size=5), VALUES))
def test_what_is_encoded_is_decoded(features):
    record = tf_example.encode(features)
    decoded = tf_example.decode(record)
    assert list(decoded) == sorted(features)
    for name, values in features.items():
        np.testing.assert_array_equal(decoded[name], values)
        if isinstance(values, np.ndarray):
            assert decoded[name].dtype == values.dtype
            if values.dtype == np.int64:
                np.testing.assert_array_equal(tf_example.int64_values(record, [name]), values)
    lists = {name: [*values] for name, values in features.items() if len(values)}
    assert tf_example.encode(lists) == tf_example.encode({name: features[name] for name in lists})


def test_missing_feature_is_named_with_the_present_ones():
    record = tf_example.encode({"text": "hello", "n": [1], "f": np.array([0.5], np.float32)})
    for names, named in ((["a", "b"], "a or b"), (["text"], "feature text")):
        with pytest.raises(ExampleError, match=rf"{named} .*f \(floats\), n .*, text \(bytes\)"):
            tf_example.int64_values(record, names)


@pytest.mark.parametrize("record", [b"\x0a", b"\x0a\x05abc", b"hello world", b"\xff" * 12])
def test_other_bytes(record):
    with pytest.raises(ExampleError):
        tf_example.decode(record)
