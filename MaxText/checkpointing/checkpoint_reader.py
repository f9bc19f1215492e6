"""Restores arrays from a checkpoint and verifies their checksums.

Older checkpoints have repeated layers one by one; they are stacked on load.
"""

import contextlib
import dataclasses
import errno
import functools
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.checkpointing import checkpoint_files, compatibility
from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError, StoredCheckpoint
from MaxText.checkpointing.checksums import array_checksums, first_mismatch, first_spec_mismatch
from MaxText.checkpointing.compatibility import ArraySpec, Casts, ConfigDiff, array_specs, leaf_path
from MaxText.config.layer_plan import LayerPlan
from MaxText.config.schema import unflatten
from MaxText.config.training_sections import CheckpointStorage
from MaxText.errors import UserError, first_line
from MaxText.storage.errors import ObjectStoreError, causes, is_permission_denied, is_storage_error

_MAX_REASON_CHARS = 300
_RETRY_SECONDS = (1.0, 2.0, 4.0)
_LOOP_CLOSED = "Event loop is closed"
_GUARD = "guard"
_CYCLE = "cycle"  # of layers, stacked by position
# Fields of the guard's state under the names of earlier versions, read for one release.
_EARLIER_GUARD = {"num_accepted": "num_sound", "last_stable_step": "calm_step"}
_REPLICA_AXIS = "data"  # the mesh axis over which parameters are never split
_CAST_BYTES = 1 << 30  # limit on bytes of arrays held in two dtypes at once during a cast

_T = TypeVar("_T")


def as_dict(state: Any) -> dict[str, Any]:
    """Returns a train state (any dataclass) as a dict without None fields."""
    fields = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: value for name, value in fields if value is not None}


@dataclasses.dataclass(frozen=True)
class CheckpointReader:
    """Restores arrays of a checkpoint onto the shardings of abstract ones.

    Raises UserError if names or shapes differ, CheckpointCorruptedError if files are damaged.
    """

    stored: StoredCheckpoint
    config_flat: Mapping[str, Any]
    log: Callable[[str], None]
    is_same_run: bool = False
    storage: CheckpointStorage = dataclasses.field(default_factory=CheckpointStorage)

    def restore_state(self, abstract_state: Any) -> Any:
        """Restores a train state.

        Uses `abstract_state.guard.reset()` if the checkpoint has no `guard` or one of other shapes.
        """
        wanted = as_dict(abstract_state)
        tree, _ = read_tree(self.stored)
        guard = wanted.pop(_GUARD, None)
        stored_guard = tree.pop(_GUARD, None)
        if guard is None:
            return dataclasses.replace(abstract_state, **self._restore(tree, wanted))
        names = _EARLIER_GUARD if "num_sound" in (stored_guard or ()) else {}
        renamed = {names.get(name, name): leaf for name, leaf in as_dict(guard).items()}
        if array_specs(stored_guard) == array_specs(renamed):
            tree[_GUARD], wanted[_GUARD] = stored_guard, renamed
        else:
            guard = guard.reset()  # collective, so not once a process may have failed to read
        arrays = self._restore(tree, wanted)
        if found := arrays.get(_GUARD):
            fields = {name: found[names.get(name, name)] for name in as_dict(guard)}
            guard = dataclasses.replace(guard, **fields)
        return dataclasses.replace(abstract_state, **arrays | {_GUARD: guard})

    def restore_params(self, abstract_params: Any) -> Any:
        return self._restore(self._stored_params(), {"params": abstract_params})["params"]

    def check_params(self, abstract_params: Any) -> None:
        """Raises the mismatch errors of `restore_params` without reading arrays."""
        self._plan(self._stored_params(), {"params": abstract_params})

    def _stored_params(self) -> dict[str, Any]:
        tree, _ = read_tree(self.stored)
        return {"params": tree["params"]} if "params" in tree else {}

    def _plan(
        self, tree: dict[str, Any], wanted: dict[str, Any]
    ) -> tuple[dict[str, Any], LayerPlan | None, Casts]:
        """Returns the tree to request, the layers to stack or None, and the casts."""
        unstacked = None
        layers, wanted_layers = (of.get("params", {}).get("layers", {}) for of in (tree, wanted))
        if _CYCLE in wanted_layers and _CYCLE not in layers and "0" in layers:
            unstacked = unflatten(dict(self.config_flat)).model.layer_plan
            wanted = _unstack(wanted, unstacked)
        stored_config = self.stored.metadata.values.get("config")
        hint = ConfigDiff(stored_config, self.config_flat, self.is_same_run)
        try:
            return wanted, unstacked, compatibility.check_compatible(tree, wanted, hint)
        except UserError as error:
            raise UserError(f"{self.stored}: {error}") from None

    def _restore(self, tree: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
        requested, unstacked, casts = self._plan(tree, wanted)
        compatibility.log_casts(casts, self.log)
        if self.stored.metadata.checksums is None:
            self.log(f"WARNING: {self.stored} has no checksums; restored arrays were not verified")
        arrays = self._restore_arrays(requested, {path: old for path, (old, _) in casts.items()})
        return _stack(arrays, wanted, unstacked) if unstacked else arrays

    def _restore_arrays(
        self, wanted: dict[str, Any], dtypes: Mapping[str, np.dtype]
    ) -> dict[str, Any]:
        """Reads, verifies and casts arrays, in groups of bounded memory.

        `dtypes` are the stored ones of arrays to cast.
        """
        import orbax.checkpoint as ocp

        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        paths, structure = jax.tree_util.tree_flatten_with_path(wanted)
        names = [leaf_path(path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        checksums = self.stored.metadata.checksums
        limits: dict[str, Any] = {"restore_concurrent_gb": self.storage.concurrent_gb}
        restore_args = ocp.ArrayRestoreArgs
        if self.storage.single_replica_restore:
            shardings = [leaf.sharding for leaf in leaves]
            if refused := _single_replica_refused(shardings):
                self.log(f"checkpoint_storage.single_replica_restore has no effect: {refused}")
            else:
                restore_args = ocp.type_handlers.SingleReplicaArrayRestoreArgs
                limits["type_handler_registry"] = _single_replica_handlers(shardings[0].mesh)
        arguments = []
        for name, leaf in zip(names, leaves, strict=True):
            dtype = dtypes.get(name, leaf.dtype)
            sharding = leaf.sharding or first
            arguments.append(restore_args(sharding=sharding, global_shape=leaf.shape, dtype=dtype))
        arrays: list[Any] = [None] * len(leaves)
        for group in _groups(names, leaves, dtypes):
            items = [leaf if i in group else ocp.PLACEHOLDER for i, leaf in enumerate(leaves)]
            restored = read_arrays(self.stored, structure, items, arguments, **limits)
            # Orbax broadcasts one replica's arrays as sums, which makes booleans integers.
            read = {
                names[i]: restored[i].astype(bool) if leaves[i].dtype == bool else restored[i]
                for i in sorted(group)
            }
            mismatch = checksums is not None and first_mismatch(array_checksums(read), checksums)
            if mismatch:
                raise CheckpointCorruptedError(mismatch)
            for i in sorted(group):
                arrays[i] = read[names[i]].astype(leaves[i].dtype)
            del restored, read
        return structure.unflatten(arrays)


def read_tree(stored: StoredCheckpoint) -> tuple[dict[str, Any], dict[str, ArraySpec]]:
    """Returns the stored tree and its arrays by path, checked as saved."""
    import orbax.checkpoint as ocp

    def read() -> tuple[dict[str, Any], dict[str, ArraySpec]]:
        with translate_errors():
            tree = dict(ocp.PyTreeCheckpointHandler().metadata(stored.items).tree)
            # Optimizer states have entries without arrays.
            arrays = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else None, tree)
            return tree, array_specs(arrays)

    tree, specs = retry(read)
    checksums = stored.metadata.checksums
    if checksums is not None and (mismatch := first_spec_mismatch(specs, checksums)):
        raise CheckpointCorruptedError(f"{stored.items}: {mismatch}")
    return tree, specs


def read_arrays(
    stored: StoredCheckpoint, structure: Any, items: list[Any], arguments: list[Any], **limits: Any
) -> list[Any]:
    """Reads arrays, except for placeholders; returns all leaves."""
    import orbax.checkpoint as ocp

    request = ocp.args.PyTreeRestore(
        item=structure.unflatten(items),
        restore_args=structure.unflatten(arguments),
        partial_restore=True,
    )

    def read() -> Any:
        handler = ocp.PyTreeCheckpointHandler(**limits)
        with translate_errors(), ocp.Checkpointer(handler) as checkpointer:
            # Restores are asynchronous; an error must surface here.
            return jax.block_until_ready(checkpointer.restore(stored.items, args=request))

    return jax.tree.leaves(retry(read))


def _groups(names: list[str], leaves: list[Any], dtypes: Mapping[str, np.dtype]) -> list[set[int]]:
    """Returns index groups: uncast arrays, then casts of bounded size."""
    groups = [{i for i, name in enumerate(names) if name not in dtypes}]
    room = 0
    for i, name in enumerate(names):
        if name in dtypes:
            size = math.prod(leaves[i].shape) * dtypes[name].itemsize
            if size > room:
                groups.append(set())
                room = _CAST_BYTES
            groups[-1].add(i)
            room -= size
    return [group for group in groups if group]


def _single_replica_refused(shardings: Sequence[Any]) -> str | None:
    """Returns why one replica cannot read for all, or None."""
    if any(_REPLICA_AXIS in jax.tree.leaves(tuple(sharding.spec)) for sharding in shardings):
        return f"arrays are split over the mesh axis {_REPLICA_AXIS}"
    mesh = shardings[0].mesh
    axis = mesh.axis_names.index(_REPLICA_AXIS)
    replicas = dict[int, set[int]]()
    for place, device in np.ndenumerate(mesh.devices):
        replicas.setdefault(device.process_index, set()).add(place[axis])
    if any(len(of_process) > 1 for of_process in replicas.values()):
        return f"processes have devices at several places of the mesh axis {_REPLICA_AXIS}"
    return "there is one replica" if mesh.shape[_REPLICA_AXIS] == 1 else None


def _single_replica_handlers(mesh: jax.sharding.Mesh) -> Any:
    import orbax.checkpoint as ocp

    axis = mesh.axis_names.index(_REPLICA_AXIS)
    placeholder = type(ocp.PLACEHOLDER)
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=axis)),
        (placeholder, ocp.type_handlers.get_type_handler(placeholder)),
    )


def _unstack(wanted: Any, plan: LayerPlan) -> Any:
    """Returns the tree to request from an unstacked checkpoint."""

    def one(tree: Any) -> Any:
        if not _has_cycle(tree):
            return tree
        layers = dict(tree["layers"])
        for run, stacked in layers.pop(_CYCLE).items():
            layer = jax.tree.map(_one_layer, stacked)
            layers |= {str(index): layer for index in plan.layers_of(int(run))}
        return {**tree, "layers": layers}

    return jax.tree.map(one, wanted, is_leaf=_has_cycle)


def _stack(arrays: Any, wanted: Any, plan: LayerPlan) -> Any:
    """Stacks arrays restored with `_unstack` into the tree of `wanted`."""

    def one(layout: Any, tree: Any) -> Any:
        if not _has_cycle(layout):
            return tree
        layers = dict(tree["layers"])
        cycle = {}
        for run, stacked in layout["layers"][_CYCLE].items():
            rows = [layers.pop(str(index)) for index in plan.layers_of(int(run))]
            cycle[run] = jax.tree.map(_stacked, stacked, *rows)
        return {**tree, "layers": layers | {_CYCLE: cycle}}

    return jax.tree.map(one, wanted, arrays, is_leaf=_has_cycle)


def _has_cycle(tree: Any) -> bool:
    layers = tree.get("layers") if isinstance(tree, dict) else None
    return isinstance(layers, dict) and _CYCLE in layers


def _one_layer(leaf: Any) -> Any:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _stacked(wanted: Any, *rows: Any) -> Any:
    return jax.jit(jnp.stack, out_shardings=wanted.sharding)(rows)


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


def _filter_unraisable(is_expected: Callable[[Any], bool]) -> Any:
    """Hides uncatchable errors; returns the previous sys.unraisablehook."""
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not is_expected(unraisable):
            previous(unraisable)

    sys.unraisablehook = hook
    return previous


def retry(read: Callable[[], _T]) -> _T:
    """Retries `read` while storage fails; raises at once if access is denied."""
    for seconds in _RETRY_SECONDS:
        try:
            return read()
        except ObjectStoreError as error:
            if error.errno != errno.EIO:
                raise
        time.sleep(seconds)
    return read()


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
