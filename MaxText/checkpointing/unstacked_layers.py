"""Reads checkpoints that hold each layer of a repeated cycle by its number.

Earlier versions stored layers that differ in shapes as layers/<number>. Now those of a repeated
cycle are stacked by their position in it, layers/cycle/<position> (layers/stack.py).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

_CYCLE = "cycle"


def is_unstacked(stored_params: Mapping[str, Any], wanted_params: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has one by one what the model wants stacked."""
    stored, wanted = (tree.get("layers", {}) for tree in (stored_params, wanted_params))
    return _CYCLE in wanted and _CYCLE not in stored and "0" in stored


def unstack(wanted: Any) -> Any:
    """The tree to ask such a checkpoint for: of the same arrays, each layer by its number."""
    params = wanted["params"]["layers"]
    repeats = jax.tree.leaves(params[_CYCLE])[0].shape[0]

    def one(tree: Any) -> Any:
        if not _has_cycle(tree):
            return tree
        layers = tree["layers"]
        found = {name: layer for name, layer in layers.items() if name != _CYCLE}
        for index, position in _cycled(layers, repeats):
            found[str(index)] = jax.tree.map(_row, layers[_CYCLE][position])
        return {**tree, "layers": found}

    return jax.tree.map(one, wanted, is_leaf=_has_cycle)


def stack(arrays: Any, wanted: Any) -> Any:
    """Arrays that were read like this, as `wanted` asks for them."""

    def one(layout: Any, tree: Any) -> Any:
        if not _has_cycle(layout):
            return tree
        layers = tree["layers"]
        leaves = jax.tree.leaves(layout["layers"][_CYCLE])
        repeats = leaves[0].shape[0] if leaves else 0
        rows: dict[str, list[Any]] = {position: [] for position in layout["layers"][_CYCLE]}
        for index, position in _cycled(layout["layers"], repeats):
            rows[position].append(layers[str(index)])
        found = {name: layers[name] for name in layout["layers"] if name != _CYCLE}
        found[_CYCLE] = {
            position: jax.tree.map(_stacked, layout["layers"][_CYCLE][position], *rows[position])
            for position in rows
        }
        return {**tree, "layers": found}

    return jax.tree.map(one, wanted, arrays, is_leaf=_has_cycle)


def _has_cycle(tree: Any) -> bool:
    layers = tree.get("layers") if isinstance(tree, dict) else None
    return isinstance(layers, dict) and _CYCLE in layers


def _cycled(layers: Mapping[str, Any], repeats: int) -> list[tuple[int, str]]:
    """(number of the layer, position) of all layers of the cycle."""
    singles = {int(name) for name in layers if name != _CYCLE}
    prefix = next(index for index in range(len(singles) + 1) if index not in singles)
    length = len(layers[_CYCLE])
    return [
        (prefix + repeat * length + position, str(position))
        for repeat in range(repeats)
        for position in range(length)
    ]


def _row(leaf: Any) -> Any:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _stacked(wanted: Any, *rows: Any) -> Any:
    return jax.jit(lambda rows: jnp.stack(rows), out_shardings=wanted.sharding)(rows)
