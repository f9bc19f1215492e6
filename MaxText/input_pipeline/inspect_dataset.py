"""Prints statistics of a run's data, or the batch of one step.

Tokens are read in blocks, all or evenly spaced, so memory does not grow with their number.
Duplicate detection keeps 16 bytes per document read.

Legend: B sequences of a batch, T tokens of a sequence, N ids of a block, S documents, V ids that
are counted, L distinct lengths.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from MaxText.config.data_sections import PreparationConfig
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import ANY_ID, OpenDataSource
from MaxText.input_pipeline.iterator import BatchIterator
from MaxText.input_pipeline.loader import make_train_iterator
from MaxText.input_pipeline.preparation.process_pool import show_progress
from MaxText.input_pipeline.sequences.batch_schedule import plan_batches
from MaxText.input_pipeline.sequences.order import OrderedWindows, random_words
from MaxText.input_pipeline.token_store.store import TokenData, document_sizes
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.storage.file_access import local_path

BLOCK_TOKENS = 2**20  # a few times 8 MB in memory

# Documents are duplicates if their lengths and this many leading tokens are equal.
COMPARED_TOKENS = 2**16

_COUNTED_IDS = 2**22  # larger ids are not counted individually; no vocabulary is that large


_IN_NO_FILE_NAME = "/"
_ID_BYTES = 4  # progress is in bytes
_SHOWN_BAD_RECORDS = 10

# Shown at each end of a long sequence: characters, or ids without a tokenizer.
_SHOWN_CHARACTERS = 500
_SHOWN_IDS = 60

# Spellings of the unknown token, which has a low id.
_UNKNOWN_SPELLINGS = {"<unk>", "<UNK>", "[UNK]", "<|unk|>", "⁇"}
_FRONT_IDS = 1000

_LONGEST_BAR = 40
_MASK = "[MASK]"

Origin = Sequence[tuple[str, int, int]]
"""(document, first token, number of tokens) for each document in a sequence."""


@dataclasses.dataclass(frozen=True)
class Duplicates:
    """Counts of repeated documents."""

    num_documents: int
    num_repeats: int
    max_copies: int  # occurrences of the most frequent document; 0 without documents
    example: tuple[int, int] | None  # first two numbers of the most frequent duplicate


def find_duplicates(hashes_S: np.ndarray, numbers_S: np.ndarray) -> Duplicates:
    """Counts equal hashes (uint64 [S]) of documents.

    `numbers_S` (int64 [S], increasing) are the numbers of the documents.
    """
    if hashes_S.size == 0:
        return Duplicates(0, 0, 0, None)
    order = np.argsort(hashes_S, kind="stable")
    _, first, counts = np.unique(hashes_S[order], return_index=True, return_counts=True)
    most = int(counts.argmax())
    example = None
    if counts[most] > 1:
        before, after = numbers_S[order[first[most] : first[most] + 2]].tolist()
        example = before, after
    return Duplicates(hashes_S.size, hashes_S.size - first.size, int(counts[most]), example)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Distinct document lengths and the document count of each.

    Lengths are int64 [L] and increase.
    """

    tokens_L: np.ndarray
    documents_L: np.ndarray

    @property
    def num_documents(self) -> int:
        return int(self.documents_L.sum())

    @property
    def num_tokens(self) -> int:
        return int((self.tokens_L * self.documents_L).sum())

    def quantile(self, share: float) -> int:
        """Returns a quantile of the lengths.

        It is the smallest length not exceeded by at least `share` of the documents.
        """
        reached = np.cumsum(self.documents_L) >= share * self.num_documents
        return int(self.tokens_L[reached.argmax()])


def document_lengths(offsets: np.ndarray) -> Lengths:
    """Counts the lengths of documents.

    `offsets` are the first token of each and the end, and may be memory-mapped.
    """
    tokens_L, documents_L = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for sizes in document_sizes(offsets):
        found, counts = np.unique(sizes, return_counts=True)
        tokens_L, index = np.unique(np.concatenate([tokens_L, found]), return_inverse=True)
        merged = np.zeros(tokens_L.size, np.int64)
        np.add.at(merged, index, np.concatenate([documents_L, counts]))
        documents_L = merged
    return Lengths(tokens_L, documents_L)


@dataclasses.dataclass(frozen=True)
class TokenStatistics:
    """Statistics of the tokens of a split."""

    num_tokens: int
    num_read: int
    smallest_id: int
    largest_id: int
    largest_document: tuple[int, int]  # (document, token in it) of the first largest id
    counts_V: np.ndarray  # int64; `num_uncounted` tokens have larger ids
    num_uncounted: int
    documents: Duplicates  # among nonempty documents that start in the blocks read

    def occurrences(self, token: int) -> int:
        return int(self.counts_V[token]) if 0 <= token < self.counts_V.size else 0

    def num_from(self, token: int) -> int:
        """Returns the number of tokens with this id or a larger one."""
        return int(self.counts_V[token:].sum()) + self.num_uncounted


def measure_tokens(
    data: TokenData, max_tokens: int, progress: Callable[[int], None]
) -> TokenStatistics:
    """Measures evenly spaced blocks of 2**20 tokens.

    Reads about `max_tokens` in all, and at least one block.
    """
    offsets, num_tokens = data.store.document_offsets, len(data.store)
    num_read = num_uncounted = 0
    smallest, largest, largest_position = -1, -1, 0
    counts_V = np.zeros(0, np.int64)
    hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for block in evenly_spaced_indices(
        -(-num_tokens // BLOCK_TOKENS), max_tokens // BLOCK_TOKENS
    ).tolist():
        start = block * BLOCK_TOKENS
        stop = min(start + BLOCK_TOKENS, num_tokens)
        first, last = np.searchsorted(offsets, (start, stop)).tolist()
        begins = np.asarray(offsets[first : last + 1])
        compared = begins[-1]
        if last > first:
            compared = min(compared, begins[-2] + COMPARED_TOKENS)
        ids_N = data.store.read(np.array([start]), np.array([max(stop, int(compared))]))
        inside = ids_N[: stop - start]
        num_read += inside.size
        low, high = int(inside.min()), int(inside.max())
        smallest = low if smallest < 0 else min(smallest, low)
        if high > largest:
            largest, largest_position = high, start + int(inside.argmax())
        countable = inside[inside < _COUNTED_IDS]
        num_uncounted += inside.size - countable.size
        found = np.bincount(countable, minlength=counts_V.size)
        found[: counts_V.size] += counts_V
        counts_V = found
        sizes = np.diff(begins)
        filled = np.flatnonzero(sizes)
        if filled.size:
            ids_N = ids_N[: int(compared) - start]
            hashes.append(_document_hashes(ids_N, begins[filled] - start, sizes[filled]))
            documents.append(first + filled)
        progress(stop - start)
    document = int(np.searchsorted(offsets, largest_position, side="right")) - 1
    return TokenStatistics(
        num_tokens=num_tokens,
        num_read=num_read,
        smallest_id=smallest,
        largest_id=largest,
        largest_document=(document, largest_position - int(offsets[document])),
        counts_V=counts_V,
        num_uncounted=num_uncounted,
        documents=find_duplicates(np.concatenate(hashes), np.concatenate(documents)),
    )


def evenly_spaced_indices(count: int, limit: int) -> np.ndarray:
    """Returns 0..count - 1 as int64, or `limit` evenly spaced ones of them."""
    limit = max(limit, 1)
    return np.arange(count) if count <= limit else np.arange(limit) * count // limit


def _document_hashes(ids_N: np.ndarray, begins_S: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
    """Returns hashes (uint64 [S]) of adjacent documents.

    `ids_N` may end within the last document. A hash is the sum of one random word per (id,
    position); two different documents among n collide with probability n^2 / 2^65.
    """
    ids_N = ids_N[begins_S[0] :]
    begins_S = begins_S - begins_S[0]
    sizes = np.diff(np.append(begins_S, ids_N.size))
    positions_N = np.arange(ids_N.size) - np.repeat(begins_S, sizes)
    words_N = random_words(0, (positions_N.astype(np.uint64) << np.uint64(32)) + ids_N.astype("u8"))
    words_N[positions_N >= COMPARED_TOKENS] = 0
    return np.add.reduceat(words_N, begins_S) + random_words(1, sizes_S)


@dataclasses.dataclass(frozen=True)
class SequenceStatistics:
    """Statistics of the sequences of an epoch."""

    num_sequences: int
    num_read: int
    num_counted: int  # targets with nonzero weight
    largest_target: int  # among counted targets; -1 without any


def measure_sequences(
    source: OrderedWindows, max_tokens: int, progress: Callable[[int], None]
) -> SequenceStatistics:
    """Measures evenly spaced groups of sequences.

    Reads about `max_tokens` in all, and at least one group.
    """
    windows, length = source.windows, source.windows.length
    in_order = source.in_order()
    group = max(1, BLOCK_TOKENS // length)
    num_read = num_counted = 0
    largest_target = -1
    for block in evenly_spaced_indices(
        -(-len(windows) // group), max_tokens // (group * length)
    ).tolist():
        numbers = np.arange(block * group, min((block + 1) * group, len(windows)))
        arrays = in_order.read(numbers)
        counted_BT = arrays["weights"] > 0
        largest = arrays["targets"].max(initial=-1, where=counted_BT)
        largest_target = max(largest_target, int(largest))
        num_read += numbers.size
        num_counted += int(np.count_nonzero(counted_BT))
        progress(numbers.size * length)
    return SequenceStatistics(len(windows), num_read, num_counted, largest_target)


class Inspection:
    """The data of a run, opened as train.py opens it."""

    def __init__(
        self, config: Config, num_devices: int, has_model: bool, show: Callable[[str], None]
    ):
        """Opens the data; raises UserError if train.py would reject it."""
        if config.data.dataset_type == "synthetic":
            raise UserError(
                "dataset_type=synthetic is random tokens, of which there is nothing to inspect. "
                "Name a data set."
            )

        def samples(per_device: float) -> int:
            return _whole(per_device, num_devices) * config.batch.gradient_accumulation_steps

        data = config.data
        if os.path.isfile(local_path(data.dataset_path)):
            # An explicitly named file is inspected even if its name contains eval_split.
            data = data.model_copy(update={"eval_split": _IN_NO_FILE_NAME})
        vocab_size = config.model.shape.vocab_size
        self._length = config.model.shape.max_target_length
        self._config = config
        self._show = show
        self._vocab_size = vocab_size if has_model else None
        self._batches: BatchIterator = make_train_iterator(
            data,
            schedule=plan_batches(config.batch, self._length, samples),
            # Masking depends on the vocabulary size; otherwise ids are checked after reading.
            vocab_size=vocab_size if config.masking.mlm_training else ANY_ID,
            masking=config.masking,
            preparation=config.preparation,
            num_steps=config.run.steps,
            show=show,
        )
        show(self._batches.description)
        self._tokenizer = _load(config.preparation, self._batches.tokenizer_folder, show)

    def show_batch(self, step: int) -> None:
        """Shows one batch; UserError past the end or for too large ids."""
        batches, masking = self._batches, self._config.masking
        if batches.num_steps is not None and step >= batches.num_steps:
            raise UserError(
                f"step={step}: with num_epoch={self._config.data.num_epoch} the data ends after "
                f"{batches.num_steps} steps. Give a step from 0 to {batches.num_steps - 1}."
            )
        batches.seek(step)
        try:
            batch = next(batches)
        finally:
            batches.close()
        arrays = {"tokens": batch.tokens_BT, "weights": batch.loss_mask_BT}
        if batch.segments_BT is not None:
            arrays["segments"] = batch.segments_BT
        mask_id = None
        if masking.mlm_training:
            of_tokenizers = [source.data.mask_id for source in batches.opened]
            named = [token for token in of_tokenizers if token is not None]
            mask_id = masking.mlm.mask_id if masking.mlm.mask_id >= 0 else named[0]
        pad_id = batches.opened[0].data.pad_id

        def show_tokens(tokens_T: np.ndarray) -> list[str]:
            return show_sequence(tokens_T, self._tokenizer, mask_id)

        self._lines(batch_lines(step, arrays, batches.origin(step), show_tokens, pad_id))
        # Targets that are labels need not occur among the tokens.
        self._check_ids(int(max(batch.tokens_BT.max(), batch.targets_BT.max())))

    def show_statistics(self, max_tokens: int) -> None:
        """Shows statistics of each dataset, from about `max_tokens` tokens."""
        largest_id = -1
        for source in self._batches.opened:
            self._show(f"\n{source.entry.location}")
            largest_id = max(largest_id, self._show_source(source, max_tokens))
        if skipped := self._batches.skipped:
            self._show(f"\nRecords that cannot be read: {len(skipped):,}")
            self._lines([f"  {message}" for message in skipped[:_SHOWN_BAD_RECORDS]])
        self._check_ids(largest_id)

    def _show_source(self, source: OpenDataSource, max_tokens: int) -> int:
        """Shows one dataset; returns the largest id."""
        data, windows = source.data, source.rows.windows
        num_bytes = _ID_BYTES * min(max_tokens, len(data.store))
        with show_progress("Reading tokens", num_bytes, self._show) as progress:
            tokens = measure_tokens(data, max_tokens, lambda done: progress(_ID_BYTES * done))
        self._lines(token_lines(data, tokens, self._tokenizer, self._vocab_size))
        lengths = document_lengths(data.store.document_offsets)
        self._lines(document_lines(lengths, tokens.documents, data.store.document_name))
        num_bytes = _ID_BYTES * min(max_tokens, len(windows) * windows.length)
        with show_progress("Reading sequences", num_bytes, self._show) as progress:
            sequences = measure_sequences(
                source.rows, max_tokens, lambda done: progress(_ID_BYTES * done)
            )
        self._lines(sequence_lines(sequences, windows.length))
        if data.labels is not None:
            self._show(f"  labels that count: ids up to {sequences.largest_target}")
        return max(tokens.largest_id, sequences.largest_target)

    def _check_ids(self, largest_id: int) -> None:
        if self._vocab_size is not None and largest_id >= self._vocab_size:
            raise UserError(
                f"vocab_size={self._vocab_size} is too small: id {largest_id} occurs. Set "
                f"vocab_size to {largest_id + 1} or more, or check that these are token ids of the "
                "tokenizer you mean."
            )

    def _lines(self, lines: list[str]) -> None:
        self._show("\n".join(lines))


def _whole(per_device: float, num_devices: int) -> int:
    samples = per_device * num_devices
    if samples != int(samples):
        raise UserError(
            f"{per_device:g} sequences per device x num_devices={num_devices} is not a whole "
            "number. Set num_devices to the devices of the run."
        )
    return int(samples)


def _load(
    preparation: PreparationConfig, folder: Path | None, show: Callable[[str], None]
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
        show(f"Showing ids instead of text: {error}")
    return None


def visible(text: str) -> str:
    """Returns `text` on one line: control characters as symbols (␊)."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character.isprintable():
        return character
    if character < " ":
        return chr(0x2400 + ord(character))
    return "\u2421" if character == "\x7f" else character.encode("unicode_escape").decode()


def _quoted(tokenizer: TextTokenizer | None, token: int) -> str:
    return "" if tokenizer is None else f' "{visible(tokenizer.decode([token]))}"'


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
    different = f"{np.count_nonzero(statistics.counts_V):,}"
    if statistics.num_uncounted:
        different = f"more than {different}"
    lines = [
        f"Tokens: {read}",
        f"  ids: {statistics.smallest_id} to {statistics.largest_id}, {different} different ones",
    ]
    ids_of_tokenizer = data.vocab_size
    if ids_of_tokenizer is None and tokenizer is not None:
        ids_of_tokenizer = tokenizer.entry.vocab_size
    for name, limit in (
        ("the tokenizer has", ids_of_tokenizer),
        ("the model has vocab_size =", vocab_size),
    ):
        if limit is not None:
            lines.append(f"  {name} {limit} ids: {_fit(data, statistics, limit)}")
    for token, meaning in _named_ids(data, tokenizer).items():
        count = statistics.occurrences(token)
        share = _share(count, statistics.num_read)
        name = f"{meaning}, id {token}{_quoted(tokenizer, token)}"
        lines.append(f"  {name}: {count:,} times, {share} of the tokens")
    return lines


def _fit(data: TokenData, statistics: TokenStatistics, limit: int) -> str:
    if statistics.largest_id < limit:
        return "every id is below that"
    document, offset = statistics.largest_document
    return (
        f"{statistics.num_from(limit):,} tokens are beyond, the largest at token {offset} of "
        f"{data.store.document_name(document)}"
    )


def _named_ids(data: TokenData, tokenizer: TextTokenizer | None) -> dict[int, str]:
    meanings: dict[int, list[str]] = {}
    if tokenizer is not None:
        for token in range(min(_FRONT_IDS, tokenizer.entry.vocab_size)):
            if tokenizer.decode([token]).strip() in _UNKNOWN_SPELLINGS:
                meanings.setdefault(token, []).append("unknown to the tokenizer")
    for token, name in ((data.eos_id, "end of text"), (data.pad_id, "padding"),
                        (data.mask_id, "mask")):  # fmt: skip
        if token is not None:
            meanings.setdefault(token, []).append(name)
    for token in data.special_ids:
        meanings.setdefault(token, ["special"])
    return {token: " and ".join(words) for token, words in sorted(meanings.items())}


def document_lines(
    lengths: Lengths, duplicates: Duplicates, document_name: Callable[[int], str]
) -> list[str]:
    """Describes documents: lengths with a histogram, and duplicates."""
    count = lengths.num_documents
    mean = lengths.num_tokens / max(count, 1)
    repeated = (
        f"  duplicates: {duplicates.num_repeats:,} of {duplicates.num_documents:,} documents equal "
        f"an earlier one ({_share(duplicates.num_repeats, duplicates.num_documents)})"
    )
    if duplicates.example is not None:
        first, second = map(document_name, duplicates.example)
        repeated += (
            f"; the most frequent occurs {duplicates.max_copies:,} times: {first} = {second}"
        )
    return [
        f"Documents: {count:,} of {lengths.tokens_L[0]:,} to {lengths.tokens_L[-1]:,} tokens, "
        f"median {lengths.quantile(0.5):,}, mean {mean:,.1f}, 99 % of them up to "
        f"{lengths.quantile(0.99):,}",
        repeated,
        *_histogram(lengths),
    ]


def _histogram(lengths: Lengths) -> list[str]:
    """Returns a line with a bar of the documents for each power of two."""
    bin_L = np.frexp(lengths.tokens_L.astype(np.float64))[1]
    counts = np.bincount(bin_L, lengths.documents_L).astype(np.int64)
    tokens = np.bincount(bin_L, lengths.documents_L * lengths.tokens_L)
    most, total = counts.max(), max(tokens.sum(), 1)
    lines = ["        tokens of a document   documents  share of tokens"]
    for number in range(int(bin_L[0]), counts.size):
        low, high = (1 << number) // 2, (1 << number) - 1
        span = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        bar = "#" * int(np.ceil(_LONGEST_BAR * counts[number] / most))
        share = f"{tokens[number] / total:.1%}"
        lines.append(f"  {span:>26} {counts[number]:>11,} {share:>16}  {bar}".rstrip())
    return lines


def sequence_lines(statistics: SequenceStatistics, length: int) -> list[str]:
    """Describes the sequences of an epoch, `length` tokens each."""
    read = "all read"
    if statistics.num_read < statistics.num_sequences:
        read = f"a sample of {statistics.num_read:,} read in evenly spread groups"
    total = statistics.num_read * length
    return [
        f"Sequences of {length:,} tokens: {statistics.num_sequences:,} in an epoch, {read}",
        f"  targets that count: {statistics.num_counted:,} of {total:,} "
        f"({_share(statistics.num_counted, total)})",
    ]


def batch_lines(
    step: int,
    arrays: Mapping[str, np.ndarray],
    origins: Sequence[Origin],
    show_tokens: Callable[[np.ndarray], Iterable[str]],
    pad_id: int,
) -> list[str]:
    """Describes a batch, sequence by sequence.

    `arrays` are tokens, weights and optionally segments, [B, T]. `origins` are per sample, which is
    several rows if sequences are shortened. `show_tokens` gets ids without padding.
    """
    tokens_BT, loss_mask_BT = arrays["tokens"], arrays["weights"]
    num_rows, length = tokens_BT.shape
    rows_of_sample = num_rows // len(origins)
    lines = [
        f"Step {step}: {num_rows:,} sequences of {length:,} tokens, "
        f"{np.count_nonzero(loss_mask_BT):,} of {loss_mask_BT.size:,} targets count, ids "
        f"{tokens_BT.min()} to {tokens_BT.max()}. Ranges of documents include the token after the "
        "sequence, if it is a target."
    ]
    if "segments" in arrays:
        used_BT = (loss_mask_BT > 0) | (arrays["segments"] > 0)
    else:
        used_BT = (loss_mask_BT > 0) | (tokens_BT != pad_id)
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
