"""The token store of a stream: random access to what can only be read in sequence.

Reading forward is free. Reading an earlier token starts an iterator again from the nearest
position before it: at the beginning of a recent step, of the checkpoint, or of the stream.

Legend: P token ranges, D documents in the window.
"""

import copy
import dataclasses
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.data_source import Document
from MaxText.input_pipeline.registered_sources.source_reader import SourceReader
from MaxText.input_pipeline.token_store.token_reader import TokenReader
from MaxText.value_types import JsonValue

_MAX_POSITIONS = 64  # of recent steps: more than are read ahead


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """The beginning of a document of a stream.

    Attributes:
      token: Tokens before it, over all passes.
      epoch: Passes before that of the document.
      document: Documents before it in its pass.
      state: State of the iterator before it; None if the iterator has none.
    """

    token: int = 0
    epoch: int = 0
    document: int = 0
    state: JsonValue = None

    def as_json(self) -> dict[str, Any]:
        """Returns what a checkpoint holds."""
        return dataclasses.asdict(self)


class StreamStore(TokenReader):
    """The documents of a stream, one after the other, without end.

    Reads are for one thread; a thread that was abandoned in a read may still finish it.

    Attributes:
      reader: The source.
    """

    def __init__(self, reader: SourceReader):
        """Initializes without reading."""
        self.reader = reader
        self._positions = {0: StreamPosition()}
        self._cursor: _Cursor | None = None

    def __len__(self) -> int:
        return sys.maxsize

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids."""
        return np.dtype(np.int32)

    @property
    def file_of_document(self) -> None:
        """None: the files of a source are unknown."""

    def reopen(self) -> None:
        """Makes the next read begin with a new source and iterator."""
        self._cursor = None
        self.reader.reopen()

    def position_before(self, token: int) -> StreamPosition:
        """Returns the nearest known position at or before a token."""
        positions = self._positions  # the reading thread replaces it
        return positions[max(start for start in positions if start <= token)]

    def add_position(self, position: StreamPosition) -> None:
        """Adds a position from which reading may start; forgets old ones."""
        positions = self._positions | {position.token: position}
        starts = sorted(positions)
        self._positions = {start: positions[start] for start in (0, *starts[1:][-_MAX_POSITIONS:])}

    def mark(self, token: int) -> None:
        """Reads up to a token, and records the position of its document.

        Raises:
          UserError: The state of the iterator is not a value of JSON.
        """
        position = self._cursor_at(token).position_of(token)
        try:
            state = json.loads(json.dumps(position.state))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"Data source {self.reader.name}: get_state() returned "
                f"{type(position.state).__name__}, which is not a value of JSON ({error}). Return "
                "numbers, text, lists and dictionaries."
            ) from error
        self.add_position(dataclasses.replace(position, state=state))

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [D + 1]: first tokens of the documents of the last read, then the end."""
        assert self._cursor is not None
        return self._cursor.document_offsets

    def document_name(self, document: int) -> str:
        """Returns the name of a document of the last read."""
        assert self._cursor is not None
        position = self._cursor.documents[document].position
        name = f"document {position.document} of data source {self.reader.name}"
        return f"{name}, pass {position.epoch + 1}" if position.epoch else name

    def read(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Reads token ranges; returns their ids (int32), one range after the other."""
        return self._read(start_P, stop_P, "tokens", np.int32)

    def read_loss_mask(self, start_P: np.ndarray, stop_P: np.ndarray) -> np.ndarray:
        """Returns bool like `read`: whether each token counts as a target."""
        return self._read(start_P, stop_P, "loss_mask", bool)

    def _read(self, start_P: np.ndarray, stop_P: np.ndarray, field: str, dtype: type) -> np.ndarray:
        if not len(start_P):
            return np.empty(0, dtype)
        first = int(start_P.min())
        cursor = self._cursor_at(first)
        cursor.extend(int(stop_P.max()))
        cursor.drop_before(first)
        values = np.concatenate([getattr(entry.document, field) for entry in cursor.documents])
        base = cursor.documents[0].position.token
        ranges = zip((start_P - base).tolist(), (stop_P - base).tolist(), strict=True)
        return np.concatenate([values[start:stop] for start, stop in ranges])

    def _cursor_at(self, token: int) -> "_Cursor":
        """Returns a cursor whose window holds a token, or whose iterator comes before it."""
        if self._cursor is None or self._cursor.first_token > token:
            self._cursor = _Cursor(self.reader, self.position_before(token))
        self._cursor.extend(token + 1, drop=True)
        return self._cursor


@dataclasses.dataclass(frozen=True)
class _StreamDocument:
    """A document in the window, with a loss mask, and its position."""

    position: StreamPosition
    document: Document

    @property
    def end(self) -> int:
        """Token after its last."""
        return self.position.token + len(self.document.tokens)


class _Cursor:
    """An iterator over a stream, and the window of documents that were read last."""

    def __init__(self, reader: SourceReader, position: StreamPosition):
        """Restores an iterator at a position, or reads up to it if the iterator has no state."""
        self._reader = reader
        self._position = position  # of the next document
        self._pass_has_tokens = position.document > 0
        self._iterator: Iterator[Any] = reader.iterator()
        self.documents: deque[_StreamDocument] = deque()
        if position.state is not None:
            reader.set_state(self._iterator, copy.deepcopy(position.state))
            return
        for index in range(position.document):
            if reader.next(self._iterator, index) is None:
                raise UserError(
                    f"Data source {reader.name}: the stream ended after {index} documents, and the "
                    f"run has read {position.document}. A stream must always give the same ones."
                )

    @property
    def first_token(self) -> int:
        """First token that can be read."""
        return self.documents[0].position.token if self.documents else self._position.token

    @property
    def document_offsets(self) -> np.ndarray:
        """First tokens of the documents in the window, then the end."""
        starts = [entry.position.token for entry in self.documents]
        return np.array([*starts, self._position.token], np.int64)

    def position_of(self, token: int) -> StreamPosition:
        """Returns the position of the document in the window with a token."""
        return next(entry.position for entry in self.documents if entry.end > token)

    def extend(self, end: int, *, drop: bool = False) -> None:
        """Reads documents until the window holds the tokens before `end`.

        Args:
          end: Token after the last.
          drop: Forget documents on the way that do not hold the token before `end`.
        """
        while self._position.token < end:
            self._read_document()
            if drop:
                self.drop_before(min(end - 1, self._position.token - 1))

    def drop_before(self, token: int) -> None:
        """Forgets the documents that end at or before a token."""
        while self.documents and self.documents[0].end <= token:
            self.documents.popleft()

    def _read_document(self) -> None:
        state = copy.deepcopy(self._reader.get_state(self._iterator))
        position = dataclasses.replace(self._position, state=state)
        document = self._reader.next(self._iterator, position.document)
        if document is None:
            self._start_again()
            return
        if document.loss_mask is None:
            document = document._replace(loss_mask=np.ones(len(document.tokens), bool))
        entry = _StreamDocument(position, document)
        self.documents.append(entry)
        self._position = StreamPosition(entry.end, position.epoch, position.document + 1)
        self._pass_has_tokens |= len(document.tokens) > 0

    def _start_again(self) -> None:
        """Begins the next pass over the stream."""
        if not self._pass_has_tokens:
            raise UserError(f"Data source {self._reader.name}: the stream has no tokens.")
        self._pass_has_tokens = False
        self._iterator = self._reader.iterator()
        self._position = StreamPosition(self._position.token, self._position.epoch + 1)


def position_from_json(values: Mapping[str, Any]) -> StreamPosition:
    """Returns a position that a checkpoint holds."""
    return StreamPosition(**values)
