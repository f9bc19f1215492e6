"""`tf.train.Example` messages, read and written without TensorFlow or protobuf.

    Example   { 1: Features }
    Features  { 1: entry { 1: name, 2: Feature }, ... }
    Feature   { 1: BytesList | 2: FloatList | 3: Int64List }, each { 1: values }

Lists of integers and floats are written packed and read packed or not. Unknown fields are skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError

Value = Sequence[int] | np.ndarray | Sequence[bytes] | bytes | str

_BYTES, _FLOAT, _INT64 = 1, 2, 3
_KIND_NAMES = {_BYTES: "bytes", _FLOAT: "floats", _INT64: "integers"}
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5

# A 64-bit integer takes at most 10 bytes of 7 bits.
_LONGEST_VARINT = 10
# By the bytes of a varint: which bits of the little-endian word at its start are its own.
_OWN_BITS = np.array([0, 0x7F, 0x7F7F, 0x7F7F7F, 0x7F7F7F7F], np.uint32)


class ExampleError(UserError):
    """A record is no tf.train.Example, or lacks the feature that is asked for.

    The caller, who knows the file, adds its name.
    """


class _Field(NamedTuple):
    """One field of a message: its contents are bytes [start, stop) of the record.

    A varint's `start` is where it begins.
    """

    number: int
    wire_type: int
    start: int
    stop: int


def encode(features: Mapping[str, Value]) -> bytes:
    """Writes a record, the same bytes as TensorFlow's deterministic serialisation.

    Args:
      features: by name. Integers (sequence, or array of an integer dtype) become an Int64List,
        floats a FloatList, bytes and str a BytesList of one or, in a sequence, of several. An
        empty sequence becomes an Int64List; an empty array what its dtype says.

    Raises:
      TypeError: a value is of no such kind.
      OverflowError: an integer is outside [-2^63, 2^63).
    """
    entries = []
    for name in sorted(features):
        try:
            feature = _encode_feature(features[name])
        except TypeError as error:
            raise TypeError(f"feature {name!r}: {error}") from error
        entry = _delimited(1, name.encode()) + _delimited(2, feature)
        entries.append(_delimited(1, entry))
    return _delimited(1, b"".join(entries))


def decode(record: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """All features of a record: int64 [N], float32 [N] or a list of bytes, by name.

    A feature without any kind of list is an empty list.

    Raises:
      ExampleError: the bytes are no tf.train.Example.
    """
    return {
        name: [] if kind is None else _values(record, kind, spans)
        for name, (kind, spans) in _features(record).items()
    }


def int64_values(record: bytes, names: Sequence[str]) -> np.ndarray:
    """The integers of the first of `names` that the record has.

    Returns:
      int64 [N].

    Raises:
      ExampleError: none is there, or it holds no integers; says which features there are.
    """
    values = _values(record, _INT64, _int64_spans(record, names))
    assert isinstance(values, np.ndarray)
    return values


def count_int64(record: bytes, names: Sequence[str]) -> int:
    """How many integers `int64_values` would return, without decoding them.

    Raises:
      ExampleError: as int64_values.
    """
    total = 0
    for start, stop in _int64_spans(record, names):
        for field in _fields(record, start, stop):
            if field.number == 1 and field.wire_type == _DELIMITED:
                data = np.frombuffer(record, np.uint8, field.stop - field.start, field.start)
                total += _count_varints(data)
            elif field.number == 1 and field.wire_type == _VARINT:
                total += 1
    return total


def describe(record: bytes) -> str:
    """The features of a record in words: `text (bytes), ids (integers)`.

    Raises:
      ExampleError: the bytes are no tf.train.Example.
    """
    features = _features(record)
    return (
        ", ".join(
            f"{name} ({_KIND_NAMES.get(kind or 0, 'empty')})"
            for name, (kind, _) in sorted(features.items())
        )
        or "none"
    )


def _encode_feature(value: Value) -> bytes:
    if isinstance(value, str):
        return _delimited(_BYTES, _delimited(1, value.encode()))
    if isinstance(value, bytes):
        return _delimited(_BYTES, _delimited(1, value))
    if not isinstance(value, np.ndarray):
        if any(isinstance(item, bytes | str) for item in value):
            items = [item.encode() if isinstance(item, str) else item for item in value]
            if not all(isinstance(item, bytes) for item in items):
                raise TypeError("bytes and numbers are mixed")
            return _delimited(_BYTES, b"".join(_delimited(1, bytes(item)) for item in items))
        if not all(isinstance(item, int | float | np.number) for item in value):
            raise TypeError("neither numbers nor bytes")
        value = np.asarray(value) if len(value) else np.empty(0, np.int64)
        if value.dtype == object:
            raise OverflowError("an integer does not fit 64 bits")
    if value.ndim != 1:
        raise TypeError(f"an array of shape {value.shape} is no list")
    if value.dtype.kind == "f":
        content = value.astype("<f4").tobytes()
        return _delimited(_FLOAT, _delimited(1, content) if content else b"")
    if value.dtype.kind in "iub":
        if value.dtype == np.uint64 and value.size and int(value.max()) >= 2**63:
            raise OverflowError("an integer does not fit 64 bits")
        content = _encode_varints(value.astype(np.int64))
        return _delimited(_INT64, _delimited(1, content) if content else b"")
    raise TypeError(f"an array of {value.dtype} is neither integers nor floats")


def _delimited(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _DELIMITED]) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode_varints(values_N: np.ndarray) -> bytes:
    """Integers int64 [N], each as the varint of its two's complement."""
    if not values_N.size:
        return b""
    rest = values_N.astype(np.uint64)
    largest = int(rest.max())
    width = max(1, -(-largest.bit_length() // 7))
    # Row i is value i in `width` groups of 7 bits; the groups beyond its last one are left out.
    shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
    rest = rest[:, None] >> shifts
    more = np.empty(rest.shape, bool)
    more[:, :-1] = rest[:, 1:] != 0
    more[:, -1] = False
    groups = (rest & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
    kept = np.ones(rest.shape, bool)
    kept[:, 1:] = more[:, :-1]
    return groups[kept].tobytes()


def _read_varint(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """The varint at `at` and the place after it."""
    value = shift = 0
    while at < stop and shift < 7 * _LONGEST_VARINT:
        byte = record[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ExampleError("the record is no tf.train.Example: a number in it does not end")


def _fields(record: bytes, start: int, stop: int) -> Iterator[_Field]:
    at = start
    while at < stop:
        tag, at = _read_varint(record, at, stop)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _DELIMITED:
            length, at = _read_varint(record, at, stop)
            field = _Field(number, wire_type, at, at + length)
        elif wire_type == _VARINT:
            field = _Field(number, wire_type, at, _read_varint(record, at, stop)[1])
        elif wire_type in (_FIXED64, _FIXED32):
            field = _Field(number, wire_type, at, at + (8 if wire_type == _FIXED64 else 4))
        else:
            raise ExampleError(f"the record is no tf.train.Example: wire type {wire_type} in it")
        if number == 0 or field.stop > stop:
            raise ExampleError("the record is no tf.train.Example: a field reaches beyond its end")
        yield field
        at = field.stop


_Spans = list[tuple[int, int]]


def _features(record: bytes) -> dict[str, tuple[int | None, _Spans]]:
    """By name: the kind of list (None for none) and where its contents lie.

    As protobuf merges: of equal names the last wins, of several kinds the last, and pieces of one
    kind are one list.
    """
    features: dict[str, tuple[int | None, _Spans]] = {}
    for top in _fields(record, 0, len(record)):
        if (top.number, top.wire_type) != (1, _DELIMITED):
            continue
        for entry in _fields(record, top.start, top.stop):
            if (entry.number, entry.wire_type) != (1, _DELIMITED):
                continue
            name, kind, spans = "", None, []
            for part in _fields(record, entry.start, entry.stop):
                if (part.number, part.wire_type) == (1, _DELIMITED):
                    name = _name(record[part.start : part.stop])
                elif (part.number, part.wire_type) == (2, _DELIMITED):
                    for values in _fields(record, part.start, part.stop):
                        if values.number in _KIND_NAMES and values.wire_type == _DELIMITED:
                            if values.number != kind:
                                kind, spans = values.number, []
                            spans.append((values.start, values.stop))
            features[name] = (kind, spans)
    return features


def _name(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ExampleError(
            "the record is no tf.train.Example: a feature's name is no UTF-8"
        ) from error


def _int64_spans(record: bytes, names: Sequence[str]) -> _Spans:
    features = _features(record)
    for name in names:
        if name in features:
            kind, spans = features[name]
            # An empty list may be written without saying of what.
            if kind in (_INT64, None):
                return spans
            raise ExampleError(
                f"feature {name} holds {_KIND_NAMES[kind]}, not integers "
                f"(features there: {describe(record)})"
            )
    wanted = " or ".join(names)
    raise ExampleError(f"there is no feature {wanted} (features there: {describe(record)})")


def _values(record: bytes, kind: int, spans: _Spans) -> np.ndarray | list[bytes]:
    fields = [
        field
        for start, stop in spans
        for field in _fields(record, start, stop)
        if field.number == 1
    ]
    if kind == _BYTES:
        return [record[field.start : field.stop] for field in fields]
    pieces = []
    for field in fields:
        size = field.stop - field.start
        if kind == _INT64 and field.wire_type in (_DELIMITED, _VARINT):
            pieces.append(_decode_varints(np.frombuffer(record, np.uint8, size, field.start)))
        elif kind == _FLOAT and field.wire_type in (_DELIMITED, _FIXED32):
            if size % 4:
                raise ExampleError(f"the record is no tf.train.Example: {size} bytes of floats")
            pieces.append(np.frombuffer(record, "<f4", size // 4, field.start))
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.empty(0, np.int64 if kind == _INT64 else np.float32), *pieces])


def _count_varints(data_N: np.ndarray) -> int:
    if data_N.size and data_N[-1] >= 0x80:
        raise ExampleError("the record is no tf.train.Example: a number in it does not end")
    return int(np.count_nonzero(data_N < 0x80))


def _decode_varints(data_N: np.ndarray) -> np.ndarray:
    """The varints that fill the bytes uint8 [N], as int64."""
    if not data_N.size:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(data_N < 0x80)
    if not ends.size or ends[-1] != data_N.size - 1:
        raise ExampleError("the record is no tf.train.Example: a number in it does not end")
    starts = np.empty_like(ends)
    starts[0] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest <= 4:
        # Each varint lies inside the 4 bytes from its start: one word holds all of it.
        padded = np.zeros(data_N.size + 3, np.uint8)
        padded[: data_N.size] = data_N
        words = np.ndarray((data_N.size,), "<u4", padded, strides=(1,)).take(starts)
        words &= _OWN_BITS.take(sizes)
        values = words & np.uint32(0x7F)
        for place in range(1, longest):
            values |= (words >> np.uint32(place)) & np.uint32(0x7F << 7 * place)
        return values.astype(np.int64)
    if longest > _LONGEST_VARINT:
        raise ExampleError("the record is no tf.train.Example: a number in it has over 64 bits")
    values = np.zeros(starts.size, np.uint64)
    for place in range(longest):
        longer = np.flatnonzero(sizes > place)
        group = data_N[starts[longer] + place].astype(np.uint64) & np.uint64(0x7F)
        values[longer] |= group << np.uint64(7 * place)
    return values.view(np.int64)
