"""Reads older checkpoints with repeated layers stored one by one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from MaxText.config.layer_plan import LayerPlan

_CYCLE = "cycle"


def is_unstacked(stored_params: Mapping[str, Any], wanted_params: Mapping[str, Any]) -> bool:
    """Returns whether only the checkpoint has separate layers."""
    stored, wanted = (tree.get("layers", {}) for tree in (stored_params, wanted_params))
    return _CYCLE in wanted and _CYCLE not in stored and "0" in stored


def unstack(wanted: Any, plan: LayerPlan) -> Any:
    """Returns the tree to request from an unstacked checkpoint."""

    def one(tree: Any) -> Any:
        if not _has_cycle(tree):
            return tree
        layers = tree["layers"]
        found = {name: layer for name, layer in layers.items() if name != _CYCLE}
        for run in range(len(plan.runs)):
            row = jax.tree.map(_row, layers[_CYCLE][str(run)])
            found |= {str(index): row for index in plan.layers_of(run)}
        return {**tree, "layers": found}

    return jax.tree.map(one, wanted, is_leaf=_has_cycle)


def stack(arrays: Any, wanted: Any, plan: LayerPlan) -> Any:
    """Stacks arrays restored with `unstack` into the tree of `wanted`."""

    def one(layout: Any, tree: Any) -> Any:
        if not _has_cycle(layout):
            return tree
        layers, cycle = tree["layers"], layout["layers"][_CYCLE]
        found = {name: layers[name] for name in layout["layers"] if name != _CYCLE}
        found[_CYCLE] = {
            run: jax.tree.map(
                _stacked, cycle[run], *(layers[str(i)] for i in plan.layers_of(int(run)))
            )
            for run in cycle
        }
        return {**tree, "layers": found}

    return jax.tree.map(one, wanted, arrays, is_leaf=_has_cycle)


def _has_cycle(tree: Any) -> bool:
    layers = tree.get("layers") if isinstance(tree, dict) else None
    return isinstance(layers, dict) and _CYCLE in layers


def _row(leaf: Any) -> Any:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _stacked(wanted: Any, *rows: Any) -> Any:
    return jax.jit(lambda rows: jnp.stack(rows), out_shardings=wanted.sharding)(rows)
