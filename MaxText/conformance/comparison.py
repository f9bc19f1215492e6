"""Comparison of parameter and gradient trees."""

from collections.abc import Iterator

import jax
import numpy as np

from MaxText.checkpointing.compatibility import leaf_path
from MaxText.value_types import PyTree

FLOAT32_ROUNDING = 2.0**-24  # relative


def arrays_by_name(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_path(path): np.asarray(leaf) for path, leaf in leaves}


def pair_arrays(tree: PyTree, other: PyTree) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields the name and both leaves for each leaf of a tree and the same one of another."""
    other_arrays = arrays_by_name(other)
    return ((name, leaf, other_arrays[name]) for name, leaf in arrays_by_name(tree).items())


def describe_difference(
    actual_results: PyTree,
    expected_results: PyTree,
    loss_tolerance: float,
    gradient_tolerance: float,
) -> str | None:
    """Describes the first relative error above its bound; None if there is none.

    A gradient below the rounding of the largest one is 0 in exact arithmetic, such as that of a
    key's bias without rotary positions, which a softmax ignores. Its digits are not compared.

    Args:
      actual_results: Loss and gradients.
      expected_results: The same, to compare with.
      loss_tolerance: Relative to the loss.
      gradient_tolerance: Relative to the largest number of each array.
    """
    (actual_loss, actual_gradients) = actual_results
    (loss, gradients) = expected_results
    if not abs(actual_loss - loss) <= loss_tolerance * abs(loss):
        return f"the loss is {actual_loss:.7f} instead of {loss:.7f}"
    pairs = list(pair_arrays(gradients, actual_gradients))
    rounding = FLOAT32_ROUNDING * np.max([np.abs(expected).max() for _, expected, _ in pairs])
    for name, expected, actual in pairs:
        # np.maximum passes on NaN, which is above no bound.
        if np.maximum(np.abs(expected).max(), np.abs(actual).max()) < rounding:
            continue
        error = np.abs(actual - expected).max() / (np.abs(expected).max() or 1.0)
        if not error <= gradient_tolerance:
            return f"the gradient of {name} differs by {error:.1e} of its largest number"
    return None
