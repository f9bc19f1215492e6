"""Detects file formats by name and first bytes, and selects the files of a split."""

import re
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tfrecord
from MaxText.storage.file_access import FileInfo, names_below, open_stream

ACCEPTED = (
    "a folder that prepare_data.py wrote; .tfrecord, .array_record, .parquet or .arrow files of "
    "token ids or text; webdataset .tar archives of tensors; Megatron's .bin with .idx; .txt or "
    ".jsonl text"
)

_BY_NAME = {
    "tfrecord": re.compile(r"\.tfrecords?(?![a-z])|tfrecord-\d"),
    "arrayrecord": re.compile(r"\.array_?records?(?![a-z])"),
    "parquet": re.compile(r"\.parquet(?![a-z])"),
    "arrow": re.compile(r"\.arrow(?![a-z])"),
    "megatron": re.compile(r"\.(bin|idx)$"),
    "webdataset": re.compile(r"\.(tar|tar\.gz|tgz)$"),
}
_TEXT = re.compile(r"\.(txt|md|rst|text|jsonl)(\.(gz|zst|xz|bz2))?$")
# Auxiliary files in record folders.
_AUXILIARY = re.compile(r"\.(json|md|lock|crc|npy|model|log|py|yml|yaml)$|^[^.]+$")

_MAGIC = {"parquet": b"PAR1", "arrow": b"ARROW1", "arrayrecord": bytes.fromhex("83af70d10d884a3f")}


def choose_format(
    files: list[FileInfo], kind: str, key: str, location: str
) -> tuple[str, list[FileInfo]]:
    """Returns the format of the files at a location, and the files that have it.

    `kind` is grain_file_type. Formats are tfrecord, arrayrecord, parquet, arrow, webdataset,
    megatron and text. Raises UserError if it is unknown, ambiguous, or `kind` does not match.
    """
    if kind != "auto":
        named = [file for file in files if _kind_by_name(file.path) == kind]
        _check_format(kind, (named or files)[0].path, key, location)
        return kind, named or files
    by_kind: dict[str, list[FileInfo]] = {}
    for file in files:
        by_kind.setdefault(_kind_by_name(file.path), []).append(file)
    auxiliary, nameless = by_kind.pop("auxiliary", []), by_kind.pop("", [])
    # Some programs write records without a file extension.
    for file in nameless or ([] if by_kind else auxiliary):
        by_kind.setdefault(_kind_by_content(file.path), []).append(file)
    by_kind.pop("", None)
    if len(by_kind) > 1:
        by_kind.pop("text", None)  # a README.txt next to records
    if len(by_kind) == 1:
        return by_kind.popitem()
    found = ", ".join(
        f"{len(members)} {kind} ({Path(members[0].path).name})" for kind, members in by_kind.items()
    )
    if by_kind:
        raise UserError(
            f"{key}={location} holds files of several formats: {found}. Set "
            "grain_file_type to the one to read, or give a pattern that matches only these."
        )
    raise UserError(
        f"{key}={location}: {files[0].path} has an unknown format. Accepted: "
        f"{ACCEPTED}. If its name is misleading, set grain_file_type."
    )


def _check_format(kind: str, file: str, key: str, location: str) -> None:
    """Checks that a file has the format that grain_file_type says."""
    # Text and Megatron ids have no magic bytes, and compressed files have gzip's.
    if kind == "text" or file.endswith((".gz", ".tgz", ".bin")):
        return
    found = _kind_by_content(file)
    # Parquet and Arrow readers accept both. Unknown files may be damaged, which their reader
    # reports better, except that an unknown "parquet" file would be read as Arrow.
    is_table = {found, kind} <= {"parquet", "arrow"}
    if found == kind or is_table or (not found and kind != "parquet"):
        return
    what = f"is {found} by its first bytes" if found else "is not"
    raise UserError(
        f"{key}={location}: grain_file_type={kind} is set, and {file} {what}. Set "
        f"grain_file_type={found or 'auto'}, or name other files."
    )


def _kind_by_name(file: str) -> str:
    name = file.rsplit("/", 1)[-1]
    for kind, pattern in _BY_NAME.items():
        if pattern.search(name):
            return kind
    if _TEXT.search(name) and not name.lower().startswith("readme"):
        return "text"
    return "auxiliary" if _AUXILIARY.search(name) and not re.search(r"\d+-of-\d+$", name) else ""


def _kind_by_content(file: str) -> str:
    start = _first_bytes(file)
    for kind, magic in _MAGIC.items():
        if start.startswith(magic):
            return kind
    if start[257:262] == b"ustar":
        return "webdataset"
    if start[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    header = start[: tfrecord.HEADER_BYTES]
    if len(header) == tfrecord.HEADER_BYTES:
        length_crc = int.from_bytes(header[8:], "little")
        if tfrecord.masked_crc32c(header[:8]) == length_crc:
            return "tfrecord"
    return ""


def _first_bytes(file: str) -> bytes:
    try:
        with open_stream(file) as stream:
            return stream.read(512)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror or error}). Check that you may read it."
        ) from error


def choose_split(
    files: list[FileInfo], evaluation: str, for_training: bool, key: str, location: str
) -> list[FileInfo]:
    """Selects files for training or evaluation by name; raises UserError if none is left.

    Files with `evaluation` in the name, below their common folder, are for evaluation.
    """
    names = names_below([file.path for file in files])
    named = [file for file, name in zip(files, names, strict=True) if evaluation in name]
    if for_training:
        left = [file for file in files if file not in set(named)]
        if not left:
            raise UserError(
                f"{key}={location}: the name of every file contains eval_split="
                f"{evaluation}, so none is left to train on. Set eval_split to what only files for "
                "evaluation have in their names."
            )
        return left
    if not named:
        raise UserError(
            f"{key}={location}: no file has eval_split={evaluation} in its name "
            f"(for example {Path(files[0].path).name}), so there is none to evaluate on. Name "
            "files in grain_eval_files, set eval_split, or, where train.py is to evaluate, switch "
            "that off (eval_interval=-1)."
        )
    return named
