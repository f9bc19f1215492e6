"""Small data sets of known ids, written without any text."""

import tempfile
from pathlib import Path

import numpy as np

from MaxText.configuration.data_sections import Data
from MaxText.input_pipeline.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    SourceEntry,
    Split,
    TokenizerEntry,
)
from MaxText.input_pipeline.preparation.part_files import PartWriter
from MaxText.input_pipeline.preparation.token_writer import (
    FileFormat,
    SplitPlan,
    narrowest_dtype,
    write_split,
)

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
    file_format: FileFormat = "array_record",
) -> Manifest:
    """Writes documents as a data set whose small chunks and files make every boundary occur."""
    entries = {}
    for name, documents in splits.items():
        entries[name] = write_small_split(
            folder / name, documents, vocab_size, chunk_length, records_per_file, file_format
        )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer=TokenizerEntry(
            origin="a test", sha256="0" * 64, vocab_size=vocab_size, eos_id=EOS
        ),
        dtype=narrowest_dtype(vocab_size),
        format=file_format,
        chunk_length=chunk_length if file_format == "array_record" else 1,
        splits=entries,
        source=SourceEntry(description="random ids", sha256="0" * 64, num_files=0),
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def write_small_split(
    folder: Path,
    documents: list[np.ndarray],
    vocab_size: int,
    chunk_length: int,
    records_per_file: int,
    file_format: FileFormat = "array_record",
    source_file: str = "numbers.txt",
) -> Split:
    """Writes one split; document i is row i of `source_file` and 3 bytes of text per id."""
    folder.mkdir(parents=True)
    dtype = np.dtype(narrowest_dtype(vocab_size)).newbyteorder("<")
    with tempfile.TemporaryDirectory() as parts_folder:
        writer = PartWriter(Path(parts_folder), "part", dtype)
        for row, document in enumerate(documents):
            writer.add(document, 3 * len(document), source_file, row)
        plan = SplitPlan(
            parts_folder=Path(parts_folder),
            parts=(writer.finish(),),
            folder=folder,
            vocab_size=vocab_size,
            file_format=file_format,
            chunk_length=chunk_length,
            records_per_file=records_per_file,
        )
        return write_split(plan)


def data_keys(folder: Path | str, **keys) -> Data:
    """The `Data` section that reads `folder`."""
    return Data(dataset_path=str(folder), **keys)
