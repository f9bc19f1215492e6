"""Restores arrays from a checkpoint onto any mesh, and verifies their checksums."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from MaxText.checkpointing import checkpoint_files, compatibility
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError, StoredCheckpoint
from MaxText.checkpointing.checksums import array_checksums, first_mismatch, first_spec_mismatch
from MaxText.checkpointing.compatibility import (
    ArraySpec,
    Casts,
    ConfigDiff,
    array_specs,
    leaf_path,
)
from MaxText.config.training_sections import CheckpointStorageConfig
from MaxText.errors import UserError, first_line
from MaxText.storage.errors import ObjectStoreError, causes, is_permission_denied, is_storage_error
from MaxText.storage.retry import call_with_retries
from MaxText.value_types import PyTree

if TYPE_CHECKING:
    import orbax.checkpoint.experimental.v1 as ocp

_MAX_REASON_CHARS = 300
_RETRY_SECONDS = (1.0, 2.0, 4.0)
_LOOP_CLOSED = "Event loop is closed"
_GUARD = "guard"
AVERAGE = "average"  # field of the train state: average of the parameters
OBJECTIVE = "objective"  # parameters of an objective, by the name of the decoder's attribute
_REPLICA_AXIS = "data"  # the mesh axis over which parameters are never split
_CAST_BYTES = 1 << 30  # limit on bytes of arrays held in two dtypes at once during a cast

_T = TypeVar("_T")


def _field(average: bool) -> str:
    """Returns the field of the train state with the parameters, or with their average."""
    return AVERAGE if average else "params"


def as_dict(state: PyTree) -> dict[str, PyTree]:
    """Returns a train state (any dataclass) as a dict without None fields."""
    fields = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: value for name, value in fields if value is not None}


@dataclasses.dataclass(frozen=True)
class CheckpointReader:
    """Restores arrays of a checkpoint onto the shardings of abstract ones.

    Its methods raise UserError if names or shapes differ, CheckpointCorruptedError if files are
    damaged, ObjectStoreError if storage fails.
    """

    stored: StoredCheckpoint
    config_flat: Mapping[str, Any]  # the current configuration by key, to explain a mismatch
    log: Callable[[str], None]
    is_same_run: bool = False  # whether the checkpoint is one of the run that restores it
    storage: CheckpointStorageConfig = dataclasses.field(default_factory=CheckpointStorageConfig)

    @functools.cached_property
    def _stored_tree(self) -> dict[str, PyTree]:
        return read_tree(self.stored).tree

    def restore_state(self, abstract_state: PyTree) -> PyTree:
        """Restores a train state.

        Args:
          abstract_state: A TrainState of `jax.ShapeDtypeStruct` leaves. Its shardings may be of any
            mesh; arrays of another floating-point dtype are cast.

        Returns:
          The state. Its guard is `abstract_state.guard.reset()` if the checkpoint has none or one
          of other shapes (another window).
        """
        abstract_tree = as_dict(abstract_state)
        tree = dict(self._stored_tree)
        guard = abstract_tree.pop(_GUARD, None)
        stored_guard = tree.pop(_GUARD, None)
        if guard is not None:
            if array_specs(stored_guard) == array_specs(as_dict(guard)):
                tree[_GUARD] = stored_guard
                abstract_tree[_GUARD] = as_dict(guard)
            else:
                guard = guard.reset()  # collective, so not once a process may have failed to read
        arrays = self._restore(tree, abstract_tree)
        if guard is not None:
            arrays[_GUARD] = dataclasses.replace(guard, **arrays.get(_GUARD, {}))
        return dataclasses.replace(abstract_state, **arrays)

    def restore_params(self, abstract_params: PyTree, *, average: bool = False) -> PyTree:
        """Restores the parameters alone, or their average; raises like the class.

        Weights of an objective are no part of what the model computes. They are left out if the
        checkpoint or the model has none, which was then trained with another objective.
        """
        field = _field(average)
        return self._restore(*self._params(abstract_params, field))[field]

    def check_params(self, abstract_params: PyTree, *, average: bool = False) -> None:
        """Raises the mismatch errors of `restore_params` without reading arrays."""
        self._find_casts(*self._params(abstract_params, _field(average)))

    def _params(
        self, abstract_params: PyTree, field: str
    ) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """Returns the stored and the abstract parameters of `restore_params`.

        Args:
          abstract_params: With target shardings.
          field: Of the train state that has them.
        """
        tree = self._stored_tree
        if field == AVERAGE and field not in tree:
            raise UserError(
                f"{self.stored} has no average of the parameters: it was trained with "
                "parameter_average.type=none.\n"
                "  What to do: set load_parameter_average=false."
            )
        if field not in tree:
            return {}, {field: abstract_params}
        stored = dict(tree[field])
        abstract = dict(abstract_params)
        if OBJECTIVE not in stored or OBJECTIVE not in abstract:
            stored.pop(OBJECTIVE, None)
            abstract.pop(OBJECTIVE, None)
        return {field: stored}, {field: abstract}

    def _find_casts(self, tree: dict[str, PyTree], abstract_tree: dict[str, PyTree]) -> Casts:
        """Returns the arrays of the stored `tree` to cast; UserError if it does not fit."""
        stored_config = self.stored.metadata.values.get("config")
        config_diff = ConfigDiff(stored_config, self.config_flat, self.is_same_run)
        try:
            return compatibility.check_compatible(tree, abstract_tree, config_diff)
        except UserError as error:
            raise UserError(f"{self.stored}: {error}") from None

    def _restore(
        self, tree: dict[str, PyTree], abstract_tree: dict[str, PyTree]
    ) -> dict[str, PyTree]:
        """Restores the arrays of `abstract_tree`, to which the stored `tree` must fit."""
        casts = self._find_casts(tree, abstract_tree)
        compatibility.log_casts(casts, self.log)
        if self.stored.metadata.checksums is None:
            self.log(f"WARNING: {self.stored} has no checksums; restored arrays were not verified")
        stored_dtypes = {path: stored_dtype for path, (stored_dtype, _) in casts.items()}
        return self._restore_arrays(abstract_tree, stored_dtypes)

    def _restore_arrays(
        self, abstract_tree: dict[str, PyTree], stored_dtypes: Mapping[str, np.dtype]
    ) -> dict[str, PyTree]:
        """Reads, verifies and casts arrays, in groups of bounded memory.

        Args:
          abstract_tree: The arrays to return, with their shardings.
          stored_dtypes: The dtypes of stored arrays to cast, by path.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(abstract_tree)
        leaves = {leaf_path(path): leaf for path, leaf in paths}
        checksums = self.stored.metadata.checksums
        context = self._load_context([leaf.sharding for leaf in leaves.values()])
        first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        arrays: dict[str, jax.Array] = {}
        for group in _groups(leaves, stored_dtypes):
            targets = {
                name: jax.ShapeDtypeStruct(
                    leaves[name].shape,
                    stored_dtypes.get(name, leaves[name].dtype),
                    sharding=leaves[name].sharding or first_device,
                )
                for name in group
            }
            restored_group = read_arrays(self.stored, self._stored_tree, targets, context)
            # Orbax broadcasts one replica's arrays as sums, which makes booleans integers.
            restored_group = {
                name: array.astype(bool) if leaves[name].dtype == bool else array
                for name, array in restored_group.items()
            }
            if checksums is not None:
                mismatch = first_mismatch(array_checksums(restored_group), checksums)
                if mismatch:
                    raise CheckpointCorruptedError(mismatch)
            for name in group:
                arrays[name] = restored_group.pop(name).astype(leaves[name].dtype)
        return structure.unflatten(arrays[name] for name in leaves)

    def _load_context(self, shardings: Sequence[NamedSharding]) -> "ocp.Context":
        """Returns Orbax's options to load arrays onto `shardings`."""
        import orbax.checkpoint.experimental.v1 as ocp

        context = ocp.Context()
        context.memory.read_concurrent_bytes = (
            self.storage.concurrent_gb * checkpoint_files.BYTES_PER_GB
        )
        if self.storage.single_replica_restore:
            obstacle = _single_replica_obstacle(shardings)
            if obstacle:
                self.log(f"checkpoint_storage.single_replica_restore has no effect: {obstacle}")
            else:
                loading = context.array.loading
                loading.use_load_and_broadcast = True
                axis = shardings[0].mesh.axis_names.index(_REPLICA_AXIS)
                loading.load_and_broadcast_options.replica_axis_index = axis
        return context


class StoredTree(NamedTuple):
    """What a checkpoint contains, without the values."""

    tree: dict[str, PyTree]  # with Orbax's metadata of each array as leaves
    specs: dict[str, ArraySpec]  # shape and dtype of each array, by path


def read_tree(stored: StoredCheckpoint) -> StoredTree:
    """Reads names, shapes and dtypes of a checkpoint's arrays, and checks that they were saved so.

    Raises:
      CheckpointCorruptedError: If the files are damaged, or of another checkpoint.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    def read() -> StoredTree:
        with translate_errors():
            # Not `ocp.metadata`: it logs any error and returns None, so that failing storage could
            # not be told from damage.
            tree = dict(_run(ocp.handlers.PyTreeHandler().metadata(stored.items)))
            # Optimizer states have entries without arrays.
            arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
            return StoredTree(tree, array_specs(arrays))

    stored_tree = _retry_storage(read)
    checksums = stored.metadata.checksums
    if checksums is not None:
        mismatch = first_spec_mismatch(stored_tree.specs, checksums)
        if mismatch:
            raise CheckpointCorruptedError(f"{stored.items}: {mismatch}")
    return stored_tree


def read_arrays(
    stored: StoredCheckpoint,
    tree: Mapping[str, PyTree],
    targets: Mapping[str, Any],
    context: "ocp.Context | None" = None,
) -> dict[str, Any]:
    """Reads some arrays of a checkpoint with Orbax.

    Args:
      tree: What the checkpoint contains, of `read_tree`.
      targets: The arrays to read by path, as what Orbax shall return: `jax.ShapeDtypeStruct` with
        a sharding, or the type `np.ndarray`.
      context: Orbax's options; None for the defaults.

    Returns:
      The arrays by path, in the order of `tree`.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    request = jax.tree_util.tree_map_with_path(
        lambda path, _: targets.get(leaf_path(path), ocp.PLACEHOLDER), dict(tree)
    )

    async def load() -> PyTree:
        # Not `ocp.load`: it refuses a folder of arrays within a checkpoint, and asks storage for
        # ten files before it reads one.
        handler = ocp.handlers.PyTreeHandler(context=context)
        return await (await handler.load(stored.items, request))

    def read() -> PyTree:
        with translate_errors():
            # Restores are asynchronous; an error must surface here.
            return jax.block_until_ready(_run(load()))

    leaves = jax.tree_util.tree_leaves_with_path(_retry_storage(read))
    return {leaf_path(path): leaf for path, leaf in leaves if leaf_path(path) in targets}


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of a coroutine, run in a thread: a notebook has an event loop already."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    try:
        return pool.submit(asyncio.run, coroutine).result()
    finally:
        pool.shutdown(wait=False)  # Ctrl-C does not wait for the read


def _groups(
    leaves: Mapping[str, jax.ShapeDtypeStruct], stored_dtypes: Mapping[str, np.dtype]
) -> list[list[str]]:
    """Returns groups of paths of arrays to read at once: uncast arrays, then casts.

    An array that is cast exists in both dtypes for a moment, so a group of those has at most
    `_CAST_BYTES`, or one array.
    """
    groups = [[name for name in leaves if name not in stored_dtypes]]
    free_bytes = 0
    for name, leaf in leaves.items():
        if name in stored_dtypes:
            num_bytes = math.prod(leaf.shape) * stored_dtypes[name].itemsize
            if num_bytes > free_bytes:
                groups.append([])
                free_bytes = _CAST_BYTES
            groups[-1].append(name)
            free_bytes -= num_bytes
    return [group for group in groups if group]


def _single_replica_obstacle(shardings: Sequence[NamedSharding]) -> str:
    """Returns why one replica cannot read for all; empty if it can."""
    if any(_REPLICA_AXIS in jax.tree.leaves(tuple(sharding.spec)) for sharding in shardings):
        return f"arrays are split over the mesh axis {_REPLICA_AXIS}"
    mesh = shardings[0].mesh
    axis = mesh.axis_names.index(_REPLICA_AXIS)
    replicas: dict[int, set[int]] = {}  # by process: positions of its devices on the axis
    for position, device in np.ndenumerate(mesh.devices):
        replicas.setdefault(device.process_index, set()).add(position[axis])
    if any(len(replicas_of_process) > 1 for replicas_of_process in replicas.values()):
        return f"processes have devices at several places of the mesh axis {_REPLICA_AXIS}"
    return "there is one replica" if mesh.shape[_REPLICA_AXIS] == 1 else ""


# --- Errors of Orbax and TensorStore: classified, retried, and printed once


@functools.cache
def silence_threads() -> None:
    """Silences background threads' errors, raised in the main thread as well.

    Orbax logs the traceback of each thread and raises the error again in the wait for the save. It
    then closes its event loop, so TensorStore's callbacks complain, and drops the tasks of the
    other arrays, whose errors asyncio logs when they are garbage-collected.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _filter_unraisable(lambda unraisable: _LOOP_CLOSED in str(unraisable.exc_value))


def _filter_unraisable(
    is_expected: Callable[["sys.UnraisableHookArgs"], bool],
) -> Callable[["sys.UnraisableHookArgs"], object]:
    """Hides uncatchable errors; returns the previous sys.unraisablehook.

    Args:
      is_expected: Gets `sys.UnraisableHookArgs`; True hides the error.
    """
    previous = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not is_expected(unraisable):
            previous(unraisable)

    sys.unraisablehook = hook
    return previous


def _retry_storage(read: Callable[[], _T]) -> _T:
    """Returns `read()`, retried a few times while storage fails.

    Raises:
      ObjectStoreError: If storage still fails, or at once if access is denied.
    """

    def is_retryable(error: Exception) -> bool:
        return isinstance(error, ObjectStoreError) and error.errno == errno.EIO

    return call_with_retries(read, delays=_RETRY_SECONDS, is_retryable=is_retryable)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Converts Orbax's errors to CheckpointCorruptedError or storage errors."""
    # When one array fails, Orbax closes its event loop and every array still in flight prints a
    # traceback, which would bury the message below.
    previous = _filter_unraisable(
        lambda x: inspect.iscoroutine(x.object) or str(x.exc_value) == _LOOP_CLOSED
    )
    try:
        yield
    except (CheckpointCorruptedError, UserError):
        raise
    except (MemoryError, jax.errors.JaxRuntimeError, ImportError):
        raise  # says nothing about the files
    except Exception as error:  # Orbax raises plain Exception, and others from damaged JSON
        time.sleep(0.3)  # for arrays in flight
        if is_storage_error(error):
            raise checkpoint_files.unreadable_now(
                _root_cause(error), is_transient=not is_permission_denied(error)
            ) from error
        raise CheckpointCorruptedError(_root_cause(error)) from error
    finally:
        sys.unraisablehook = previous


def _root_cause(error: BaseException) -> str:
    """Returns the first line of the root cause, without TensorStore settings."""
    *_, root = causes(error)
    return first_line(root)[:_MAX_REASON_CHARS]
