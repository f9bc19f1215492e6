"""Places grown arrays on devices, one at a time."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from MaxText.checkpointing.compatibility import ArraySpec, array_specs, leaf_path, mismatches
from MaxText.errors import UserError
from MaxText.growth.growth_plan import Index, ParamGrowth, grow_shard
from MaxText.growth.resolve import PendingGrowth
from MaxText.training.optimizer import BASE_TRANSFORM

_SECOND_MOMENT = "nu"  # optax's name, in Adam and in Muon's Adam
_OPT_STATE = "opt_state/"


def grow_params(growth: PendingGrowth, abstract_params: Any, fresh_params: Any) -> Any:
    """Returns the parameters of the larger model, sharded as abstract ones.

    `fresh_params` are drawn for the larger model with these shardings, and deleted array by array.
    """
    fresh: dict[str, Any] = dict(traverse_util.flatten_dict(fresh_params, sep="/"))
    for name, leaf in growth.plan.leaves.items():
        if not leaf.takes_fresh(growth.mode):
            fresh.pop(name).delete()

    def place(path: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        name = leaf_path(path)
        drawn = fresh.pop(name, None)
        stored = growth.source.read(name)
        array = _placed(growth.plan.leaves[name], stored, wanted, drawn)
        if drawn is not None:
            drawn.delete()
        return array

    return jax.tree_util.tree_map_with_path(place, abstract_params)


def grow_opt_state(growth: PendingGrowth, abstract_opt_state: Any, fresh_opt_state: Any) -> Any:
    """Returns a fresh optimizer state with the smaller model's moments.

    First moments of new slots are zero. Their second moments are zero with growth.opt_state=reused;
    with warmed each is the mean over the old slots of its array, so that a new slot's first updates
    are as large as an old one's. Counts are kept, or Adam would correct a missing bias.
    The schedule restarts. `fresh_opt_state` is deleted array by array. Raises UserError if the
    source has no such state.
    """
    plans = _moment_plans(growth, array_specs(abstract_opt_state))

    def place(path: Any, wanted: jax.ShapeDtypeStruct, fresh: jax.Array) -> jax.Array:
        name = leaf_path(path)
        if name not in plans:
            return fresh
        assert growth.source.read_other is not None  # its arrays are among the plans
        stored = growth.source.read_other(_OPT_STATE + name)
        means = None
        if growth.opt_state == "warmed" and _SECOND_MOMENT in name.split("/"):
            means = _mean_over_slots(plans[name], stored)
        fresh.delete()
        return _placed(plans[name], stored, wanted, means)

    return jax.tree_util.tree_map_with_path(place, abstract_opt_state, fresh_opt_state)


def _moment_plans(growth: PendingGrowth, wanted: Mapping[str, ArraySpec]) -> dict[str, ParamGrowth]:
    others = growth.source.others
    plans = {}
    expected = {}
    for name, new in wanted.items():
        if name.split("/")[0] != str(BASE_TRANSFORM):
            continue  # the schedule's step
        parts = name.split("/")
        leaves = growth.plan.leaves
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        parameter = next((leaves[end] for end in ends if end in leaves), None)
        if parameter is None or parameter.new.shape != new.shape:
            parameter = ParamGrowth(new, new, None, None, None)
        path = _OPT_STATE + name
        expected[path] = new._replace(shape=parameter.old.shape)
        plans[name] = parameter._replace(old=others.get(path, new), new=new)
    problems = mismatches({path: others[path] for path in expected if path in others}, expected)
    if problems:
        raise UserError(
            f"growth.opt_state={growth.opt_state}: {growth.source.folder} does not hold the state "
            "of this optimizer:\n" + "\n".join(f"  {problem}" for problem in problems) + "\n"
            "  Name a checkpoint of a run with the same opt_type, or set growth.opt_state=zeroed."
        )
    return plans


def _mean_over_slots(leaf: ParamGrowth, stored: np.ndarray) -> np.ndarray | None:
    """Returns the mean over stored slots for every new slot, if any."""
    if leaf.slots is None or leaf.slots.new <= leaf.slots.old:
        return None
    axis = leaf.slots.axis
    means = stored.mean(axis, dtype=np.float32, keepdims=True)
    one_slot = tuple(1 if i == axis else size for i, size in enumerate(leaf.new.shape))
    same = leaf._replace(
        old=ArraySpec(means.shape, means.dtype), new=leaf.new._replace(shape=one_slot), slots=None
    )
    return np.broadcast_to(grow_shard(same, means), leaf.new.shape)


def _placed(
    leaf: ParamGrowth,
    stored: np.ndarray,
    wanted: jax.ShapeDtypeStruct,
    drawn: jax.Array | np.ndarray | None,
) -> jax.Array:
    """Returns one grown array when complete: its inputs may be deleted."""
    sharding = wanted.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def part(index: Index | None) -> np.ndarray:
        assert index is not None  # jax passes one for each device
        fresh: Any = 0.0
        if isinstance(drawn, jax.Array):
            fresh = next(one.data for one in drawn.addressable_shards if one.index == index)
        elif drawn is not None:
            fresh = drawn[index]
        return grow_shard(leaf, stored, index, np.asarray(fresh))

    return jax.block_until_ready(jax.make_array_from_callback(wanted.shape, sharding, part))
