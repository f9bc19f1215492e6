"""Opens the data sources that users register, for training or evaluation."""

import hashlib
import json
from collections.abc import Callable

from MaxText.config import import_modules, registry
from MaxText.config.data_sections import DataConfig
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.data_source import DocumentSource, RecordSource, SourceContext
from MaxText.input_pipeline.registered_sources.indexed_stores import (
    SourceDocuments,
    SourceLabels,
    SourceRecords,
    count_documents,
)
from MaxText.input_pipeline.registered_sources.source_reader import KIND, SourceReader
from MaxText.input_pipeline.registered_sources.source_sequences import (
    RecordSequences,
    StreamSequences,
)
from MaxText.input_pipeline.registered_sources.stream_store import StreamStore
from MaxText.input_pipeline.sequences.slicing import SequenceOptions, SequenceSlicer
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset, boundaries_digest

PREFIX = "source:"
"""Begins the location of a registered source in a mixture: `source:arithmetic`."""


def is_registered_type(dataset_type: str) -> bool:
    """Returns whether dataset_type names a registered source."""
    return dataset_type in registry.Name(KIND).choices


def has_registered_sources(data: DataConfig) -> bool:
    """Returns whether a run reads a registered source, alone or in a mixture."""
    in_mixture = any(part[0].startswith(PREFIX) for part in data.data_mixture_weights)
    return in_mixture or is_registered_type(data.dataset_type)


def _registration(name: str, setting: str) -> registry.Registration:
    """Returns the registration of a source; UserError if there is none."""
    try:
        return registry.registration(KIND, name)
    except KeyError:
        names = ", ".join(registry.Name(KIND).choices) or "none"
        raise UserError(
            f"{setting}: no data source is called {name!r} (registered: {names}). Name the file "
            "that registers it in import_modules."
        ) from None


def is_single_document(name: str, setting: str = "dataset_type") -> bool:
    """Returns whether each sequence of a source is one document."""
    source_class = _registration(name, setting).load()
    return isinstance(source_class, type) and issubclass(source_class, RecordSource)


def open_registered(
    config: Config, name: str, setting: str, for_training: bool, log: Callable[[str], None]
) -> TokenDataset:
    """Opens a source, and counts the documents of a DocumentSource.

    Args:
      config: The run's configuration.
      name: The registered name.
      setting: Key and value that chose it, for messages.
      for_training: Of the training data, else of the evaluation data.
      log: Receives messages.

    Raises:
      UserError: There is no such source, it fails, or it has nothing.
    """
    _registration(name, setting)
    reader = make_reader(config, name, for_training)
    if isinstance(reader.source, DocumentSource):
        return _open_documents(config, reader, log)
    if isinstance(reader.source, RecordSource):
        length = config.model.shape.max_target_length
        store = SourceRecords(reader, length)
        if not len(reader):
            raise UserError(f"Data source {name}: there are no records (split {_split(reader)}).")
        description = f"{len(reader):,} records of the data source {name}"
        return _dataset(reader, store, description, _fingerprint(reader, str(len(reader))))
    description = f"the stream of the data source {name}"
    return _dataset(reader, StreamStore(reader), description, _fingerprint(reader))


def make_reader(config: Config, name: str, for_training: bool) -> SourceReader:
    """Constructs a registered source with its keys of a configuration."""
    data = config.data
    section = data.parts.of(registry.lookup(KIND, name))
    context = SourceContext(
        split=data.train_split if for_training else data.eval_split,
        for_training=for_training,
        sequence_length=config.model.shape.max_target_length,
        vocab_size=config.model.shape.vocab_size,
        seed=data.data_shuffle_seed,
        tokenizer_path=config.preparation.tokenizer_path,
    )
    values = {} if section is None else section.model_dump()
    return SourceReader(name, values, context, tuple(config.run.import_modules))


def _open_documents(
    config: Config, reader: SourceReader, log: Callable[[str], None]
) -> TokenDataset:
    hashes = import_modules.imported(config.run.import_modules)
    key = json.dumps([_fingerprint(reader), str(reader.source.context), len(reader), hashes])
    documents = count_documents(reader, config.data.local_cache_dir, key, log)
    store = SourceDocuments(reader, documents)
    if not len(store):
        raise UserError(f"Data source {reader.name}: there are no tokens (split {_split(reader)}).")
    description = (
        f"{len(store):,} tokens in {len(reader):,} documents of the data source {reader.name}"
    )
    boundaries = boundaries_digest(store.document_offsets)
    return _dataset(reader, store, description, _fingerprint(reader, boundaries))


def _split(reader: SourceReader) -> str:
    return reader.source.context.split


def _fingerprint(reader: SourceReader, contents: str = "") -> str:
    """Returns a digest of the name, the keys and what is known about the contents."""
    key = json.dumps([reader.name, reader.values, contents], sort_keys=True, default=str)
    return f"{reader.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _dataset(
    reader: SourceReader,
    store: SourceDocuments | SourceRecords | StreamStore,
    description: str,
    fingerprint: str,
) -> TokenDataset:
    labels = None
    # Records are padded, and padding is no target.
    has_loss_mask = reader.source.has_loss_mask or isinstance(store, SourceRecords)
    if isinstance(store, SourceRecords) and reader.source.has_labels:
        labels = SourceLabels(reader, reader.source.context.sequence_length)
        has_loss_mask = False  # a position without a label is no target
    return TokenDataset(
        store=store,
        description=description,
        fingerprint=fingerprint,
        pad_id=reader.source.pad_id,
        labels=labels,
        loss_mask=store if has_loss_mask else None,
    )


def slicer_of(dataset: TokenDataset, options: SequenceOptions) -> SequenceSlicer | None:
    """Returns the slicer of records or of a stream; None for datasets of documents."""
    if isinstance(dataset.store, SourceRecords):
        return RecordSequences(dataset, options)
    if isinstance(dataset.store, StreamStore):
        return StreamSequences(dataset, options)
    return None
