"""Opens the datasets of a run, slices and orders their sequences."""

import dataclasses
import functools
import math
import os
import re

import numpy as np

from MaxText.config.data_sections import SAMPLINGS, DataConfig, mix_part
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.prefetch import Retries
from MaxText.input_pipeline.sequences.gpt_neox_order import GptNeoxSamples, document_range
from MaxText.input_pipeline.sequences.order import (
    Concatenation,
    Mixture,
    OrderedWindows,
    SequenceDataset,
)
from MaxText.input_pipeline.sequences.packing import FirstFitPacking
from MaxText.input_pipeline.sequences.windows import (
    ConcatThenSplit,
    DocumentWindows,
    JoinedDocuments,
    SequenceOptions,
    Windows,
)
from MaxText.input_pipeline.token_store.opening import OpenRequest, open_token_data
from MaxText.input_pipeline.token_store.store import TokenSplit
from MaxText.storage.errors import is_transient
from MaxText.storage.file_access import is_url, split_list

ANY_ID = 2**31 - 1  # a vocab_size without a model: every id fits
# Warn above this ratio of model ids to tokenizer ids; padded tables stay below it.
_MAX_ID_RATIO = 1.25

CHUNKS = SAMPLINGS[0]
_WEIGHTED = re.compile(r"(?P<location>.+?),\s*(?P<weight>\d+(\.\d*)?([eE][+-]?\d+)?)\s*")


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Configuration of one dataset."""

    location: str
    key: str  # configuration key that named it
    weight: float = 1.0  # share in a mixture, before mixture_temperature
    sampling: str = CHUNKS  # or GPT-Neo's documents_random, documents_fixed
    stitch: int = 1  # documents per window with documents_* sampling


def _without_weight(part: str) -> str:
    match = _WEIGHTED.fullmatch(part)
    return match["location"] if match else part


def _weighted(text: str, key: str) -> list[DataSource]:
    entries = []
    for part in split_list(text, ";", _without_weight):
        # A name may itself end like a weight.
        exists = os.path.exists(os.path.expanduser(part))
        match = None if exists else _WEIGHTED.fullmatch(part)
        weight = float(match["weight"]) if match else 1.0
        if not 0 < weight < math.inf:
            raise UserError(f"{key}: the weight of {part!r} must be above 0 and finite.")
        entries.append(DataSource(match["location"] if match else part, key, weight))
    if not entries:
        raise UserError(
            f"{key} is not set, and dataset_type=grain reads a data set. Make one with: python "
            "MaxText/prepare_data.py prepare_source=<files, folders or python_stdlib> "
            "dataset_path=<folder>, name token records that are there (dataset_path or "
            "grain_train_files), or train on random tokens with dataset_type=synthetic."
        )
    return entries


@dataclasses.dataclass(frozen=True)
class OpenDataSource:
    """An opened dataset and its sequences in order."""

    entry: DataSource
    data: TokenSplit
    rows: OrderedWindows


def requested_sources(request: OpenRequest) -> list[DataSource]:
    """Returns the datasets to open; UserError unless weights are positive."""
    data = request.data
    keys = ["data_mixture_weights", "grain_train_files"]
    if not request.for_training:
        keys = ["grain_eval_files", "dataset_path", *keys]
    key = next((key for key in keys if getattr(data, key)), "dataset_path")
    if key == "data_mixture_weights":
        parts = map(mix_part, data.data_mixture_weights)
        return [
            DataSource(location, key, weight, sampling, stitch)
            for location, stitch, sampling, weight in parts
        ]
    return _weighted(getattr(data, key), key)


def _open_tokens(request: OpenRequest, entry: DataSource) -> TokenSplit:
    """Opens a dataset; UserError as open_token_data, or for too large ids."""
    location = entry.location
    vocab_size = request.vocab_size
    tokens = open_token_data(dataclasses.replace(request, location=location, key=entry.key))
    largest = tokens.max_token_id
    if largest is not None and largest >= vocab_size:
        has = f"; the tokenizer has {tokens.vocab_size} ids" if tokens.vocab_size else ""
        raise UserError(
            f"vocab_size={vocab_size} is too small: the largest token id in {location} is "
            f"{largest}. Set vocab_size to {largest + 1} or more{has}. Trained weights need data "
            "of their own tokenizer."
        )
    return tokens


def prepared_has_documents(config: Config) -> bool:
    """Returns `has_documents` for the data set of `prepare_source`."""
    kind = _window_kind(config.data)
    return config.data.dataset_type != "synthetic" and _has_documents(config, kind)


def _has_documents(config: Config, kind: type[Windows]) -> bool:
    across = config.data.cross_document_attention
    if config.masking.mlm_training:
        # Segments mask padding in bidirectional attention; only the last packed window has any.
        return not (across and kind is ConcatThenSplit)
    return not (across or kind.single_documents)


def prepare_sources(config: Config) -> None:
    """Prepares the dataset of `prepare_source`, and checks all local data."""
    data = config.data
    if data.dataset_type == "grain" and config.preparation.prepare_source:
        from MaxText.input_pipeline.prepare.prepare import prepare

        cache_dir = data.local_cache_dir
        most = data.bad_records.maximum
        prepare(config.preparation, data.dataset_path, cache_dir=cache_dir, max_bad_records=most)
    check_sources(config)


def check_sources(config: Config) -> None:
    """Opens the run's local data before devices start, to fail early.

    Raises UserError if data is missing or damaged, or has no tokenizer or ids beyond the
    vocabulary.
    """
    if config.data.dataset_type == "synthetic":
        return
    for for_training in (True, False) if config.evaluation.eval_interval > 0 else (True,):
        vocab_size = config.model.shape.vocab_size
        request = OpenRequest(config.data, config.preparation, for_training, vocab_size, print)
        for entry in requested_sources(request):
            if is_url(entry.location):
                continue  # slow, and the network may fail
            try:
                _open_tokens(request, entry)
            except Exception as error:
                if not is_transient(error, False):  # the loader retries
                    raise


def open_sources(
    config: Config, for_training: bool, num_samples: int | None, retries: Retries
) -> list[OpenDataSource]:
    """Opens the datasets of training or evaluation.

    `num_samples` are the sequences of the whole run; None for evaluation. Raises UserError if a
    dataset is missing, damaged, does not fit vocab_size or is shorter than one sequence.
    """
    data = config.data
    masking = config.masking
    length = config.model.shape.max_target_length
    vocab_size = config.model.shape.vocab_size
    if masking.mlm_training and masking.mlm.cls_token_id >= 0:
        length -= 1  # for CLS
    truncate = data.use_truncation and not data.packing
    options = SequenceOptions(length, data.cross_document_attention, data.zero_loss, truncate)
    request = OpenRequest(data, config.preparation, for_training, vocab_size, retries.log)

    def open_and_slice(entry: DataSource) -> tuple[TokenSplit, Windows]:
        tokens = _open_tokens(request, entry)
        used = tokens.vocab_size or vocab_size
        if for_training and ANY_ID > vocab_size > _MAX_ID_RATIO * used:
            retries.log(
                f"warning: vocab_size={vocab_size}, but the tokenizer of {entry.location} has "
                f"{used} ids: {1 - used / vocab_size:.0%} of the embedding is never used"
            )
        if tokens.pad_id >= vocab_size:
            # A pad id may lie outside the model's table; padding has no weight, so use any id.
            tokens = dataclasses.replace(tokens, pad_id=0)
        return tokens, _slice(request, entry, tokens, options, num_samples)

    opened = []
    for number, entry in enumerate(requested_sources(request)):
        remote = is_url(entry.location) or entry.location.startswith("@")
        tokens, windows = retries.call(
            f"{entry.location} could not be opened",
            functools.partial(open_and_slice, entry),
            functools.partial(is_transient, remote=remote),
        )
        num_tokens = len(tokens.store)
        is_short = isinstance(windows, ConcatThenSplit) and num_tokens <= length
        if len(windows) == 0 or (for_training and is_short):
            raise UserError(
                f"{entry.key}={entry.location}: split {request.split} has {num_tokens} tokens, too "
                f"few for one window of max_target_length + 1 = {length + 1}. Lower "
                "max_target_length or prepare more text."
            )
        windows.has_documents = _has_documents(config, type(windows))
        # Windows with their own order already contain all epochs.
        ends = not for_training or (windows.has_own_order and data.num_epoch > 0)
        rows = OrderedWindows(
            windows,
            # Identical datasets of a mixture must not be visited in the same order.
            seed=data.data_shuffle_seed + 1_000_003 * number,
            shuffle=data.enable_data_shuffling and for_training and not windows.has_own_order,
            num_epoch=1 if ends else data.num_epoch,
            groups=_file_groups(data, tokens, windows),
        )
        opened.append(OpenDataSource(entry, tokens, rows))
    return opened


def _slice(
    request: OpenRequest,
    entry: DataSource,
    tokens: TokenSplit,
    options: SequenceOptions,
    num_samples: int | None,
) -> Windows:
    data = request.data
    cache_dir = request.data.local_cache_dir
    kind = _window_kind(data, tokens.labels is not None or _are_sequences(tokens, options.length))
    if tokens.labels is not None and (kind is GptNeoxSamples or entry.sampling != CHUNKS):
        raise UserError(
            f"{entry.key}={entry.location} has labels, so its sequences are fixed. Leave "
            "megatron.order=stored and the sampling chunks."
        )
    if kind is GptNeoxSamples:
        part, samples = _gpt_neox_part(request, tokens, options.length, num_samples)
        return GptNeoxSamples(tokens, options, data.data_shuffle_seed, cache_dir, samples, part)
    if entry.sampling != CHUNKS:
        return JoinedDocuments(tokens, options, entry.stitch, entry.sampling == "documents_random")
    if kind is DocumentWindows:
        return DocumentWindows(tokens, options, cache_dir)
    if kind is ConcatThenSplit:
        return ConcatThenSplit(tokens, options)
    return FirstFitPacking(tokens, options, data.grain_packing_type == "best_fit", cache_dir)


def _window_kind(data: DataConfig, are_cut: bool = False) -> type[Windows]:
    if data.megatron.order == "gpt_neox":
        return GptNeoxSamples
    if are_cut or not data.packing:
        return DocumentWindows
    return ConcatThenSplit if data.grain_packing_type == "concat_then_split" else FirstFitPacking


def _are_sequences(tokens: TokenSplit, length: int) -> bool:
    """Whether records are sequences of this length; others are documents."""
    size = tokens.record_length
    return size is not None and size >= length and (size - 1) % length in (0, length - 1)


def _gpt_neox_part(
    request: OpenRequest, tokens: TokenSplit, length: int, num_samples: int | None
) -> tuple[tuple[int, int], int | None]:
    """Returns the documents to visit, and the number of samples to read."""
    offsets = tokens.store.document_offsets
    data = request.data
    documents = 0, len(offsets) - 1
    if data.megatron.split:
        which = 0 if request.for_training else 1
        documents = document_range(data.megatron.split, which, documents[1])
    if num_samples is not None and data.num_epoch > 0:
        num_tokens = int(offsets[documents[1]] - offsets[documents[0]])
        num_samples = min(num_samples, (data.num_epoch * num_tokens - 1) // length)
    return documents, num_samples


def _file_groups(data: DataConfig, tokens: TokenSplit, windows: Windows) -> np.ndarray | None:
    """Returns the first window of each group of files, and the end."""
    files = tokens.store.file_of_document if data.iter_file_nums else None
    if files is None or len(files) <= 2:
        return None
    firsts = files[:-1][:: data.iter_file_nums]
    return np.unique(np.append(windows.first_window(firsts), len(windows)))


def mix_sources(data: DataConfig, opened: list[OpenDataSource]) -> SequenceDataset:
    """Returns the training sequences of one source, or of a mixture."""
    if len(opened) == 1:
        return Concatenation([opened[0].rows])
    if data.num_epoch != -1:
        raise UserError(
            f"num_epoch={data.num_epoch}: the sources of a mixture end at different times, so it "
            "repeats each of them without end. Leave num_epoch=-1 and set steps; the passes over "
            "each source are printed."
        )
    return Mixture([source.rows for source in opened], weights(data, opened))


def weights(data: DataConfig, opened: list[OpenDataSource]) -> list[float]:
    power = 1 / data.mixture_temperature if data.mixture_temperature else 0
    return [source.entry.weight * len(source.data.store) ** power for source in opened]


def describe(data: DataConfig, opened: list[OpenDataSource], num_rows: int) -> str:
    """Describes the sources: contents, share, and epochs."""
    lines = []
    shares = weights(data, opened)
    for source, share in zip(opened, shares, strict=True):
        lines.append(source.data.description)
        windows = source.rows.windows
        location = source.entry.location
        if windows.padding_share > 0.01:
            why = "packing=true packs documents"
            if source.data.labels is not None:
                why = "records with labels are never packed; set max_target_length to their length"
            lines.append(
                f"padding: {windows.padding_share:.1%} of the positions of {location}; {why}"
            )
        if len(opened) > 1:
            part = share / sum(shares)
            lines.append(
                f"  {part:.2%} of the sequences: {num_rows * part / len(windows):.2f} passes over "
                f"{len(windows):,} windows of {location}"
            )
    return "\n".join(lines)
