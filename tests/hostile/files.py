"""Makers of hostile files that several tests need."""

import io
import os
import random
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np


def torch_file(ids: np.ndarray) -> bytes:
    """What torch.save writes of a one-dimensional int64 tensor (version 2 of its rebuild call)."""
    ids = ids.astype("<i8")
    count = ids.size
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\nLongStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + b"J"
        + count.to_bytes(4, "little")
        + b"tQK\x00"
        + b"J"
        + count.to_bytes(4, "little")
        + b"\x85K\x01\x85\x89"
        + b"ccollections\nOrderedDict\n)RtR."
    )
    return torch_archive(pickled, {"data/0": ids.tobytes()})


def torch_archive(pickled: bytes, parts: dict[str, bytes] | None = None) -> bytes:
    """The archive that torch.save writes, around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in {"version": b"3\n", **(parts or {})}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def npy(array: np.ndarray | list) -> bytes:
    np.save(stored := io.BytesIO(), array, allow_pickle=True)
    return stored.getvalue()


def tar_archive(members: dict[str, bytes], mode: str = "w") -> bytes:
    """An archive with these files, and a folder for each name that ends as one."""
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode=mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(content))
    return stored.getvalue()


class Touches:
    """Pickled, it is a program that makes a file when it is loaded."""

    def __init__(self, marker: Path):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


def damaged(
    seed: str, content: bytes, number: int, inserted: Sequence[bytes] = ()
) -> Iterator[tuple[bytes, int]]:
    """Contents with one or two damages each, and the offset of the first of them."""
    rng = random.Random(seed)
    kinds = ["cut", "removed", "flipped", "zeroed", "repeated", *["inserted"] * 3 * bool(inserted)]
    for _ in range(number):
        found, first = _damage(content, rng, rng.choice(kinds), inserted)
        if found and rng.random() < 0.3:
            found, other = _damage(found, rng, rng.choice(kinds), inserted)
            first = min(first, other)
        yield found, first


def _damage(
    content: bytes, rng: random.Random, kind: str, inserted: Sequence[bytes]
) -> tuple[bytes, int]:
    at, length = rng.randrange(len(content)), rng.randrange(1, 300)
    before, after, end = content[:at], content[at:], content[at + length :]
    changed = {
        "cut": before,
        "removed": before + end,
        "flipped": before + bytes([content[at] ^ 1 << rng.randrange(8)]) + after[1:],
        "zeroed": before + bytes(len(after) - len(end)) + end,
        "repeated": before + content[max(0, at - length) :],
    }
    if kind == "inserted":
        return before + rng.choice(inserted) + after, at
    return changed[kind], at
