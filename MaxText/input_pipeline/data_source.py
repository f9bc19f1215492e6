"""Data sources: classes of your own that give training data.

A data source is a class registered under a name, which `dataset_type` chooses::

    @register("data_source", "counting")
    class Counting(DocumentSource):
        def __len__(self) -> int:
            return 1000

        def document(self, index: int) -> np.ndarray:
            return np.arange(index % 50)

There are three forms, by what the data allow:

- DocumentSource: documents by index. Packing, shuffling, mixtures, hosts, reader processes and
  exact resuming are those of a prepared dataset.
- RecordSource: training sequences by index, of any number, such as generated ones.
- StreamSource: documents in sequence, from what cannot be read by index.

Importing this file does not import jax, so reader processes start fast.
"""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from MaxText.config.registry import register

__all__ = [
    "DataSource",
    "Document",
    "DocumentSource",
    "RecordSource",
    "SourceContext",
    "StreamSource",
    "TokenIds",
    "register",
]


class Document(NamedTuple):
    """A document, or a record, with a loss mask or labels.

    Attributes:
      tokens: Token ids [n], of an integer dtype.
      loss_mask: bool [n], whether each token counts as a target. The first token of a document is
        never a target. None counts all.
      labels: Of a record: int [n], the id to predict at each position, negative for none. None
        predicts the next token.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None
    labels: np.ndarray | None = None


TokenIds = np.ndarray | Sequence[int] | Document
"""What sources return: ids [n], alone or with a loss mask or labels."""


@dataclasses.dataclass(frozen=True)
class SourceContext:
    """What a run tells its data sources.

    Attributes:
      split: `train_split` or `eval_split`, such as "train" and "validation".
      for_training: False for the evaluation data.
      sequence_length: T, the targets of a training sequence. It has T + 1 tokens.
      vocab_size: Ids of the model; larger ones are refused.
      seed: `data_shuffle_seed`.
      tokenizer_path: As configured; "" if it is not.
    """

    split: str
    for_training: bool
    sequence_length: int
    vocab_size: int
    seed: int
    tokenizer_path: str = ""


class DataSource:
    """Base class of data sources; derive from one of the three forms below.

    With `grain_worker_count`, each reader process constructs a source of its own.

    Attributes:
      config: The source's keys (`@register(..., keys=...)`); an empty Section without any.
      context: What the run tells it.
      pad_id: Id that fills sequences.
      has_loss_mask: Whether it returns a `Document` with a loss mask.
      has_labels: Whether it returns a `Document` with labels; only a RecordSource can.
    """

    pad_id: int = 0
    has_loss_mask: bool = False
    has_labels: bool = False

    def __init__(self, config: Any, context: SourceContext):
        """Keeps the arguments; override it to open files, and call it first.

        Args:
          config: The source's keys, an instance of its Section.
          context: Split, sequence length, vocabulary and seed.
        """
        self.config: Any = config
        self.context = context


class DocumentSource(DataSource, abc.ABC):
    """Documents by index: a pure function of the index and the keys.

    Sequences are made from the documents as from a prepared dataset: all keys of packing, shuffling
    and mixtures apply, and a run resumes at any step without reading what came before. To know
    where documents begin, a run needs the length of each: `lengths`.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of documents."""

    @abc.abstractmethod
    def document(self, index: int) -> TokenIds:
        """Returns a document, 0 <= index < len(self), with its end-of-text id if it has one."""

    def lengths(self) -> np.ndarray | None:
        """Returns the tokens of every document (int [len(self)]); None reads each to count them."""
        return None


class RecordSource(DataSource, abc.ABC):
    """Training sequences by index: a pure function of the index and the keys.

    A record has up to T + 1 tokens for T = `context.sequence_length`: the inputs are all but the
    last, the targets all but the first. With labels it has up to T. A shorter one is padded.
    Records are never joined or split, so nothing is read in advance, and there may be up to
    2^32 - 1.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of records."""

    @abc.abstractmethod
    def record(self, index: int) -> TokenIds:
        """Returns a record, 0 <= index < len(self)."""


class StreamSource(DataSource, abc.ABC):
    """Documents in sequence, concatenated and split every T tokens.

    Each host reads the whole stream and keeps its own sequences, so every iteration must give the
    same documents on every host, and a run may resume on another number of hosts. After the last
    document, the stream starts again. Streams are neither shuffled nor read by reader processes.

    If the iterator has `get_state` and `set_state`, as those of Grain, checkpoints hold its state,
    a value of JSON, and a run resumes there. Otherwise a run resumes after it has read all earlier
    documents of the pass again. `get_state` is called before each document.
    """

    @abc.abstractmethod
    def __iter__(self) -> Iterator[TokenIds]:
        """Returns an iterator over one pass, from its beginning."""
