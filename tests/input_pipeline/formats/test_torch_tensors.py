"""Tensors saved by torch, read without it; the golden files were written by torch 2.13.0."""

import json
from pathlib import Path

import numpy as np
import pytest

from MaxText.input_pipeline.formats.torch_tensors import TorchFileError, read_tensor

GOLDEN = Path(__file__).parents[2] / "golden" / "torch_tensors"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["tensors"]


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files(name):
    tensor = read_tensor((GOLDEN / f"{name}.pth").read_bytes())
    assert tensor.dtype.name == EXPECTED[name]["dtype"]
    assert tensor.tolist() == EXPECTED[name]["values"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("matrix", r"\(2, 3\)"), ("floats", "FloatStorage"), ("dictionary", "dict")],
)
def test_other_objects(name, message):
    with pytest.raises(TorchFileError, match=message):
        read_tensor((GOLDEN / f"refused_{name}.pth").read_bytes())


def test_truncated_files():
    content = (GOLDEN / "int64.pth").read_bytes()
    for num_bytes in range(0, len(content), 7):
        with pytest.raises(TorchFileError):
            read_tensor(content[:num_bytes])


def test_damaged_and_other_files():
    content = bytearray((GOLDEN / "int64.pth").read_bytes())
    at = bytes(content).index(np.array(EXPECTED["int64"]["values"], "<i8").tobytes())
    content[at + 8] ^= 1
    with pytest.raises(TorchFileError, match="CRC"):
        read_tensor(bytes(content))
    for other in (b"", b"PK", b"hello", b"\x80\x02.", b"\x80\x02K\x01."):
        with pytest.raises(TorchFileError, match=r"not a torch\.save file"):
            read_tensor(other)
