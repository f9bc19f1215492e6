"""`manifest.json`: contents of a prepared dataset, and checks before it is read.

    <dataset_path>/
      manifest.json                  this file
      tokenizer.json                 or tokenizer.model, a ranks file or settings
      <split>/tokens-000000.bin ...  the ids end to end, or chunks of them as .array_record
      <split>/document_offsets.npy   first token of each document, then the end
      <split>/document_rows.npy      row of each document in its source file
      <split>/source_files.json      [[first document, name of its file], ...]

The last two are absent in schema_version 1, which is always array_record.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from MaxText.counting import counted
from MaxText.errors import UserError
from MaxText.storage.file_access import FileInfo, file_infos, path_type
from MaxText.storage.unreadable import UnreadableFile

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
OFFSETS_NAME = "document_offsets.npy"
ROWS_NAME = "document_rows.npy"
SOURCE_FILES_NAME = "source_files.json"

# Names in a manifest become paths: no separators, no leading dot, so they stay in their folder.
_PLAIN_NAME = r"^\w[\w.-]*$"


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)


class RecordFile(_Entry):
    """A token file.

    Attributes:
      num_records: Chunks of an array_record file, ids of a bin file.
      num_tokens: None in schema_version 1, where only the last record of the split may be shorter.
    """

    name: str = pydantic.Field(pattern=_PLAIN_NAME)
    num_bytes: int
    num_records: int
    num_tokens: int | None = None


class Split(_Entry):
    """One part of the data, such as `train` or `validation`.

    Attributes:
      files: In the order of their tokens.
      num_tokens: bos and eos included.
      num_text_bytes: UTF-8 bytes of the text behind them.
      unigram_entropy: Nats per token of the token frequencies, the loss of a unigram model.
      tokens_sha256: Of the ids as little-endian bytes in `dtype`.
      offsets_sha256: Of the document offsets as little-endian int64.
    """

    files: tuple[RecordFile, ...]
    num_tokens: int
    num_documents: int
    num_text_bytes: int
    unigram_entropy: float
    largest_id: int
    tokens_sha256: str
    offsets_sha256: str


class TokenizerEntry(_Entry):
    """The tokenizer that made the ids.

    Attributes:
      origin: Text about its source.
      sha256: Of tokenizer.json, or of the file in its place.
      vocab_size: Largest id it can produce, plus 1.
      mask_id: Mask of masked language modeling.
    """

    origin: str
    sha256: str
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None

    @property
    def special_ids(self) -> set[int]:
        """Its control ids."""
        ids = (self.bos_id, self.eos_id, self.pad_id, self.mask_id)
        return {control for control in ids if control is not None}


class SourceEntry(_Entry):
    """The text a dataset was made from.

    Attributes:
      sha256: Of the texts of all documents, in order.
      skipped: Reason -> number of skipped files or documents.
    """

    description: str
    sha256: str
    num_files: int
    skipped: dict[str, int] = {}


class Manifest(_Entry):
    """Contents of a dataset.

    Attributes:
      schema_version: Layout of the folder; readers refuse newer ones.
      dtype: Type of a stored id, little-endian; uint8 for the bytes of a text.
      format: array_record (records of chunk_length ids) or bin (flat files of ids).
      chunk_length: Ids per record; the last record of a file may be shorter. 1 for bin.
      splits: Name -> Split. Splits without documents are absent.
      options: The preparation keys it was made with.
    """

    schema_version: int
    tokenizer: TokenizerEntry
    dtype: Literal["uint8", "uint16", "uint32"]
    format: Literal["array_record", "bin"] = "array_record"
    chunk_length: int = pydantic.Field(gt=0)
    splits: dict[str, Split]
    source: SourceEntry
    options: dict[str, Any] = {}

    @pydantic.field_validator("splits")
    @classmethod
    def _plain_split_names(cls, splits: dict[str, Split]) -> dict[str, Split]:
        for name in splits:
            if not name.replace("-", "_").isidentifier():
                raise ValueError(f"{name!r} is no name of a split")
        return splits

    @property
    def fingerprint(self) -> str:
        """Hex digest of ids and document boundaries, independent of the location."""
        contents = {
            name: [split.num_tokens, split.tokens_sha256, split.offsets_sha256]
            for name, split in self.splits.items()
        }
        text = json.dumps([self.tokenizer.sha256, contents], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def filler_id(self) -> int:
        """Padding id: pad, else eos, else 0."""
        for candidate in (self.tokenizer.pad_id, self.tokenizer.eos_id):
            if candidate is not None:
                return candidate
        return 0

    def to_json(self) -> str:
        """Returns the text of manifest.json, deterministically."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"


def unigram_entropy(counts_V: np.ndarray) -> float:
    """Returns the entropy in nats of ids that occur `counts_V` times; 0 without any."""
    present = counts_V[counts_V > 0].astype(np.float64)
    if present.size == 0:
        return 0.0
    share = present / present.sum()
    return float(-(share * np.log(share)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0


def read_manifest(dataset_path: str, name: str = MANIFEST_NAME) -> Manifest:
    """Reads and checks `<dataset_path>/manifest.json`, or another file there.

    Args:
      dataset_path: Local; for a bucket, the folder of a copy (local_copies.py).

    Raises:
      UserError: The path is empty, missing, unreadable or without manifest; the manifest is damaged
        or newer than this program.
    """
    how = (
        "Make one with: python MaxText/prepare_data.py prepare_source=<files, folders or "
        f"python_stdlib> dataset_path={dataset_path or '<folder>'}"
    )
    if not dataset_path:
        raise UserError(
            f"dataset_path is not set, and dataset_type=grain reads a prepared data set. {how}, "
            "or train on random tokens with dataset_type=synthetic."
        )
    folder = Path(dataset_path).expanduser()
    file = folder / name
    try:
        if not path_type(folder):
            raise UserError(f"dataset_path={dataset_path}: no such folder. {how}")
        if path_type(file) != "file":
            raise UserError(f"dataset_path={dataset_path} holds no {name}. {how}")
        entries = json.loads(file.read_text(encoding="utf-8"))
        version = entries["schema_version"]
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise UserError(
                f"{file} has schema_version {version}; this program reads up to "
                f"{SCHEMA_VERSION}. Update the program, or prepare the data again with this one."
            )
        return Manifest.model_validate(entries)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(file, error) from error


def damaged(path: Path | str, error: Exception) -> UserError:
    """Returns the error for a file of a dataset that cannot be read or parsed."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError):
        return UnreadableFile(
            f"{path} cannot be read ({error.strerror or error}). Check that you may read it and "
            "the folders above it, or copy the data set again.",
            str(path),
        )
    problem = str(error).replace("\n", " ")
    return UserError(
        f"{path} is damaged ({type(error).__name__}: {problem}). Copy the data set again, or "
        "delete the folder and prepare it again."
    )


def find_split(manifest: Manifest, dataset_path: str, split: str, key: str) -> Split:
    """Returns the entry of `split`, which the configuration key `key` named.

    Raises:
      UserError: There is no such split, or it is empty.
    """
    entry = manifest.splits.get(split)
    if entry is not None and entry.num_tokens > 0:
        return entry
    present = ", ".join(sorted(manifest.splits)) or "none"
    remedy = f"Set {key} to one of them"
    if key == "eval_split":
        if _can_be_held_out(manifest, split):
            remedy += ", prepare again with validation_fraction above 0 and at least two documents"
        elif manifest.splits:
            remedy += f" ({' or '.join(f'{key}={name}' for name in sorted(manifest.splits))})"
        remedy += ", or, where train.py is to evaluate, switch that off (eval_interval=-1)"
    problem = "is empty" if entry is not None else "does not exist"
    raise UserError(
        f"{key}={split}: this split {problem} in {dataset_path} (splits there: {present}). "
        f"{remedy}."
    )


def _can_be_held_out(manifest: Manifest, split: str) -> bool:
    """Returns whether preparing again with validation_fraction can make this split."""
    if split != "validation" or not set(manifest.splits) <= {"train", "validation"}:
        return False
    # Of two documents one is held out, unless the splits are those that the source has.
    num_documents = sum(entry.num_documents for entry in manifest.splits.values())
    return not manifest.options.get("validation_fraction") or num_documents < 2


def check_files(manifest: Manifest, folder: Path, split: str) -> list[FileInfo]:
    """Returns the token files of a split after a check of their sizes.

    Raises:
      UserError: One is missing, has another size or may not be looked at.
    """
    entry = manifest.splits[split]
    again = "Copy the data set again, or delete the folder and prepare it again."
    paths = [str(folder / split / file.name) for file in entry.files]
    for path in [*paths, str(folder / split / OFFSETS_NAME)]:
        try:
            found = path_type(path)
        except OSError as error:
            raise damaged(path, error) from error
        if found != "file":
            raise UserError(f"{path} is missing, and {MANIFEST_NAME} lists it. {again}")
    infos = file_infos(paths)
    for file, known in zip(infos, entry.files, strict=True):
        if file.size != known.num_bytes:
            raise UserError(
                f"{file.path} has {file.size} bytes, and {MANIFEST_NAME} says {known.num_bytes}: "
                f"it was cut short or changed. {again}"
            )
    return infos


def tokens_of_files(entry: Split, chunk_length: int) -> list[int]:
    """Returns the number of ids of each file."""
    counts: list[int] = []
    for number, file in enumerate(entry.files):
        num_tokens = file.num_tokens
        if num_tokens is None:  # schema_version 1
            is_last = number == len(entry.files) - 1
            num_tokens = (
                entry.num_tokens - sum(counts) if is_last else file.num_records * chunk_length
            )
        counts.append(num_tokens)
    assert sum(counts) == entry.num_tokens or not entry.files, counts
    return counts


def describe(manifest: Manifest) -> str:
    """Describes size, documents, bytes per token and unigram entropy of each split."""
    tokenizer = manifest.tokenizer
    lines = [
        f"Data set {manifest.fingerprint}: {manifest.source.description}",
        f"  tokenizer: {tokenizer.vocab_size} ids, {tokenizer.origin}",
    ]
    for name, split in manifest.splits.items():
        per_token = split.num_text_bytes / max(split.num_tokens, 1)
        nats = split.unigram_entropy
        lines.append(
            f"  {name}: {split.num_tokens:,} tokens, {counted(split.num_documents, 'document')}, "
            f"{per_token:.2f} bytes/token, unigram entropy {nats:.3f} nats/token"
        )
    return "\n".join(lines)
