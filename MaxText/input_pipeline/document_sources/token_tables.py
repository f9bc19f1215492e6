"""Reads token ids, attention masks and labels from tables with one document per row."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.arrow_tables import (
    Table,
    is_list,
    is_list_of_integers,
)
from MaxText.storage.errors import BadRecord

IGNORED = -100
"""Label of a position that does not count; any negative one is read as such."""

_MASK, _LABELS = "attention_mask", "labels"
_UNIT = "row"
_LARGEST_ID = np.iinfo(np.int32).max


class TokenDocument(NamedTuple):
    """A document of N tokens."""

    ids: np.ndarray  # int32 [N]
    labels: np.ndarray | None = None  # int32 [N], id to predict or IGNORED; None: the next id


def as_ids(values_N: np.ndarray, path: str, offset: int, unit: str) -> np.ndarray:
    """Converts integers [N] to int32 ids; raises BadRecord if one is negative or too large."""
    if values_N.size:
        low, high = int(values_N.min()), int(values_N.max())
        if low < 0 or high > _LARGEST_ID:
            bad = low if low < 0 else high
            reason = f"{bad} is no token id (ids are 0 to {_LARGEST_ID})"
            raise BadRecord(path, offset, reason, unit)
    return values_N.astype(np.int32, copy=False)


def id_column(table: Table, path: str, fields: Sequence[str], text_field: str = "") -> str | None:
    """Returns the first of `fields` that is a column of ids; None if there is text instead.

    Raises UserError, listing the columns, if there is neither.
    """
    types = {field.name: field.type for field in table.schema}
    for name in fields:
        if name in types and is_list_of_integers(types[name]):
            return name
    if text_field in types and "string" in str(types[text_field]):
        return None
    no_text = f" and no text in {text_field}" if text_field else ""
    there = ", ".join(f"{name} ({kind})" for name, kind in types.items())
    raise UserError(
        f"{path} has no column of lists of integers named {' or '.join(fields)}{no_text} (columns "
        f"there: {there}). Set tokens_field, or text_field for text, to one of them."
    )


def table_documents(
    table: Table, path: str, column: str, shift_labels: bool | None = None
) -> Iterator[tuple[int, TokenDocument | BadRecord]]:
    """Yields (row number, document or error) for all rows.

    Without labels, a row ends after the last position with attention, if there is an
    `attention_mask`. With labels it keeps its length, and padding has no label.

    `shift_labels` says that labels are the ids of their own positions, as Hugging Face models take
    them, and must be shifted left by one; None infers it from the first labels.
    """
    types = {field.name: field.type for field in table.schema}
    has_mask = _MASK in types and is_list(types[_MASK])
    has_labels = _LABELS in types and is_list_of_integers(types[_LABELS])
    if has_labels and shift_labels is None:
        shift_labels = labels_are_ids(table, column)
    columns = [column, *[_MASK] * has_mask, *[_LABELS] * has_labels]
    for first, batch in table.batches(columns):
        ids = _rows(batch, column)
        masks = _rows(batch, _MASK) if has_mask else [None] * len(ids)
        labels = _rows(batch, _LABELS) if has_labels else [None] * len(ids)
        for row, values in enumerate(zip(ids, masks, labels, strict=True), start=first):
            try:
                document = _document(*values, bool(shift_labels), path, row)
            except BadRecord as problem:
                document = problem
            yield row, document


def labels_are_ids(table: Table, column: str) -> bool:
    """Returns whether labels are the ids of their own positions, by the first rows with labels."""
    for _, batch in table.batches([column, _LABELS]):
        num_counted = 0
        for ids, labels in zip(_rows(batch, column), _rows(batch, _LABELS), strict=True):
            if isinstance(ids, str) or isinstance(labels, str) or ids.size != labels.size:
                return False
            counted = labels >= 0
            num_counted += np.count_nonzero(counted)
            if not np.array_equal(ids[counted], labels[counted]):
                return False
        if num_counted:
            return True
    return False


def _rows(batch: Any, name: str) -> list[np.ndarray | str]:
    """Returns the values of each row of a list column, or an error message instead."""
    column = batch.column(name)
    # Arrow files have no checksums, and corrupt offsets would read arbitrary memory.
    column.validate(full=True)
    lengths = column.value_lengths().to_pylist()
    flat = column.flatten()
    values = flat.fill_null(0).to_numpy(zero_copy_only=False)
    nulls = flat.is_null().to_numpy(zero_copy_only=False)
    rows: list[np.ndarray | str] = []
    at = 0
    for length in lengths:
        stop = at + (length or 0)
        if length is None:
            rows.append(f"the row has no list in {name}")
        elif nulls[at:stop].any():
            rows.append(f"the row lacks a value in {name}")
        else:
            rows.append(values[at:stop].copy())  # the file may be memory-mapped
        at = stop
    return rows


def _document(
    ids: np.ndarray | str,
    mask: np.ndarray | str | None,
    labels: np.ndarray | str | None,
    shift_labels: bool,
    path: str,
    row: int,
) -> TokenDocument:
    for problem in (ids, mask, labels):
        if isinstance(problem, str):
            raise BadRecord(path, row, problem, _UNIT)
    assert isinstance(ids, np.ndarray)
    ids = as_ids(ids, path, row, _UNIT)
    end = ids.size if mask is None else int(np.flatnonzero(mask).max(initial=-1)) + 1
    if labels is None:
        return TokenDocument(ids[:end])
    assert isinstance(labels, np.ndarray)
    if labels.size != ids.size:
        reason = f"the row has {labels.size} labels for {ids.size} ids"
        raise BadRecord(path, row, reason, _UNIT)
    labels = labels.astype(np.int64)
    if shift_labels:
        labels = np.append(labels[1:], IGNORED)
    labels = np.where(labels < 0, IGNORED, labels).astype(np.int32)
    labels[end:] = IGNORED
    return TokenDocument(ids, labels)
