"""Conformance checks of data sources.

They read a few batches of the source as training does.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from MaxText.config.schema import Config
from MaxText.input_pipeline.data_source import Document, DocumentSource
from MaxText.input_pipeline.iterator import TrainIterator
from MaxText.input_pipeline.loader import make_train_iterator
from MaxText.input_pipeline.registered_sources.opening_sources import make_reader
from MaxText.input_pipeline.registered_sources.source_reader import SourceReader, first_documents
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule
from MaxText.layers.batch import Batch

_NUM_DOCUMENTS = 200  # looked at
_NUM_STEPS = 6
_RESUMED_STEP = 3
_BATCH_SIZE = 4

SOURCE_KEYS = {"max_target_length": 64, "steps": _NUM_STEPS}
"""Keys of the configuration that a source is checked with."""


class SourceSubject:
    """A data source, as a run opens it."""

    def __init__(self, config: Config):
        """Opens nothing yet."""
        self.config = config

    def reader(self) -> SourceReader:
        """Returns a new instance of the source."""
        return make_reader(self.config, self.config.data.dataset_type, for_training=True)

    def documents(self) -> Iterator[Document]:
        """Yields the first documents or records of a new instance."""
        return itertools.islice(first_documents(self.reader()), _NUM_DOCUMENTS)

    def batches(self) -> TrainIterator:
        """Returns new training batches of the source."""
        length = self.config.model.shape.max_target_length
        schedule = BatchSchedule.constant(_BATCH_SIZE, length)
        return make_train_iterator(self.config, schedule, log=lambda line: None)


def token_ids(subject: SourceSubject) -> str | None:
    """Returns a problem of ids or shapes, which reading checks; ids must fit vocab_size."""
    vocab_size = subject.config.model.shape.vocab_size
    num_tokens = 0
    for index, document in enumerate(subject.documents()):
        num_tokens += len(document.tokens)
        largest = int(document.tokens.max(initial=-1))
        if document.labels is not None:
            largest = max(largest, int(document.labels.max(initial=-1)))
        if largest >= vocab_size:
            return f"document {index} has the id {largest}, and vocab_size={vocab_size}"
    return None if num_tokens else f"the first {_NUM_DOCUMENTS} documents have no token"


def is_deterministic(subject: SourceSubject) -> str | None:
    """Returns a difference between two instances, of which one reads backward if it can."""
    documents = list(subject.documents())
    again: list[Document] = list(subject.documents())
    reader = subject.reader()
    if hasattr(type(reader.source), "__len__"):
        again = [reader[index] for index in reversed(range(len(documents)))][::-1]
    for index, (first, second) in enumerate(zip(documents, again, strict=True)):
        if not _are_equal(first, second):
            return f"{reader.unit} {index} differs when it is read again"
    return None


def _are_equal(first: Document, second: Document) -> bool:
    if not np.array_equal(first.tokens, second.tokens):
        return False
    return _are_equal_or_absent(first.loss_mask, second.loss_mask) and _are_equal_or_absent(
        first.labels, second.labels
    )


def _are_equal_or_absent(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def lengths(subject: SourceSubject) -> str | None:
    """Returns a document of another length than `lengths` says."""
    reader = subject.reader()
    if not isinstance(reader.source, DocumentSource):
        return None
    stated = reader.lengths()
    if stated is None:
        return None
    for index, document in enumerate(subject.documents()):
        if len(document.tokens) != stated[index]:
            return f"document {index} has {len(document.tokens)} tokens, not {stated[index]}"
    return None


def resume(subject: SourceSubject) -> str | None:
    """Returns the step at which a resumed run reads other batches than an uninterrupted one."""
    uninterrupted = _take(subject.batches(), _NUM_STEPS)
    interrupted = subject.batches()
    _take(interrupted, _RESUMED_STEP)
    resumed = subject.batches()
    resumed.set_state(interrupted.get_state())
    expected = uninterrupted[_RESUMED_STEP:]
    for index, batch in enumerate(_take(resumed, len(expected))):
        if not _same_batch(batch, expected[index]):
            return f"step {_RESUMED_STEP + index} differs after a resume"
    return None


def _take(batches: TrainIterator, count: int) -> list[Batch]:
    """Returns the next batches, and stops reading ahead."""
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def _same_batch(batch: Batch, other: Batch) -> bool:
    """Returns whether two batches have the same tokens, targets and loss mask."""
    fields = ("tokens_BT", "targets_BT", "loss_mask_BT")
    return all(np.array_equal(getattr(batch, name), getattr(other, name)) for name in fields)
