"""A user's data source: constructed, its results checked, its errors named."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from MaxText.config import import_modules, registry
from MaxText.config.keys import Section
from MaxText.errors import UserError, first_line, raising_line
from MaxText.input_pipeline.data_source import (
    DataSource,
    Document,
    DocumentSource,
    RecordSource,
    SourceContext,
    StreamSource,
    TokenIds,
)
from MaxText.storage.errors import FileReadError
from MaxText.value_types import JsonValue

Result = TypeVar("Result")
KIND = "data_source"
_MAX_ID = 2**31 - 1


class SourceReader:
    """Reads a user's data source, and checks what it returns.

    It is pickled as the names from which another process imports and constructs the source again.

    Attributes:
      name: The registered name.
      values: The source's keys.
      source: The user's object.
    """

    source: DataSource

    def __init__(
        self, name: str, values: Mapping[str, Any], context: SourceContext, modules: tuple[str, ...]
    ):
        """Constructs the source.

        Args:
          name: The registered name.
          values: The source's keys.
          context: What the run tells it.
          modules: `import_modules` of the run, for other processes.

        Raises:
          UserError: The class is no data source, or its constructor fails.
        """
        self.name = name
        self.values = dict(values)
        self._context = context
        self._modules = modules
        self.reopen()

    def __reduce__(self):
        return _construct, (self.name, self.values, self._context, self._modules)

    def reopen(self) -> None:
        """Constructs the source again, so that it opens its files again."""
        part = registry.registration(KIND, self.name)
        source_class = part.load()
        forms = (DocumentSource, RecordSource, StreamSource)
        if not (isinstance(source_class, type) and issubclass(source_class, forms)):
            raise UserError(
                f"Data source {self.name} ({part.location}) must be derived from DocumentSource, "
                "RecordSource or StreamSource of MaxText.input_pipeline.data_source."
            )
        section = (part.keys or Section).model_validate(self.values)
        self.source = self._call("__init__", lambda: source_class(section, self._context))

    @property
    def unit(self) -> str:
        """Name of what the source gives by index or in sequence."""
        return "record" if isinstance(self.source, RecordSource) else "document"

    def __len__(self) -> int:
        source = self.source
        assert isinstance(source, DocumentSource | RecordSource)
        return self._call("__len__", lambda: len(source))

    def lengths(self) -> np.ndarray | None:
        """Returns the lengths that the source states (int64), or None."""
        source = self.source
        assert isinstance(source, DocumentSource)
        lengths = self._call("lengths()", source.lengths)
        if lengths is None:
            return None
        lengths = np.asarray(lengths)
        if lengths.shape != (len(self),) or lengths.dtype.kind not in "iu" or (lengths < 0).any():
            raise self._error(
                "lengths()",
                f"returned an array {lengths.dtype} {list(lengths.shape)}. Return a count of "
                f"tokens for each of the {len(self)} documents",
            )
        return lengths.astype(np.int64)

    def __getitem__(self, index: int) -> Document:
        """Returns a document or record by index.

        Raises:
          UserError: The source fails, or returns what is no token ids.
          FileReadError: It raised an OSError, after which a read may be tried again.
        """
        source = self.source
        call = f"{self.unit}({index})"
        if isinstance(source, RecordSource):
            return self._checked(call, self._call(call, lambda: source.record(index)))
        assert isinstance(source, DocumentSource)
        return self._checked(call, self._call(call, lambda: source.document(index)))

    def iterator(self) -> Iterator[TokenIds]:
        """Returns the iterator of one pass over a stream."""
        source = self.source
        assert isinstance(source, StreamSource)
        return self._call("__iter__", lambda: iter(source))

    def next(self, iterator: Iterator[TokenIds], index: int) -> Document | None:
        """Returns the next document of a stream, the `index`-th of its pass; None at the end."""
        call = f"document {index} of the stream"
        tokens = self._call(call, lambda: next(iterator, None))
        return None if tokens is None else self._checked(call, tokens)

    def get_state(self, iterator: Iterator[TokenIds]) -> JsonValue:
        """Returns the state of a stream's iterator; None if it has none."""
        if not hasattr(iterator, "get_state"):
            return None
        return self._call("get_state()", iterator.get_state)  # type: ignore[attr-defined]

    def set_state(self, iterator: Iterator[TokenIds], state: JsonValue) -> None:
        """Restores a state of `get_state`."""
        self._call("set_state()", lambda: iterator.set_state(state))  # type: ignore[attr-defined]

    def _call(self, call: str, function: Callable[[], Result]) -> Result:
        """Calls the user's code; names the source and the call in its errors."""
        try:
            return function()
        except Exception as error:  # a user's class can raise anything
            file, _, _ = registry.registration(KIND, self.name).location.rpartition(":")
            line = raising_line(error, file)
            problem = f"raised {type(error).__name__}: {first_line(error)} ({line})"
            error_type = FileReadError if isinstance(error, OSError) else UserError
            raise self._error(call, problem, error_type) from error

    def _checked(self, call: str, tokens: TokenIds) -> Document:
        """Returns what the source returned as a Document with ids in int32."""
        loss_mask = None
        labels = None
        if isinstance(tokens, Document):
            tokens, loss_mask, labels = tokens
        try:
            ids = np.asarray(tokens)
        except ValueError:  # a ragged list
            ids = np.empty(0, object)
        if ids.size == 0 and ids.ndim == 1:
            ids = ids.astype(np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise self._error(
                call,
                f"returned {type(tokens).__name__} of {ids.dtype} {list(ids.shape)}. Return token "
                "ids: a list of integers or an integer array of one dimension",
            )
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= _MAX_ID:
            raise self._error(call, f"returned the ids {ids.min()} to {ids.max()}")
        if loss_mask is not None:
            loss_mask = self._checked_mask(call, loss_mask, len(ids))
        if self.source.has_labels or labels is not None:
            labels = self._checked_labels(call, labels, len(ids))
        return Document(ids.astype(np.int32), loss_mask, labels)

    def _checked_mask(self, call: str, loss_mask: np.ndarray, num_tokens: int) -> np.ndarray:
        mask = np.asarray(loss_mask)
        if mask.shape != (num_tokens,):
            raise self._error(
                call, f"returned {num_tokens} tokens and a loss_mask of shape {list(mask.shape)}"
            )
        if not self.source.has_loss_mask:
            raise self._error(
                call, "returned a loss_mask. Set has_loss_mask = True in its class, so it is used"
            )
        return mask.astype(bool)

    def _checked_labels(self, call: str, labels: Any, num_tokens: int) -> np.ndarray:
        array = np.asarray(labels)
        if array.shape != (num_tokens,) or array.dtype.kind not in "iu":
            raise self._error(
                call,
                f"returned {num_tokens} tokens and labels of {array.dtype} {list(array.shape)}. "
                "Return an integer for each token, negative for none",
            )
        if not (self.source.has_labels and isinstance(self.source, RecordSource)):
            raise self._error(
                call,
                "returned labels. Set has_labels = True in its class, which must be a RecordSource",
            )
        return np.maximum(array, -1).astype(np.int32)

    def _error(self, call: str, problem: str, error_type: type[UserError] = UserError) -> UserError:
        return error_type(f"Data source {self.name}: {call} {problem}.")


def first_documents(reader: SourceReader) -> Iterator[Document]:
    """Yields the documents or records of a source in order, once."""
    if not isinstance(reader.source, StreamSource):
        for index in range(len(reader)):
            yield reader[index]
        return
    iterator = reader.iterator()
    for index in itertools.count():
        document = reader.next(iterator, index)
        if document is None:
            return
        yield document


def _construct(
    name: str, values: Mapping[str, Any], context: SourceContext, modules: tuple[str, ...]
) -> SourceReader:
    """Constructs a source in another process, which imports the modules first."""
    import_modules.import_again(modules)
    try:
        registry.registration(KIND, name)
    except KeyError:
        raise UserError(
            f"Data source {name} is registered in no module of import_modules, which reader "
            "processes import. Name its file there, or leave grain_worker_count=0."
        ) from None
    return SourceReader(name, values, context, modules)
