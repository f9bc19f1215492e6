"""Packs documents whole into rows: first fit and best fit, planned from their lengths alone.

Legend: T tokens of a window, I items, R rows, G groups.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.sequences.windows import EMPTY, Cutting, Spans, Windows
from MaxText.input_pipeline.token_store.token_data import TokenData, boundaries_digest

# Documents are packed in groups of this many that follow each other, so that a row's documents lie
# near each other in the files, all groups are planned at once by array operations, and few rows
# (the last of each group) stay partly empty.
GROUP = 1024

# Groups planned at a time: bounds the table of free places to some 50 MB.
_GROUPS_AT_A_TIME = 4096

# Plans of more items than this are kept on disk: at 3 million items a second they cost more than
# a start should.
_KEPT_FROM = 2**20


def pack_group_rows(sizes_GI: np.ndarray, length: int, best_fit: bool) -> np.ndarray:
    """Puts the items of each group into rows, in order.

    First fit takes the first row of the group with enough free places, best fit the fullest such
    row (the first of equals); a new row is begun where no other fits.

    Args:
      sizes_GI: places each item needs, 0 < size <= length; 0 where there is no item.
      length: T, places of a row.

    Returns:
      int32 like `sizes_GI`: the row within the group.
    """
    num_groups, num_items = sizes_GI.shape
    # Of two rows in a row at least one is more than half full.
    most_rows = min(num_items, int(2 * (sizes_GI.sum(axis=1).max(initial=0) // length) + 2))
    free_GR = np.full((num_groups, most_rows), length, np.int32)
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


_FILES = ("starts.npy", "first_item.npy")


class PackedDocuments(Windows):
    """Rows of several whole documents; those longer than T give full windows and a last piece.

    A piece of n tokens fills n - 1 places and predicts in each, so that every token but the first
    of its document is a target exactly once per epoch, and no place is spent on a last token.
    """

    joined = False

    def __init__(self, data: TokenData, cutting: Cutting, best_fit: bool, cache_dir: Path):
        super().__init__(data, cutting)
        self._best_fit = best_fit
        self._starts_I, self._first_item_R = self._load_or_plan(cache_dir)

    def _load_or_plan(self, cache_dir: Path) -> tuple[np.ndarray, np.ndarray]:
        offsets = self.data.stream.document_offsets
        # A plan depends on these alone; data of one fingerprint could differ in them.
        name = f"{boundaries_digest(offsets)} {self.length} {self._best_fit} {GROUP}"
        folder = cache_dir / f"packing-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        try:
            starts, first_item = (np.load(folder / file, mmap_mode="r") for file in _FILES)
            return starts, first_item
        except (OSError, EOFError, ValueError):  # not there, or damaged
            plan = _plan(offsets, self.length, self._best_fit)
        if len(plan[0]) >= _KEPT_FROM:
            _keep(folder, plan)
        return plan

    @property
    def description(self) -> str:
        return f"whole documents by {'best' if self._best_fit else 'first'} fit"

    def __len__(self) -> int:
        return len(self._first_item_R) - 1

    def spans(self, windows: np.ndarray, draws: np.ndarray) -> Spans:
        rows = np.flatnonzero(windows != EMPTY)
        first, last = self._first_item_R[windows[rows]], self._first_item_R[windows[rows] + 1]
        counts = last - first
        row_P = np.repeat(rows, counts)
        begin_P = np.cumsum(counts) - counts
        items_P = np.arange(len(row_P)) + np.repeat(first - begin_P, counts)
        starts_P = np.asarray(self._starts_I[items_P])
        offsets = self.data.stream.document_offsets
        documents_P = np.searchsorted(offsets, starts_P, side="right")
        stops_P = np.minimum(starts_P + self.length + 1, offsets[documents_P])
        filled_P = np.cumsum(stops_P - starts_P - 1)
        before = np.concatenate([[0], filled_P])[begin_P]
        places_P = filled_P - (stops_P - starts_P - 1) - np.repeat(before, counts)
        return Spans(row_P, places_P, starts_P, stops_P)

    def first_window(self, documents: np.ndarray) -> np.ndarray:
        # Groups cross files; a row belongs to the file of its first item.
        starts_R = np.asarray(self._starts_I[self._first_item_R[:-1]])
        return np.searchsorted(
            np.maximum.accumulate(starts_R), self.data.stream.document_offsets[documents]
        )


def _keep(folder: Path, plan: tuple[np.ndarray, np.ndarray]) -> None:
    """Writes a plan beside its place and renames it there; one that is there already is kept."""
    building = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for file, array in zip(_FILES, plan, strict=True):
            np.save(building / file, array)
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    except OSError as error:
        raise UserError(
            f"data_cache_dir={folder.parent} cannot be written ({error.strerror or error}). Set "
            "data_cache_dir to a folder on a disk with room."
        ) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)


def _plan(offsets: np.ndarray, length: int, best_fit: bool) -> tuple[np.ndarray, np.ndarray]:
    """First token of each item, by row, and the first item of each row and the end."""
    sizes = np.diff(offsets) - 1
    documents = np.flatnonzero(sizes > 0)
    sizes = sizes[documents]
    full = sizes // length
    rest = sizes - full * length
    num_groups = -(-len(documents) // GROUP)
    rows_I = np.zeros(num_groups * GROUP, np.int64)
    rest_I = np.zeros(num_groups * GROUP, np.int32)
    rest_I[: len(rest)] = rest
    for begin in range(0, num_groups, _GROUPS_AT_A_TIME):
        end = min(begin + _GROUPS_AT_A_TIME, num_groups)
        sizes_GI = rest_I[begin * GROUP : end * GROUP].reshape(end - begin, GROUP)
        rows_GI = pack_group_rows(sizes_GI, length, best_fit).astype(np.int64)
        rows_I[begin * GROUP : end * GROUP] = (
            rows_GI + (np.arange(begin, end) * GROUP)[:, None]
        ).reshape(-1)
    short = np.flatnonzero(rest)
    # Order: by group, first the packed rows, then the full windows of its documents.
    full_documents = np.repeat(np.arange(len(documents)), full)
    number = np.arange(len(full_documents)) - np.repeat(np.cumsum(full) - full, full)
    begins = np.asarray(offsets[documents])
    starts = np.concatenate(
        [begins[short] + full[short] * length, begins[full_documents] + number * length]
    )
    # Packed rows have numbers below GROUP within their group, full windows come after them.
    group = np.concatenate([short // GROUP, full_documents // GROUP])
    row = np.concatenate([rows_I[short] % GROUP, GROUP + np.arange(len(full_documents))])
    order = np.lexsort((row, group))
    group, row, starts = group[order], row[order], starts[order]
    new_row = np.ones(len(starts), bool)
    new_row[1:] = (row[1:] != row[:-1]) | (group[1:] != group[:-1])
    return starts, np.append(np.flatnonzero(new_row), len(starts))
