"""Finds validation text among the training text.

Windows of 32 tokens of the validation text, side by side, are looked up at every position of the
training text by a polynomial hash. Windows of a few repeated tokens (blank lines, rulers) do not
count. Natural text repeats itself, licenses for example: Lee et al. (2022, "Deduplicating Training
Data Makes Language Models Better", table 2) find 1 % of the validation tokens of C4 and 14 % of
RealNews in near-duplicates among the training text. So only a larger share is an error.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import OpenDataSource, open_sources
from MaxText.input_pipeline.loader import open_eval_sources
from MaxText.input_pipeline.prefetch import Retries
from MaxText.input_pipeline.token_store.token_reader import TokenReader

WINDOW = 32  # tokens
MAX_SHARE = 0.2  # of windows
_MIN_DISTINCT = 12  # different tokens of a window that counts
_MAX_TOKENS = 500_000_000  # of the training text that are looked through
CHUNK = 2**22  # tokens read at a time
_FILTER_BITS = 24  # of a hash, by which nearly all windows of the training text are passed over
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_BASE_INVERSE = pow(_BASE, -1, 2**64)


@dataclasses.dataclass(frozen=True)
class TextOverlap:
    """How much of the validation text is in the training text.

    Attributes:
      num_windows: Windows of the validation text that count.
      num_found: Of those, windows that are in the training text.
      num_tokens: Tokens of the training text that were looked through.
      is_complete: Whether those are all of them.
    """

    num_windows: int
    num_found: int
    num_tokens: int
    is_complete: bool

    @property
    def share(self) -> float:
        """Share of the windows that are in the training text; 0 without any."""
        return self.num_found / self.num_windows if self.num_windows else 0.0


def check_validation_text(config: Config, log: Callable[[str], None] = print) -> TextOverlap:
    """Returns how much of a configuration's validation text is in its training text.

    Streams and random tokens are not looked through.

    Args:
      config: Of the baseline.
      log: Receives messages of opening the data.

    Raises:
      UserError: More than MAX_SHARE of the windows are in the training text.
    """
    if config.data.dataset_type == "synthetic":
        return TextOverlap(0, 0, 0, is_complete=False)
    training = open_sources(config, True, None, Retries(config.data.data_retry, log))
    validation = open_eval_sources(config, log)
    overlap = find_overlap(_stores(training), _stores(validation))
    if overlap.share > MAX_SHARE:
        locations = {source.entry.location for source in validation}
        raise UserError(
            f"{overlap.share:.0%} of the validation text ({', '.join(sorted(locations))}) is among "
            f"the training text: {overlap.num_found:,} of {overlap.num_windows:,} windows of "
            f"{WINDOW} tokens. A model that memorizes would win. Choose other validation text, or "
            "remove these documents from the training text."
        )
    return overlap


def _stores(sources: Sequence[OpenDataSource]) -> list[TokenReader]:
    """Returns the tokens of sources that can be read at any position."""
    return [source.dataset.store for source in sources if source.stream is None]


def find_overlap(
    training: Sequence[TokenReader], validation: Sequence[TokenReader], chunk: int = CHUNK
) -> TextOverlap:
    """Returns how many windows of the validation text are in the training text.

    Args:
      training: Tokens to look through, up to 500 million.
      validation: Tokens to look up.
      chunk: Tokens of the training text that are read at a time.
    """
    hashes = [_counted_hashes(_read(store, 0, len(store))) for store in validation]
    validation_hashes = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))
    is_found = np.zeros(len(validation_hashes), bool)
    # Sorting every chunk would take most of the time, and hardly any window is found.
    shift = np.uint64(64 - _FILTER_BITS)  # the low bits of the hash depend on those of tokens alone
    may_be_found = np.zeros(2**_FILTER_BITS, bool)
    may_be_found[validation_hashes >> shift] = True
    num_tokens = 0
    is_complete = True
    for store in training:
        for first in range(0, len(store) - WINDOW + 1, chunk):
            if num_tokens >= _MAX_TOKENS:
                is_complete = False
                break
            end = min(first + chunk + WINDOW - 1, len(store))
            rolling = rolling_hashes(_read(store, first, end))
            is_found |= np.isin(validation_hashes, rolling[may_be_found[rolling >> shift]])
            num_tokens += end - first
    return TextOverlap(len(validation_hashes), int(is_found.sum()), num_tokens, is_complete)


def _read(store: TokenReader, first: int, end: int) -> np.ndarray:
    """Returns the tokens [first, end) of a store."""
    return store.read(np.array([first]), np.array([end]))


def _counted_hashes(tokens_N: np.ndarray) -> np.ndarray:
    """Returns the hashes of windows side by side that have enough different tokens."""
    num_windows = len(tokens_N) // WINDOW
    windows = np.sort(tokens_N[: num_windows * WINDOW].reshape(num_windows, WINDOW), axis=1)
    num_distinct = 1 + np.count_nonzero(np.diff(windows, axis=1), axis=1)
    hashes = rolling_hashes(tokens_N)[: num_windows * WINDOW : WINDOW]
    return hashes[num_distinct >= _MIN_DISTINCT]


def rolling_hashes(tokens_N: np.ndarray) -> np.ndarray:
    """Returns the hash of the window at each position, uint64 [N - WINDOW + 1].

    The hash of tokens t_0 ... t_(W-1) is the sum of (t_i + 1) b^i modulo 2^64, with an odd b. It is
    a difference of prefix sums, times a power of the inverse of b.

    Args:
      tokens_N: Ids.
    """
    if len(tokens_N) < WINDOW:
        return np.zeros(0, np.uint64)
    powers_N = _powers(_BASE, len(tokens_N))
    prefix_N = np.cumsum((tokens_N.astype(np.uint64) + np.uint64(1)) * powers_N)
    sums = prefix_N[WINDOW - 1 :].copy()
    sums[1:] -= prefix_N[:-WINDOW]
    return sums * _powers(_BASE_INVERSE, len(sums))


@functools.lru_cache(maxsize=4)  # of both bases, for whole chunks and for the last one
def _powers(base: int, count: int) -> np.ndarray:
    """Returns 1, b, b^2, ... modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
