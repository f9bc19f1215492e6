"""Sources of every form, of the same documents; imported by a run.

FAULT in the environment makes them fail.
"""

import os

import numpy as np

from MaxText.config.keys import Section, key
from MaxText.input_pipeline.data_source import (
    Document,
    DocumentSource,
    RecordSource,
    StreamSource,
    register,
)
from tests.input_pipeline.registered_sources.known_documents import (
    NUM_DOCUMENTS,
    document_of,
    mask_of,
)

FAULT = os.environ.get("FAULT", "")


class Keys(Section):
    """Numbered documents."""

    numbered_longest: int = key(40, "Tokens of a document, at most.", ge=2)


@register("data_source", "numbered", keys=Keys)
class Numbered(DocumentSource):
    def __len__(self):
        return NUM_DOCUMENTS if self.context.for_training else 5

    def document(self, index):
        if FAULT == "raises" and index == 3:
            raise KeyError("no such thing")
        if FAULT == "floats":
            return np.zeros(3)
        if FAULT == "two dimensions":
            return [[1, 2]]
        if FAULT == "negative":
            return [1, -2]
        if FAULT == "a mask":
            return Document(np.arange(3), np.ones(3))
        if FAULT == "random":
            return np.arange(1, np.random.default_rng().integers(2, 40))
        return document_of(index, self.config.numbered_longest)

    def lengths(self):
        if FAULT == "wrong lengths":
            return np.full(len(self), 4)
        return None


@register("data_source", "masked")
class Masked(DocumentSource):
    has_loss_mask = True

    def __len__(self):
        return NUM_DOCUMENTS

    def document(self, index):
        return Document(document_of(index), mask_of(index))

    def lengths(self):
        return np.array([len(document_of(index)) for index in range(len(self))])


@register("data_source", "numbered_records")
class Records(RecordSource):
    has_loss_mask = True
    pad_id = 9

    def __len__(self):
        return 2**32 - 1 if FAULT == "many" else 50

    def record(self, index):
        size = self.context.sequence_length + 1 - index % 5 + (FAULT == "too long") * 5
        tokens = np.random.default_rng(index).integers(0, 50_000, size)
        return Document(tokens, np.arange(size) >= index % 4)


@register("data_source", "stateless")
class Stateless(StreamSource):
    def __iter__(self):
        return map(document_of, range(NUM_DOCUMENTS))


class Positions:
    """An iterator with a state, as Grain's."""

    num_read = 0

    def __init__(self):
        self.state = {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["next"] == NUM_DOCUMENTS:
            raise StopIteration
        self.state["next"] += 1
        Positions.num_read += 1
        return document_of(self.state["next"] - 1)

    def get_state(self):
        return {1, 2} if FAULT == "a set" else self.state

    def set_state(self, state):
        if FAULT != "forgets":
            self.state = state


@register("data_source", "stateful")
class Stateful(StreamSource):
    def __iter__(self):
        return Positions()
