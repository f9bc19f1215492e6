"""Linear layers over any number of dimensions, and embedding tables."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from MaxText.config.model_sections import ModelConfig
from MaxText.config.registry import register
from MaxText.layers.lowering.matmul import DotDims, cpu_dot, pad_vocab
from MaxText.layers.params import Init, Initializer, Shape, as_readout, param, zeros
from MaxText.parallelism.logical_sharding import platform

Axes = tuple[str | None, ...]


class Dense(nnx.Module):
    """y[..., outputs] = x[..., inputs] kernel (+ bias), over any number of dimensions.

    The kernel is an array [inputs..., outputs...], such as [D, N, H] of a query projection, so that
    heads are a dimension of their own, for sharding.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        inputs: Shape,
        outputs: Shape,
        axes: Axes,
        initializer: Initializer,
        init: Init,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = False,
        used_in: jnp.dtype | None = None,
        readout: bool = False,
    ):
        """Declares the kernel and the bias.

        Args:
          inputs: Sizes of the contracted dimensions, the last ones of x.
          outputs: Sizes of the dimensions that replace them.
          axes: Logical axes of the kernel, inputs first.
          initializer: Of the kernel. The bias starts at 0.
          init: Dtypes and precision.
          rngs: RNG streams that weights are drawn from.
          use_bias: Whether a bias [outputs...] is added.
          used_in: Dtype of the product, which is then never quantized; None is that of activations.
          readout: Whether the outputs are a fixed number of logits (`params.as_readout`).
        """
        self.num_input_dims = len(inputs)
        self.axes = axes
        self.dtype = used_in or init.dtype
        self.precision = init.precision
        self.dot_general = dot_general  # replaced in quantized layers
        self.is_quantizable = used_in is None
        dtype = init.weight_dtype
        self.kernel = param(
            rngs,
            inputs + outputs,
            axes,
            initializer,
            dtype=dtype,
            num_input_dims=len(inputs),
            used_in=self.dtype,
        )
        if readout:
            as_readout(self.kernel)
        self.bias = (
            param(rngs, outputs, axes[len(inputs) :], zeros, dtype=dtype) if use_bias else None
        )

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Returns x kernel + bias, computed in `dtype`, or else in that of the layer."""
        dtype = dtype or self.dtype
        last_dims = tuple(range(x.ndim - self.num_input_dims, x.ndim))
        contracted = (last_dims, tuple(range(self.num_input_dims)))
        # The kernel of a head may be padded on GPU: the crop drops those logits, elsewhere nothing.
        y = self.dot_general(
            x.astype(dtype),
            pad_vocab(self.kernel[...].astype(dtype), self.axes),
            (contracted, ((), ())),
            precision=self.precision,
        )[..., : self.kernel.shape[-1]]
        if self.bias is not None:
            y = y + self.bias[...].astype(dtype)
        return y


class Embedding(nnx.Module):
    """A table of vectors, read by id; for tokens also the tied output head."""

    def __init__(  # noqa: PLR0917
        self,
        num_rows: int,
        row_axis: str,
        init: Init,
        rngs: nnx.Rngs,
        scale: float | None = None,
        used_in: jnp.dtype | None = None,
    ):
        """Declares the table, [rows, D].

        Args:
          num_rows: Number of ids.
          row_axis: Logical axis of the rows: "vocab" or "position". It chooses the initializer.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
          scale: Factor of the embeddings, not of the tied head; None is 1.
          used_in: Widest dtype that the table is read in; None is that of activations.
        """
        D = init.dimensions.emb_dim
        self.dtype = init.dtype
        self.precision = init.precision
        self.scale = scale
        draw = init.initializers
        initial = draw.position if row_axis == "position" else draw.embedding
        self.embedding = param(
            rngs,
            (num_rows, D),
            (row_axis, "embed"),
            initial,
            dtype=init.weight_dtype,
            used_in=used_in or init.dtype,
        )

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        """Returns the vectors of ids, [B, T, D]."""
        rows_BTD = jnp.take(self.embedding[...].astype(self.dtype), ids_BT, axis=0)
        if self.scale is None:
            return rows_BTD
        # The scale is rounded first, as Gemma was trained: sqrt(3072) is 55.5 in bfloat16.
        return rows_BTD * jnp.asarray(self.scale, self.dtype)

    def attend(
        self, x_BTD: jax.Array, dtype: jnp.dtype, rounded: jnp.dtype | None = None
    ) -> jax.Array:
        """Returns logits x table^T, [B, T, V] in `dtype`.

        Args:
          x_BTD: Hidden states.
          dtype: Of the product.
          rounded: Dtype that the table is rounded to first, if any.
        """
        table = self.embedding[...]
        if rounded is not None:
            table = table.astype(rounded)
        table = pad_vocab(table.astype(dtype), ("vocab", "embed"))  # the crop below undoes it
        logits = dot_general(x_BTD.astype(dtype), table, (((2,), (1,)), ((), ())), self.precision)
        return logits[..., : self.embedding.shape[0]]


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a number, computed in float32, in the dtype of x.

    In bfloat16 JAX would round the number first.
    """
    if factor == 1.0:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def dot_general(
    x: jax.Array,
    kernel: jax.Array,
    dims: jax.lax.DotDimensionNumbers,
    precision: str | None = None,
) -> jax.Array:
    """Returns jax.lax.dot_general of the last dimensions of x with a kernel.

        The kernel's contracted dimensions are in order. On CPU the gradient is that of
    `lowering.matmul.cpu_dot`; for precision "highest" see `dot_in_double`.

    Args:
      x: [..., inputs].
      kernel: Inputs and outputs in any order.
      dims: As jax.lax.dot_general's dimension_numbers, without batch dimensions.
      precision: Of the products, a name of jax.lax.Precision or None.
    """
    if is_exact_on_cpu(precision, x, kernel):
        return dot_in_double(x, kernel, dims)
    if platform() != "cpu":
        return jax.lax.dot_general(x, kernel, dims, precision=precision)
    return cpu_dot(dims, precision, x, kernel)


def is_exact_on_cpu(precision: str | None, *operands: jax.Array) -> bool:
    """Returns whether a product is to lose no digits beyond the rounding of its result.

    So it is on CPU with float32 operands and matmul_precision=highest. There the plain mathematical
    forms are computed in place of the fast ones, too.
    """
    is_float32 = all(operand.dtype == jnp.float32 for operand in operands)
    return precision == "highest" and is_float32 and platform() == "cpu"


def dot_in_double(  # noqa: PLR0917
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: jax.sharding.Sharding | None = None,
) -> jax.Array:
    """jax.lax.dot_general of float32 arrays with products added up in float64.

    XLA adds them up in float32 on CPU, which costs more digits than all other operations of a model
    together: in TokenFormers with score norms, hidden states were up to 6 times and gradients
    up to 8 times as far from float64 as with each sum rounded once. Slower, since products are
    converted to float64.

    Has the signature that jnp.einsum asks of its `_dot_general`, and can be differentiated in
    reverse any number of times.
    """
    del precision, preferred_element_type  # float32 is both
    assert out_sharding is None
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    groups = (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch)
    hashable = tuple(tuple(tuple(map(int, dims)) for dims in pair) for pair in groups)
    return _dot_in_double(hashable, lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot_in_double(dims: DotDims, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the float32 product of float32 arrays, summed in float64."""
    with jax.enable_x64(True):
        lhs, rhs = (jax.lax.convert_element_type(x, jnp.float64) for x in (lhs, rhs))
        # Without preferred_element_type: outside of this context JAX would truncate float64.
        product = jax.lax.dot_general(lhs, rhs, dims)
        return jax.lax.convert_element_type(product, jnp.float32)


def _dot_in_double_backward(
    dims: DotDims, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands, as products in float64."""
    lhs, rhs = operands
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dims
    swapped = (rhs_contracted, lhs_contracted), (rhs_batch, lhs_batch)
    num_batch = len(lhs_batch)
    num_rhs = rhs.ndim - len(rhs_batch) - len(rhs_contracted)
    # Dimensions of g are those of the batch, what lhs keeps, what rhs keeps.
    from_rhs = tuple(range(g.ndim - num_rhs, g.ndim))
    from_lhs = tuple(range(num_batch, g.ndim - num_rhs))
    return (
        _gradient_of_first(dims, lhs, rhs, g, from_rhs),
        _gradient_of_first(swapped, rhs, lhs, g, from_lhs),
    )


def _gradient_of_first(
    dims: DotDims, first: jax.Array, second: jax.Array, g: jax.Array, from_second: tuple[int, ...]
) -> jax.Array:
    """Returns the gradient of one operand of a product.

    Args:
      dims: Dimension numbers, of the operand `first` and of `second`.
      g: The gradient of the product.
      from_second: The dimensions of `g` that come from `second`.
    """
    (first_contracted, second_contracted), (first_batch, second_batch) = dims
    g_batch = tuple(range(len(first_batch)))
    first_kept = [i for i in range(first.ndim) if i not in first_contracted + first_batch]
    second_kept = tuple(i for i in range(second.ndim) if i not in second_contracted + second_batch)
    gradient: Any = _dot_in_double(((from_second, second_kept), (g_batch, second_batch)), g, second)
    # The product ends with the contracted dimensions, in the order of `second`.
    pairs = sorted(zip(second_contracted, first_contracted, strict=True))
    order = [*first_batch, *first_kept, *(axis for _, axis in pairs)]
    return gradient.transpose([order.index(axis) for axis in range(first.ndim)])


_dot_in_double.defvjp(
    lambda dims, lhs, rhs: (_dot_in_double(dims, lhs, rhs), (lhs, rhs)), _dot_in_double_backward
)


def einsum_f32(subscripts: str, a: jax.Array, b: jax.Array, precision: str | None) -> jax.Array:
    """Returns `einsum` of two arrays with sums, and a result, in float32."""
    return einsum(subscripts, a, b, precision, preferred_element_type=jnp.float32)


def einsum(
    subscripts: str,
    a: jax.Array,
    b: jax.Array,
    precision: str | None,
    *,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Returns jnp.einsum of two arrays; on CPU "highest" adds up in float64."""
    dot = dot_in_double if is_exact_on_cpu(precision, a, b) else jax.lax.dot_general
    return jnp.einsum(
        subscripts,
        a,
        b,
        precision=precision,
        preferred_element_type=preferred_element_type,
        _dot_general=dot,
    )


@register("projection", "dense")
def projection(  # noqa: PLR0913, PLR0917
    model: ModelConfig,
    init: Init,
    rngs: nnx.Rngs,
    role: str,
    inputs: Shape,
    outputs: Shape,
    axes: Axes,
    initializer: Initializer,
    use_bias: bool,
) -> Dense:
    """Builds an attention projection. A user's projection has the same parameters.

    Args:
      model: The configuration, for the keys of a projection of its own.
      init: Dimensions, dtypes and initializers.
      rngs: Draws the weights.
      role: "qkv" for inputs of attention, "proj" for its output.
      inputs: Sizes of the dimensions that are contracted.
      outputs: Sizes of the dimensions of the result.
      axes: Logical axes of the kernel, inputs first.
      initializer: Of the kernel.
      use_bias: Whether a bias is added.
    """
    return Dense(inputs, outputs, axes, initializer, init, rngs, use_bias=use_bias)
