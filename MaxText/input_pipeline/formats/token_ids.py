"""Ids out of a record, in the type that the rest of the program computes with."""

import numpy as np

from MaxText.input_pipeline.data_errors import BadRecord

_LARGEST = np.iinfo(np.int32).max


def as_ids(values_N: np.ndarray, path: str, offset: int, unit: str = "byte") -> np.ndarray:
    """Integers [N] of any type as int32 ids; `offset` and `unit` are those of BadRecord.

    Raises:
      BadRecord: one is below 0 or beyond int32.
    """
    if values_N.size:
        low, high = int(values_N.min()), int(values_N.max())
        if low < 0 or high > _LARGEST:
            bad = low if low < 0 else high
            raise BadRecord(path, offset, f"{bad} is no token id (ids are 0 to {_LARGEST})", unit)
    return values_N.astype(np.int32, copy=False)
