"""Random access to the tokens of a split."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from array_record.python import (
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]
)

from MaxText.errors import UserError
from MaxText.input_pipeline.manifest import OFFSETS_NAME, Manifest, check_files

# Each read fetches single records at random places: read nothing ahead.
READER_OPTIONS = "readahead_buffer_size:0"


class TokenStream:
    """The tokens of a split as one sequence: `stream[a:b]` is an int32 array [b - a].

    Safe to use from several threads. Files open at the first read that needs them; a pickled
    stream (sent to a reader process) opens its own.
    """

    def __init__(self, dataset_path: str, manifest: Manifest, split: str):
        """Checks the files of `split` by size and opens none.

        Raises:
          UserError: a file is missing or has another size than the manifest says.
        """
        check_files(manifest, dataset_path, split)
        entry = manifest.splits[split]
        self._folder = Path(dataset_path).expanduser().resolve() / split
        self._files = [file.name for file in entry.files]
        # First record of each file, then the end.
        self._first_record = np.cumsum([0, *(file.num_records for file in entry.files)])
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._chunk_length = manifest.chunk_length
        self._num_tokens = entry.num_tokens
        self._num_documents = entry.num_documents
        self._start()

    def _start(self) -> None:
        self._readers: dict[int, array_record_module.ArrayRecordReader] = {}
        self._offsets: np.ndarray | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        state = self.__dict__.copy()
        for name in ("_readers", "_offsets", "_lock"):
            del state[name]
        return state

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._start()

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
            offsets = np.load(path, mmap_mode="r", allow_pickle=False)
            found = (len(offsets) - 1, int(offsets[-1]))
        except (OSError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"{path} is damaged ({error}). Copy the data set again.") from error
        expected = (self._num_documents, self._num_tokens)
        if found != expected:
            raise UserError(
                f"{path} is of other data: {found[0]} documents and {found[1]} tokens, where the "
                f"manifest has {expected[0]} and {expected[1]}. Copy the data set again."
            )
        return offsets

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
          UserError: a record is damaged.
        """
        length = self._chunk_length
        wanted: set[int] = set()
        for start, stop in places:
            assert 0 <= start <= stop <= self._num_tokens, (start, stop, self._num_tokens)
            if start < stop:
                wanted.update(range(start // length, (stop - 1) // length + 1))
        chunks = self._read_records(sorted(wanted))
        pieces = []
        for start, stop in places:
            piece = np.empty(stop - start, np.int32)
            at = start
            while at < stop:
                index, inside = divmod(at, length)
                part = chunks[index][inside : inside + stop - at]
                piece[at - start : at - start + part.size] = part
                at += part.size
            pieces.append(piece)
        return pieces

    def _read_records(self, records: list[int]) -> dict[int, np.ndarray]:
        chunks = {}
        of_file: dict[int, list[int]] = {}
        for record in records:
            file = int(np.searchsorted(self._first_record, record, side="right")) - 1
            of_file.setdefault(file, []).append(record)
        for file, members in of_file.items():
            first = int(self._first_record[file])
            try:
                contents = self._reader(file).read([record - first for record in members])
            except (RuntimeError, IndexError, ValueError) as error:
                raise UserError(
                    f"{self._folder / self._files[file]} is damaged ({error}). Copy the data set "
                    "again, or delete the folder and prepare it again."
                ) from error
            for record, content in zip(members, contents, strict=True):
                chunk = np.frombuffer(content, self._dtype)
                expected = min(self._chunk_length, self._num_tokens - record * self._chunk_length)
                assert chunk.size == expected, (record, chunk.size, expected)
                chunks[record] = chunk
        return chunks

    def _reader(self, file: int) -> array_record_module.ArrayRecordReader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = array_record_module.ArrayRecordReader(
                    str(self._folder / self._files[file]),
                    options=READER_OPTIONS,
                    file_reader_buffer_size=32768,
                )
            return self._readers[file]
