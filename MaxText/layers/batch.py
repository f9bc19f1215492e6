"""The batch between input pipeline and model."""

import dataclasses
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of sequences; NumPy arrays on the host, jax arrays on devices."""

    tokens_BT: Any  # int32 input ids
    targets_BT: Any  # int32 ids to predict
    loss_mask_BT: Any  # float32, 1 if the target counts in the loss, 0 at padding and boundaries
    positions_BT: Any = None  # int32 position within the document; None is 0..T-1
    segments_BT: Any = None  # int32 document from 1, bounds attention; 0: padding; None: only one


def batch_shapes(batch_size: int, length: int, with_documents: bool) -> Batch:
    ids = jax.ShapeDtypeStruct((batch_size, length), np.int32)
    weights = jax.ShapeDtypeStruct((batch_size, length), np.float32)
    documents = ids if with_documents else None
    return Batch(ids, ids, weights, documents, documents)
