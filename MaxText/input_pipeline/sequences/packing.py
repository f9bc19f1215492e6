"""Packs whole documents into sequences, by first fit or best fit.

Legend: T tokens of a window, I items, R sequences (rows), G groups.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from MaxText.input_pipeline.local_cache import cached_arrays
from MaxText.input_pipeline.sequences.windows import (
    SequenceOptions,
    TokenRanges,
    Windows,
    expand,
    items_of_rows,
    ranges_in_rows,
)
from MaxText.input_pipeline.token_store.store import TokenSplit

# Packing consecutive documents in groups keeps a row's documents close in the files and vectorizes
# planning over groups; only the last rows of each group stay partly empty.
GROUP = 1024

# Documents planned at a time, in whole groups: limits memory to about 200 MB.
_AT_ONCE = 1024 * GROUP


def pack_group_rows(sizes_GI: np.ndarray, length: int, best_fit: bool) -> np.ndarray:
    """Packs items in order; returns the row of each within its group.

    First fit takes the first row of the group with enough room, best fit the fullest such row (the
    first of equals); a new row is started if none fits. Sizes are at most `length`; 0 means empty.
    """
    num_groups, num_items = sizes_GI.shape
    # Of two consecutive rows at least one is more than half full.
    max_rows = min(num_items, int(2 * (sizes_GI.sum(axis=1).max(initial=0) // length) + 2))
    free_GR = np.full((num_groups, max_rows), length, np.int32)
    rows_GI = np.zeros(sizes_GI.shape, np.int32)
    groups = np.arange(num_groups)
    for item in range(num_items):
        sizes_G = sizes_GI[:, item, None]
        if best_fit:
            chosen_G = np.where(free_GR >= sizes_G, free_GR, length + 1).argmin(axis=1)
        else:
            chosen_G = (free_GR >= sizes_G).argmax(axis=1)
        rows_GI[:, item] = chosen_G
        free_GR[groups, chosen_G] -= sizes_GI[:, item]
    return rows_GI


class FirstFitPacking(Windows):
    """Sequences of whole documents; longer ones give windows and a rest.

    A range of n tokens fills n - 1 positions, so every token but the first of its document is a
    target exactly once per epoch.
    """

    joined = False

    def __init__(self, data: TokenSplit, options: SequenceOptions, best_fit: bool, cache_dir: Path):
        super().__init__(data, options)
        self.description = f"whole documents by {'best' if best_fit else 'first'} fit"
        offsets = data.store.document_offsets
        key = f"{data.fingerprint} {self.length} {best_fit} {GROUP}"
        self._plan = cached_arrays(
            cache_dir, "packing2", key, lambda: plan_rows(offsets, self.length, best_fit)
        )

    def __len__(self) -> int:
        return len(self._plan["first_item"]) - 1

    def _ranges(self, windows: np.ndarray, draws: np.ndarray) -> TokenRanges:
        row_P, item_P = items_of_rows(self._plan["first_item"], windows)
        starts_P = np.asarray(self._plan["starts"][item_P])
        offsets = self.data.store.document_offsets
        documents_P = np.searchsorted(offsets, starts_P, side="right")
        stops_P = np.minimum(starts_P + self.length + 1, offsets[documents_P])
        return ranges_in_rows(row_P, starts_P, stops_P)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        # Groups cross files; a row belongs to the file of its first item.
        starts_R = np.asarray(self._plan["starts"][self._plan["first_item"][:-1]])
        return np.searchsorted(
            np.maximum.accumulate(starts_R), self.data.store.document_offsets[documents]
        )


def plan_rows(
    offsets: np.ndarray, length: int, best_fit: bool, at_once: int = _AT_ONCE
) -> Iterator[dict[str, np.ndarray]]:
    """Yields blocks of `starts` (by item) and `first_item` (by row)."""
    begins = np.empty(0, np.int64)
    sizes = np.empty(0, np.int64)
    num_items = 0
    for first in range(0, max(len(offsets) - 1, 1), at_once):
        block = np.asarray(offsets[first : first + at_once + 1])
        new = np.diff(block) - 1
        begins = np.concatenate([begins, block[:-1][new > 0]])
        sizes = np.concatenate([sizes, new[new > 0]])
        is_last = first + at_once >= len(offsets) - 1
        count = len(sizes) if is_last else len(sizes) // GROUP * GROUP
        starts, first_item = _plan_groups(begins[:count], sizes[:count], length, best_fit)
        yield {"starts": starts, "first_item": first_item + num_items}
        num_items += len(starts)
        begins = begins[count:]
        sizes = sizes[count:]
    yield {"starts": np.empty(0, np.int64), "first_item": np.array([num_items])}


def _plan_groups(
    begins_D: np.ndarray, sizes_D: np.ndarray, length: int, best_fit: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the items of groups by row, and the first item of each row."""
    full_D = sizes_D // length
    rest_D = sizes_D - full_D * length
    num_groups = -(-len(sizes_D) // GROUP)
    rest_GI = np.zeros((num_groups, GROUP), np.int32)
    rest_GI.reshape(-1)[: len(rest_D)] = rest_D
    row_D = pack_group_rows(rest_GI, length, best_fit).reshape(-1)
    short = np.flatnonzero(rest_D)
    # Order: by group, first packed rows, then full windows.
    full = np.repeat(np.arange(len(sizes_D)), full_D)
    number = expand(np.zeros_like(full_D), full_D)
    starts = np.concatenate(
        [begins_D[short] + full_D[short] * length, begins_D[full] + number * length]
    )
    # Packed rows are numbered below GROUP within their group, full windows from GROUP on.
    group = np.concatenate([short // GROUP, full // GROUP])
    row = np.concatenate([row_D[short], GROUP + np.arange(len(full))])
    order = np.lexsort((row, group))
    group = group[order]
    row = row[order]
    starts = starts[order]
    new_row = np.ones(len(starts), bool)
    new_row[1:] = (row[1:] != row[:-1]) | (group[1:] != group[:-1])
    return starts, np.flatnonzero(new_row)
