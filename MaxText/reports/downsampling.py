"""Thinning (keeping spikes) and smoothing."""

import itertools
import math

import numpy as np

MAX_POINTS = 1200  # about a screen's columns; more would only slow the page down
MAX_SMOOTH_POINTS = 400

_MIN_HALF = 4  # minimum half window of the running median
_WINDOWS = 25  # the window is 1/_WINDOWS of all points


def downsample(values_N: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Returns ascending indices of points to draw, at most `most`.

    Keeps minimum, maximum and the first NaN (so that the gap shows) of equal ranges.
    """
    count = values_N.size
    if count <= most:
        return np.arange(count)
    # Up to three points per range, and both ends.
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
    """Returns the window of a running median: 1/25, nine at least."""
    return 2 * max(count // (2 * _WINDOWS), _MIN_HALF) + 1


def running_median(values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (indices [M], medians [M]), M at most 600, without NaN."""
    count = values_N.size
    half = median_window(count) // 2
    spacing = max(count / MAX_SMOOTH_POINTS, 1.0)
    indices_M = np.minimum((np.arange(math.ceil(count / spacing)) * spacing).astype(int), count - 1)
    if count:
        indices_M[-1] = count - 1
    # The window shrinks on both sides at the steep start, on one side at the flat end.
    reach_M = np.minimum(half, indices_M)
    offsets_W = np.arange(-half, half + 1)
    padded = np.pad(values_N, half, constant_values=np.nan)
    windows_MW = padded[indices_M[:, None] + half + offsets_W]
    windows_MW[np.abs(offsets_W) > reach_M[:, None]] = np.nan
    absent_M = np.isnan(values_N[indices_M])
    windows_MW[absent_M] = 0.0  # all NaN would warn
    medians_M = np.nanmedian(windows_MW, axis=1)
    medians_M[absent_M] = np.nan
    return indices_M, medians_M
