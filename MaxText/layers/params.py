"""Declaration of weights: shape, logical axes and initializer.

`param` declares one. Logical axes are metadata of the nnx.Param under our own key, so that building
needs no mesh. `initializers` makes the initializers of a `weight_init` scheme, by the role of a
weight; a part finds them in `Init.initializers`. They know their standard deviation
(`RandomInitializer`), from which other parametrizations derive that of a wider model
(assembly/parametrization.py).
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.layer_sections import Dimensions
from MaxText.config.model_sections import InitConfig

Shape = tuple[int, ...]
Params = dict[str, Any]  # parameters by name: a nested dict whose leaves are arrays
# From a weight and its statistic of a step (part_scalars.py), both of the weight's shape with any
# further leading dimensions, to what the step adds to it. Has to be hashable.
UpdateRule = Callable[[jax.Array, jax.Array], jax.Array]
# Draws a weight from (key, shape, number of leading dimensions that are inputs, dtype).
Initializer = Callable[[jax.Array, Shape, int, jnp.dtype], jax.Array]


@dataclasses.dataclass(frozen=True)
class RandomInitializer:
    """An initializer that draws random numbers of a known standard deviation.

    Attributes:
      draw: The initializer.
      std: (fan in, fan out) -> the standard deviation of what it draws.
    """

    draw: Initializer
    std: Callable[[int, int], float]

    def __call__(
        self, key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        """Draws a weight; an Initializer."""
        return self.draw(key, shape, num_input_dims, dtype)


@dataclasses.dataclass(frozen=True)
class ConstantInitializer:
    """An initializer with one value, or an array that broadcasts to the shape."""

    value: float | np.ndarray | jax.Array

    def __call__(
        self, key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        """Returns the value in a weight's shape; an Initializer."""
        return jnp.broadcast_to(jnp.asarray(self.value, dtype), shape)


class AbstractRngs(nnx.Rngs):
    """Draws only shapes, in a tenth of the time of jax.eval_shape."""


def stream(rngs: nnx.Rngs, name: str) -> nnx.Rngs:
    """Returns RNG streams for a part, whose draws do not depend on those of other parts.

    Models that differ in one part start with the same weights elsewhere, so that their runs of one
    seed can be paired. Otherwise one more weight would change all weights that are drawn later.

    Args:
      rngs: Of the module that the part belongs to. They are not advanced.
      name: Of the part, different from those of the module's other parts.
    """
    if isinstance(rngs, AbstractRngs):
        return rngs
    key = rngs.params.key[...]
    return nnx.Rngs(params=jax.random.fold_in(key, zlib.crc32(name.encode())))


def param(
    rngs: nnx.Rngs,
    shape: Shape,
    logical_axes: tuple[str | None, ...],
    initializer: Initializer,
    *,
    dtype: jnp.dtype,
    num_input_dims: int = 0,
    used_in: jnp.dtype | None = None,
    update_rule: UpdateRule | None = None,
) -> nnx.Param:
    """Declares a weight.

    Args:
      rngs: RNG streams that it is drawn from. With AbstractRngs it has a shape and no value.
      shape: Its shape; [inputs..., outputs...] of a matrix.
      logical_axes: Logical axis of each dimension, which logical_axis_rules map to the mesh; None
        is never sharded.
      initializer: Draws it.
      dtype: Its dtype, usually `Init.weight_dtype`.
      num_input_dims: Input dimensions of a matrix; 0 for other weights.
      used_in: dtype that it is always cast to, so that generation casts it once; None if it varies.
      update_rule: Updates it in place of the optimizer, from the `Statistic` that its part returns.
        It is no part of norms and has no weight decay. None trains it.
    """
    assert len(shape) == len(logical_axes), (shape, logical_axes)
    if isinstance(rngs, AbstractRngs):
        value = jax.ShapeDtypeStruct(shape, dtype)
    elif _is_constant(initializer):
        # A gain or a bias advances no stream: with or without it, the other weights are the same.
        value = initializer(jax.random.key(0), shape, num_input_dims, dtype)
    else:
        value = initializer(rngs.params(), shape, num_input_dims, dtype)
    return nnx.Param(
        value,
        logical_axes=logical_axes,
        num_input_dims=num_input_dims,
        used_in=used_in,
        update_rule=update_rule,
        init_std=_std_of(initializer, shape, logical_axes, num_input_dims),
        is_readout=num_input_dims > 0 and "vocab" in logical_axes[num_input_dims:],
    )


def as_readout(parameter: nnx.Param) -> nnx.Param:
    """Marks a matrix from the width of the model to a fixed number of logits; returns it.

    Such as those of a router; a matrix to `vocab` is one in any case. The parametrizations mup,
    completep and hyperp draw readouts with a smaller standard deviation.
    """
    parameter.set_metadata(is_readout=True)
    return parameter


def _is_constant(initializer: Initializer) -> bool:
    return initializer is zeros or isinstance(initializer, ConstantInitializer)


def _std_of(
    initializer: Initializer,
    shape: Shape,
    logical_axes: tuple[str | None, ...],
    num_input_dims: int,
) -> float | None:
    """Returns the standard deviation that a weight is drawn with: 0 if not randomly.

    None if the initializer does not know it.
    """
    if _is_constant(initializer):
        return 0.0
    if not isinstance(initializer, RandomInitializer):
        return None
    num_experts_dims = logical_axes.count("exp")  # each expert's matrix is drawn on its own
    return initializer.std(*_fans(shape[num_experts_dims:], num_input_dims))


def zeros(key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype) -> jax.Array:
    """Returns zeros; an Initializer."""
    return jnp.zeros(shape, dtype)


def constant(value: float | np.ndarray | jax.Array) -> Initializer:
    """Returns an initializer with one value, or an array that broadcasts to the shape."""
    return ConstantInitializer(value)


def _fans(shape: Shape, num_input_dims: int) -> tuple[int, int]:
    """Returns the sizes of inputs and outputs of a matrix."""
    return math.prod(shape[:num_input_dims]), math.prod(shape[num_input_dims:])


def normal(std: float | Callable[[int, int], float]) -> RandomInitializer:
    """Draws from a normal distribution; `std` may depend on (fan in, fan out)."""
    std_of_fans = std if callable(std) else lambda *fans: std

    def initialize(
        key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        scale = std_of_fans(*_fans(shape, num_input_dims))
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return RandomInitializer(initialize, std_of_fans)


def _std_fan_in(fan_in: int, fan_out: int) -> float:
    """Returns 1 / sqrt(fan in)."""
    return 1.0 / math.sqrt(fan_in)


def _std_xavier(fan_in: int, fan_out: int) -> float:
    """Returns sqrt(2 / (fan in + fan out)): Glorot and Bengio 2010, equation 16."""
    return math.sqrt(2.0 / (fan_in + fan_out))


normal_fan_in = normal(_std_fan_in)
_xavier_normal = normal(_std_xavier)


def _draw_xavier_uniform(
    key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
) -> jax.Array:
    """Draws from a uniform distribution with the variance of `_xavier_normal`."""
    bound = math.sqrt(3 * (2.0 / sum(_fans(shape, num_input_dims))))
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


_xavier_uniform = RandomInitializer(_draw_xavier_uniform, _std_xavier)


def _draw_truncated_fan_in(
    key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
) -> jax.Array:
    """Draws from a normal distribution truncated at 2 sigma, of variance 1 / fan in."""
    fan_in, _ = _fans(shape, num_input_dims)
    # The divisor is the standard deviation of a unit normal truncated at 2 sigma.
    std = 1.0 / math.sqrt(fan_in) / 0.87962566103423978
    return (std * jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)).astype(dtype)


_truncated_fan_in = RandomInitializer(_draw_truncated_fan_in, _std_fan_in)


def orthogonal(scale: float) -> RandomInitializer:
    """Draws orthonormal rows or columns, times `scale` (Saxe et al. 2014)."""

    def initialize(
        key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        matrix = jax.nn.initializers.orthogonal(scale)(
            key, _fans(shape, num_input_dims), jnp.float32
        )
        return matrix.reshape(shape).astype(dtype)

    return RandomInitializer(
        initialize, lambda fan_in, fan_out: scale / math.sqrt(max(fan_in, fan_out))
    )


def _times(factor: Callable[[int], float], initializer: RandomInitializer) -> RandomInitializer:
    """Multiplies what an initializer draws by a factor that depends on the fan in."""

    def initialize(
        key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        fan_in, _ = _fans(shape, num_input_dims)
        return factor(fan_in) * initializer(key, shape, num_input_dims, dtype)

    return RandomInitializer(
        initialize, lambda fan_in, fan_out: factor(fan_in) * initializer.std(fan_in, fan_out)
    )


def for_each_expert(initializer: Initializer) -> Initializer:
    """Returns an initializer that draws each expert's matrix with a key of its own.

    Of weights [experts, inputs..., outputs...].
    """

    def initialize(
        key: jax.Array, shape: Shape, num_input_dims: int, dtype: jnp.dtype
    ) -> jax.Array:
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: initializer(key, shape[1:], num_input_dims, dtype))(keys)

    if isinstance(initializer, RandomInitializer):
        return RandomInitializer(initialize, initializer.std)
    return initialize


class Initializers(NamedTuple):
    """Initializers by the role of a weight."""

    kernel: Initializer  # into a part: feed-forward in, head
    output: Initializer  # out of a part, back to the residual stream
    query: Initializer
    key_value: Initializer
    attention_output: Initializer
    embedding: Initializer  # token table
    position: Initializer  # position tables
    attention_slots: tuple[Initializer, Initializer]  # learned keys and values
    persistent_kv: Initializer  # learned keys and values


def initializers(config: InitConfig, dimensions: Dimensions) -> Initializers:
    """Returns the initializers of a `weight_init` scheme.

    gpt2: Radford et al. 2019, section 2.3 (outputs scaled by 1/sqrt of the number of residual
    additions). neox: GPT-NeoX-20B, section 2.1.3 (small init of Nguyen and Salazar 2019, outputs of
    Wang and Komatsuzaki 2021). tokenformer, wang: that paper's JAX program, which does not truncate
    attention slots, and its PyTorch program; elsewhere key slots are drawn as kernels and value
    slots as outputs. gpt_neo: GPT-Neo's code, with the scale of attention in the queries.

    Args:
      config: The scheme, and deviations from it.
      dimensions: Sizes of the model.
    """
    kind = config.weight_init
    depth = dimensions.num_layers
    width = dimensions.emb_dim
    table = math.sqrt(2 / (5 * width)) if kind == "neox" else config.init_std
    kernel = output = normal(table)
    if kind == "gpt2":
        output = normal(table / math.sqrt(2 * depth))
    elif kind in ("neox", "wang"):
        output = normal(2 / (depth * math.sqrt(width)))
    elif kind in ("fan_in", "tokenformer"):
        kernel = _truncated_fan_in
        output = _truncated_fan_in
        table = 1.0
    elif kind.startswith("xavier"):
        kernel = output = _xavier_uniform if kind == "xavier_uniform" else _xavier_normal
        table = 1.0
    if config.embedding_init_std is not None:
        table = config.embedding_init_std
    if config.init_scale_by.fan_in:
        kernel = _times(lambda fan_in: fan_in**-0.5, kernel)
        output = _times(lambda fan_in: fan_in**-0.5, output)
    if config.init_scale_by.depth:
        output = _times(lambda _: depth**-0.5, output)
    query = key_value = kernel
    attention_output = output
    position = normal(table)
    if kind == "gpt_neo":
        query = normal((width * dimensions.head_dim) ** -0.5)
        key_value = normal(width**-0.5)
        attention_output = normal((dimensions.num_query_heads * dimensions.head_dim) ** -0.5)
        position = normal(0.01)
    attention_slots = kernel, output
    if kind == "tokenformer":
        attention_slots = normal_fan_in, normal_fan_in
    return Initializers(
        kernel=kernel,
        output=output,
        query=query,
        key_value=key_value,
        attention_output=attention_output,
        embedding=normal(table),
        position=position,
        attention_slots=attention_slots,
        persistent_kv=normal(dimensions.head_dim**-0.5),
    )


@dataclasses.dataclass(frozen=True)
class Init:
    """Sizes, initializers and dtypes to build a part with."""

    dimensions: Dimensions
    initializers: Initializers
    dtype: jnp.dtype  # activations
    weight_dtype: jnp.dtype  # parameters
    precision: str | None  # of matmuls, a name of jax.lax.Precision
    zero_centered_norms: bool  # whether norms store their scale as its difference from 1
