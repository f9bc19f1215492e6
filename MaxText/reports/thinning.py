"""Thinning that keeps spikes, and smoothing."""

import itertools
import math

import numpy as np

# A screen has about as many columns; more would only make the page slow.
MOST_POINTS = 2000
MOST_SMOOTH_POINTS = 600

# Values of the running median on each side, at least.
_LEAST_HALF = 4
# Window of the running median: this part of all points, on both sides together.
_WINDOWS = 25


def thin(values_N: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Returns the indices of points to draw: minimum and maximum of each of many equal ranges.

    Args:
      values_N: float; the first NaN of a range is kept, so that the gap shows.
      most: Maximum number of indices.

    Returns:
      Ascending int64 indices, with the first and the last.
    """
    count = values_N.size
    if count <= most:
        return np.arange(count)
    # Up to three of each stretch, and both ends.
    edges = np.linspace(0, count, (most - 2) // 3 + 1).astype(np.int64)
    kept = [0, count - 1]
    for begin, end in itertools.pairwise(edges):
        stretch = values_N[begin:end]
        absent = np.isnan(stretch)
        if absent.any():
            kept.append(begin + int(absent.argmax()))
        if not absent.all():
            kept += [begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))]
    return np.unique(np.array(kept, np.int64))


def median_window(count: int) -> int:
    """Returns the window of a running median: 1/25 of the values, but nine at least."""
    return 2 * max(count // (2 * _WINDOWS), _LEAST_HALF) + 1


def running_median(values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (indices [M], medians [M]) with M at most 600; NaN where a whole window is absent.

    A spike of one step does not bend a median, and a centered window does not lag behind a falling
    loss. NaN counts as absent.
    """
    count = values_N.size
    half = median_window(count) // 2
    spacing = max(count / MOST_SMOOTH_POINTS, 1.0)
    indices_M = np.minimum((np.arange(math.ceil(count / spacing)) * spacing).astype(int), count - 1)
    if count:
        indices_M[-1] = count - 1
    medians_M = np.full(indices_M.size, np.nan)
    for place, centre in enumerate(indices_M):
        if np.isnan(values_N[centre]):
            continue
        # At the steep beginning the window shrinks on both sides, at the flat end on one.
        reach = min(half, centre)
        window = values_N[centre - reach : centre + reach + 1]
        medians_M[place] = np.median(window[~np.isnan(window)])
    return indices_M, medians_M
