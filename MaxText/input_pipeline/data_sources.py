"""Opens the datasets of a run, slices them into sequences, and orders these.

A source is one dataset of a run: what the configuration says of it (`DatasetEntry`), or opened
(`OpenDataSource`).
"""

import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Sequence

import numpy as np

from MaxText.config.data_sections import SAMPLINGS, DataConfig, mix_part
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.prefetch import Retries
from MaxText.input_pipeline.registered_sources.opening_sources import (
    PREFIX,
    is_registered_type,
    is_single_document,
    open_registered,
    slicer_of,
)
from MaxText.input_pipeline.registered_sources.source_sequences import StreamSequences
from MaxText.input_pipeline.sequences.gpt_neox_order import GptNeoxSequences, document_range
from MaxText.input_pipeline.sequences.order import (
    Concatenation,
    Mixture,
    OrderedSequences,
    SequenceDataset,
)
from MaxText.input_pipeline.sequences.packing import FirstFitPacking
from MaxText.input_pipeline.sequences.slicing import (
    ConcatThenSplit,
    SequenceOptions,
    SequenceSlicer,
    SplitDocuments,
    StitchedDocuments,
)
from MaxText.input_pipeline.token_store.opening import OpenRequest, open_token_data
from MaxText.input_pipeline.token_store.token_dataset import TokenDataset
from MaxText.runtime.first_process import first_process_first
from MaxText.storage.errors import is_transient
from MaxText.storage.file_access import absolute, is_url, split_list

ANY_ID = 2**31 - 1  # a vocab_size without a model: every id fits
# Warn above this ratio of model ids to tokenizer ids; padded tables stay below it.
_MAX_ID_RATIO = 1.25
# Difference of the seeds of two sources: identical datasets of a mixture must not be visited in the
# same order.
_SEED_STEP = 1_000_003

CHUNKS = SAMPLINGS[0]
_WEIGHTED = re.compile(r"(?P<location>.+?),\s*(?P<weight>\d+(\.\d*)?([eE][+-]?\d+)?)\s*")


@dataclasses.dataclass(frozen=True)
class DatasetEntry:
    """Configuration of one dataset."""

    location: str
    key: str  # configuration key that named it
    weight: float = 1.0  # share in a mixture, before mixture_temperature
    sampling: str = CHUNKS  # or GPT-Neo's documents_random, documents_fixed
    stitch: int = 1  # documents per sequence with documents_* sampling

    @property
    def source_name(self) -> str:
        """Name of a registered data source; "" for files."""
        if self.key == "dataset_type":
            return self.location
        return self.location.removeprefix(PREFIX) if self.location.startswith(PREFIX) else ""


def _without_weight(entry: str) -> str:
    """Returns the location of `location,weight`."""
    match = _WEIGHTED.fullmatch(entry)
    return match["location"] if match else entry


def _parse_weighted(value: str, key: str) -> list[DatasetEntry]:
    """Parses `location,weight;location,weight;...`, the value of `key`; weights may be absent."""
    sources = []
    for entry in split_list(value, ";", _without_weight):
        # A name may itself end like a weight.
        exists = os.path.exists(os.path.expanduser(entry))
        match = None if exists else _WEIGHTED.fullmatch(entry)
        location = entry
        weight = 1.0
        if match:
            location = match["location"]
            weight = float(match["weight"])
        if not 0 < weight < math.inf:
            raise UserError(f"{key}: the weight of {entry!r} must be above 0 and finite.")
        sources.append(DatasetEntry(location, key, weight))
    if not sources:
        raise UserError(
            f"{key} is not set, and dataset_type=grain reads a data set. Make one with: python "
            "MaxText/prepare_data.py prepare_source=<files, folders or python_stdlib> "
            "dataset_path=<folder>, name token records that are there (dataset_path or "
            "grain_train_files), or train on random tokens with dataset_type=synthetic."
        )
    return sources


@dataclasses.dataclass(frozen=True)
class OpenDataSource:
    """An opened dataset and its sequences in order."""

    entry: DatasetEntry
    dataset: TokenDataset
    sequences: OrderedSequences

    @property
    def stream(self) -> StreamSequences | None:
        """The sequences of a stream; None for data that is read by index."""
        slicer = self.sequences.slicer
        return slicer if isinstance(slicer, StreamSequences) else None


def requested_sources(request: OpenRequest) -> list[DatasetEntry]:
    """Returns the datasets to open; UserError unless weights are positive."""
    data = request.data
    if data.dataset_type != "grain" and (request.for_training or not data.grain_eval_files):
        return [DatasetEntry(data.dataset_type, "dataset_type")]
    keys = ["data_mixture_weights", "grain_train_files"]
    if not request.for_training:
        keys = ["grain_eval_files", "dataset_path", *keys]
    key = next((key for key in keys if getattr(data, key)), "dataset_path")
    if key != "data_mixture_weights":
        return _parse_weighted(getattr(data, key), key)
    sources = []
    for part in data.data_mixture_weights:
        location, stitch, sampling, weight = mix_part(part)
        sources.append(DatasetEntry(location, key, weight=weight, sampling=sampling, stitch=stitch))
    return sources


def _open_dataset(config: Config, request: OpenRequest, entry: DatasetEntry) -> TokenDataset:
    """Opens a dataset; UserError as open_token_data, or for too large ids."""
    location = entry.location
    if entry.source_name:
        setting = f"{entry.key}={location}"
        return open_registered(
            config, entry.source_name, setting, request.for_training, request.log
        )
    vocab_size = request.vocab_size
    dataset = open_token_data(dataclasses.replace(request, location=location, key=entry.key))
    max_token_id = dataset.max_token_id
    if max_token_id is not None and max_token_id >= vocab_size:
        tokenizer_size = ""
        if dataset.vocab_size:
            tokenizer_size = f"; the tokenizer has {dataset.vocab_size} ids"
        raise UserError(
            f"vocab_size={vocab_size} is too small: the largest token id in {location} is "
            f"{max_token_id}. Set vocab_size to {max_token_id + 1} or more{tokenizer_size}. "
            "Trained weights need data of their own tokenizer."
        )
    return dataset


def prepared_has_documents(config: Config) -> bool:
    """Returns whether batches of the dataset of `prepare_source` hold positions and segment ids.

    Known before it is prepared, so that the train step can be compiled meanwhile.
    """
    if config.data.dataset_type == "synthetic":
        return False
    if is_registered_type(config.data.dataset_type) and is_single_document(
        config.data.dataset_type
    ):
        return False
    return _has_documents(config, _slicer_class(config.data))


def _has_documents(config: Config, slicer_class: type[SequenceSlicer]) -> bool:
    """Returns whether batches of sequences of this kind hold positions and segment ids."""
    are_joined = config.data.cross_document_attention
    if config.masking.mlm_training:
        # Segments mask padding in bidirectional attention; only the last joined sequence has any.
        return not (are_joined and slicer_class is ConcatThenSplit)
    return not (are_joined or slicer_class.is_single_document)


def prepare_sources(config: Config) -> None:
    """Prepares the dataset of `prepare_source`, and checks all local data. Collective.

    Of the processes that see the dataset's folder, only the first prepares it.
    """
    data = config.data
    if data.dataset_type == "grain" and config.preparation.prepare_source:
        from MaxText.input_pipeline.prepare.prepare import prepare

        folder = data.dataset_path
        if not is_url(folder):
            folder = os.path.dirname(absolute(folder))
        with first_process_first("preparing the text", folder) as is_first:
            if is_first:
                prepare(
                    config.preparation,
                    data.dataset_path,
                    cache_dir=data.local_cache_dir,
                    max_bad_records=data.bad_records.maximum,
                )
    check_sources(config)


def check_sources(config: Config) -> None:
    """Opens the run's local data before devices start, to fail early. Collective.

    Raises UserError if data is missing or damaged, or has no tokenizer or ids beyond the
    vocabulary.
    """
    if config.data.dataset_type == "synthetic":
        return
    with first_process_first("importing the data", config.data.data_cache_dir):
        _check_sources(config)


def _check_sources(config: Config) -> None:
    """Does the work of `check_sources` in one process."""
    purposes = [True, False] if config.evaluation.eval_interval > 0 else [True]
    for for_training in purposes:
        vocab_size = config.model.shape.vocab_size
        request = OpenRequest(config.data, config.preparation, for_training, vocab_size, print)
        for entry in requested_sources(request):
            if is_url(entry.location):
                continue  # slow, and the network may fail
            try:
                _open_dataset(config, request, entry)
            except Exception as error:
                if not is_transient(error, False):  # the loader retries
                    raise


def open_sources(
    config: Config, for_training: bool, num_sequences: int | None, retries: Retries
) -> list[OpenDataSource]:
    """Opens the datasets of training or evaluation.

    Args:
      config: The run's configuration.
      for_training: Open the training data; else the evaluation data, for one pass in its order.
      num_sequences: Sequences of the whole run; None for evaluation.
      retries: Policy of failed reads.

    Raises:
      UserError: A dataset is missing, damaged, does not fit vocab_size or is shorter than one
        sequence.
    """
    request = OpenRequest(
        config.data, config.preparation, for_training, config.model.shape.vocab_size, retries.log
    )
    sources = []
    for number, entry in enumerate(requested_sources(request)):
        is_remote = is_url(entry.location) or entry.location.startswith("@")
        dataset, slicer = retries.call(
            functools.partial(_open_and_slice, config, request, entry, num_sequences),
            failure=f"{entry.location} could not be opened",
            is_retryable=functools.partial(is_transient, remote=is_remote),
        )
        _check_long_enough(request, entry, dataset, slicer)
        slicer.has_documents = _has_documents(config, type(slicer))
        sequences = _ordered(request, dataset, slicer, number)
        if not for_training:
            sequences = evaluated_half(config, entry, sequences)
        sources.append(OpenDataSource(entry, dataset, sequences))
    return sources


def evaluated_half(
    config: Config, entry: DatasetEntry, sequences: OrderedSequences
) -> OrderedSequences:
    """Returns the evaluation sequences of one dataset that eval_half chooses.

    Args:
      config: The run's configuration.
      entry: The dataset.
      sequences: All of its sequences, in their order.

    Raises:
      UserError: The dataset is a stream, or has one sequence only.
    """
    half = config.evaluation.eval_half
    if half == "all":
        return sequences
    num_sequences = sequences.num_sequences
    if num_sequences == sys.maxsize or num_sequences < 2:
        size = "is a stream" if num_sequences == sys.maxsize else "has one sequence"
        raise UserError(
            f"eval_half={half}: the validation text {entry.location} {size}, so it has no halves. "
            "Set eval_half=all, or give validation text of two sequences or more."
        )
    return sequences.half(is_second=half == "second")


def _sequence_options(config: Config) -> SequenceOptions:
    """Returns how the datasets of a run are sliced."""
    data = config.data
    masking = config.masking
    length = config.model.shape.max_target_length
    if masking.mlm_training and masking.mlm.cls_token_id >= 0:
        length -= 1  # for CLS
    return SequenceOptions(
        length=length,
        cross_document_attention=data.cross_document_attention,
        zero_loss=data.zero_loss,
        truncate=data.use_truncation and not data.packing,
    )


def _open_and_slice(
    config: Config,
    request: OpenRequest,
    entry: DatasetEntry,
    num_sequences: int | None,
) -> tuple[TokenDataset, SequenceSlicer]:
    """Opens a dataset; warns if much of the embedding is never used."""
    vocab_size = request.vocab_size
    dataset = _open_dataset(config, request, entry)
    num_ids = dataset.vocab_size or vocab_size
    if request.for_training and ANY_ID > vocab_size > _MAX_ID_RATIO * num_ids:
        request.log(
            f"warning: vocab_size={vocab_size}, but the tokenizer of {entry.location} has "
            f"{num_ids} ids: {1 - num_ids / vocab_size:.0%} of the embedding is never used"
        )
    if dataset.pad_id >= vocab_size:
        # A pad id may lie outside the model's table; padding has no weight, so use any id.
        dataset = dataclasses.replace(dataset, pad_id=0)
    options = _sequence_options(config)
    return dataset, _slice(request, entry, dataset, options, num_sequences)


def _check_long_enough(
    request: OpenRequest, entry: DatasetEntry, dataset: TokenDataset, slicer: SequenceSlicer
) -> None:
    """Raises UserError for a dataset without a sequence; in training also for a padded one only."""
    num_tokens = len(dataset.store)
    length = slicer.length
    is_short = isinstance(slicer, ConcatThenSplit) and num_tokens <= length
    if len(slicer) == 0 or (request.for_training and is_short):
        raise UserError(
            f"{entry.key}={entry.location}: split {request.split} has {num_tokens} tokens, too "
            f"few for one window of max_target_length + 1 = {length + 1}. Lower "
            "max_target_length or prepare more text."
        )


def _ordered(
    request: OpenRequest, dataset: TokenDataset, slicer: SequenceSlicer, number: int
) -> OrderedSequences:
    """Returns the sequences of the `number`-th dataset of a run in order."""
    data = request.data
    num_epoch = data.num_epoch
    if isinstance(slicer, StreamSequences):
        _check_stream(data)
    # Sequences with their own order already contain all epochs.
    elif not request.for_training or (slicer.has_own_order and num_epoch > 0):
        num_epoch = 1
    return OrderedSequences(
        slicer,
        seed=data.data_shuffle_seed + _SEED_STEP * number,
        shuffle=data.enable_data_shuffling and request.for_training and not slicer.has_own_order,
        num_epoch=num_epoch,
        groups=_file_groups(data, dataset, slicer),
    )


def _check_stream(data: DataConfig) -> None:
    """Raises UserError for keys that a stream cannot follow."""
    if data.num_epoch != -1:
        raise UserError(
            f"num_epoch={data.num_epoch}: the length of a stream is unknown, so it repeats without "
            "end. Leave num_epoch=-1 and set steps."
        )
    if not data.packing or data.grain_packing_type != "concat_then_split":
        raise UserError(
            "A stream is packed by grain_packing_type=concat_then_split with packing=true, as it "
            "is read without knowing what follows. Leave both keys, or give documents by index."
        )


def _slice(
    request: OpenRequest,
    entry: DatasetEntry,
    dataset: TokenDataset,
    options: SequenceOptions,
    num_sequences: int | None,
) -> SequenceSlicer:
    """Returns the slicer of a dataset that the configuration chooses."""
    data = request.data
    cache_dir = data.local_cache_dir
    if source_slicer := slicer_of(dataset, options):
        _check_unsliced(data, entry)
        return source_slicer
    records_are_sequences = dataset.labels is not None or _are_sequences(dataset, options.length)
    slicer_class = _slicer_class(data, records_are_sequences)
    if dataset.labels is not None and (
        slicer_class is GptNeoxSequences or entry.sampling != CHUNKS
    ):
        raise UserError(
            f"{entry.key}={entry.location} has labels, so its sequences are fixed. Leave "
            "megatron.order=stored and the sampling chunks."
        )
    if slicer_class is GptNeoxSequences:
        documents = _gpt_neox_documents(request, dataset)
        return GptNeoxSequences(
            dataset,
            options,
            data.data_shuffle_seed,
            cache_dir,
            num_sequences=_gpt_neox_length(data, dataset, documents, options.length, num_sequences),
            documents=documents,
        )
    if entry.sampling != CHUNKS:
        is_random = entry.sampling == "documents_random"
        return StitchedDocuments(dataset, options, entry.stitch, is_random)
    if slicer_class is SplitDocuments:
        return SplitDocuments(dataset, options, cache_dir)
    if slicer_class is ConcatThenSplit:
        return ConcatThenSplit(dataset, options)
    return FirstFitPacking(dataset, options, data.grain_packing_type == "best_fit", cache_dir)


def _check_unsliced(data: DataConfig, entry: DatasetEntry) -> None:
    """Raises UserError for keys of documents that records and streams cannot follow."""
    if data.megatron.order == "gpt_neox" or entry.sampling != CHUNKS:
        raise UserError(
            f"{entry.key}={entry.location} gives records or a stream. Leave megatron.order=stored "
            "and the sampling chunks."
        )


def _slicer_class(data: DataConfig, records_are_sequences: bool = False) -> type[SequenceSlicer]:
    """Returns the kind of slicing that the data keys choose, sampling apart."""
    if data.megatron.order == "gpt_neox":
        return GptNeoxSequences
    if records_are_sequences or not data.packing:
        return SplitDocuments
    return ConcatThenSplit if data.grain_packing_type == "concat_then_split" else FirstFitPacking


def _are_sequences(dataset: TokenDataset, length: int) -> bool:
    """Returns whether records are sequences of this length; others are documents."""
    size = dataset.record_length
    return size is not None and size >= length and (size - 1) % length in (0, length - 1)


def _gpt_neox_documents(request: OpenRequest, dataset: TokenDataset) -> tuple[int, int]:
    """Returns the range [first, end) of documents to visit in GPT-NeoX's order."""
    num_documents = len(dataset.store.document_offsets) - 1
    split = request.data.megatron.split
    if not split:
        return 0, num_documents
    return document_range(split, 0 if request.for_training else 1, num_documents)


def _gpt_neox_length(
    data: DataConfig,
    dataset: TokenDataset,
    documents: tuple[int, int],
    length: int,
    num_sequences: int | None,
) -> int | None:
    """Returns the sequences to draw: those of the run, or of num_epoch if these are fewer.

    None, for evaluation, is one epoch.
    """
    if num_sequences is None or data.num_epoch <= 0:
        return num_sequences
    offsets = dataset.store.document_offsets
    first, end = documents
    num_tokens = int(offsets[end] - offsets[first])
    return min(num_sequences, (data.num_epoch * num_tokens - 1) // length)


def _file_groups(
    data: DataConfig, dataset: TokenDataset, slicer: SequenceSlicer
) -> np.ndarray | None:
    """Returns the first sequence of each group of files, and the end; None for one group."""
    first_documents = dataset.store.file_of_document if data.iter_file_nums else None
    if first_documents is None or len(first_documents) <= 2:
        return None
    group_documents = first_documents[:-1][:: data.iter_file_nums]
    return np.unique(np.append(slicer.first_sequences(group_documents), len(slicer)))


def mix_sources(data: DataConfig, sources: Sequence[OpenDataSource]) -> SequenceDataset:
    """Returns the training sequences of one source, or of a mixture."""
    orders = [source.sequences for source in sources]
    if len(sources) == 1:
        return Concatenation(orders)
    if data.num_epoch != -1:
        raise UserError(
            f"num_epoch={data.num_epoch}: the sources of a mixture end at different times, so it "
            "repeats each of them without end. Leave num_epoch=-1 and set steps; the passes over "
            "each source are printed."
        )
    return Mixture(orders, mixture_weights(data, sources))


def mixture_weights(data: DataConfig, sources: Sequence[OpenDataSource]) -> list[float]:
    """Returns the relative share of each source: weight * tokens ^ (1 / temperature).

    Without mixture_temperature, the number of tokens does not matter.
    """
    power = 1 / data.mixture_temperature if data.mixture_temperature else 0
    streams = [source for source in sources if source.stream is not None]
    if power and streams:
        raise UserError(
            f"mixture_temperature={data.mixture_temperature:g}: the stream "
            f"{streams[0].entry.location} has no size. Leave mixture_temperature=0, and give each "
            "part of data_mixture_weights its final weight."
        )
    return [source.entry.weight * len(source.dataset.store) ** power for source in sources]


def describe(data: DataConfig, sources: Sequence[OpenDataSource], num_sequences: int) -> str:
    """Describes the sources of a run of `num_sequences`: contents, share, and epochs."""
    lines = []
    weights = mixture_weights(data, sources)
    for source, weight in zip(sources, weights, strict=True):
        lines.append(source.dataset.description)
        slicer = source.sequences.slicer
        location = source.entry.location
        if slicer.padding_share > 0.01:
            remedy = "packing=true packs documents"
            if source.dataset.labels is not None:
                remedy = (
                    "records with labels are never packed; set max_target_length to their length"
                )
            lines.append(
                f"padding: {slicer.padding_share:.1%} of the positions of {location}; {remedy}"
            )
        if len(sources) > 1 and source.stream is not None:
            lines.append(f"  {weight / sum(weights):.2%} of the sequences")
        elif len(sources) > 1:
            share = weight / sum(weights)
            lines.append(
                f"  {share:.2%} of the sequences: {num_sequences * share / len(slicer):.2f} passes "
                f"over {len(slicer):,} windows of {location}"
            )
    return "\n".join(lines)
