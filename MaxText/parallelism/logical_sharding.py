"""Sharding of activations by logical axis names.

Parts name the axes of activations; the current rules map these to mesh axes. Without a mesh (tests,
conversion, one device) the names have no effect.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from MaxText.errors import UserError
from MaxText.value_types import Device

Rules = Sequence[tuple[str, Sequence[str]]]
# Logical axes of hidden states [B, T, D] between branches: the residual stream, and norms. Their
# tokens are split over the tensor axis, too.
HIDDEN = ("activation_batch", "activation_norm_length", "activation_embed")
# Logical axes of the inputs [B, T, D] of mixers and feed-forwards, whose weights are split over the
# tensor axis. A constraint from HIDDEN to these gathers tokens.
BRANCH_INPUT = ("activation_batch", "activation_length", "activation_embed")


OBJECTIVE_LAYERS = "layers of the objective"  # owner of weights of an objective's own layers


class ParamSpec(NamedTuple):
    """Metadata of a parameter of the abstract model."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    logical_axes: tuple[str | None, ...]
    num_input_dims: int  # leading dimensions contracted with the input, after `layers` and `exp`
    used_in: jnp.dtype | None = None  # dtype that it is always read in; None if that may differ
    # Attribute of the decoder: "layers", "connections", "head", ...; or OBJECTIVE_LAYERS.
    owner: str = "layers"
    row: str = ""  # of the FLOPs table (layers/part.py)
    is_recomputed: bool = True  # whether remat of its owner recomputes its product
    # Updates it in place of the optimizer (params.UpdateRule); None if the optimizer trains it.
    update_rule: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    # Standard deviation that it is drawn with: 0 if not randomly, None if unknown.
    init_std: float | None = None
    is_readout: bool = False  # whether it maps the width of the model to a fixed number of logits
    # Of a parametrization other than standard (layers/assembly/parametrization.py).
    weight_class: str = ""  # table, vector, hidden or readout; empty in standard form
    r_in: float = 1.0  # product of input dimensions over that at base_shape
    r_out: float = 1.0  # the same of all other dimensions but `layers` and `exp`
    branch_factor: float = 1.0  # multiplier of the residual branch with the weight, (L / L_base)^-a
    branch_rate: float = 1.0  # factor of learning rates in that branch, (L / L_base)^(a - 1)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_stacked_dims(self) -> int:
        """Number of leading dimensions that count separate arrays: layers and experts."""
        return sum(name in ("layers", "exp") for name in self.logical_axes)

    @property
    def input_dims(self) -> tuple[int, ...]:
        """Sizes that are contracted with the input; none for other weights than matrices."""
        return self.shape[self.num_stacked_dims :][: self.num_input_dims]

    @property
    def output_dims(self) -> tuple[int, ...]:
        """All other sizes, without layers and experts."""
        return self.shape[self.num_stacked_dims + self.num_input_dims :]


_current: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar(
    "axis_rules", default=None
)


@contextlib.contextmanager
def axis_rules(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Sets the mesh and rules for code traced in this context."""
    token = _current.set((mesh, rules))
    try:
        yield
    finally:
        _current.reset(token)


def logical_to_mesh_axes(
    names: Sequence[str | None], shape: Sequence[int], rules: Rules, mesh: Mesh
) -> PartitionSpec:
    """Returns the mesh axes of each dimension of an array by `names`.

    Rules apply in order: each gives its mesh axes to the first dimension of its name that has none
    yet, unless another dimension has one of them or they do not divide this one. A dimension that
    no rule fits is replicated. Axes of `embed` move to `mlp` or `slots` if its shards do not fill
    tiles.

    Args:
      names: Logical axis of each dimension; None is replicated.
      shape: Size of each dimension.
      rules: Pairs (logical axis, mesh axes), logical_axis_rules.
      mesh: The mesh; its axes of size 1 are left out of the result.

    Raises:
      UserError: No rule names a logical axis.
    """
    if unknown := {name for name in names if name is not None} - {name for name, _ in rules}:
        name = min(unknown)
        raise UserError(
            f"logical axis {name!r} has no entry in logical_axis_rules\n"
            f"  What to do: add [{name}, []] to it to replicate that dimension, or keep the base "
            "rules with override_logical_axis_rules=false"
        )
    spec: list[tuple[str, ...] | None] = [None] * len(names)
    undecided = [dim for dim, name in enumerate(names) if name is not None]
    taken: set[str] = set()
    for rule_name, rule_axes in rules:
        axes = tuple(axis for axis in rule_axes if mesh.shape[axis] > 1)
        dim = next((dim for dim in undecided if names[dim] == rule_name), None)
        if dim is None or taken.intersection(axes):
            continue
        if shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            undecided.remove(dim)
            spec[dim] = axes or None
            taken.update(axes)
    _avoid_thin_shards(spec, names, shape, mesh)
    return PartitionSpec(*spec)


def _avoid_thin_shards(
    spec: list[tuple[str, ...] | None],
    names: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh,
) -> None:
    """Moves the axes of `embed` to the hidden width for fuller tiles.

    A TPU tile has 8 rows. Compiled for v5e-256, shards of 20 rows along the last dimension are
    copied once gathered, which takes a third of the estimated time of an MLP of 5120 x 20480.
    """
    embed = names.index("embed") if "embed" in names else None
    hidden = next((dim for dim, name in enumerate(names) if name in ("mlp", "slots")), None)
    if embed is None or hidden is None or not (moved := spec[embed]):
        return

    def fit(dim: int, axes: Sequence[str]) -> tuple[bool, bool, bool]:
        """Returns whether a dimension divides, fills tiles and is not the last one, to compare."""
        shard, remainder = divmod(shape[dim], math.prod(mesh.shape[axis] for axis in axes))
        return not remainder, shard % 8 == 0, dim < len(shape) - 1

    joined = (*(spec[hidden] or ()), *moved)
    current_fit = fit(embed, moved)
    if not current_fit[1] and fit(hidden, joined) > current_fit:
        spec[embed], spec[hidden] = None, joined


def split_axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """Returns the mesh axes of one dimension, always as a tuple."""
    axes = sharding.spec[dim] if dim < len(sharding.spec) else None
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def axes_of_current_mesh(*names: str) -> tuple[Mesh, list[tuple[str, ...]]] | None:
    """Returns the current mesh, and its axes for each logical name; None on one device."""
    current = _current.get()
    if current is None or current[0].size == 1:
        return None
    mesh, rules = current
    axes_of_names = (next(axes for rule_name, axes in rules if rule_name == name) for name in names)
    return mesh, [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in axes_of_names]


def with_logical_constraint(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains the sharding of an array by the logical names of its dimensions.

    Args:
      x: An activation. It is returned as it is on one device.
      *names: Logical axis of each dimension; None is replicated.
    """
    assert x.ndim == len(names), f"{x.ndim} dimensions, {len(names)} names: {names}"
    sharding = current_sharding(names, x.shape)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def current_sharding(names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding | None:
    """Returns the current sharding for these axes; None on one device."""
    current = _current.get()
    if current is None or current[0].size == 1:
        return None
    mesh, rules = current
    return NamedSharding(mesh, logical_to_mesh_axes(names, shape, rules, mesh))


def current_num_stages() -> int:
    """Returns the number of pipeline stages of the current mesh; 1 without a mesh."""
    current = _current.get()
    return 1 if current is None else current[0].shape["stage"]


def split_batch(x: jax.Array, num_parts: int, *names: str | None) -> jax.Array:
    """Reshapes [B, ...] to [A, B/A, ...] for A `num_parts`, part a taking rows a, a + A, ...

    Each part has rows of every device's share of the batch, so that no row moves.

    Args:
      x: Arrays of B sequences.
      num_parts: A, microbatches.
      *names: Logical axes of the dimensions after the rows, which are unsharded by default.
    """
    x = jnp.moveaxis(x.reshape(x.shape[0] // num_parts, num_parts, *x.shape[1:]), 1, 0)
    return with_logical_constraint(x, None, "activation_batch", *(names or [None] * (x.ndim - 2)))


def merge_batch(x: jax.Array) -> jax.Array:
    """Reshapes [A, B/A, ...] to [B, ...], the inverse of `split_batch`."""
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def has_mesh() -> bool:
    """Returns whether code is traced for a mesh, and not for export or on its own."""
    return _current.get() is not None


def target_device() -> Device:
    """Returns a device of the current mesh, maybe of another machine."""
    current = _current.get()
    return jax.devices()[0] if current is None else current[0].devices.flat[0]


def platform() -> str:
    """Returns the target platform: "cpu", "gpu" or "tpu"."""
    return target_device().platform
