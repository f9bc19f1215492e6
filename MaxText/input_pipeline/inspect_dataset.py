"""Prints statistics of a run's data, or the batch of one step.

Tokens are read in blocks, all or evenly spaced, so memory does not grow with their number. Of each
document 24 bytes are kept.

Legend: B sequences of a batch, T tokens of a sequence, N ids of a block, D documents.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from MaxText.config.data_sections import PreparationConfig
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import ANY_ID, OpenDataSource
from MaxText.input_pipeline.iterator import BatchIterator
from MaxText.input_pipeline.loader import make_train_iterator
from MaxText.input_pipeline.prepare.process_pool import progress_in_bytes
from MaxText.input_pipeline.sequences.batch_schedule import plan_batches
from MaxText.input_pipeline.token_store.store import TokenData
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.layers.batch import Batch
from MaxText.storage.file_access import local_path

BLOCK_TOKENS = 2**20  # a few times 8 MB in memory

# Documents are duplicates if their lengths and this many leading tokens are equal.
COMPARED_TOKENS = 2**16

_IN_NO_FILE_NAME = "/"
_ID_BYTES = 4  # progress is in bytes
_SHOWN_BAD_RECORDS = 10

# Shown at each end of a long sequence: characters, or ids without a tokenizer.
_SHOWN_CHARACTERS = 500
_SHOWN_IDS = 60

_MASK = "[MASK]"
_SYMBOLS = {**{code: 0x2400 + code for code in range(32)}, 0x7F: 0x2421}  # of control characters

Origin = Sequence[tuple[str, int, int]]
"""(document, first token, number of tokens) for each document in a sequence."""


@dataclasses.dataclass
class TokenStatistics:
    """Statistics of the tokens of a split."""

    num_tokens: int
    num_read: int = 0
    smallest_id: int = ANY_ID
    largest_id: int = -1
    largest_document: tuple[int, int] = (0, 0)  # (document, token in it) of the first largest id
    num_documents: int = 0  # nonempty ones that start in the blocks read
    num_repeats: int = 0  # of these, copies of an earlier one
    example: tuple[int, int] | None = None  # first two numbers of the most frequent duplicate


def measure_tokens(
    data: TokenData, max_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Measures evenly spaced blocks of 2**20 tokens.

    Reads about `max_tokens` in all, and at least one block.
    """
    offsets, found = data.store.document_offsets, TokenStatistics(len(data.store))
    hashes: list[int] = []
    documents: list[int] = []
    num_blocks = -(-found.num_tokens // BLOCK_TOKENS)
    for block in evenly_spaced_indices(num_blocks, max_tokens // BLOCK_TOKENS).tolist():
        start = block * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, found.num_tokens)
        first, last = np.searchsorted(offsets, (start, stop)).tolist()
        begins = np.asarray(offsets[first : last + 1])
        ends = np.minimum(begins[1:], begins[:-1] + COMPARED_TOKENS)
        # The last document of the block may end after it.
        ids_N = data.store.read(np.array([start]), np.array([max([stop, *ends[-1:]])]))
        inside = ids_N[: stop - start]
        found.num_read += inside.size
        found.smallest_id = min(found.smallest_id, int(inside.min()))
        if (high := int(inside.max())) > found.largest_id:
            position = start + int(inside.argmax())
            document = int(np.searchsorted(offsets, position, side="right")) - 1
            found.largest_id = high
            found.largest_document = document, position - int(offsets[document])
        for number, size in enumerate(np.diff(begins).tolist()):
            if size:
                compared = ids_N[begins[number] - start : ends[number] - start]
                hashes.append(hash((size, compared.tobytes())))
                documents.append(first + number)
        progress(stop - start)
    hashes_D = np.array(hashes, np.int64)
    distinct, counts = np.unique(hashes_D, return_counts=True)
    found.num_documents = len(documents)
    found.num_repeats = len(documents) - distinct.size
    if found.num_repeats:
        same = np.flatnonzero(hashes_D == distinct[counts.argmax()])
        found.example = documents[same[0]], documents[same[1]]
    return found


def evenly_spaced_indices(count: int, limit: int) -> np.ndarray:
    """Returns 0..count - 1 as int64, or `limit` evenly spaced ones of them."""
    limit = max(limit, 1)
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit


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

        data = config.data
        if os.path.isfile(local_path(data.dataset_path)):
            # An explicitly named file is inspected even if its name contains eval_split.
            data = data.model_copy(update={"eval_split": _IN_NO_FILE_NAME})
        vocab_size = config.model.shape.vocab_size
        self._length = config.model.shape.max_target_length
        self._config = config
        self._log = log
        self._vocab_size = vocab_size if has_model else None
        self._batches: BatchIterator = make_train_iterator(
            data,
            schedule=plan_batches(config.batch, self._length, samples),
            # Masking depends on the vocabulary size; otherwise ids are checked after reading.
            vocab_size=vocab_size if config.masking.mlm_training else ANY_ID,
            masking=config.masking,
            preparation=config.preparation,
            num_steps=config.run.steps,
            log=log,
        )
        log(self._batches.description)
        self._tokenizer = _load(config.preparation, self._batches.tokenizer_folder, log)

    def show_batch(self, step: int) -> None:
        """Shows one batch; UserError past the end or for too large ids."""
        batches, masking = self._batches, self._config.masking
        if batches.num_steps is not None and step >= batches.num_steps:
            raise UserError(
                f"step={step}: with num_epoch={self._config.data.num_epoch} the data ends after "
                f"{batches.num_steps} steps. Give a step from 0 to {batches.num_steps - 1}."
            )
        batches.seek(step)
        with contextlib.closing(batches):
            batch = next(batches)
        mask_id = None
        if masking.mlm_training:
            of_tokenizers = [source.data.mask_id for source in batches.opened]
            named = [token for token in of_tokenizers if token is not None]
            mask_id = masking.mlm.mask_id if masking.mlm.mask_id >= 0 else named[0]
        show_tokens = functools.partial(show_sequence, tokenizer=self._tokenizer, mask_id=mask_id)
        pad_id = batches.opened[0].data.pad_id
        self._lines(batch_lines(step, batch, batches.origin(step), show_tokens, pad_id))
        # Targets that are labels need not occur among the tokens.
        self._check_ids(int(max(batch.tokens_BT.max(), batch.targets_BT.max())))

    def show_statistics(self, max_tokens: int) -> None:
        """Shows statistics of each dataset, from about `max_tokens` tokens."""
        largest_ids = []
        for source in self._batches.opened:
            self._log(f"\n{source.entry.location}")
            largest_ids.append(self._show_source(source, max_tokens))
        if skipped := self._batches.skipped:
            self._log(f"\nRecords that cannot be read: {len(skipped):,}")
            self._lines([f"  {message}" for message in skipped[:_SHOWN_BAD_RECORDS]])
        self._check_ids(max(largest_ids))

    def _show_source(self, source: OpenDataSource, max_tokens: int) -> int:
        """Shows one dataset; returns the largest id."""
        data, windows = source.data, source.rows.windows
        num_bytes = _ID_BYTES * min(max_tokens, len(data.store))
        progress = progress_in_bytes("Reading tokens", num_bytes, self._log)
        tokens = measure_tokens(data, max_tokens, lambda done: progress(_ID_BYTES * done))
        self._lines(token_lines(data, tokens, self._tokenizer, self._vocab_size))
        sizes_D = np.diff(data.store.document_offsets)
        self._lines(document_lines(sizes_D, tokens, data.store.document_name))
        self._log(f"Sequences of {windows.length:,} tokens: {len(windows):,} in an epoch")
        return tokens.largest_id

    def _check_ids(self, largest_id: int) -> None:
        if self._vocab_size is not None and largest_id >= self._vocab_size:
            raise UserError(
                f"vocab_size={self._vocab_size} is too small: id {largest_id} occurs. Set "
                f"vocab_size to {largest_id + 1} or more, or check that these are token ids of the "
                "tokenizer you mean."
            )

    def _lines(self, lines: list[str]) -> None:
        self._log("\n".join(lines))


def _load(
    preparation: PreparationConfig, folder: Path | None, log: Callable[[str], None]
) -> TextTokenizer | None:
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


def visible(text: str) -> str:
    """Returns `text` on one line: control characters as symbols (␊)."""
    symbols = text.translate(_SYMBOLS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in symbols)


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.2%}"


def token_lines(
    data: TokenData,
    statistics: TokenStatistics,
    tokenizer: TextTokenizer | None,
    vocab_size: int | None,
) -> list[str]:
    """Describes the ids of a split; `vocab_size` is the model's, if any."""
    read = f"all {statistics.num_read:,} read"
    if statistics.num_read < statistics.num_tokens:
        read = (
            f"a sample, {statistics.num_read:,} of {statistics.num_tokens:,} "
            f"({_share(statistics.num_read, statistics.num_tokens)}), read in evenly spread blocks"
        )
    largest, (document, offset) = statistics.largest_id, statistics.largest_document
    lines = [f"Tokens: {read}", f"  ids: {statistics.smallest_id} to {largest}"]
    ids_of_tokenizer = data.vocab_size
    if ids_of_tokenizer is None and tokenizer is not None:
        ids_of_tokenizer = tokenizer.entry.vocab_size
    beyond = f"id {largest} is beyond, at token {offset} of {data.store.document_name(document)}"
    for name, limit in (
        ("the tokenizer has", ids_of_tokenizer),
        ("the model has vocab_size =", vocab_size),
    ):
        if limit is not None:
            fit = "every id is below that" if largest < limit else beyond
            lines.append(f"  {name} {limit} ids: {fit}")
    return lines


def document_lines(
    sizes_D: np.ndarray, statistics: TokenStatistics, document_name: Callable[[int], str]
) -> list[str]:
    """Describes the lengths of documents, and duplicates."""
    middle, high = np.quantile(sizes_D, (0.5, 0.99), method="inverted_cdf").tolist()
    count, repeats = statistics.num_documents, statistics.num_repeats
    repeated = (
        f"  duplicates: {repeats:,} of {count:,} documents equal an earlier one "
        f"({_share(repeats, count)})"
    )
    if statistics.example is not None:
        first, second = map(document_name, statistics.example)
        repeated += f"; the most frequent: {first} = {second}"
    return [
        f"Documents: {sizes_D.size:,} of {sizes_D.min():,} to {sizes_D.max():,} tokens, median "
        f"{middle:,}, mean {sizes_D.mean():,.1f}, 99 % of them up to {high:,}",
        repeated,
    ]


def batch_lines(
    step: int,
    batch: Batch,
    origins: Sequence[Origin],
    show_tokens: Callable[[np.ndarray], Iterable[str]],
    pad_id: int,
) -> list[str]:
    """Describes a batch, sequence by sequence.

    `origins` are per sample, which is several rows if sequences are shortened. `show_tokens` gets
    ids without padding.
    """
    tokens_BT, loss_mask_BT = np.asarray(batch.tokens_BT), np.asarray(batch.loss_mask_BT)
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
        used = int(np.flatnonzero(used_BT[row])[-1]) + 1 if used_BT[row].any() else 0
        padding = f", {length - used:,} tokens of padding" if used < length else ""
        counted = np.count_nonzero(loss_mask_BT[row])
        lines.append(f"Sequence {row}: {counted:,} targets of {length:,}{padding}")
        sample, part = divmod(row, rows_of_sample)
        if part:
            lines.append(
                f"  part {part + 1} of {rows_of_sample} of the documents of sequence {row - part}"
            )
        else:
            lines += [
                f"  {name}: tokens {first:,} to {first + count - 1:,}"
                for name, first, count in origins[sample]
            ]
        lines += [f"  | {line}" for line in show_tokens(tokens_BT[row, :used])]
    return lines


def show_sequence(
    tokens_T: np.ndarray, tokenizer: TextTokenizer | None, mask_id: int | None = None
) -> list[str]:
    """Returns both ends of the text of a sequence, or of its ids."""
    if tokenizer is None:
        words = [_MASK if token == mask_id else str(token) for token in tokens_T.tolist()]
        return _both_ends(words, _SHOWN_IDS, "ids", " ")
    masked = np.flatnonzero(tokens_T == mask_id) if mask_id is not None else np.zeros(0, np.int64)
    pieces = np.split(tokens_T, np.sort(np.concatenate([masked, masked + 1])))
    # The text is split before and after each mask, so every second piece is one.
    text = "".join(
        _MASK if index % 2 else tokenizer.decode(piece.tolist())
        for index, piece in enumerate(pieces)
    )
    return [*map(visible, _both_ends(text, _SHOWN_CHARACTERS, "characters", ""))]


def _both_ends(words: Sequence[str], shown: int, unit: str, space: str) -> list[str]:
    if len(words) <= 2 * shown:
        return [space.join(words)]
    excluded = f"... {len(words) - 2 * shown:,} more {unit} ..."
    return [space.join(words[:shown]), excluded, space.join(words[-shown:])]
