"""What inspect_data.py prints: lines about tokens, documents, rows and single batches.

Imports no jax.

Legend: B rows, T tokens of a window.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from MaxText.input_pipeline.inspection.data_statistics import (
    Lengths,
    Repeats,
    RowStatistics,
    TokenStatistics,
)
from MaxText.input_pipeline.token_store.store import TokenData
from MaxText.input_pipeline.tokenization.interface import TextTokenizer

# Characters of a text that are shown at each end, and ids where there is no tokenizer.
_SHOWN_CHARACTERS = 500
_SHOWN_IDS = 60

# How tokenizers spell the token for what they cannot write, and the ids it is searched among:
# published tokenizers have it at the front of their vocabulary.
_UNKNOWN_SPELLINGS = {"<unk>", "<UNK>", "[UNK]", "<|unk|>", "⁇"}
_FRONT_IDS = 1000

_LONGEST_BAR = 40
_MASK = "[MASK]"

Origin = Sequence[tuple[str, int, int]]


def visible(text: str) -> str:
    """`text` in one line, control characters as pictures (␊) and what shows nothing as escapes."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return character.encode("unicode_escape").decode()


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
    """About the ids.

    Args:
      data: the split.
      statistics: of its tokens.
      tokenizer: that decodes them, None where there is none.
      vocab_size: ids that the model knows, None where no model is meant.
    """
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
    lines += [
        f"  {meaning}, id {token}{_quoted(tokenizer, token)}: {_times(statistics, token)}"
        for token, meaning in _named_ids(data, tokenizer).items()
    ]
    return lines


def _fit(data: TokenData, statistics: TokenStatistics, limit: int) -> str:
    if statistics.largest_id < limit:
        return "every id is below that"
    document, place = statistics.largest_document
    return (
        f"{statistics.num_from(limit):,} tokens are beyond, the largest at token {place} of "
        f"{data.store.document_name(document)}"
    )


def _times(statistics: TokenStatistics, token: int) -> str:
    count = statistics.occurrences(token)
    return f"{count:,} times, {_share(count, statistics.num_read)} of the tokens"


def _named_ids(data: TokenData, tokenizer: TextTokenizer | None) -> dict[int, str]:
    """Ids with a meaning, and the meaning."""
    meanings: dict[int, list[str]] = {}
    if tokenizer is not None:
        front = range(min(_FRONT_IDS, tokenizer.entry.vocab_size))
        for token in front:
            if tokenizer.decode([token]).strip() in _UNKNOWN_SPELLINGS:
                meanings.setdefault(token, []).append("unknown to the tokenizer")
    if data.eos_id is not None:
        meanings.setdefault(data.eos_id, []).append("end of text")
    meanings.setdefault(data.filler_id, []).append("filling")
    if data.mask_id is not None:
        meanings.setdefault(data.mask_id, []).append("mask")
    for token in data.special_ids:
        meanings.setdefault(token, ["special"])
    return {token: " and ".join(words) for token, words in sorted(meanings.items())}


def document_lines(
    lengths: Lengths, repeats: Repeats, document_name: Callable[[int], str]
) -> list[str]:
    """About the documents: lengths with a histogram, and duplicates."""
    count = lengths.num_documents
    mean = lengths.num_tokens / max(count, 1)
    lines = [
        f"Documents: {count:,} of {lengths.tokens_L[0]:,} to {lengths.tokens_L[-1]:,} tokens, "
        f"median {lengths.quantile(0.5):,}, mean {mean:,.1f}, 99 % of them up to "
        f"{lengths.quantile(0.99):,}",
        f"  {_repeats(repeats, 'documents', document_name)}",
        *_histogram(lengths),
    ]
    return lines


def _repeats(repeats: Repeats, what: str, name: Callable[[int], str]) -> str:
    text = (
        f"duplicates: {repeats.num_repeats:,} of {repeats.num_sequences:,} {what} equal an earlier "
        f"one ({_share(repeats.num_repeats, repeats.num_sequences)})"
    )
    if repeats.example is None:
        return text
    first, second = repeats.example
    often = f"the most frequent occurs {repeats.most_often:,} times"
    return f"{text}; {often}: {name(first)} = {name(second)}"


def _histogram(lengths: Lengths) -> list[str]:
    """A line for each power of two, with a bar as long as its share of the documents."""
    # Length 0 is a bin of its own.
    bin_L = np.frexp(lengths.tokens_L.astype(np.float64))[1]
    counts = np.bincount(bin_L, lengths.documents_L).astype(np.int64)
    tokens = np.bincount(bin_L, lengths.documents_L * lengths.tokens_L)
    most, total = counts.max(), max(tokens.sum(), 1)
    lines = ["        tokens of a document   documents  share of tokens"]
    for number in range(int(bin_L[0]), counts.size):
        low, high = (1 << number) // 2, (1 << number) - 1
        span = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        # Whatever occurs has a bar.
        bar = "#" * int(np.ceil(_LONGEST_BAR * counts[number] / most))
        share = f"{tokens[number] / total:.1%}"
        lines.append(f"  {span:>26} {counts[number]:>11,} {share:>16}  {bar}".rstrip())
    return lines


def row_lines(statistics: RowStatistics, length: int, origin: Callable[[int], Origin]) -> list[str]:
    """About the rows of an epoch.

    Args:
      statistics: of the rows.
      length: T, tokens of a row.
      origin: what a window holds.
    """
    read = "all read"
    if statistics.num_read < statistics.num_windows:
        read = f"a sample of {statistics.num_read:,} read in evenly spread groups"

    def name(window: int) -> str:
        places = origin(window)
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        document, first, _ = places[0]
        return f"window {window} (from token {first:,} of {document}{more})"

    return [
        f"Rows of {length:,} tokens: {statistics.num_windows:,} in an epoch, {read}",
        f"  targets that count: {statistics.num_counted:,} of {statistics.num_places:,} places "
        f"({_share(statistics.num_counted, statistics.num_places)})",
        f"  {_repeats(statistics.windows, 'rows', name)}",
    ]


def batch_lines(
    step: int,
    arrays: Mapping[str, np.ndarray],
    origins: Sequence[Origin],
    show_tokens: Callable[[np.ndarray], Iterable[str]],
    filler_id: int,
) -> list[str]:
    """A whole batch, row by row.

    Args:
      step: its step.
      arrays: by the names of Batch without suffix, [B, T].
      origins: of each sample; a batch of shorter rows has several rows of each sample, in order.
      show_tokens: lines for the ids of a row (int32 [at most T], without filling).
      filler_id: id of places without token.
    """
    tokens_BT, weights_BT = arrays["tokens"], arrays["weights"]
    num_rows, length = tokens_BT.shape
    rows_of_sample = num_rows // len(origins)
    lines = [
        f"Step {step}: {num_rows:,} rows of {length:,} tokens, {np.count_nonzero(weights_BT):,} of "
        f"{weights_BT.size:,} targets count, ids {tokens_BT.min()} to {tokens_BT.max()}. Ranges of "
        "documents include the token after the row, where it is a target."
    ]
    for row in range(num_rows):
        used = _used_places(arrays, row, filler_id)
        filling = f", {length - used:,} places of filling" if used < length else ""
        lines.append(
            f"Row {row}: {np.count_nonzero(weights_BT[row]):,} targets of {length:,}{filling}"
        )
        sample, part = divmod(row, rows_of_sample)
        if part:
            lines.append(
                f"  part {part + 1} of {rows_of_sample} of the documents of row {row - part}"
            )
        else:
            lines += [
                f"  {name}: tokens {first:,} to {first + count - 1:,}"
                for name, first, count in origins[sample]
            ]
        lines += [f"  | {line}" for line in show_tokens(tokens_BT[row, :used])]
    return lines


def _used_places(arrays: Mapping[str, np.ndarray], row: int, filler_id: int) -> int:
    """Places of a row up to its last token that is no filling."""
    used = arrays["weights"][row] > 0
    if "segments" in arrays:
        used = used | (arrays["segments"][row] > 0)
    else:
        used = used | (arrays["tokens"][row] != filler_id)
    places = np.flatnonzero(used)
    return int(places[-1]) + 1 if places.size else 0


def show_row(
    tokens_T: np.ndarray, tokenizer: TextTokenizer | None, mask_id: int | None = None
) -> list[str]:
    """The beginning and the end of the text of a row; of its ids where there is no tokenizer.

    Args:
      tokens_T: int32, ids.
      tokenizer: decodes them.
      mask_id: id that is shown as [MASK].
    """
    if tokenizer is None:
        return _show_ids(tokens_T.tolist(), mask_id)
    masked = np.flatnonzero(tokens_T == mask_id) if mask_id is not None else np.zeros(0, np.int64)
    pieces = np.split(tokens_T, np.sort(np.concatenate([masked, masked + 1])))
    # Between two cuts at a mask lies the mask itself: every second piece.
    text = "".join(
        _MASK if index % 2 else tokenizer.decode(piece.tolist())
        for index, piece in enumerate(pieces)
    )
    if len(text) <= 2 * _SHOWN_CHARACTERS:
        return [visible(text)]
    left_out = len(text) - 2 * _SHOWN_CHARACTERS
    return [
        visible(text[:_SHOWN_CHARACTERS]),
        f"... {left_out:,} more characters ...",
        visible(text[-_SHOWN_CHARACTERS:]),
    ]


def _show_ids(ids: list[int], mask_id: int | None) -> list[str]:
    words = [_MASK if token == mask_id else str(token) for token in ids]
    if len(words) <= 2 * _SHOWN_IDS:
        return [" ".join(words)]
    return [
        " ".join(words[:_SHOWN_IDS]),
        f"... {len(words) - 2 * _SHOWN_IDS:,} more ids ...",
        " ".join(words[-_SHOWN_IDS:]),
    ]
