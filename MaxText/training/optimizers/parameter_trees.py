"""Trees like the parameters, made from their names."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import traverse_util

from MaxText.parallelism.logical_sharding import ParamSpec

ParamSpecs = Mapping[str, ParamSpec]


def map_param_names(parameters: ParamSpecs, value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Returns a nested dict like the parameters, with `value_of(name)` as leaves."""
    return traverse_util.unflatten_dict({name: value_of(name) for name in parameters}, sep="/")
