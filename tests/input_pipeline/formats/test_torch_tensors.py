"""Tensors saved by torch, read without it; the golden files were written by torch 2.13.0."""

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from MaxText.input_pipeline.formats.torch_tensors import TorchFileError, read_tensor

GOLDEN = Path(__file__).parents[2] / "golden" / "torch_tensors"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["tensors"]


@pytest.mark.parametrize("name", EXPECTED)
def test_tensors_of_every_integer_type_and_format(name):
    tensor = read_tensor((GOLDEN / f"{name}.pth").read_bytes())
    assert tensor.dtype.name == EXPECTED[name]["dtype"]
    assert tensor.tolist() == EXPECTED[name]["values"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refused_matrix", r"shape \(2, 3\); one dimension"),
        ("refused_floats", "torch.FloatStorage, which no plain tensor of integers needs"),
        ("refused_dictionary", "the file holds a dict, not a tensor"),
    ],
)
def test_other_objects_are_refused(name, message):
    with pytest.raises(TorchFileError, match=message):
        read_tensor((GOLDEN / f"{name}.pth").read_bytes())


class _Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_runs_something_is_refused_unrun(tmp_path, legacy):
    path = tmp_path / "evil.pth"
    trace = tmp_path / "trace"
    evil = pickle.dumps(_Attack(trace), protocol=2)
    if legacy:
        path.write_bytes(evil)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("evil/data.pkl", evil)
    with pytest.raises(TorchFileError, match="it is not read"):
        read_tensor(path.read_bytes())
    assert not trace.exists()
    pickle.loads(evil)  # which would have run it
    assert trace.exists()


@pytest.mark.parametrize("name", ["int64", "int32_legacy"])
def test_every_truncation_is_refused(name):
    content = (GOLDEN / f"{name}.pth").read_bytes()
    for left in range(0, len(content), 7):
        with pytest.raises(TorchFileError):
            read_tensor(content[:left])


def test_a_flipped_bit_in_the_ids_is_found():
    content = bytearray((GOLDEN / "int64.pth").read_bytes())
    place = bytes(content).index(np.array(EXPECTED["int64"]["values"], "<i8").tobytes())
    content[place + 8] ^= 1
    with pytest.raises(TorchFileError, match="CRC"):
        read_tensor(bytes(content))


@pytest.mark.parametrize("content", [b"", b"PK", b"hello", b"\x80\x02.", b"\x80\x02K\x01."])
def test_other_bytes_are_refused(content):
    with pytest.raises(TorchFileError, match="no file of torch"):
        read_tensor(content)


def test_a_compressed_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"0" * 10_000)
    with pytest.raises(TorchFileError, match="compressed"):
        read_tensor((tmp_path / "x.pth").read_bytes())
