"""Small data sets of known ids, written without any text."""

from pathlib import Path

import numpy as np

from MaxText.configuration.training_sections import Data
from MaxText.input_pipeline.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    SourceEntry,
    TokenizerEntry,
)
from MaxText.input_pipeline.preparation.token_writer import TokenWriter, narrowest_dtype

VOCAB_SIZE = 50_000
EOS = 0


def random_documents(
    seed: int, count: int, longest: int, vocab_size: int = VOCAB_SIZE
) -> list[np.ndarray]:
    """Documents of 1..longest random ids, each ended by EOS."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest, count)
    return [np.append(rng.integers(1, vocab_size, size), EOS) for size in sizes]


def numbered_documents(sizes: list[int]) -> list[np.ndarray]:
    """Documents in which every id of the whole stream is different: 1, 2, 3, ..."""
    ends = np.cumsum([0, *sizes]) + 1
    return [np.arange(ends[i], ends[i + 1]) for i in range(len(sizes))]


def write_data_set(
    folder: Path,
    splits: dict[str, list[np.ndarray]],
    vocab_size: int = VOCAB_SIZE,
    chunk_length: int = 64,
    records_per_file: int = 5,
) -> Manifest:
    """Writes documents as a data set whose small chunks and files make every boundary occur."""
    entries = {}
    for name, documents in splits.items():
        writer = TokenWriter(folder / name, vocab_size, chunk_length, records_per_file)
        for document in documents:
            writer.add(document, num_text_bytes=3 * len(document))
        entries[name] = writer.finish()
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=TokenizerEntry(
            origin="a test", sha256="0" * 64, vocab_size=vocab_size, eos_id=EOS
        ),
        dtype=narrowest_dtype(vocab_size),
        chunk_length=chunk_length,
        splits=entries,
        source=SourceEntry(description="random ids", sha256="0" * 64, num_files=0),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def data_keys(folder: Path | str, **keys) -> Data:
    """The `Data` section that reads `folder`."""
    return Data(dataset_path=str(folder), **keys)
