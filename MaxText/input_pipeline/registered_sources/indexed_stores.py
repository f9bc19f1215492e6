"""Token stores of data sources that are read by index.

Legend: P token ranges, D documents.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_source import Document
from MaxText.input_pipeline.local_cache import Arrays, cached_arrays
from MaxText.input_pipeline.registered_sources.source_reader import SourceReader
from MaxText.input_pipeline.token_store.token_reader import TokenReader

_BLOCK = 2**13  # documents counted at a time
_MANY_DOCUMENTS = 50_000  # counting them takes seconds or more


class SourceStore(TokenReader):
    """The documents or records of a data source, one after the other; not thread-safe.

    Attributes:
      reader: The source.
    """

    def __init__(self, reader: SourceReader):
        self.reader = reader
        # Those of the last read: the loss mask is read after the ids.
        self._documents: dict[int, Document] = {}

    def __reduce__(self):
        return type(self), (self.reader,)

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids."""
        return np.dtype(np.int32)

    @property
    def file_of_document(self) -> None:
        """None: the files of a source are unknown."""

    def reopen(self) -> None:
        """Constructs the source again."""
        self._documents = {}
        self.reader.reopen()

    def document_name(self, document: int) -> str:
        """Returns a name such as `document 17 of data source arithmetic`."""
        return f"{self.reader.unit} {document} of data source {self.reader.name}"

    def read(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Reads token ranges; returns their ids (int32), one range after the other."""
        documents = self._documents
        self._documents = {}
        pieces = [np.empty(0, np.int32)]
        for index, first, last in self._pieces(start_P, stop_P):
            if index not in self._documents:
                cached = documents.get(index)
                self._documents[index] = self._document(index) if cached is None else cached
            pieces.append(self._values(self._documents[index])[first:last])
        return np.concatenate(pieces)

    def read_loss_mask(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Returns bool like `read`: whether each token counts as a target."""
        self.read(start_P, stop_P)
        return np.concatenate(
            [
                _loss_mask(self._documents[index])[first:last]
                for index, first, last in self._pieces(start_P, stop_P)
            ]
            or [np.empty(0, bool)]
        )

    def _values(self, document: Document) -> np.ndarray:
        return document.tokens

    def _document(self, index: int) -> Document:
        """Returns a document of the length by which it is addressed."""
        raise NotImplementedError

    def _pieces(self, start_P: np.ndarray, stop_P: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yields (document, first token in it, end in it) of all ranges in order."""
        raise NotImplementedError


def _loss_mask(document: Document) -> np.ndarray:
    if document.loss_mask is None:
        return np.ones(len(document.tokens), bool)
    return document.loss_mask


class SourceDocuments(SourceStore):
    """The documents of a DocumentSource, whose lengths are known."""

    def __init__(self, reader: SourceReader, documents: Arrays):
        """Initializes without reading; `documents` holds `document_offsets`."""
        super().__init__(reader)
        self._arrays = documents

    def __reduce__(self):
        return type(self), (self.reader, self._arrays)

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [D + 1]: first token of each document, then the end."""
        return self._arrays["document_offsets"]

    def __len__(self) -> int:
        return int(self.document_offsets[-1])

    def _pieces(self, start_P: np.ndarray, stop_P: np.ndarray) -> Iterator[tuple[int, int, int]]:
        offsets = self.document_offsets
        for start, stop in zip(start_P.tolist(), stop_P.tolist(), strict=True):
            token = start
            index = int(np.searchsorted(offsets, token, side="right")) - 1
            while token < stop:
                first = int(offsets[index])
                end = min(stop, int(offsets[index + 1]))
                if end > token:
                    yield index, token - first, end - first
                token = end
                index += 1

    def _document(self, index: int) -> Document:
        document = self.reader[index]
        expected = int(self.document_offsets[index + 1] - self.document_offsets[index])
        if len(document.tokens) != expected:
            raise UserError(
                f"Data source {self.reader.name}: document({index}) returned "
                f"{len(document.tokens)} tokens, and {expected} when documents were counted. A "
                "document must depend on its index and the keys alone, and lengths() must be exact."
            )
        return document


def count_documents(
    reader: SourceReader, cache_dir: Path, key: str, log: Callable[[str], None]
) -> Arrays:
    """Returns `document_offsets` (int64 [D + 1]) of a DocumentSource; cached if there are many.

    Args:
      reader: The source.
      cache_dir: Folder of the cache.
      key: Everything that the lengths depend on.
      log: Receives a line before many documents are read.

    Raises:
      UserError: A document is wrong, or the cache cannot be written.
    """
    return cached_arrays(cache_dir, "lengths1", key, lambda: _offset_blocks(reader, log))


def _offset_blocks(
    reader: SourceReader, log: Callable[[str], None]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields `document_offsets` in blocks."""
    stated = reader.lengths()
    num_documents = len(reader)
    if stated is None and num_documents >= _MANY_DOCUMENTS:
        log(
            f"Reading {num_documents:,} documents of the data source {reader.name} to count their "
            "tokens; lengths() would save this"
        )
    offset = 0
    yield {"document_offsets": np.zeros(1, np.int64)}
    for first in range(0, num_documents, _BLOCK):
        indices = range(first, min(first + _BLOCK, num_documents))
        if stated is None:
            sizes = np.array([len(reader[index].tokens) for index in indices], np.int64)
        else:
            sizes = stated[indices.start : indices.stop]
        ends = offset + np.cumsum(sizes)
        yield {"document_offsets": ends}
        offset = int(ends[-1])


class SourceRecords(SourceStore):
    """The records of a RecordSource, each padded to T + 1 tokens, or to T if they have labels."""

    def __init__(self, reader: SourceReader, length: int):
        """Initializes without reading; `length` is T."""
        super().__init__(reader)
        self._length = length
        # The last token of a record without labels is only a target.
        self.record_size = length if reader.source.has_labels else length + 1

    def __reduce__(self):
        return type(self), (self.reader, self._length)

    @property
    def document_offsets(self) -> np.ndarray:
        """Not stored: record i begins at token i (T + 1), and there may be 2^32 of them."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.reader) * self.record_size

    def _pieces(self, start_P: np.ndarray, stop_P: np.ndarray) -> Iterator[tuple[int, int, int]]:
        for start, stop in zip(start_P.tolist(), stop_P.tolist(), strict=True):
            token = start
            while token < stop:
                index, first = divmod(token, self.record_size)
                num_tokens = min(stop - token, self.record_size - first)
                yield index, first, first + num_tokens
                token += num_tokens

    def _document(self, index: int) -> Document:
        record = self.reader[index]
        num_tokens = len(record.tokens)
        if num_tokens > self.record_size:
            limit = "max_target_length"
            if self.record_size > self._length:
                limit += " + 1"
            raise UserError(
                f"Data source {self.reader.name}: record({index}) has {num_tokens} tokens. A "
                f"record has at most {limit} = {self.record_size}; longer ones are for a "
                "DocumentSource, which splits them."
            )
        num_padding = self.record_size - num_tokens
        tokens = np.pad(record.tokens, (0, num_padding), constant_values=self.reader.source.pad_id)
        loss_mask = np.pad(_loss_mask(record), (0, num_padding))
        labels = record.labels
        if labels is not None:
            labels = np.pad(labels, (0, num_padding), constant_values=-1)
        return Document(tokens, loss_mask, labels)


class SourceLabels(SourceRecords):
    """The labels of records: the id to predict at each position, negative for none."""

    def _values(self, document: Document) -> np.ndarray:
        assert document.labels is not None
        return document.labels
