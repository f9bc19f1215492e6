"""Prints statistics of a run's data, or the batch of one step.

Tokens are read in blocks, all or evenly spaced, so memory does not grow with their number.

Legend: B sequences of a batch, T tokens of a sequence, N ids of a block, D documents.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.config.data_sections import PreparationConfig
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import ANY_ID, OpenDataSource
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.input_pipeline.loader import make_train_iterator
from MaxText.input_pipeline.prepare.process_pool import progress_in_bytes
from MaxText.input_pipeline.sequences.batch_schedule import plan_batches
from MaxText.input_pipeline.token_store.store import TokenStore
from MaxText.input_pipeline.tokenization.interface import Tokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.layers.batch import Batch
from MaxText.storage.file_access import local_path

BLOCK_TOKENS = 2**20  # a few times 8 MB in memory

_IN_NO_FILE_NAME = "/"
_ID_BYTES = 4  # progress is in bytes
_SHOWN_BAD_RECORDS = 10

# Shown at each end of a long sequence: characters, or ids without a tokenizer.
_SHOWN_CHARACTERS = 500
_SHOWN_IDS = 60


@dataclasses.dataclass
class TokenStatistics:
    """Statistics of the tokens of a split."""

    num_read: int = 0
    smallest_id: int = ANY_ID
    max_token_id: int = -1
    largest_at: int = 0  # position of the first largest id
    sha256: str = ""  # of the ids as stored, if all were read


def measure_tokens(
    store: TokenStore, max_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Measures evenly spaced blocks of 2**20 tokens.

    Reads about `max_tokens` in all, and at least one block.
    """
    found = TokenStatistics()
    digest = hashlib.sha256()
    num_blocks = -(-len(store) // BLOCK_TOKENS)
    num_read = num_blocks if max_tokens >= len(store) else max(max_tokens // BLOCK_TOKENS, 1)
    for block in np.linspace(0, num_blocks, num_read, endpoint=False, dtype=np.int64).tolist():
        start = block * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, len(store))
        ids_N = store.read(np.array([start]), np.array([stop]))
        found.num_read += ids_N.size
        found.smallest_id = min(found.smallest_id, int(ids_N.min()))
        if (high := int(ids_N.max())) > found.max_token_id:
            found.max_token_id, found.largest_at = high, start + int(ids_N.argmax())
        digest.update(ids_N.astype(store.dtype).data)
        progress(ids_N.size)
    found.sha256 = digest.hexdigest() if num_read == num_blocks else ""
    return found


def _compare_checksums(source: OpenDataSource, found: TokenStatistics) -> str:
    """Returns what protects the tokens; UserError if they changed."""
    data = source.data
    location = source.entry.location
    if data.store.is_checked:
        return "CRC-32C of every 4 KiB, compared at each read"
    if not data.tokens_sha256:
        return "none"
    if not found.sha256:
        return f"not compared; sample={len(data.store)} compares the SHA-256 of the manifest"
    if found.sha256 != data.tokens_sha256:
        raise UserError(
            f"{location} is damaged: the SHA-256 of its tokens is not tokens_sha256 in "
            "manifest.json. Copy the data set again, or delete it and prepare it again."
        )
    return "SHA-256 of the manifest, compared now"


class Inspection:
    """The data of a run, opened as train.py opens it."""

    def __init__(
        self, config: Config, num_devices: int, has_model: bool, log: Callable[[str], None]
    ):
        """Opens the data; raises UserError if train.py would reject it."""
        if config.data.dataset_type == "synthetic":
            raise UserError(
                "dataset_type=synthetic is random tokens, of which there is nothing to inspect. "
                "Name a data set."
            )

        def samples(per_device: float) -> int:
            count = per_device * num_devices
            if count != int(count):
                raise UserError(
                    f"{per_device:g} sequences per device x num_devices={num_devices} is not a "
                    "whole number. Set num_devices to the devices of the run."
                )
            return int(count) * config.batch.gradient_accumulation_steps

        keys: dict[str, Any] = {}
        if os.path.isfile(local_path(config.data.dataset_path)):
            # An explicitly named file is inspected even if its name contains eval_split.
            keys["eval_split"] = _IN_NO_FILE_NAME
        shape = config.model.shape
        if not config.masking.mlm_training:  # which depends on the vocabulary
            keys["vocab_size"] = ANY_ID  # ids are checked after reading
        self._config = config
        self._log = log
        self._vocab_size = shape.vocab_size if has_model else None
        self._batches: TrainIterator = make_train_iterator(
            unflatten(flatten(config) | keys),
            plan_batches(config.batch, shape.max_target_length, samples),
            log=log,
        )
        self._tokenizer = _load(config.preparation, self._batches.tokenizer_folder, log)

    def show_batch(self, step: int) -> None:
        """Shows one batch; UserError past the end or for too large ids."""
        batches = self._batches
        if batches.num_steps is not None and step >= batches.num_steps:
            raise UserError(
                f"step={step}: with num_epoch={self._config.data.num_epoch} the data ends after "
                f"{batches.num_steps} steps. Give a step from 0 to {batches.num_steps - 1}."
            )
        batches.seek(step)
        with contextlib.closing(batches):
            batch = next(batches)
        pad_id = batches.opened[0].data.pad_id
        origins = batches.source.origin(step)
        self._log("\n".join(batch_lines(step, batch, origins, self._tokenizer, pad_id)))
        # Targets that are labels need not occur among the tokens.
        self._check_ids(int(max(batch.tokens_BT.max(), batch.targets_BT.max())))

    def show_statistics(self, max_tokens: int) -> None:
        """Shows statistics of each dataset, from about `max_tokens` tokens."""
        max_token_ids = []
        for source in self._batches.opened:
            self._log(f"\n{source.entry.location}")
            max_token_ids.append(self._show_source(source, max_tokens))
        if skipped := self._batches.skipped:
            first = "\n  ".join(skipped[:_SHOWN_BAD_RECORDS])
            self._log(f"\nRecords that cannot be read: {len(skipped):,}\n  {first}")
        self._check_ids(max(max_token_ids))

    def _show_source(self, source: OpenDataSource, max_tokens: int) -> int:
        store = source.data.store
        windows = source.rows.windows
        num_bytes = _ID_BYTES * min(max_tokens, len(store))
        progress = progress_in_bytes("Reading tokens", num_bytes, self._log)
        found = measure_tokens(store, max_tokens, lambda done: progress(_ID_BYTES * done))
        offsets = store.document_offsets
        document = int(np.searchsorted(offsets, found.largest_at, side="right")) - 1
        num_ids = source.data.vocab_size
        if num_ids is None and self._tokenizer is not None:
            num_ids = self._tokenizer.entry.vocab_size
        sizes_D = np.diff(offsets)
        middle, high = np.quantile(sizes_D, (0.5, 0.99), method="inverted_cdf").tolist()
        self._log(
            f"Tokens read: {found.num_read:,} of {len(store):,}\n"
            f"  ids: {found.smallest_id} to {found.max_token_id}, which is token "
            f"{found.largest_at - offsets[document]} of {store.document_name(document)}\n"
            f"  ids of the tokenizer: {'unknown' if num_ids is None else num_ids}\n"
            f"Checksums: {_compare_checksums(source, found)}\n"
            f"Documents: {sizes_D.size:,} of {sizes_D.min():,} to {sizes_D.max():,} tokens, median "
            f"{middle:,}, mean {sizes_D.mean():,.1f}, 99 % of them up to {high:,}\n"
            f"Sequences of {windows.length:,} tokens: {len(windows):,} in an epoch"
        )
        return found.max_token_id

    def _check_ids(self, max_token_id: int) -> None:
        if self._vocab_size is not None and max_token_id >= self._vocab_size:
            raise UserError(
                f"vocab_size={self._vocab_size} is too small: id {max_token_id} occurs. Set "
                f"vocab_size to {max_token_id + 1} or more, or check that these are token ids of "
                "the tokenizer you mean."
            )


def _load(
    preparation: PreparationConfig, folder: Path | None, log: Callable[[str], None]
) -> Tokenizer | None:
    """Returns the tokenizer of the dataset, else tokenizer_path, else None."""
    try:
        asked = preparation.tokenizer_path
        # tokenizer_type only applies to tokenizer_path.
        if folder is not None and (not asked or folder != Path(asked).expanduser()):
            return load_tokenizer(str(folder))
        if asked:
            return load_tokenizer(asked, preparation.tokenizer_type)
    except UserError as error:
        log(f"Showing ids instead of text: {error}")
    return None


def batch_lines(
    step: int,
    batch: Batch,
    origins: Sequence[Sequence[tuple[str, int, int]]],
    tokenizer: Tokenizer | None,
    pad_id: int,
) -> list[str]:
    """Describes a batch, sequence by sequence.

    `origins` are (document, first token, tokens) by sample, which is several rows if sequences are
    shortened.
    """
    tokens_BT = np.asarray(batch.tokens_BT)
    loss_mask_BT = np.asarray(batch.loss_mask_BT)
    num_rows, length = tokens_BT.shape
    rows_of_sample = num_rows // len(origins)
    lines = [
        f"Step {step}: {num_rows:,} sequences of {length:,} tokens, "
        f"{np.count_nonzero(loss_mask_BT):,} of {loss_mask_BT.size:,} targets count, ids "
        f"{tokens_BT.min()} to {tokens_BT.max()}. Ranges of documents include the token after the "
        "sequence, if it is a target."
    ]
    has_token_BT = tokens_BT != pad_id if batch.segments_BT is None else batch.segments_BT > 0
    used_BT = (loss_mask_BT > 0) | has_token_BT
    for row in range(num_rows):
        used = int(np.max(np.flatnonzero(used_BT[row]), initial=-1)) + 1
        padding = f", {length - used:,} tokens of padding" if used < length else ""
        counted = np.count_nonzero(loss_mask_BT[row])
        sample, part = divmod(row, rows_of_sample)
        continues = f", continues sequence {row - 1}" if part else ""
        lines.append(f"Sequence {row}: {counted:,} targets of {length:,}{padding}{continues}")
        if not part:
            lines += [
                f"  {name}: tokens {first:,} to {first + count - 1:,}"
                for name, first, count in origins[sample]
            ]
        lines += [f"  | {line}" for line in show_sequence(tokens_BT[row, :used], tokenizer)]
    return lines


def show_sequence(tokens_T: np.ndarray, tokenizer: Tokenizer | None) -> list[str]:
    """Returns both ends of the text of a sequence, or of its ids."""
    if tokenizer is None:
        return _both_ends([*map(str, tokens_T.tolist())], _SHOWN_IDS, "ids", " ")
    ends = _both_ends(tokenizer.decode(tokens_T.tolist()), _SHOWN_CHARACTERS, "characters", "")
    return [repr(line)[1:-1] for line in ends]


def _both_ends(words: Sequence[str], shown: int, unit: str, space: str) -> list[str]:
    if len(words) <= 2 * shown:
        return [space.join(words)]
    excluded = f"... {len(words) - 2 * shown:,} more {unit} ..."
    return [space.join(words[:shown]), excluded, space.join(words[-shown:])]
