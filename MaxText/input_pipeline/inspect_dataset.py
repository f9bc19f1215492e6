"""Prints statistics of a run's data, or the batch of one step.

Tokens are read in blocks, all or evenly spaced, so memory does not grow with their number.

Legend: B rows of a batch, T tokens of a row, N ids of a block, D documents.
"""

import contextlib
import dataclasses
import hashlib
import itertools
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
from MaxText.input_pipeline.registered_sources.indexed_stores import SourceRecords
from MaxText.input_pipeline.registered_sources.opening_sources import has_registered_sources
from MaxText.input_pipeline.registered_sources.source_reader import first_documents
from MaxText.input_pipeline.registered_sources.stream_store import StreamStore
from MaxText.input_pipeline.sequences.batch_schedule import schedule_batches
from MaxText.input_pipeline.sequences.slicing import TokenOrigin
from MaxText.input_pipeline.token_store.store import TokenStore
from MaxText.input_pipeline.token_store.token_reader import TokenReader
from MaxText.input_pipeline.tokenization.interface import Tokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.layers.batch import Batch
from MaxText.storage.file_access import local_path

BLOCK_TOKENS = 2**20  # a few times 8 MB in memory

_IN_NO_FILE_NAME = "/"
_ID_BYTES = 4  # progress is in bytes
_SHOWN_BAD_RECORDS = 10
_SHOWN_DOCUMENTS = 1000  # of a stream, or records

# Shown at each end of a long sequence: characters, or ids without a tokenizer.
_SHOWN_CHARACTERS = 500
_SHOWN_IDS = 60


@dataclasses.dataclass
class TokenStatistics:
    """Statistics of the tokens of a token store."""

    num_read: int = 0
    min_token_id: int = ANY_ID
    max_token_id: int = -1
    max_id_offset: int = 0  # of the first token with the largest id, in the store
    sha256: str = ""  # of the ids as stored, if all were read


def measure_tokens(
    store: TokenReader, max_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Measures evenly spaced blocks of 2**20 tokens.

    Args:
      store: The tokens.
      max_tokens: About as many are read, and at least one block.
      progress: Called with the number of tokens of each block.
    """
    statistics = TokenStatistics()
    digest = hashlib.sha256()
    num_blocks = -(-len(store) // BLOCK_TOKENS)
    num_read = num_blocks if max_tokens >= len(store) else max(max_tokens // BLOCK_TOKENS, 1)
    for block in np.linspace(0, num_blocks, num_read, endpoint=False, dtype=np.int64).tolist():
        start = block * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, len(store))
        ids_N = store.read(np.array([start]), np.array([stop]))
        statistics.num_read += ids_N.size
        statistics.min_token_id = min(statistics.min_token_id, int(ids_N.min()))
        max_id = int(ids_N.max())
        if max_id > statistics.max_token_id:
            statistics.max_token_id = max_id
            statistics.max_id_offset = start + int(ids_N.argmax())
        digest.update(ids_N.astype(store.dtype).data)
        progress(ids_N.size)
    if num_read == num_blocks:
        statistics.sha256 = digest.hexdigest()
    return statistics


def _compare_checksums(source: OpenDataSource, statistics: TokenStatistics) -> str:
    """Returns what protects the tokens; UserError if they changed."""
    dataset = source.dataset
    location = source.entry.location
    if not isinstance(dataset.store, TokenStore):
        return "none"
    if dataset.store.is_checked:
        return "CRC-32C of every 4 KiB, compared at each read"
    if not dataset.tokens_sha256:
        return "none"
    if not statistics.sha256:
        return f"not compared; sample={len(dataset.store)} compares the SHA-256 of the manifest"
    if statistics.sha256 != dataset.tokens_sha256:
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
        """Opens the data; raises UserError if train.py would reject it.

        Args:
          config: The run's configuration.
          num_devices: Devices that share the batch.
          has_model: Check that vocab_size holds all ids.
          log: Receives the results.
        """
        if config.data.dataset_type == "synthetic":
            raise UserError(
                "dataset_type=synthetic is random tokens, of which there is nothing to inspect. "
                "Name a data set."
            )

        def batch_size_of(per_device: float) -> int:
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
        # Masks and sources of users depend on the vocabulary.
        if not config.masking.mlm_training and not has_registered_sources(config.data):
            keys["vocab_size"] = ANY_ID  # ids are checked after reading
        self._config = config
        self._log = log
        self._vocab_size = shape.vocab_size if has_model else None
        self._batches: TrainIterator = make_train_iterator(
            unflatten(flatten(config) | keys),
            schedule_batches(config.batch, shape.max_target_length, batch_size_of),
            log=log,
        )
        self._tokenizer = _load_tokenizer(config.preparation, self._batches.tokenizer_folder, log)

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
        pad_id = batches.opened[0].dataset.pad_id
        origins = batches.source.origins(step)
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
        """Shows statistics of a dataset; returns the largest id that was read."""
        store = source.dataset.store
        slicer = source.sequences.slicer
        if isinstance(store, SourceRecords | StreamStore):
            return self._show_unmeasured_source(store, slicer.length)
        num_bytes = _ID_BYTES * min(max_tokens, len(store))
        progress = progress_in_bytes("Reading tokens", num_bytes, self._log)
        statistics = measure_tokens(
            store, max_tokens, lambda num_tokens: progress(_ID_BYTES * num_tokens)
        )
        offsets = store.document_offsets
        document = int(np.searchsorted(offsets, statistics.max_id_offset, side="right")) - 1
        num_ids = source.dataset.vocab_size
        if num_ids is None and self._tokenizer is not None:
            num_ids = self._tokenizer.entry.vocab_size
        sizes_D = np.diff(offsets)
        median, quantile_99 = np.quantile(sizes_D, (0.5, 0.99), method="inverted_cdf").tolist()
        self._log(
            f"Tokens read: {statistics.num_read:,} of {len(store):,}\n"
            f"  ids: {statistics.min_token_id} to {statistics.max_token_id}, which is token "
            f"{statistics.max_id_offset - offsets[document]} of {store.document_name(document)}\n"
            f"  ids of the tokenizer: {'unknown' if num_ids is None else num_ids}\n"
            f"Checksums: {_compare_checksums(source, statistics)}\n"
            f"Documents: {sizes_D.size:,} of {sizes_D.min():,} to {sizes_D.max():,} tokens, median "
            f"{median:,}, mean {sizes_D.mean():,.1f}, 99 % of them up to {quantile_99:,}\n"
            f"Sequences of {slicer.length:,} tokens: {len(slicer):,} in an epoch"
        )
        return statistics.max_token_id

    def _show_unmeasured_source(self, store: SourceRecords | StreamStore, length: int) -> int:
        """Shows statistics of the first records or documents; returns their largest id.

        There may be 2^32 records, and streams have no end.
        """
        documents = list(itertools.islice(first_documents(store.reader), _SHOWN_DOCUMENTS))
        sizes_D = np.array([len(document.tokens) for document in documents])
        ids_N = np.concatenate([document.tokens for document in documents])
        total = f"{len(store.reader):,}" if isinstance(store, SourceRecords) else "a stream"
        self._log(
            f"The first {len(documents):,} {store.reader.unit}s of {total}\n"
            f"  ids: {ids_N.min(initial=ANY_ID)} to {ids_N.max(initial=-1)}\n"
            f"  {sizes_D.min()} to {sizes_D.max()} tokens, mean {sizes_D.mean():,.1f}; a sequence "
            f"has {length + 1:,}"
        )
        return int(ids_N.max(initial=-1))

    def _check_ids(self, max_token_id: int) -> None:
        """Raises UserError for an id that the model lacks."""
        if self._vocab_size is not None and max_token_id >= self._vocab_size:
            raise UserError(
                f"vocab_size={self._vocab_size} is too small: id {max_token_id} occurs. Set "
                f"vocab_size to {max_token_id + 1} or more, or check that these are token ids of "
                "the tokenizer you mean."
            )


def _load_tokenizer(
    preparation: PreparationConfig, folder: Path | None, log: Callable[[str], None]
) -> Tokenizer | None:
    """Returns the tokenizer of the dataset, else tokenizer_path, else None."""
    try:
        configured_path = preparation.tokenizer_path
        is_configured = bool(configured_path) and folder == Path(configured_path).expanduser()
        # tokenizer_type only applies to tokenizer_path.
        if folder is not None and not is_configured:
            return load_tokenizer(str(folder))
        if configured_path:
            return load_tokenizer(configured_path, preparation.tokenizer_type)
    except UserError as error:
        log(f"Showing ids instead of text: {error}")
    return None


def batch_lines(
    step: int,
    batch: Batch,
    origins: Sequence[Sequence[TokenOrigin]],
    tokenizer: Tokenizer | None,
    pad_id: int,
) -> list[str]:
    """Describes a batch, row by row.

    Args:
      step: The step of the batch.
      batch: The whole batch.
      origins: Documents of each sequence, which is several rows if sequences are shortened.
      tokenizer: Decodes the tokens; None to show ids.
      pad_id: Id of padding, for batches without segments.
    """
    tokens_BT = np.asarray(batch.tokens_BT)
    loss_mask_BT = np.asarray(batch.loss_mask_BT)
    num_rows, length = tokens_BT.shape
    rows_per_sequence = num_rows // len(origins)
    lines = [
        f"Step {step}: {num_rows:,} sequences of {length:,} tokens, "
        f"{np.count_nonzero(loss_mask_BT):,} of {loss_mask_BT.size:,} targets count, ids "
        f"{tokens_BT.min()} to {tokens_BT.max()}. Ranges of documents include the token after the "
        "sequence, if it is a target."
    ]
    has_token_BT = tokens_BT != pad_id if batch.segments_BT is None else batch.segments_BT > 0
    is_used_BT = (loss_mask_BT > 0) | has_token_BT
    for row in range(num_rows):
        num_used = int(np.max(np.flatnonzero(is_used_BT[row]), initial=-1)) + 1
        num_targets = np.count_nonzero(loss_mask_BT[row])
        sequence, part = divmod(row, rows_per_sequence)
        line = f"Sequence {row}: {num_targets:,} targets of {length:,}"
        if num_used < length:
            line += f", {length - num_used:,} tokens of padding"
        if part > 0:
            line += f", continues sequence {row - 1}"
        lines.append(line)
        if part == 0:
            for document, first_token, num_tokens in origins[sequence]:
                last_token = first_token + num_tokens - 1
                lines.append(f"  {document}: tokens {first_token:,} to {last_token:,}")
        lines += [f"  | {line}" for line in show_sequence(tokens_BT[row, :num_used], tokenizer)]
    return lines


def show_sequence(tokens_T: np.ndarray, tokenizer: Tokenizer | None) -> list[str]:
    """Returns both ends of the text of a sequence, or of its ids."""
    if tokenizer is None:
        ids = [str(token) for token in tokens_T.tolist()]
        return _both_ends(ids, _SHOWN_IDS, unit="ids", separator=" ")
    text = tokenizer.decode(tokens_T.tolist())
    ends = _both_ends(text, _SHOWN_CHARACTERS, unit="characters", separator="")
    return [repr(line)[1:-1] for line in ends]


def _both_ends(elements: Sequence[str], num_shown: int, *, unit: str, separator: str) -> list[str]:
    """Returns the first and last `num_shown` elements as lines, with a note on the rest."""
    num_hidden = len(elements) - 2 * num_shown
    if num_hidden <= 0:
        return [separator.join(elements)]
    return [
        separator.join(elements[:num_shown]),
        f"... {num_hidden:,} more {unit} ...",
        separator.join(elements[-num_shown:]),
    ]
