"""Makers of hostile files that several tests need."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np


def torch_file(ids: np.ndarray) -> bytes:
    """What torch.save writes of a one-dimensional int64 tensor (version 2 of its rebuild call)."""
    ids = ids.astype("<i8")
    count = ids.size
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\nLongStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + b"J" + count.to_bytes(4, "little") + b"tQK\x00"
        + b"J" + count.to_bytes(4, "little") + b"\x85K\x01\x85\x89"
        + b"ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip
    return torch_archive(pickled, {"data/0": ids.tobytes()})


def torch_archive(pickled: bytes, parts: dict[str, bytes] | None = None) -> bytes:
    """The archive that torch.save writes, around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in {"version": b"3\n", **(parts or {})}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def tar_archive(members: dict[str, bytes]) -> bytes:
    """An archive with these files."""
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stored.getvalue()


class Touches:
    """Pickled, it is a program that makes a file when it is loaded."""

    def __init__(self, marker: Path):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)
