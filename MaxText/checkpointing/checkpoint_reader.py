"""Restores arrays from a checkpoint and verifies their checksums."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from MaxText.checkpointing.checkpoint_files import CheckpointCorruptedError, StoredCheckpoint
from MaxText.checkpointing.checksums import array_checksums, first_mismatch, first_spec_mismatch
from MaxText.checkpointing.compatibility import (
    Casts,
    ConfigDiff,
    array_specs,
    check_compatible,
    describe_casts,
    leaf_path,
)
from MaxText.checkpointing.orbax_errors import retry, translate_errors
from MaxText.checkpointing.unstacked_layers import is_unstacked, stack, unstack
from MaxText.config.layer_plan import LayerPlan
from MaxText.config.schema import unflatten
from MaxText.config.training_sections import CheckpointStorage
from MaxText.errors import UserError

_GUARD = "guard"
# Fields of the guard's state under the names of earlier versions, read for one release.
_EARLIER_GUARD = {"num_accepted": "num_sound", "last_stable_step": "calm_step"}
_REPLICA_AXIS = "data"  # the mesh axis over which parameters are never split
_DEFAULT_STORAGE = CheckpointStorage()
_CAST_BYTES = 1 << 30  # limit on bytes of arrays held in two dtypes at once during a cast


def as_dict(state: Any) -> dict[str, Any]:
    """Returns a train state (any dataclass) as a dict without None fields."""
    fields = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: value for name, value in fields if value is not None}


def restore_state(
    stored: StoredCheckpoint,
    abstract_state: Any,
    config_flat: Mapping[str, Any],
    log: Callable[[str], None],
    *,
    is_same_run: bool = False,
    storage: CheckpointStorage = _DEFAULT_STORAGE,
) -> Any:
    """Restores a train state onto the shardings of `abstract_state`.

    Uses `abstract_state.guard.reset()` if the checkpoint has no `guard` or one of other shapes.
    Raises UserError if names or shapes differ, CheckpointCorruptedError if files are damaged.
    """
    wanted, tree, fresh = as_dict(abstract_state), _verified_tree(stored), {}
    stored_guard = tree.pop(_GUARD, None)
    guard: Any = wanted.pop(_GUARD, None)
    names: dict[str, str] = {}  # field of the guard -> stored name
    if guard is not None:
        is_earlier = "num_sound" in (stored_guard or ())
        fields = as_dict(guard)
        names = {name: _EARLIER_GUARD.get(name, name) if is_earlier else name for name in fields}
        renamed = {names[name]: leaf for name, leaf in fields.items()}
        if array_specs(stored_guard) == array_specs(renamed):
            tree[_GUARD], wanted[_GUARD] = stored_guard, renamed
        else:
            fresh = {_GUARD: guard.reset()}
    arrays = _restore_matching(stored, tree, wanted, config_flat, log, is_same_run, storage)
    if guard is not None and _GUARD in arrays:
        restored = {name: arrays[_GUARD][stored_name] for name, stored_name in names.items()}
        arrays[_GUARD] = dataclasses.replace(guard, **restored)
    return dataclasses.replace(abstract_state, **arrays, **fresh)


def restore_params(
    stored: StoredCheckpoint,
    abstract_params: Any,
    config_flat: Mapping[str, Any],
    log: Callable[[str], None],
) -> Any:
    """Restores the parameters only. Raises like `restore_state`."""
    wanted = {"params": abstract_params}
    arrays = _restore_matching(stored, _params_of(stored), wanted, config_flat, log)
    return arrays["params"]


def check_params(
    stored: StoredCheckpoint, abstract_params: Any, config_flat: Mapping[str, Any]
) -> None:
    """Raises the mismatch errors of `restore_params` without reading arrays."""
    _plan(stored, _params_of(stored), {"params": abstract_params}, config_flat)


def _params_of(stored: StoredCheckpoint) -> dict[str, Any]:
    tree = _verified_tree(stored)
    return {"params": tree["params"]} if "params" in tree else {}


def _verified_tree(stored: StoredCheckpoint) -> dict[str, Any]:
    """Returns names, shapes and dtypes of all arrays, checked as saved."""
    import orbax.checkpoint as ocp

    def read() -> dict[str, Any]:
        with translate_errors():
            return dict(ocp.PyTreeCheckpointHandler().metadata(stored.items).tree)

    tree, checksums = retry(read), stored.metadata.checksums
    if checksums is not None and (mismatch := first_spec_mismatch(array_specs(tree), checksums)):
        raise CheckpointCorruptedError(f"{stored.items}: {mismatch}")
    return tree


def _plan(
    stored: StoredCheckpoint,
    tree: dict[str, Any],
    wanted: dict[str, Any],
    config_flat: Mapping[str, Any],
    is_same_run: bool = False,
) -> tuple[dict[str, Any], LayerPlan | None, Casts]:
    """Returns the tree to request, the layers to stack or None, and the casts."""
    unstacked = None
    if is_unstacked(tree.get("params", {}), wanted["params"]):
        unstacked = unflatten(dict(config_flat)).model.layer_plan
        wanted = unstack(wanted, unstacked)
    hint = ConfigDiff(stored.metadata.values.get("config"), config_flat, is_same_run)
    try:
        return wanted, unstacked, check_compatible(tree, wanted, hint)
    except UserError as error:
        raise UserError(f"{stored}: {error}") from None


def _restore_matching(
    stored: StoredCheckpoint,
    tree: dict[str, Any],
    wanted: dict[str, Any],
    config_flat: Mapping[str, Any],
    log: Callable[[str], None],
    is_same_run: bool = False,
    storage: CheckpointStorage = _DEFAULT_STORAGE,
) -> dict[str, Any]:
    requested, unstacked, casts = _plan(stored, tree, wanted, config_flat, is_same_run)
    for line in describe_casts(casts):
        log(line)
    if stored.metadata.checksums is None:
        log(f"WARNING: {stored} has no checksums; restored arrays were not verified")
    arrays = _restore_arrays(stored, requested, casts, storage, log)
    return stack(arrays, wanted, unstacked) if unstacked else arrays


def _restore_arrays(
    stored: StoredCheckpoint,
    wanted: dict[str, Any],
    casts: Casts,
    storage: CheckpointStorage,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Reads, verifies and casts arrays, in groups of bounded memory."""
    import orbax.checkpoint as ocp

    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    paths, structure = jax.tree_util.tree_flatten_with_path(wanted)
    names, leaves = [leaf_path(path) for path, _ in paths], [leaf for _, leaf in paths]
    dtypes = {path: old for path, (old, _) in casts.items()}
    checksums = stored.metadata.checksums
    limits: dict[str, Any] = {"restore_concurrent_gb": storage.concurrent_gb}
    restore_args = ocp.ArrayRestoreArgs
    if storage.single_replica_restore:
        shardings = [leaf.sharding for leaf in leaves]
        if refused := _single_replica_refused(shardings):
            log(f"checkpoint_storage.single_replica_restore has no effect: {refused}")
        else:
            restore_args = ocp.type_handlers.SingleReplicaArrayRestoreArgs
            limits["type_handler_registry"] = _single_replica_handlers(shardings[0].mesh)
    arguments = []
    for name, leaf in zip(names, leaves, strict=True):
        dtype, sharding = dtypes.get(name, leaf.dtype), leaf.sharding or first
        arguments.append(restore_args(sharding=sharding, global_shape=leaf.shape, dtype=dtype))
    arrays: list[Any] = [None] * len(leaves)
    for group in _groups(names, leaves, dtypes):
        items = [leaf if i in group else ocp.PLACEHOLDER for i, leaf in enumerate(leaves)]
        restored = jax.tree.leaves(
            _restore(stored, structure.unflatten(items), structure.unflatten(arguments), limits)
        )
        # Orbax broadcasts one replica's arrays as sums, which makes booleans integers.
        read = {
            names[i]: restored[i].astype(bool) if leaves[i].dtype == bool else restored[i]
            for i in sorted(group)
        }
        if checksums is not None and (mismatch := first_mismatch(array_checksums(read), checksums)):
            raise CheckpointCorruptedError(mismatch)
        for i in sorted(group):
            arrays[i] = read[names[i]].astype(leaves[i].dtype)
        del restored, read
    return structure.unflatten(arrays)


def _groups(names: list[str], leaves: list[Any], dtypes: Mapping[str, np.dtype]) -> list[set[int]]:
    """Returns index groups: uncast arrays, then casts of bounded size."""
    groups, room = [{i for i, name in enumerate(names) if name not in dtypes}], 0
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
    axis, replicas = mesh.axis_names.index(_REPLICA_AXIS), dict[int, set[int]]()
    for place, device in np.ndenumerate(mesh.devices):
        replicas.setdefault(device.process_index, set()).add(place[axis])
    if any(len(of_process) > 1 for of_process in replicas.values()):
        return f"processes have devices at several places of the mesh axis {_REPLICA_AXIS}"
    return "there is one replica" if mesh.shape[_REPLICA_AXIS] == 1 else None


def _single_replica_handlers(mesh: jax.sharding.Mesh) -> Any:
    import orbax.checkpoint as ocp

    axis, placeholder = mesh.axis_names.index(_REPLICA_AXIS), type(ocp.PLACEHOLDER)
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=axis)),
        (placeholder, ocp.type_handlers.get_type_handler(placeholder)),
    )


def _restore(
    stored: StoredCheckpoint, items: Any, arguments: Any, options: Mapping[str, Any]
) -> Any:
    import orbax.checkpoint as ocp

    wanted = ocp.args.PyTreeRestore(item=items, restore_args=arguments, partial_restore=True)

    def read() -> Any:
        handler = ocp.PyTreeCheckpointHandler(**options)
        with translate_errors(), ocp.Checkpointer(handler) as checkpointer:
            # Restores are asynchronous; an error must surface here.
            return jax.block_until_ready(checkpointer.restore(stored.items, args=wanted))

    return retry(read)
