"""Weights of unrolled layers that are stored as one stacked tree, and their gradients."""

import jax
import jax.numpy as jnp

from MaxText.layers.lowering.gradient_barriers import (
    Gradient,
    barrier,
    barrier_gradients,
    is_zero,
)
from MaxText.layers.params import Params
from MaxText.parallelism.logical_sharding import platform
from MaxText.value_types import PyTree, Tree


def take_layer(stacked: Params, index: int) -> Params:
    """Returns row `index` of each array of a stacked tree."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)


@jax.custom_vjp
def unstack(stacked: Params) -> list[Params]:
    """Splits a stacked tree into the trees of its layers.

    For every backend: gradients of plain slices would each have the stacked size. On CPU, adding
    them up costs more than the layers themselves. So the gradient joins those of the layers
    instead.

    On CPU the slices have hidden indices, too: with constant ones XLA compiles kernels for each
    layer. A barrier hides the constants, so that layers share kernels: GPT-2 with 6 layers compiles
    in 3/4 of the time. Gradients of matrices are written at the hidden indices. XLA would compile
    such an update of a vector for each layer, so vectors are stacked.
    """
    return [take_layer(stacked, index) for index in range(_num_layers(stacked))]


def _num_layers(stacked: Params) -> int:
    """Returns the number of layers of a stacked tree."""
    return jax.tree.leaves(stacked)[0].shape[0]


def _unstack_forward(stacked: Params) -> tuple[list[Params], list[jax.Array] | None]:
    """Returns the layers' trees, sliced at hidden indices on CPU, and these indices."""
    if platform() != "cpu":
        return unstack(stacked), None
    hidden_indices = list(jax.lax.optimization_barrier(jnp.arange(_num_layers(stacked))))

    def take_hidden(index: jax.Array) -> Params:
        take = jax.lax.dynamic_index_in_dim
        return jax.tree.map(lambda leaf: take(leaf, index, keepdims=False), stacked)

    return [take_hidden(index) for index in hidden_indices], hidden_indices


def _unstack_backward(
    hidden_indices: list[jax.Array] | None, gradients: list[Params]
) -> tuple[Params]:
    """Joins the gradients of the layers to those of the stacked tree."""

    def join(*leaves: jax.Array) -> jax.Array:
        if hidden_indices is None or leaves[0].ndim < 2:
            return jnp.stack(leaves)
        stacked = jnp.zeros((len(leaves), *leaves[0].shape), leaves[0].dtype)
        for leaf, index in zip(leaves, hidden_indices, strict=True):
            stacked = jax.lax.dynamic_update_index_in_dim(stacked, leaf, index, 0)
        return stacked

    return (jax.tree.map(join, *gradients),)


unstack.defvjp(_unstack_forward, _unstack_backward)


def postpones_weight_gradients() -> bool:
    """Returns whether XLA for the target platform postpones weight gradients: for TPU it does.

    See `SequentialWeights`, which works around that.
    """
    return platform() == "tpu"


class SequentialWeights:
    """Weights of unrolled layers, whose backward pass goes layer by layer.

    For TPU: a layer's backward pass waits for the weight gradients of the layer after it. With
    dense connections XLA otherwise postpones all of them to the end and keeps their operands until
    then. Without dense connections waiting costs memory. docs/explanation/dense_connections.md has
    the measurements.
    """

    def __init__(self, weights: Params | list[Params]):
        """Holds each layer's weights, as a list or as one stacked tree.

        A list with one tree is that of layers that share their weights.
        """
        self._weights = weights

    def take(self, index: int, carry: Tree) -> tuple[Params, Tree]:
        """Returns the weights of layer `index`, and the carry that the layer has to read.

        Each layer has to be taken once, in order.
        """
        if isinstance(self._weights, list):
            row = index % len(self._weights)
            self._weights[row], carry = barrier_gradients((self._weights[row], carry))
            return self._weights[row], carry
        layer, self._weights, carry = _take_sequentially(index, self._weights, carry)
        return layer, carry


def _take(index: int, stacked: Params, carry: Tree) -> tuple[Params, Params, Tree]:
    """Returns a layer's weights, the stack for the layers after it, and `carry`.

    In the backward pass a layer's gradients are written into the stacked ones as soon as the layer
    is done, as in a scan, not once those of all layers exist.
    """
    return take_layer(stacked, index), stacked, carry


_take_sequentially = jax.custom_vjp(_take, nondiff_argnums=(0,))


def _take_forward(index: int, *arguments: PyTree) -> tuple[PyTree, None]:
    """Returns the outputs of `_take`; there are no residuals."""
    # With symbolic zeros, arguments are pairs (value, perturbed).
    return _take_sequentially(index, *jax.tree.map(lambda x: x.value, arguments)), None


def _take_backward(
    index: int, _: None, gradients: tuple[PyTree, PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
    """Writes a layer's gradients into the stacked ones, before the gradient of `carry` goes on."""

    def write(layer_gradient: Gradient, accumulated: Gradient) -> Gradient:
        if is_zero(layer_gradient):
            return accumulated
        if is_zero(accumulated):
            num_layers, *_ = accumulated.aval.shape
            shape = (num_layers, *layer_gradient.shape)
            accumulated = jnp.zeros(shape, layer_gradient.dtype)
        return jax.lax.dynamic_update_index_in_dim(accumulated, layer_gradient, index, 0)

    grad_weights, accumulated, grad_carry = gradients
    stacked = jax.tree.map(write, grad_weights, accumulated, is_leaf=is_zero)
    return barrier((stacked, grad_carry))


_take_sequentially.defvjp(_take_forward, _take_backward, symbolic_zeros=True)
