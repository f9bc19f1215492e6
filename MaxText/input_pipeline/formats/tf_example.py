"""Encodes and decodes `tf.train.Example` messages without TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from MaxText.errors import UserError

Value = Sequence[int] | Sequence[float] | np.ndarray | Sequence[bytes | str] | bytes | str

# tensorflow/core/example/{feature,example}.proto. The map is declared as its wire format, a list
# of entries, because protobuf does not serialize maps in a fixed order.
_DEFINITION = """
name: "example.proto" package: "example" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: "Int64List" oneof_index: 0 } }
message_type { name: "Entry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type_name: "Feature" } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Entry" } }
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
"""
# A separate pool, because TensorFlow registers the same messages if imported.
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_DEFINITION, descriptor_pb2.FileDescriptorProto()))
_Example: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("example.Example"))

_CONTENTS = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "integers", None: "empty"}


class ExampleError(UserError):
    """Not a tf.train.Example, or a missing feature; the caller adds the file."""


def encode(features: Mapping[str, Value]) -> bytes:
    """Serializes an example as TensorFlow's deterministic serialization.

    Args:
      features: Values by name. Integers become an Int64List, floats a FloatList, bytes and str a
        BytesList; an empty sequence an Int64List.

    Raises:
      TypeError: A value of another type.
      ValueError: An integer beyond int64.
    """
    example = _Example()
    example.features.SetInParent()
    for name in sorted(features):
        value = features[name]
        feature = example.features.feature.add(key=name).value
        if isinstance(value, np.ndarray):
            is_float = value.dtype.kind == "f"
            values = value.tolist()
        else:
            values = [value] if isinstance(value, bytes | str) else value
            is_float = any(isinstance(item, float | np.floating) for item in values)
        if len(values) and isinstance(values[0], bytes | str):
            kind = feature.bytes_list
            values = [item.encode() if isinstance(item, str) else item for item in values]
        else:
            kind = feature.float_list if is_float else feature.int64_list
        kind.SetInParent()
        kind.value.extend(values)
    return example.SerializeToString()


def decode(record: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """Returns all features by name: int64 [N], float32 [N] or a list of bytes.

    A feature without a list kind is an empty list. Raises ExampleError.
    """
    return {name: _values(feature) for name, feature in _features(record).items()}


def int64_values(record: bytes, names: Sequence[str]) -> np.ndarray:
    """Returns the integers (int64 [N]) of the first of `names` that has integers.

    Raises ExampleError if there is none, or the record is not an example.
    """
    features = _features(record)
    for name in names:
        # An empty list may have no kind.
        if name in features and features[name].WhichOneof("kind") in ("int64_list", None):
            return np.array(features[name].int64_list.value, np.int64)
    alternatives = " or ".join(names)
    raise ExampleError(f"there is no integer feature {alternatives} (features: {describe(record)})")


def describe(record: bytes) -> str:
    """Describes the features of a record: `text (bytes), ids (integers)`."""
    described = (
        f"{name} ({_CONTENTS[feature.WhichOneof('kind')]})"
        for name, feature in sorted(_features(record).items(), key=lambda pair: pair[0])
    )
    return ", ".join(described) or "none"


def _features(record: bytes) -> dict[str, Any]:
    """Returns the Feature messages of a record by name; raises ExampleError."""
    try:
        entries = _Example.FromString(record).features.feature
    except DecodeError as error:
        raise ExampleError(f"the record is not a tf.train.Example: {error}") from error
    return {entry.key: entry.value for entry in entries}  # the last of duplicate names wins


def _values(feature: Any) -> np.ndarray | list[bytes]:
    """Returns the values of a Feature message."""
    kind = feature.WhichOneof("kind")
    if kind is None or kind == "bytes_list":
        return list(feature.bytes_list.value)
    dtype = np.int64 if kind == "int64_list" else np.float32
    return np.array(getattr(feature, kind).value, dtype)
