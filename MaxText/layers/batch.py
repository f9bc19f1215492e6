"""What the input pipeline yields and the model reads.

Legend: B sequences, T tokens of a window.
"""

import dataclasses
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of sequences; NumPy arrays on the host, jax arrays on devices.

    Attributes:
      tokens_BT: int32 input ids.
      targets_BT: int32 ids to predict.
      weights_BT: float32, 1 where the target counts in the loss, 0 at padding and boundaries.
      positions_BT: int32 position within the document, None for 0..T-1.
      segments_BT: int32 number of the document from 1, 0 is padding; None if a sequence is one
        document. Attention stays within a segment.
    """

    tokens_BT: Any
    targets_BT: Any
    weights_BT: Any
    positions_BT: Any = None
    segments_BT: Any = None


def batch_shapes(num_rows: int, length: int, with_documents: bool) -> Batch:
    """Returns the shapes of a batch, to compile before data is read."""
    ids = jax.ShapeDtypeStruct((num_rows, length), np.int32)
    weights = jax.ShapeDtypeStruct((num_rows, length), np.float32)
    documents = ids if with_documents else None
    return Batch(ids, ids, weights, documents, documents)
