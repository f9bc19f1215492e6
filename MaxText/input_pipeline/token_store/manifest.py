"""The manifest of a prepared dataset, and checks before reading.

    <dataset_path>/
      manifest.json                  this file
      tokenizer.json                 or tokenizer.model, a tiktoken file or settings
      <split>/tokens-000000.bin ...  concatenated ids, or chunks of them as .array_record
      <split>/tokens_running_crc32c.npy    checksums of bin files as in store.py, where they exist
      <split>/document_offsets.npy   first token of each document, then the end
      <split>/document_rows.npy      row of each document in its source file
      <split>/source_files.json      [[first document, name of its file], ...]

The last two may be absent; documents then have numbers instead of names.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from MaxText.errors import UserError
from MaxText.formatting import pluralize
from MaxText.storage.errors import FileReadError
from MaxText.storage.file_access import FileInfo, file_infos, path_type

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
OFFSETS_NAME = "document_offsets.npy"
ROWS_NAME = "document_rows.npy"
SOURCE_FILES_NAME = "source_files.json"


class FrozenModel(pydantic.BaseModel):
    """An object of a JSON file; unknown fields are ignored."""

    model_config = pydantic.ConfigDict(frozen=True)


_Count = Annotated[int, pydantic.Field(ge=0, lt=2**62)]
_Id = Annotated[int, pydantic.Field(ge=0, lt=2**31)]


class RecordFile(FrozenModel):
    """A token file."""

    name: str
    num_bytes: _Count
    num_records: _Count  # chunks of an array_record file, ids of a bin file
    num_tokens: _Count


class Split(FrozenModel):
    """One split of the data, such as `train` or `validation`."""

    files: tuple[RecordFile, ...]
    num_tokens: _Count  # including bos and eos
    num_documents: _Count
    num_text_bytes: _Count  # UTF-8 bytes of the source text
    unigram_entropy_nats: float  # per token
    max_token_id: int
    tokens_sha256: str  # of the ids as little-endian bytes in `dtype`
    offsets_sha256: str  # of the document offsets as little-endian int64


class TokenizerEntry(FrozenModel):
    """The tokenizer of the ids."""

    origin: str  # free-text provenance
    sha256: str
    vocab_size: _Id
    bos_id: _Id | None = None
    eos_id: _Id | None = None
    pad_id: _Id | None = None
    mask_id: _Id | None = None

    @property
    def special_ids(self) -> set[int]:
        """Ids that are never text."""
        ids = (self.bos_id, self.eos_id, self.pad_id, self.mask_id)
        return {special_id for special_id in ids if special_id is not None}


class SourceEntry(FrozenModel):
    """The text a dataset was made from."""

    description: str
    sha256: str
    num_files: int
    skipped: dict[str, int] = {}  # reason -> number of skipped files or documents


class Manifest(FrozenModel):
    """Contents of a dataset."""

    schema_version: int  # readers reject others
    tokenizer: TokenizerEntry
    dtype: Literal["uint8", "uint16", "uint32"]  # little-endian; uint8 for the bytes of a text
    format: Literal["array_record", "bin"]  # records of ids, or flat files
    chunk_length: int = pydantic.Field(gt=0)  # ids per record; last may be shorter; 1 for bin
    splits: dict[str, Split]  # splits without documents are absent
    source: SourceEntry
    options: dict[str, Any] = {}  # preparation keys

    @property
    def fingerprint(self) -> str:
        """Hex digest of ids and document boundaries, independent of the location."""
        contents = {
            name: [split.num_tokens, split.tokens_sha256, split.offsets_sha256]
            for name, split in self.splits.items()
        }
        identity = json.dumps([self.tokenizer.sha256, contents], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def pad_id(self) -> int:
        """Padding id: pad, else eos, else 0."""
        candidates = (self.tokenizer.pad_id, self.tokenizer.eos_id, 0)
        return next(candidate for candidate in candidates if candidate is not None)

    def to_json(self) -> str:
        """Returns the contents of the file."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"


def unigram_entropy(counts_V: np.ndarray) -> float:
    """Returns the entropy in nats of ids with these counts; 0 without any."""
    probabilities = counts_V[counts_V > 0] / max(counts_V.sum(), 1)
    entropy = -(probabilities * np.log(probabilities)).sum()
    return float(entropy) + 0.0  # + 0.0 turns -0.0 into 0.0


def read_manifest(dataset_path: str, name: str = MANIFEST_NAME) -> Manifest:
    """Reads and validates a manifest in a local folder (for buckets, a copy).

    Raises UserError if it is missing, unreadable, damaged or of another version of the format.
    """
    file = Path(dataset_path).expanduser() / name
    try:
        if path_type(file) != "file":
            raise UserError(
                f"dataset_path={dataset_path} holds no {name}. Make one with: python "
                "MaxText/prepare_data.py prepare_source=<files, folders or python_stdlib> "
                f"dataset_path={dataset_path or '<folder>'}"
            )
        entries = json.loads(file.read_text(encoding="utf-8"))
        version = entries["schema_version"]
        if isinstance(version, int) and version != SCHEMA_VERSION:
            raise UserError(
                f"{file} has schema_version {version}; this program reads {SCHEMA_VERSION}. Update "
                "the program, or prepare the data again with this one."
            )
        return Manifest.model_validate(entries)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(file, error) from error


def damaged(path: Path | str, error: Exception) -> UserError:
    """Returns the error for a dataset file that cannot be read or understood."""
    if isinstance(error, OSError):
        return FileReadError(
            f"{path} cannot be read ({error.strerror or error}). Check that you may read it and "
            "the folders above it, or copy the data set again."
        )
    problem = str(error).replace("\n", " ")
    return UserError(
        f"{path} is damaged ({type(error).__name__}: {problem}). Copy the data set again, or "
        "delete the folder and prepare it again."
    )


def find_split(manifest: Manifest, dataset_path: str, split: str, key: str) -> Split:
    """Returns the entry of a split.

    Raises UserError, about the configuration key that named it, if it is absent or empty.
    """
    if split in manifest.splits and manifest.splits[split].num_tokens > 0:
        return manifest.splits[split]
    present = ", ".join(sorted(manifest.splits)) or "none"
    remedy = f"Set {key} to one of them"
    if key == "eval_split":
        remedy += (
            ", prepare two documents or more with validation_fraction above 0, or, where train.py "
            "is to evaluate, switch that off (eval_interval=-1)"
        )
    raise UserError(
        f"{key}={split}: this split does not exist in {dataset_path} (splits: {present}). {remedy}."
    )


def check_files(manifest: Manifest, folder: Path, split: str) -> list[FileInfo]:
    """Returns the token files of a split; UserError for a missing one."""
    entry = manifest.splits[split]
    try:
        return file_infos([str(folder / split / file.name) for file in entry.files])
    except OSError as error:
        raise damaged(error.filename, error) from error


def describe(manifest: Manifest) -> str:
    """Describes the contents and statistics of each split."""
    tokenizer = manifest.tokenizer
    lines = [
        f"Data set {manifest.fingerprint}: {manifest.source.description}",
        f"  tokenizer: {tokenizer.vocab_size} ids, {tokenizer.origin}",
    ]
    for name, split in manifest.splits.items():
        bytes_per_token = split.num_text_bytes / max(split.num_tokens, 1)
        lines.append(
            f"  {name}: {split.num_tokens:,} tokens, {pluralize(split.num_documents, 'document')}, "
            f"{bytes_per_token:.2f} bytes/token, unigram entropy "
            f"{split.unigram_entropy_nats:.3f} nats/token"
        )
    return "\n".join(lines)
