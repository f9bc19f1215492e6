"""What every part is built with, besides its own section: sizes, initialisers, number formats."""

import dataclasses

import jax.numpy as jnp

from MaxText.configuration.layer_sections import Dimensions
from MaxText.layers.weights import Initializers


@dataclasses.dataclass(frozen=True)
class Building:
    """Handed down from the decoder to its parts while they declare their weights."""

    dimensions: Dimensions
    initializers: Initializers
    dtype: jnp.dtype  # activations
    weight_dtype: jnp.dtype  # parameters
    precision: str | None  # of matrix products, as jax.lax.Precision names it
    zero_centered_norms: bool  # whether scales of norms are stored as their difference from 1
