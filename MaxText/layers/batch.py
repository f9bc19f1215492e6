"""The batch between input pipeline and model.

Legend: B sequences, T tokens.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

# NumPy's on the host, jax's on devices, a jax.ShapeDtypeStruct before there are values.
BatchArray = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of sequences.

    Attributes:
      tokens_BT: int32 input ids.
      targets_BT: int32 ids to predict.
      loss_mask_BT: float32, 1 if the target counts in the loss, 0 at padding and boundaries.
      positions_BT: int32 positions within the document; None is 0 to T - 1.
      segments_BT: int32 document of each token, from 1, which bounds attention; 0 is padding. None
        is a single document.
    """

    tokens_BT: BatchArray
    targets_BT: BatchArray
    loss_mask_BT: BatchArray
    positions_BT: BatchArray = None
    segments_BT: BatchArray = None


def batch_shapes(batch_size: int, length: int, with_documents: bool) -> Batch:
    """Returns the shapes of a batch.

    Args:
      batch_size: B.
      length: T.
      with_documents: Whether it has positions and segments.
    """
    ids = jax.ShapeDtypeStruct((batch_size, length), np.int32)
    weights = jax.ShapeDtypeStruct((batch_size, length), np.float32)
    documents = ids if with_documents else None
    return Batch(
        tokens_BT=ids,
        targets_BT=ids,
        loss_mask_BT=weights,
        positions_BT=documents,
        segments_BT=documents,
    )
