"""First pass over a corpus: counts, a digest, which documents are held out, a sample to train on.

Finds unreadable rows in seconds, before minutes of encoding. Imports no jax.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.text_sources import TextSource

# Text that a tokenizer is trained on. On 31 MB of Python: 8 MB train in 1.5 s on two cores and all
# of it in 5.0 s, which saves 1.2 % of the tokens; 2 MB cost 2.5 % more tokens than 8.
SAMPLE_BYTES = 8_000_000

_HELD_OUT, _SAMPLED = 0, 1


def _keyed_hash(seed: int, purpose: int, index: int) -> int:
    """A number below 2**64 that looks random: splitmix64 of seed, purpose and index."""
    mask = 2**64 - 1
    value = (seed * 0x9E3779B97F4A7C15 + purpose * 0xD1B54A32D192ED03 + index) & mask
    for _ in range(2):
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value


@dataclass(frozen=True)
class HeldOut:
    """Which documents are validation, by their number in the corpus.

    Each is, with probability `fraction`, by a hash of the seed and its number. Of two documents
    or more, the one with the smallest hash always is and the one with the largest never is, so
    that neither part is empty.
    """

    seed: int
    fraction: float
    first: int | None = None
    last: int | None = None

    def __contains__(self, index: object) -> bool:
        assert isinstance(index, int)
        if self.fraction == 0 or self.first == self.last:
            return False
        if index in (self.first, self.last):
            return index == self.first
        return _keyed_hash(self.seed, _HELD_OUT, index) < self.fraction * 2**64


class CorpusDigest:
    """sha256 over the texts of documents and where each ends."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, encoded: bytes) -> None:
        """Takes in one document as UTF-8."""
        self._hash.update(len(encoded).to_bytes(8, "little"))
        self._hash.update(encoded)

    def hexdigest(self) -> str:
        """Digest of all documents so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Survey:
    """What the first pass found.

    Attributes:
      num_documents: documents with text.
      num_bytes: UTF-8 bytes of text.
      sha256: see CorpusDigest.
      skipped: reason -> documents left out.
      held_out: numbers of the validation documents.
      sample: documents that are not held out, at most SAMPLE_BYTES of them, chosen by hash.
    """

    num_documents: int
    num_bytes: int
    sha256: str
    skipped: dict[str, int]
    held_out: HeldOut
    sample: tuple[str, ...]


def survey(
    source: TextSource,
    seed: int,
    validation_fraction: float,
    progress: Callable[[int], None],
    sample_bytes: int = SAMPLE_BYTES,
) -> Survey:
    """Reads the whole corpus once; keeps no more than `sample_bytes` of it in memory.

    Raises:
      UserError: as TextSource.documents, or there is no document with text.
    """
    digest = CorpusDigest()
    skipped: Counter[str] = Counter()
    # Documents with the smallest hashes, largest on top of the heap to be dropped first.
    kept: list[tuple[int, int, bytes]] = []
    num_kept = num_bytes = num_documents = 0
    ends: list[tuple[int, int]] = []
    for index, text in enumerate(source.documents(skipped)):
        encoded = text.encode()
        digest.add(encoded)
        num_bytes += len(encoded)
        num_documents += 1
        ranked = (_keyed_hash(seed, _HELD_OUT, index), index)
        ends = [min([*ends, ranked]), max([*ends, ranked])]
        heapq.heappush(kept, (-_keyed_hash(seed, _SAMPLED, index), index, encoded))
        num_kept += len(encoded)
        while len(kept) > 1 and num_kept > sample_bytes:
            num_kept -= len(heapq.heappop(kept)[2])
        progress(len(encoded))
    if num_documents == 0:
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no rows"
        raise UserError(
            f"prepare_source={source.description} has no document with text "
            f"({len(source.files)} files: {left_out})."
        )
    held_out = HeldOut(seed, validation_fraction, ends[0][1], ends[1][1])
    in_order = sorted((index, encoded) for _, index, encoded in kept)
    sample = [encoded for index, encoded in in_order if index not in held_out]
    # With nearly everything held out the sample may be all validation; better that than nothing.
    sample = sample or [encoded for _, encoded in in_order]
    return Survey(
        num_documents,
        num_bytes,
        digest.hexdigest(),
        dict(skipped),
        held_out,
        tuple(encoded[:sample_bytes].decode(errors="ignore") for encoded in sample),
    )
