"""Held-out documents, digests of a corpus, and a tokenizer sample."""

import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus, Shard
from MaxText.input_pipeline.document_sources.text_streams import Skipped
from MaxText.input_pipeline.sequences.windows import INCREMENT, hash_uint64

TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""Names of splits; a corpus without splits of its own is divided into the first two."""

HELD_OUT, SAMPLED = 0, 1
"""Purposes of a hash. The hashes of different purposes are independent."""

_BITS = 2**64 - 1
_PURPOSE_STEP = 0xD1B54A32D192ED03

_SHARD_BITS = 40  # Limits: 2**40 documents per shard, 2**24 shards per corpus

# On 31 MB of Python code, training on everything instead of 8 MB saves only 1.2 % of the tokens;
# 2 MB cost 2.5 % more.
SAMPLE_BYTES = 8_000_000

SAMPLED_SHARDS = 32  # limits sampling to 2 GB, so that terabytes are not read twice for 8 MB

_HASHED_TOGETHER = 1024  # hashing short documents one by one would take longer than reading them


def document_number(shard: int, index: int) -> int:
    """Returns a number in the corpus for document `index` of a shard.

    Numbers increase with gaps between shards, so they do not depend on earlier shards' sizes.
    """
    assert index < 2**_SHARD_BITS, index
    return (shard << _SHARD_BITS) + index


def shard_of(number: int) -> int:
    return number >> _SHARD_BITS


def hashes(seed: int, purpose: int, numbers_N: np.ndarray) -> np.ndarray:
    """Returns SplitMix64 hashes (uint64 [N]) of seed, purpose and numbers."""
    start = (seed * INCREMENT + purpose * _PURPOSE_STEP) & _BITS
    return hash_uint64(numbers_N.astype(np.uint64) + np.uint64(start))


def held_out_threshold(fraction: float) -> int:
    return math.ceil(fraction * 2**64)


def text_cleaner(fix_text: bool) -> Callable[[str], str]:
    """Returns the function to clean text before tokenization.

    `fix_text` repairs broken Unicode with ftfy (wrong encodings, look-alike quotes and ligatures,
    line ends) and normalizes to NFC. Raises UserError if ftfy is not installed.
    """
    if not fix_text:
        return str
    try:
        import ftfy
    except ImportError as error:
        raise UserError(
            "prepare_fix_text=true needs the package ftfy, which is not installed. Run: pip "
            "install 'MaxText[data]'"
        ) from error
    return ftfy.fix_text


class TextDigest:
    """Running SHA-256 of the texts of documents and their lengths."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, encoded: bytes) -> None:
        self._hash.update(len(encoded).to_bytes(8, "little"))
        self._hash.update(encoded)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def corpus_digest(of_shards: Sequence[str]) -> str:
    """Combines shard digests in order; a single one is returned unchanged."""
    if len(of_shards) == 1:
        return of_shards[0]
    return hashlib.sha256("".join(of_shards).encode()).hexdigest()


@dataclass(frozen=True)
class ReadSettings:
    seed: int
    fix_text: bool = False


@dataclass(frozen=True)
class ReadJob:
    """A shard to read, and how many bytes of its text to keep as a sample."""

    number: int
    shard: Shard
    sample_bytes: int = 0


@dataclass(frozen=True)
class ShardText:
    """Digest of a shard, and its documents with the lowest hashes."""

    number: int
    sha256: str
    sample: tuple[tuple[int, int, bytes], ...] = field(repr=False)


def read_shard(settings: ReadSettings, job: ReadJob) -> ShardText:
    """Reads a shard once, with bounded memory."""
    digest = TextDigest()
    clean = text_cleaner(settings.fix_text)
    # Negated hashes make a max-heap: the top is dropped first.
    kept: list[tuple[int, int, bytes]] = []
    num_kept = 0
    drawn_of: list[int] = []
    for index, document in enumerate(job.shard.documents(Skipped())):
        encoded = document.text.encode()
        digest.add(encoded)
        if not job.sample_bytes:
            continue
        number = document_number(job.number, index)
        if index % _HASHED_TOGETHER == 0:
            numbers = number + np.arange(_HASHED_TOGETHER)
            drawn_of = hashes(settings.seed, SAMPLED, numbers).tolist()
        drawn = drawn_of[index % _HASHED_TOGETHER]
        if kept and num_kept >= job.sample_bytes and -drawn < kept[0][0]:
            continue
        encoded = clean(document.text).encode()
        heapq.heappush(kept, (-drawn, number, encoded))
        num_kept += len(encoded)
        while len(kept) > 1 and num_kept > job.sample_bytes:
            num_kept -= len(heapq.heappop(kept)[2])
    sample = tuple((-drawn, number, encoded) for drawn, number, encoded in kept)
    return ShardText(job.number, digest.hexdigest(), sample)


def sampling_jobs(corpus: Corpus, seed: int) -> list[ReadJob]:
    """Selects shards to sample, each with its share of SAMPLE_BYTES."""
    numbers = np.arange(len(corpus.shards))
    if TRAIN in corpus.splits:
        numbers = np.flatnonzero(np.array(corpus.splits) == TRAIN)
    drawn = hashes(seed, SAMPLED, numbers)
    numbers = sorted(numbers[np.argsort(drawn, kind="stable")[:SAMPLED_SHARDS]].tolist())
    total = max(sum(corpus.shards[number].num_bytes for number in numbers), 1)
    return [
        ReadJob(number, shard, max(SAMPLE_BYTES * shard.num_bytes // total, 1))
        for number in numbers
        for shard in [corpus.shards[number]]
    ]


def join_samples(
    texts: Sequence[ShardText], seed: int, validation_fraction: float
) -> tuple[str, ...]:
    """Returns the sampled texts in order, without held-out ones."""
    in_order = sorted((number, text) for each in texts for _, number, text in each.sample)
    ranks = hashes(seed, HELD_OUT, np.array([number for number, _ in in_order], np.uint64))
    threshold = held_out_threshold(validation_fraction)
    sample = [
        text for (_, text), rank in zip(in_order, ranks.tolist(), strict=True) if rank >= threshold
    ]
    # If nearly everything is held out, fall back to validation text.
    sample = sample or [text for _, text in in_order]
    return tuple(text[:SAMPLE_BYTES].decode(errors="ignore") for text in sample)
