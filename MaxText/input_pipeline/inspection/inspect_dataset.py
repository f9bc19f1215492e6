"""Prints statistics of a run's data, or the batch of one step, for inspect_data.py."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from MaxText.config.data_sections import Preparation
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.input_pipeline.data_sources import ANY_ID, OpenedSource
from MaxText.input_pipeline.inspection import inspection_report as inspection_report
from MaxText.input_pipeline.inspection.statistics import (
    document_lengths,
    measure_sequences,
    measure_tokens,
)
from MaxText.input_pipeline.iterator import BatchIterator
from MaxText.input_pipeline.loader import train_loader
from MaxText.input_pipeline.preparation.process_pool import show_progress
from MaxText.input_pipeline.sequences.batch_schedule import plan_batches
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.storage.file_access import local_path

_IN_NO_FILE_NAME = "/"
_ID_BYTES = 4  # progress is in bytes
_SHOWN_BAD_RECORDS = 10


class Inspection:
    """The data of a run, opened as train.py opens it."""

    def __init__(
        self, config: Config, num_devices: int, has_model: bool, show: Callable[[str], None]
    ):
        """Opens the data; raises UserError if train.py would reject it."""
        if config.data.dataset_type == "synthetic":
            raise UserError(
                "dataset_type=synthetic is random tokens, of which there is nothing to inspect. "
                "Name a data set."
            )

        def samples(per_device: float) -> int:
            return _whole(per_device, num_devices) * config.batch.gradient_accumulation_steps

        data = config.data
        if os.path.isfile(local_path(data.dataset_path)):
            # An explicitly named file is inspected even if its name contains eval_split.
            data = data.model_copy(update={"eval_split": _IN_NO_FILE_NAME})
        vocab_size = config.model.shape.vocab_size
        self._length = config.model.shape.max_target_length
        self._config = config
        self._show = show
        self._vocab_size = vocab_size if has_model else None
        self._batches: BatchIterator = train_loader(
            data,
            plan=plan_batches(config.batch, self._length, samples),
            # Masking depends on the vocabulary size; otherwise ids are checked after reading.
            vocab_size=vocab_size if config.masking.mlm_training else ANY_ID,
            masking=config.masking,
            preparation=config.preparation,
            num_steps=config.run.steps,
            show=show,
        )
        show(self._batches.description)
        self._tokenizer = _load(config.preparation, self._batches.tokenizer_folder, show)

    def show_batch(self, step: int) -> None:
        """Shows one batch. Raises UserError past the end of the data or for too large ids."""
        batches, masking = self._batches, self._config.masking
        if batches.num_steps is not None and step >= batches.num_steps:
            raise UserError(
                f"step={step}: with num_epoch={self._config.data.num_epoch} the data ends after "
                f"{batches.num_steps} steps. Give a step from 0 to {batches.num_steps - 1}."
            )
        batches.seek(step)
        try:
            batch = next(batches)
        finally:
            batches.close()
        arrays = {"tokens": batch.tokens_BT, "weights": batch.weights_BT}
        if batch.segments_BT is not None:
            arrays["segments"] = batch.segments_BT
        mask_id = None
        if masking.mlm_training:
            of_tokenizers = [source.data.mask_id for source in batches.opened]
            named = [token for token in of_tokenizers if token is not None]
            mask_id = masking.mlm_mask_id if masking.mlm_mask_id >= 0 else named[0]
        filler_id = batches.opened[0].data.filler_id

        def show_tokens(tokens_T: np.ndarray) -> list[str]:
            return inspection_report.show_sequence(tokens_T, self._tokenizer, mask_id)

        self._lines(
            inspection_report.batch_lines(
                step, arrays, batches.origin(step), show_tokens, filler_id
            )
        )
        # Targets that are labels need not occur among the tokens.
        self._check_ids(int(max(batch.tokens_BT.max(), batch.targets_BT.max())))

    def show_statistics(self, max_tokens: int) -> None:
        """Shows statistics of each dataset, from at most `max_tokens` evenly spread tokens."""
        largest_id = -1
        for source in self._batches.opened:
            self._show(f"\n{source.entry.location}")
            largest_id = max(largest_id, self._show_source(source, max_tokens))
        if skipped := self._batches.skipped:
            self._show(f"\nRecords that cannot be read: {len(skipped):,}")
            self._lines([f"  {message}" for message in skipped[:_SHOWN_BAD_RECORDS]])
        self._check_ids(largest_id)

    def _show_source(self, source: OpenedSource, max_tokens: int) -> int:
        """Shows one dataset; returns the largest id."""
        data, windows = source.data, source.rows.windows
        num_bytes = _ID_BYTES * min(max_tokens, len(data.store))
        with show_progress("Reading tokens", num_bytes, self._show) as progress:
            tokens = measure_tokens(data, max_tokens, lambda done: progress(_ID_BYTES * done))
        self._lines(inspection_report.token_lines(data, tokens, self._tokenizer, self._vocab_size))
        lengths = document_lengths(data.store.document_offsets)
        self._lines(
            inspection_report.document_lines(lengths, tokens.documents, data.store.document_name)
        )
        num_bytes = _ID_BYTES * min(max_tokens, len(windows) * windows.length)
        with show_progress("Reading sequences", num_bytes, self._show) as progress:
            sequences = measure_sequences(
                source.rows, max_tokens, lambda done: progress(_ID_BYTES * done)
            )
        self._lines(inspection_report.sequence_lines(sequences, windows.length))
        if data.labels is not None:
            self._show(f"  labels that count: ids up to {sequences.largest_target}")
        return max(tokens.largest_id, sequences.largest_target)

    def _check_ids(self, largest_id: int) -> None:
        if self._vocab_size is not None and largest_id >= self._vocab_size:
            raise UserError(
                f"vocab_size={self._vocab_size} is too small: id {largest_id} occurs. Set "
                f"vocab_size to {largest_id + 1} or more, or check that these are token ids of the "
                "tokenizer you mean."
            )

    def _lines(self, lines: list[str]) -> None:
        self._show("\n".join(lines))


def _whole(per_device: float, num_devices: int) -> int:
    samples = per_device * num_devices
    if samples != int(samples):
        raise UserError(
            f"{per_device:g} sequences per device x num_devices={num_devices} is not a whole "
            "number. Set num_devices to the devices of the run."
        )
    return int(samples)


def _load(
    preparation: Preparation, folder: Path | None, show: Callable[[str], None]
) -> TextTokenizer | None:
    """Returns the tokenizer of the dataset, else tokenizer_path; None if neither loads."""
    try:
        asked = preparation.tokenizer_path
        # tokenizer_type only applies to tokenizer_path.
        if folder is not None and (not asked or folder != Path(asked).expanduser()):
            return load_tokenizer(str(folder))
        if asked:
            return load_tokenizer(asked, preparation.tokenizer_type)
    except UserError as error:
        show(f"Showing ids instead of text: {error}")
    return None
