"""Trees like the parameters, made from their names."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import traverse_util
from jax.tree_util import KeyPath

from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.value_types import PyTree

ParamSpecs = Mapping[str, ParamSpec]


def map_param_names(parameters: ParamSpecs, value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Returns a nested dict like the parameters, with `value_of(name)` as leaves."""
    return traverse_util.unflatten_dict({name: value_of(name) for name in parameters}, sep="/")


def map_with_names(function: Callable[..., PyTree], tree: PyTree, *others: PyTree) -> PyTree:
    """Returns a tree like `tree` with `function(name, leaf, *leaves of others)` as leaves.

    Args:
      function: Its first argument is the name of a parameter.
      tree: Nested dicts with parameters' names. Leaves that optax.partition masks are left out.
      *others: Trees of the same structure.
    """

    def call(path: KeyPath, *leaves: PyTree) -> PyTree:
        return function(jax.tree_util.keystr(path, simple=True, separator="/"), *leaves)

    return jax.tree_util.tree_map_with_path(call, tree, *others)
