"""Batches for training and evaluation: `train_loader` and `eval_loader`.

The batch of step s is a pure function of (data set, seed, s). Row j of host h is row
`s * global_batch_size + h * local_rows + j` of the run, so hosts joined in order give the same
global batch bit for bit, however many they are, and continuing at any step needs no replay.
Grain runs the readers, in threads or processes, and keeps the next batches ready.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from MaxText.configuration.training_sections import Data
from MaxText.errors import UserError
from MaxText.input_pipeline.batch import Batch
from MaxText.input_pipeline.manifest import Manifest, find_split, read_manifest
from MaxText.input_pipeline.synthetic import EVAL_STREAM, SyntheticBatches
from MaxText.input_pipeline.token_stream import TokenStream
from MaxText.input_pipeline.window_order import WindowOrder
from MaxText.input_pipeline.windows import DocumentWindows, PackedWindows, Windows

# An element is a whole batch: a few threads hide slow storage, and few batches are kept ready.
_READ_THREADS = 4
_BATCHES_READY = 4


class BatchSource(Protocol):
    """Random access to the batches of a run by step, as dicts of arrays [B, T]."""

    def __len__(self) -> int:
        """Steps there are; sys.maxsize for no end."""
        ...

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """The rows of one step that this host holds."""
        ...


class StoredBatches:
    """Batches of windows of a prepared data set, see BatchSource.

    Rows past the end of the data have weight 0 everywhere: the last batch is filled with them.
    """

    def __init__(
        self,
        windows: Windows,
        order: WindowOrder,
        first_row: int,
        num_rows: int,
        rows_per_step: int,
        num_steps: int = sys.maxsize,
    ):
        """Args: `first_row`, `num_rows`: of each global batch of `rows_per_step`, this host's."""
        self._windows = windows
        self._order = order
        self._first_row = first_row
        self._num_rows = num_rows
        self._rows_per_step = rows_per_step
        if order.num_rows != sys.maxsize:
            num_steps = min(num_steps, -(-order.num_rows // rows_per_step))
        self._num_steps = num_steps

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        first = step * self._rows_per_step + self._first_row
        return self._windows.read([self._order[first + row] for row in range(self._num_rows)])


class _StepsFrom:
    """A source whose element 0 is step `first`: how a reader starts in the middle for free."""

    def __init__(self, source: BatchSource, first: int):
        self._source = source
        self._first = first

    def __len__(self) -> int:
        return max(0, len(self._source) - self._first)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._source[self._first + index]


def _read_ahead(source: BatchSource, first: int, num_workers: int) -> Any:
    """Grain's iterator over `source` from step `first` on, with batches prepared ahead."""
    dataset = grain.MapDataset.source(_StepsFrom(source, first)).to_iter_dataset(
        grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=_BATCHES_READY)
    )
    if num_workers:
        # Grain reads absl flags in the processes it starts; programs without absl's main never
        # parse any, so their defaults are declared final here.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=2)
        )
    return iter(dataset)


def _to_batch(arrays: Mapping[str, np.ndarray]) -> Batch:
    return Batch(
        tokens_BT=arrays["tokens"],
        targets_BT=arrays["targets"],
        weights_BT=arrays["weights"],
        positions_BT=arrays.get("positions"),
        segments_BT=arrays.get("segments"),
    )


class BatchIterator(Iterator[Batch]):
    """The host's training batches in order, from any step.

    Not for several threads at once. Nothing is read before the first `next`.
    """

    def __init__(
        self,
        source: BatchSource,
        identity: dict[str, Any],
        start_step: int = 0,
        num_workers: int = 0,
        reuse_first: bool = False,
        manifest: Manifest | None = None,
    ):
        """Starts before `start_step`.

        Args:
          source: the batches by step.
          identity: what fixes the meaning of a step; part of every position.
          start_step: step of the first batch yielded.
          num_workers: reader processes, 0 for threads of this one.
          reuse_first: yield the batch of step 0 at every step.
          manifest: of the data set, for reports; None for random tokens.
        """
        self.manifest = manifest
        self._source = source
        self._identity = identity
        self._num_workers = num_workers
        self._reuse_first = reuse_first
        self._first_batch: Batch | None = None
        self._reader: Any = None
        self._step = start_step

    @property
    def num_steps(self) -> int | None:
        """Batches of the whole run, None when the data repeats without end."""
        return None if len(self._source) == sys.maxsize else len(self._source)

    @property
    def position(self) -> dict[str, Any]:
        """State after the last batch yielded: JSON-able, the same on every host.

        `step` is the step of the next batch; the rest says which data that step counts in.
        """
        return {"step": self._step, **self._identity}

    def seek(self, step: int) -> None:
        """Makes `step` the next one yielded. Reads nothing, whatever the distance."""
        assert step >= 0, step
        self.close()
        self._step = step

    def check_position(self, position: Mapping[str, Any]) -> None:
        """Compares a saved position with this run's data; does not move.

        Raises:
          UserError: the data set, its reading, the seed or the batch size differ, so that the
            saved step would stand for other text. Names each key with both values.
        """
        differences = [
            f"{_KEY_OF[name]} was {position[name]!r} and is {value!r}"
            for name, value in self._identity.items()
            if name in position and position[name] != value
        ]
        if differences:
            raise UserError(
                f"The checkpoint stands at step {position.get('step')} of other data: "
                + "; ".join(differences)
                + ". Set back what differs to continue that run exactly, or begin a new run "
                "(another run_name) from its weights with load_parameters_path."
            )

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        if self._step >= len(self._source):
            self.close()
            raise StopIteration
        if self._reuse_first:
            if self._first_batch is None:
                self._first_batch = _to_batch(self._source[0])
            batch = self._first_batch
        else:
            if self._reader is None:
                self._reader = _read_ahead(self._source, self._step, self._num_workers)
            batch = _to_batch(next(self._reader))
        self._step += 1
        return batch

    def close(self) -> None:
        """Stops the readers; the next `next` starts them again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


# Words of a position -> the configuration keys they come from, for messages.
_KEY_OF = {
    "data_set": "the contents of dataset_path",
    "split": "train_split",
    "seed": "data_shuffle_seed",
    "shuffle": "enable_data_shuffling",
    "packing": "packing",
    "max_target_length": "max_target_length",
    "global_batch_size": (
        "the global batch (per_device_batch_size x devices x gradient_accumulation_steps)"
    ),
}


class EvalBatches:
    """One pass over a split, in order, each time it is iterated. `len` is its batches."""

    def __init__(self, source: BatchSource, manifest: Manifest | None = None):
        """Args: `source`: the batches; `manifest`: of the data set, None for random tokens."""
        self.manifest = manifest
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Batch]:
        reader = _read_ahead(self._source, 0, num_workers=0)
        try:
            for arrays in reader:
                yield _to_batch(arrays)
        finally:
            reader.close()


def _local_rows(global_batch_size: int, process_index: int, process_count: int) -> tuple[int, int]:
    """First row and number of rows of a global batch that one host holds."""
    assert 0 <= process_index < process_count, (process_index, process_count)
    if global_batch_size < 1 or global_batch_size % process_count:
        raise UserError(
            f"A global batch of {global_batch_size} sequences cannot be split evenly over "
            f"{process_count} hosts: change per_device_batch_size so that it is a multiple of "
            f"{process_count}."
        )
    rows = global_batch_size // process_count
    return process_index * rows, rows


def _open_windows(
    data: Data, manifest: Manifest, split: str, key: str, length: int, vocab_size: int
) -> Windows:
    """Opens a split for reading; `key` names the configuration key that chose it.

    Raises:
      UserError: unknown or empty split, files that do not fit the manifest, a vocab_size too
        small for the ids, nothing to predict.
    """
    entry = find_split(manifest, data.dataset_path, split, key)
    if entry.largest_id >= vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} is too small: the largest token id of split {split} in "
            f"{data.dataset_path} is {entry.largest_id}. Set vocab_size to "
            f"{entry.largest_id + 1} or more; the tokenizer has {manifest.tokenizer.vocab_size} "
            "ids."
        )
    stream = TokenStream(data.dataset_path, manifest, split)
    cut = PackedWindows if data.packing else DocumentWindows
    windows = cut(stream, length, data.document_mask, manifest.filler_id)
    if len(windows) == 0:
        raise UserError(
            f"{key}={split} of {data.dataset_path} has {entry.num_tokens} tokens in "
            f"{entry.num_documents} documents: nothing to predict. Prepare more text."
        )
    return windows


def train_loader(
    data: Data,
    *,
    max_target_length: int,
    vocab_size: int,
    global_batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    start_step: int = 0,
) -> BatchIterator:
    """This host's rows of each training batch, from `start_step` on.

    Args:
      data: the keys about data.
      max_target_length: T, tokens of a window.
      vocab_size: ids the model knows.
      global_batch_size: sequences of an update over all hosts (accumulation included).
      process_index: this host.
      process_count: hosts.
      start_step: step of the first batch.

    Returns:
      An iterator over host-local Batch of NumPy arrays [global_batch_size / process_count, T].
      With `num_epoch` it ends after that many passes, the last batch filled up with rows of
      weight 0; otherwise it never ends.

    Raises:
      UserError: the data set is missing, damaged, too short for one window, or does not fit
        vocab_size; or the batch does not split over the hosts.
    """
    first_row, num_rows = _local_rows(global_batch_size, process_index, process_count)
    identity: dict[str, Any] = {
        "data_set": "synthetic",
        "global_batch_size": global_batch_size,
        "seed": data.data_shuffle_seed,
        "max_target_length": max_target_length,
    }
    manifest = None
    if data.dataset_type == "synthetic":
        source: BatchSource = SyntheticBatches(
            max_target_length,
            vocab_size,
            data.data_shuffle_seed,
            first_row,
            num_rows,
            global_batch_size,
        )
    else:
        manifest = read_manifest(data.dataset_path)
        split = data.train_split
        windows = _open_windows(data, manifest, split, "train_split", max_target_length, vocab_size)
        num_tokens = manifest.splits[split].num_tokens
        if data.packing and num_tokens < max_target_length + 1:
            raise UserError(
                f"Split {split} of {data.dataset_path} has {num_tokens} tokens, and one window "
                f"needs max_target_length + 1 = {max_target_length + 1}. Lower max_target_length "
                "or prepare more text."
            )
        order = WindowOrder(
            len(windows), data.data_shuffle_seed, data.enable_data_shuffling, data.num_epoch
        )
        source = StoredBatches(windows, order, first_row, num_rows, global_batch_size)
        identity |= {
            "data_set": manifest.fingerprint,
            "split": split,
            "shuffle": data.enable_data_shuffling,
            "packing": data.packing,
        }
    return BatchIterator(
        source,
        identity,
        start_step,
        data.grain_worker_count if data.dataset_type == "grain" else 0,
        data.reuse_example_batch,
        manifest,
    )


def eval_loader(
    data: Data,
    *,
    eval_steps: int,
    max_target_length: int,
    vocab_size: int,
    global_batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """This host's rows of the evaluation batches: the split `eval_split` in order, once.

    Args:
      data: the keys about data.
      eval_steps: batches at most; -1 for the whole split.
      max_target_length: T, tokens of a window.
      vocab_size: ids the model knows.
      global_batch_size: sequences of a batch over all hosts.
      process_index: this host.
      process_count: hosts.

    Returns:
      Batches that can be iterated again and again, the last one filled up with rows of weight 0.

    Raises:
      UserError: as train_loader; also an unknown or empty split, eval_steps=0, or random tokens
        without eval_steps.
    """
    first_row, num_rows = _local_rows(global_batch_size, process_index, process_count)
    if eval_steps == 0:
        raise UserError("eval_steps=0 evaluates nothing: use -1 (the whole split) or 1 and above.")
    num_steps = sys.maxsize if eval_steps == -1 else eval_steps
    if data.dataset_type == "synthetic":
        if eval_steps == -1:
            raise UserError(
                "dataset_type=synthetic never ends, so an evaluation needs eval_steps (batches)."
            )
        return EvalBatches(
            SyntheticBatches(
                max_target_length,
                vocab_size,
                data.data_shuffle_seed,
                first_row,
                num_rows,
                global_batch_size,
                num_steps,
                EVAL_STREAM,
            )
        )
    manifest = read_manifest(data.dataset_path)
    windows = _open_windows(
        data, manifest, data.eval_split, "eval_split", max_target_length, vocab_size
    )
    order = WindowOrder(len(windows), seed=0, shuffle=False, num_epoch=1)
    return EvalBatches(
        StoredBatches(windows, order, first_row, num_rows, global_batch_size, num_steps), manifest
    )
