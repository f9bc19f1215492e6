"""Token ids in webdataset archives: a member like `000123.input_id.pth` holds one tensor.

Members of one sample share the part of their name before the first dot; what follows says which
field it is and how it is stored: .pth and .pt as torch.save does, .npy as numpy does.
"""

import dataclasses
import io
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord
from MaxText.input_pipeline.formats.tar_members import Member, members
from MaxText.input_pipeline.formats.token_ids import as_ids
from MaxText.input_pipeline.formats.torch_tensors import TorchFileError, read_tensor
from MaxText.input_pipeline.storage import Blocks, open_file
from MaxText.input_pipeline.token_store.record_index import FileRecords, FileScan

# Python's ast, which parses the header of .npy, fails now and then in threads (3.11).
_HEADER_LOCK = threading.Lock()

_ENDINGS = (".pth", ".pt", ".npy")
# Fields that are taken without asking when a sample has several.
_USUAL = ("input_id", "input_ids", "tokens", "text", "")


@dataclasses.dataclass(frozen=True)
class TarTensors:
    """See RecordFormat. `field`: which member of a sample is read; empty for the only one."""

    unit: ClassVar[str] = "byte"
    field: str

    def scan(self, path: str) -> FileRecords:
        file = open_file(path)
        data = Blocks(file)
        found = FileScan(path)
        for member in self._chosen(members(file), path):
            stop = member.offset + member.size
            found.add(
                member.offset,
                member.size,
                lambda at=member.offset, stop=stop: _ids(data[at:stop], path, at).size,
            )
        return found.records()

    def _chosen(self, found: list[Member], path: str) -> list[Member]:
        """The members that hold tokens, one of each sample."""
        fields: dict[str, list[Member]] = {}
        for member in found:
            name = member.name.rsplit("/", 1)[-1]
            if name.endswith(_ENDINGS):
                # 12.input_id.pth is field input_id; 12.pth has no name of a field.
                fields.setdefault(".".join(name.split(".")[1:-1]), []).append(member)
        if not found:
            return []
        wanted = [self.field] if self.field or len(fields) != 1 else list(fields)
        if not self.field and len(fields) > 1:
            wanted = [field for field in _USUAL if field in fields]
        if not wanted or wanted[0] not in fields:
            there = ", ".join(sorted(field or "(no name)" for field in fields)) or "none"
            asked = f"field {self.field}" if self.field else "one field of tokens"
            raise UserError(
                f"{path} has no tensors of {asked} (fields of its {'/'.join(_ENDINGS)} members: "
                f"{there}; first member: {found[0].name}). Set tokens_field to the one that holds "
                "token ids."
            )
        return fields[wanted[0]]

    def read(self, path: str, offsets: Sequence[int], sizes: Sequence[int]) -> list[np.ndarray]:
        contents = open_file(path).read_many(list(zip(offsets, sizes, strict=True)))
        return [
            _ids(content, path, offset) for offset, content in zip(offsets, contents, strict=True)
        ]


def _ids(content: bytes, path: str, offset: int) -> np.ndarray:
    # Formats without a checksum show damage by values that are no ids.
    return as_ids(_tensor(content, path, offset), path, offset)


def _tensor(content: bytes, path: str, offset: int) -> np.ndarray:
    if content.startswith(b"\x93NUMPY"):
        try:
            with _HEADER_LOCK:
                values = np.load(io.BytesIO(content), allow_pickle=False)
        # What a damaged header raises is any kind of error; MemoryError for a shape of 2^60.
        except Exception as error:
            raise BadRecord(path, offset, f"the .npy member is damaged ({error})") from error
        if values.ndim != 1 or values.dtype.kind not in "iu":
            reason = f"the member is {values.dtype} of shape {values.shape}, not a list of ids"
            raise BadRecord(path, offset, reason)
        return values
    try:
        return read_tensor(content)
    except TorchFileError as error:
        raise BadRecord(path, offset, str(error)) from error
