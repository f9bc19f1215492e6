"""Names of types that no class describes: trees of arrays, values of JSON and YAML.

Imports no jax, for modules that do without it.
"""

from typing import Any, TypeVar

# Nested dicts, lists, tuples and registered dataclasses, as jax.tree.map takes them. Leaves are
# arrays, or what stands for an array: its shape and dtype, its sharding, its gradient.
PyTree = Any
# The structure of a PyTree, of jax.tree.structure, and a jax.Device. Type checkers take jax's names
# for variables.
TreeDef = Any
Device = Any
# A PyTree of a function that returns the same structure.
Tree = TypeVar("Tree")

# What json.loads returns: None, bool, int, float, str, or lists and dicts of them.
JsonValue = Any
JsonObject = dict[str, Any]
