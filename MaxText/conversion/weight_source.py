"""Sources of weights for conversion: arrays under our names, asked for one at a time."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from MaxText.checkpointing import checkpoint_files, compatibility
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError
from MaxText.checkpointing.checkpoint_reader import AVERAGE, read_arrays, read_tree
from MaxText.checkpointing.checksums import host_checksum
from MaxText.config import import_modules, schema
from MaxText.config.schema import Config
from MaxText.config.serialization import check_recorded
from MaxText.errors import UserError
from MaxText.training.backend_defaults import abstract_model

PARAMS = "params/"
_AVERAGE = f"{AVERAGE}/"  # parameter_average
_MAX_LINES = 20
_READ_AHEAD_BYTES = 16 << 20


class WeightSource:
    """Arrays under our names, read one at a time.

    Attributes:
      formats: The dtype of each parameter by name.
      description: Where the weights are from, for messages.
      config: The configuration of their model.
      model: That model, without values: parameter names and shapes.
    """

    formats: dict[str, np.dtype]
    description: object = ""

    def __init__(self, config: Config):
        self.config = config
        self.model = abstract_model(config.model)

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, all layers stacked."""
        raise NotImplementedError


@contextlib.contextmanager
def corruption_as_user_error(source: object, key: str = "") -> Iterator[None]:
    """Converts CheckpointCorruptedError to UserError.

    Args:
      source: The checkpoint, for the message.
      key: The configuration key that names it, if there is one.
    """
    try:
        yield
    except CheckpointCorruptedError as error:
        raise UserError(
            f"{key}{': ' if key else ''}the checkpoint at {source} cannot be read: {error}\n"
            "  Use an older step, or restore the files."
        ) from error


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree from paths such as "layers/mlp/wo/kernel"."""
    return traverse_util.unflatten_dict(flat, sep="/")


def common_format(formats: Iterable[str]) -> np.dtype:
    """Returns the format of an array assembled from tensors in `formats`.

    float16 widens losslessly to float32: there are no float16 parameters.
    """
    return np.dtype("bfloat16" if set(formats) == {"bfloat16"} else "float32")


def check_arrays(
    stored_specs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], summary: str, advice: str
) -> None:
    """Checks stored arrays against the shapes of a model.

    Args:
      stored_specs: By name, as `mismatches` takes them.
      shapes: Of the model, by name.
      summary: The first line of the message.
      advice: Its last line.

    Raises:
      UserError: If names or shapes differ.
    """
    specs = {
        name: compatibility.ArraySpec(tuple(shape), np.dtype("float32"))
        for name, shape in shapes.items()
    }
    problems = compatibility.mismatches(stored_specs, specs)
    if problems:
        # Arrays that are there and differ say more than those that are missing.
        problems.sort(key=lambda problem: not problem.startswith("other"))
        lines = problems[:_MAX_LINES]
        num_omitted = len(problems) - len(lines)
        if num_omitted:
            lines.append(f"... and {num_omitted} more")
        raise UserError("\n  ".join([f"{summary}:", *lines]) + f"\n{advice}")


_CHUNK = 1 << 20  # elements per call, so that temporaries stay small


def require_finite(array: np.ndarray, name: str, source: object) -> None:
    """Refuses weights with NaN or infinity: nothing computed with them is a number.

    Args:
        array: of any floating-point format; other formats pass.
        name: of the tensor, for the message.
        source: the file or checkpoint that it is in, for the message.

    Raises:
        UserError: a weight is not finite.
    """
    if not jax.numpy.issubdtype(array.dtype, np.floating):
        return
    flat = array.reshape(-1)
    num_nan = num_infinite = 0
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if not np.isfinite(chunk).all():
            num_nan += int(np.isnan(chunk).sum())
            num_infinite += int(np.isinf(chunk).sum())
    if num_nan or num_infinite:
        raise UserError(
            f"{source}: {name} has {num_nan:,} NaN and {num_infinite:,} infinite of "
            f"{flat.size:,} weights. Use a checkpoint from before they appeared, or copy the files "
            "again if they were damaged."
        )


class LazyCheckpointReader:
    """An Orbax PyTree on disk. Verifies checksums if they were saved.

    Attributes:
      leaves: Shape and dtype of all arrays by path, such as "params/decoder_norm/scale", including
        the optimizer state.
      params: Those of the parameters, by name, such as "decoder_norm/scale".
    """

    def __init__(self, folder: epath.Path, prefix: str = PARAMS):
        """Reads the tree metadata; UserError if unreadable or altered.

        Args:
          folder: The items of a checkpoint.
          prefix: What precedes the names of parameters in the paths of `params`.
        """
        self._prefix = prefix
        self._stored = checkpoint_files.StoredCheckpoint(folder, None)
        with corruption_as_user_error(folder):
            self._tree, self.leaves = read_tree(self._stored)
        entries = jax.tree_util.tree_leaves_with_path(self._tree)
        self._paths = [compatibility.leaf_path(path) for path, _ in entries]
        self._read_ahead: dict[str, np.ndarray] = {}
        params = {path: leaf for path, leaf in self.leaves.items() if path.startswith(prefix)}
        self.params = {path.removeprefix(prefix): leaf for path, leaf in params.items()}

    def read(self, path: str) -> np.ndarray:
        """Returns one array by its path; UserError for damage, or weights that are not finite."""
        if path not in self._read_ahead:
            self._read_ahead = self._read_from(path)
        array = self._read_ahead.pop(path)
        checksums = self._stored.metadata.checksums
        with corruption_as_user_error(self._stored):
            if checksums is not None and host_checksum(array) != checksums[path]:
                raise CheckpointCorruptedError(f"{path}: checksum mismatch")
        if path.startswith(self._prefix):
            require_finite(array, path, self._stored)
        return array

    def _read_from(self, path: str) -> dict[str, np.ndarray]:
        """Returns an array, and those after it as long as they are small together, by path.

        Arrays are mostly asked for in their order, and a call of Orbax takes 20 ms however small
        the array is.
        """
        first = self._paths.index(path)
        end = first + 1
        num_bytes = self._num_bytes(first)
        while end < len(self._paths) and num_bytes + self._num_bytes(end) <= _READ_AHEAD_BYTES:
            num_bytes += self._num_bytes(end)
            end += 1
        targets = dict.fromkeys(self._paths[first:end], np.ndarray)
        with corruption_as_user_error(self._stored):
            return read_arrays(self._stored, self._tree, targets)

    def _num_bytes(self, index: int) -> float:
        """Returns the size of an array; infinite for an entry of the tree that holds none."""
        spec = self.leaves.get(self._paths[index])
        return math.inf if spec is None else math.prod(spec.shape) * spec.dtype.itemsize


class RunWeights(WeightSource):
    """Weights of a checkpoint (checkpoint_files.resolve_checkpoint)."""

    def __init__(self, path: str, config: Config | None = None, *, average: bool = False):
        """Reads names and shapes of a run, its checkpoints, a step or its items.

        Args:
          path: The folder.
          config: The configuration, for a checkpoint without one.
          average: Whether to take the average of the parameters (parameter_average).

        Raises:
          UserError: For a missing, unreadable or mismatched checkpoint.
        """
        self.stored = self.description = checkpoint_files.resolve_checkpoint(path, "from")
        self.metadata = self.stored.try_metadata()
        if config is None:
            shown_source = str(self.stored)
            flat = self.metadata.get("config")
            if not flat:
                raise UserError(
                    f"{shown_source} has no configuration. Add it: convert.py CONFIG.yml from=..."
                )
            import_modules.check_named(flat, shown_source)
            check_recorded(flat, shown_source)
            config = schema.unflatten(flat)
        super().__init__(config)
        self._prefix = _AVERAGE if average else PARAMS
        self._arrays = LazyCheckpointReader(self.stored.items, self._prefix)
        if average and not self._arrays.params:
            raise UserError(
                f"{self.stored} has no average of the parameters: it was trained with "
                "parameter_average.type=none. Leave out --average."
            )
        check_arrays(
            self._arrays.params,
            {name: spec.shape for name, spec in self.model.parameters.items()},
            f"{self.stored} does not hold the model of its configuration",
            "Put the run's own config.yml before from=, or use a checkpoint of this program; "
            "from=maxtext:... reads MaxText's.",
        )
        self.formats = {name: leaf.dtype for name, leaf in self._arrays.params.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter, all layers stacked; UserError for damage."""
        return self._arrays.read(self._prefix + name)
