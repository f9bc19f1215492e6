"""Places grown arrays on devices, one at a time."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.tree_util import KeyPath

from MaxText.checkpointing.compatibility import (
    ArraySpec,
    array_specs,
    leaf_path,
    mismatches,
)
from MaxText.errors import UserError
from MaxText.growth.growth_plan import Index, ParamGrowth, grow_shard
from MaxText.growth.resolve import PendingGrowth
from MaxText.layers.params import Params
from MaxText.training.optimizer import BASE_TRANSFORM
from MaxText.value_types import PyTree

_SECOND_MOMENT = "nu"  # optax's name, in Adam and in Muon's Adam
_OPT_STATE = "opt_state/"


def grow_params(growth: PendingGrowth, abstract_params: PyTree, fresh_params: Params) -> Params:
    """Returns the parameters of the larger model.

    Args:
      abstract_params: Those parameters, with the shardings of the result.
      fresh_params: Drawn for the larger model with these shardings. Deleted array by array, so that
        the devices never hold both.
    """
    fresh_by_name: dict[str, Any] = dict(traverse_util.flatten_dict(fresh_params, sep="/"))
    for name, leaf in growth.plan.leaves.items():
        if not leaf.takes_fresh(growth.mode):
            fresh_by_name.pop(name).delete()

    def grow_param(tree_path: KeyPath, abstract_param: jax.ShapeDtypeStruct) -> jax.Array:
        name = leaf_path(tree_path)
        fresh = fresh_by_name.pop(name, None)
        if name not in growth.plan.leaves:  # of an objective that the source does not have
            return fresh
        stored = growth.source.read(name)
        array = _grow_array(growth.plan.leaves[name], stored, abstract_param, fresh)
        if fresh is not None:
            fresh.delete()
        return array

    return jax.tree_util.tree_map_with_path(grow_param, abstract_params)


def grow_opt_state(
    growth: PendingGrowth, abstract_opt_state: PyTree, fresh_opt_state: PyTree
) -> PyTree:
    """Returns a fresh optimizer state with the smaller model's moments.

    First moments of new slots are zero. Their second moments are zero with growth.opt_state=reused;
    with warmed each is the mean over the old slots of its array, so that a new slot's first updates
    are as large as an old one's. Counts are kept, or Adam would correct a missing bias.
    The schedule restarts.

    Args:
      abstract_opt_state: The optimizer state of the larger model, with the shardings of the result.
      fresh_opt_state: A fresh one; deleted array by array.

    Raises:
      UserError: If the source has no such state.
    """
    leaves = _moment_leaves(growth, array_specs(abstract_opt_state))

    def grow_moment(
        tree_path: KeyPath, abstract_moment: jax.ShapeDtypeStruct, fresh: jax.Array
    ) -> jax.Array:
        name = leaf_path(tree_path)
        if name not in leaves:
            return fresh
        assert growth.source.read_state is not None  # `leaves` are of its arrays
        stored = growth.source.read_state(_OPT_STATE + name)
        means = None
        if growth.opt_state == "warmed" and _SECOND_MOMENT in name.split("/"):
            means = _mean_over_slots(leaves[name], stored)
        fresh.delete()
        return _grow_array(leaves[name], stored, abstract_moment, means)

    return jax.tree_util.tree_map_with_path(grow_moment, abstract_opt_state, fresh_opt_state)


def _moment_leaves(
    growth: PendingGrowth, opt_state_specs: Mapping[str, ArraySpec]
) -> dict[str, ParamGrowth]:
    """Returns how each array of the optimizer state grows, by its path.

    A moment has the path of its parameter at the end of its own ("1/0/mu/layers/mlp/wi") and grows
    like it. Arrays of other shapes, such as counts, are copied.

    Raises:
      UserError: If the source does not hold the state of this optimizer.
    """
    stored_specs = growth.source.state_specs
    leaves = {}
    expected = {}
    for name, new_spec in opt_state_specs.items():
        if name.split("/")[0] != str(BASE_TRANSFORM):
            continue  # the schedule's step
        leaf = _parameter_of(name, growth.plan.leaves)
        if leaf is None or leaf.new_spec.shape != new_spec.shape:
            leaf = ParamGrowth(
                old_spec=new_spec, new_spec=new_spec, slots=None, layers=None, role=None
            )
        path = _OPT_STATE + name
        expected[path] = new_spec._replace(shape=leaf.old_spec.shape)
        leaves[name] = leaf._replace(old_spec=stored_specs.get(path, new_spec), new_spec=new_spec)
    present = {path: stored_specs[path] for path in expected if path in stored_specs}
    problems = mismatches(present, expected)
    if problems:
        raise UserError(
            f"growth.opt_state={growth.opt_state}: {growth.source.folder} does not hold the state "
            "of this optimizer:\n" + "\n".join(f"  {problem}" for problem in problems) + "\n"
            "  Name a checkpoint of a run with the same opt_type, or set growth.opt_state=zeroed."
        )
    return leaves


def _parameter_of(name: str, leaves: Mapping[str, ParamGrowth]) -> ParamGrowth | None:
    """Returns the growth of the parameter whose name ends that of an array; None without one."""
    parts = name.split("/")
    for start in range(len(parts)):
        leaf = leaves.get("/".join(parts[start:]))
        if leaf is not None:
            return leaf
    return None


def _mean_over_slots(leaf: ParamGrowth, stored: np.ndarray) -> np.ndarray | None:
    """Returns the mean over stored slots for every slot of the new array; None if none is new."""
    if leaf.slots is None or leaf.slots.new_size <= leaf.slots.old_size:
        return None
    axis = leaf.slots.axis
    means = stored.mean(axis, dtype=np.float32, keepdims=True)
    new_shape = leaf.new_spec.shape
    one_slot_shape = tuple(1 if i == axis else size for i, size in enumerate(new_shape))
    one_slot_leaf = leaf._replace(
        old_spec=ArraySpec(means.shape, means.dtype),
        new_spec=leaf.new_spec._replace(shape=one_slot_shape),
        slots=None,
    )
    return np.broadcast_to(grow_shard(one_slot_leaf, means), new_shape)


def _grow_array(
    leaf: ParamGrowth,
    stored: np.ndarray,
    abstract_array: jax.ShapeDtypeStruct,
    fresh: jax.Array | np.ndarray | None,
) -> jax.Array:
    """Returns one grown array on its devices, once it is complete: its inputs may be deleted.

    Args:
      stored: The whole stored array.
      abstract_array: Shape and sharding of the result.
      fresh: Values of new slots, of the result's shape; None for zeros.
    """
    sharding = abstract_array.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shard_at(index: Index | None) -> np.ndarray:
        assert index is not None  # jax passes one for each device
        fresh_shard: jax.typing.ArrayLike = 0.0
        if isinstance(fresh, jax.Array):
            fresh_shard = next(
                shard.data for shard in fresh.addressable_shards if shard.index == index
            )
        elif fresh is not None:
            fresh_shard = fresh[index]
        return grow_shard(leaf, stored, index, np.asarray(fresh_shard))

    return jax.block_until_ready(
        jax.make_array_from_callback(abstract_array.shape, sharding, shard_at)
    )
