"""Random access to the tokens of a split of a prepared data set."""

import bisect
import json
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_errors import BadRecord, UnreadableFile
from MaxText.input_pipeline.formats.array_record_ids import ArrayRecordIds, Readers, read_records
from MaxText.input_pipeline.token_store.flat_files import FlatFile, FlatStream
from MaxText.input_pipeline.token_store.healing import check_sizes, told_where
from MaxText.input_pipeline.token_store.manifest import (
    OFFSETS_NAME,
    ROWS_NAME,
    SOURCE_FILES_NAME,
    Manifest,
    Split,
    check_files,
    read_manifest,
    unreadable,
)


class _Part(NamedTuple):
    """Tokens [start, stop) of one record of one file."""

    file: int
    record: int
    start: int
    stop: int


class TokenStream:
    """The tokens of a split as one sequence: `stream[a:b]` is an int32 array [b - a].

    Safe to use from several threads. Files open at the first read that needs them; a pickled
    stream (sent to a reader process) opens its own. A data set of flat files offers `gather` too,
    see FlatStream.
    """

    def __init__(
        self, dataset_path: str, manifest: Manifest, split: str, records: str | None = None
    ):
        """Checks the files of `split` by size and opens none.

        Args:
          dataset_path: local folder of the data set.
          manifest: of it.
          split: to read.
          records: URL of the data set that the folder is a copy of; of a data set of flat files
            the records are read there.

        Raises:
          UserError: a file is missing or has another size than the manifest says.
        """
        is_flat = manifest.format == "bin"
        check_files(manifest, dataset_path, split, records_too=not (is_flat and records))
        entry = manifest.splits[split]
        self._opened = dataset_path, manifest.fingerprint
        self._folder = Path(dataset_path).expanduser().resolve() / split
        place = f"{records}/{split}" if is_flat and records else self._folder
        self._files = [f"{place}/{file.name}" for file in entry.files]
        self._num_bytes = [file.num_bytes for file in entry.files]
        # First token of each file, then the end.
        self._first_token = _first_tokens(entry, manifest.chunk_length)
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._chunk_length = manifest.chunk_length
        self._num_tokens = entry.num_tokens
        self._num_documents = entry.num_documents
        self._flat: FlatStream | None = None
        self._start()
        if is_flat:
            self._open_flat(look=True)

    def check(self, given_up: Collection[str] = ()) -> None:
        """See token_data.TokenStream; raises also where the manifest is that of other data."""
        path, fingerprint = self._opened
        manifest = read_manifest(path)
        if manifest.fingerprint != fingerprint:
            raise UserError(
                f"{path} holds other data than at the start of the run: its fingerprint was "
                f"{fingerprint} and is {manifest.fingerprint}. Put the data set back."
            )
        check_sizes(self._files, self._num_bytes, given_up)
        with self._lock:
            self._offsets = self._load_offsets()

    def _open_flat(self, look: bool) -> None:
        files = [
            FlatFile(path, first)
            for path, first in zip(self._files, self._first_token, strict=False)
        ]
        self._flat = FlatStream(files, self._dtype, self.document_offsets, look)
        # Not a method: readers look for it to know whether rows can be copied at once.
        self.gather = self._flat.gather

    def _start(self) -> None:
        self._readers = Readers()
        self._offsets: np.ndarray | None = None
        self._origins: tuple[np.ndarray, list[int], list[str]] | None = None
        self._lock = threading.RLock()

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        for name in ("_readers", "_offsets", "_origins", "_lock", "_flat", "gather"):
            state.pop(name, None)
        # The offsets are mapped again by the one who unpickles.
        state["_is_flat"] = self._flat is not None
        return state

    def __setstate__(self, state: dict) -> None:
        is_flat = state.pop("_is_flat")
        self.__dict__.update(state)
        self._flat = None
        self._start()
        if is_flat:
            self._open_flat(look=False)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1]: first token of each document, then the length of the stream.

        Mapped from disk, not loaded.

        Raises:
          UserError: the file does not fit the manifest.
        """
        with self._lock:
            if self._offsets is None:
                self._offsets = self._load_offsets()
            return self._offsets

    def _load_offsets(self) -> np.ndarray:
        path = self._folder / OFFSETS_NAME
        try:
            # A plain array over the map: slicing numpy's memmap class costs several times as much.
            offsets = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            found = (len(offsets) - 1, int(offsets[-1]))
            if offsets.dtype != np.int64 or offsets[0] or (np.diff(offsets) < 0).any():
                raise ValueError("they are no ascending numbers from 0 on")
        except PermissionError as error:
            raise unreadable(path, error) from error
        except OSError as error:
            raise UnreadableFile(
                f"{path} cannot be read ({error.strerror or error}). Copy the data set again."
            ) from error
        # What a damaged header raises is any kind of error.
        except Exception as error:
            raise UserError(f"{path} is damaged ({error}). Copy the data set again.") from error
        expected = (self._num_documents, self._num_tokens)
        if found != expected:
            raise UserError(
                f"{path} is of other data: {found[0]} documents and {found[1]} tokens, where the "
                f"manifest has {expected[0]} and {expected[1]}. Copy the data set again."
            )
        return offsets

    def document_name(self, document: int) -> str:
        """`letters.jsonl, row 17`; `document 17` in data sets that do not say more.

        Raises:
          UserError: what says it is damaged.
        """
        with self._lock:
            if self._origins is None:
                self._origins = self._load_origins()
            rows, firsts, names = self._origins
        if not names:
            return f"document {document}"
        file = bisect.bisect_right(firsts, document) - 1
        return f"{names[file]}, row {rows[document]}"

    @property
    def file_of_document(self) -> np.ndarray | None:
        """int64 [files + 1]: first document of each source file, then the end; None if unknown."""
        with self._lock:
            if self._origins is None:
                self._origins = self._load_origins()
            _, firsts, names = self._origins
        return np.array([*firsts, self._num_documents], np.int64) if names else None

    def _load_origins(self) -> tuple[np.ndarray, list[int], list[str]]:
        path = self._folder / SOURCE_FILES_NAME
        try:
            if not path.exists():
                return np.empty(0, np.int32), [], []
            entries = json.loads(path.read_text(encoding="utf-8"))
            firsts = [int(first) for first, _ in entries]
            rows = np.load(self._folder / ROWS_NAME, mmap_mode="r", allow_pickle=False)
            if rows.shape != (self._num_documents,) or firsts[:1] != [0][: len(rows)]:
                raise ValueError(f"{rows.shape} rows for {self._num_documents} documents")
            return rows, firsts, [str(name) for _, name in entries]
        except PermissionError as error:
            raise unreadable(Path(error.filename), error) from error
        # What a damaged header raises is any kind of error.
        except Exception as error:
            raise UserError(
                f"{path} or {ROWS_NAME} is damaged ({error}). Copy the data set again."
            ) from error

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, step = place.indices(self._num_tokens)
        if step != 1:
            raise ValueError(f"a stream is read in steps of 1, not {step}")
        return self.ranges([(start, max(start, stop))])[0]

    def ranges(self, places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Reads several pieces at once, each record once and each file in one call.

        Args:
          places: pairs (start, stop), 0 <= start <= stop <= len(stream).

        Returns:
          int32 arrays [stop - start].

        Raises:
          BadRecord: a record is damaged.
        """
        if self._flat is not None:
            return self._flat.ranges(places)
        parts_of_places = [self._parts(start, stop) for start, stop in places]
        records = self._read_records(
            {(part.file, part.record) for parts in parts_of_places for part in parts}
        )
        pieces = []
        for (start, stop), parts in zip(places, parts_of_places, strict=True):
            piece = np.empty(stop - start, np.int32)
            at = 0
            for part in parts:
                size = part.stop - part.start
                piece[at : at + size] = records[part.file, part.record][part.start : part.stop]
                at += size
            pieces.append(piece)
        return pieces

    def _parts(self, start: int, stop: int) -> list[_Part]:
        """What of which records makes up the tokens [start, stop)."""
        assert 0 <= start <= stop <= self._num_tokens, (start, stop, self._num_tokens)
        length = self._chunk_length
        parts = []
        file = bisect.bisect_right(self._first_token, start) - 1
        while start < stop:
            first, end = self._first_token[file], self._first_token[file + 1]
            record, inside = divmod(start - first, length)
            until = min(stop, end, first + (record + 1) * length)
            if start < until:
                parts.append(_Part(file, record, inside, inside + until - start))
            start = until
            file += start == end
        return parts

    def _read_records(self, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], np.ndarray]:
        """Whole records by (file, record), in their stored type."""
        of_file: dict[int, list[int]] = {}
        for file, record in sorted(wanted):
            of_file.setdefault(file, []).append(record)
        chunks = {}
        for file, records in of_file.items():
            path = self._files[file]
            num_tokens = self._first_token[file + 1] - self._first_token[file]
            unit = ArrayRecordIds.unit
            with told_where(path, self._num_bytes[file], records[0], unit):
                contents = read_records(self._readers.reader(path), path, records)
                for record, content in zip(records, contents, strict=True):
                    expected = min(self._chunk_length, num_tokens - record * self._chunk_length)
                    if len(content) != expected * self._dtype.itemsize:
                        raise BadRecord(
                            path,
                            record,
                            f"the record is damaged: it has {len(content)} bytes, where {expected} "
                            f"tokens take {expected * self._dtype.itemsize}",
                            unit,
                        )
                    chunks[file, record] = np.frombuffer(content, self._dtype)
        return chunks


def _first_tokens(entry: Split, chunk_length: int) -> list[int]:
    """First token of each file, then the end."""
    firsts = [0]
    for number, file in enumerate(entry.files):
        num_tokens = file.num_tokens
        if num_tokens is None:
            is_last = number == len(entry.files) - 1
            rest = entry.num_tokens - firsts[-1]
            num_tokens = rest if is_last else file.num_records * chunk_length
        firsts.append(firsts[-1] + num_tokens)
    assert firsts[-1] == entry.num_tokens or not entry.files, (firsts[-1], entry.num_tokens)
    return firsts
