"""A stack of layers, walked by a scan or written out.

Layers whose parameters have the same shapes are stored as one, with a leading `layers` dimension,
whether or not the walk is a scan, so checkpoints do not depend on it. Where shapes differ, each
layer is stored under its number.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from MaxText.configuration.model_sections import RematPolicy
from MaxText.layers.weights import ShapesOnly
from MaxText.parallelism.constraints import platform, token_by_token

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")
_PRODUCTS_OF_ATTENTION = (*_PROJECTIONS, "slot_scores", "out_proj")
# Policy -> names of intermediate values (checkpoint_name in the parts) that are kept.
_SAVED: dict[str, tuple[str, ...]] = {
    "minimal": (*_PRODUCTS_OF_ATTENTION, "mlpwi", "mlpwo"),
    "minimal_with_context": (*_PRODUCTS_OF_ATTENTION, "context", "mlpwi", "mlpwo"),
    "save_dot_except_mlp": _PRODUCTS_OF_ATTENTION,
    "save_dot_except_mlpwi": (*_PRODUCTS_OF_ATTENTION, "mlpwo"),
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ("out_proj",),
}
# Under every policy: a few numbers of each token that a whole hidden state was read for, and the
# sums that dense_kept_sums names.
_ALWAYS_SAVED = ("depth_product", "depth_sum")
_OFFLOADED: dict[str, tuple[str, ...]] = {
    "minimal_offloaded": (*_PRODUCTS_OF_ATTENTION, "mlpwi", "mlpwo"),
    "qkv_proj_offloaded": _PROJECTIONS,
}


def rematerialized(function: Callable, policy: RematPolicy, *, in_scan: bool) -> Callable:
    """`function` whose backward pass computes again what `policy` does not keep."""
    policies = jax.checkpoint_policies
    if policy == "none":
        return function
    if policy == "full" or policy in _SAVED:
        keep = policies.save_only_these_names(*_ALWAYS_SAVED, *_SAVED.get(policy, ()))
    else:
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(_ALWAYS_SAVED),
            names_which_can_be_offloaded=list(_OFFLOADED[policy]),
            offload_src="device",
            offload_dst="pinned_host",
        )
    # Inside a scan the loop itself keeps XLA from merging the two computations.
    return jax.checkpoint(function, policy=keep, prevent_cse=not in_scan)


def stack(
    make_layer: Callable[[int, nnx.Rngs], Any], num_layers: int, rngs: nnx.Rngs, *, alike: bool
) -> Any:
    """All layers as one module.

    Args:
      make_layer: (index, keys) -> layer.
      alike: whether all have parameters of the same shapes.

    Returns:
      A module like a single layer, whose weights have a leading dimension of `num_layers`; or, of
      layers that differ, an nnx.Dict from "0", "1", ... to each.
    """
    shapes_only = isinstance(rngs, ShapesOnly)
    if not alike:
        if shapes_only:
            own = [rngs] * num_layers
        else:
            own = [nnx.Rngs(params=k) for k in jax.random.split(rngs.params(), num_layers)]
        return nnx.Dict({str(i): make_layer(i, own[i]) for i in range(num_layers)})

    # Drawn by one vmap over keys: layer by layer inside a jit, deep models take seconds to compile.
    def draw(key: jax.Array) -> dict:
        return nnx.to_pure_dict(nnx.state(make_layer(0, nnx.Rngs(params=key))))

    one = make_layer(0, ShapesOnly())
    if shapes_only:
        values = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_layers, *x.shape), x.dtype),
            nnx.to_pure_dict(nnx.state(one)),
        )
    else:
        values = jax.vmap(draw)(jax.random.split(rngs.params(), num_layers))
    layers = nnx.merge(nnx.graphdef(one), values)
    for _, parameter in nnx.to_flat_state(nnx.state(layers)):
        axes = parameter.get_metadata()["logical_axes"]
        parameter.set_metadata(logical_axes=("layers", *axes))
    return layers


@jax.custom_vjp
def _unstacked(stacked: Any) -> list[Any]:
    """A stacked tree as a list of one tree per layer.

    Its gradient is one concatenation. Plain slices would each give a gradient of the whole
    stacked size, and adding those up costs more than the layers themselves on CPU.
    """
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda leaf: leaf[i], stacked) for i in range(num_layers)]  # noqa: B023


def _unstacked_forward(stacked: Any) -> tuple[list[Any], None]:
    return _unstacked(stacked), None


def _unstacked_backward(_: None, gradients: list[Any]) -> tuple[Any]:
    return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients),)


_unstacked.defvjp(_unstacked_forward, _unstacked_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cut(index: int, stacked: Any) -> tuple[Any, Any]:
    """Weights of one layer, and the stacked tree that the next layer's are to be cut from.

    Backward, a layer's gradients are written into the stacked ones that have come back so far, as
    in a scan: each layer's are there when its own backward pass is over.
    """
    return jax.tree.map(lambda leaf: leaf[index], stacked), stacked


def _cut_forward(index: int, stacked: Any) -> tuple[tuple[Any, Any], None]:
    # With symbolic zeros, arguments come with the question whether they are differentiated.
    return _cut(index, jax.tree.map(lambda x: x.value, stacked)), None


def _cut_backward(index: int, _: None, gradients: tuple[Any, Any]) -> tuple[Any]:
    def put(own: Any, so_far: Any) -> Any:
        if _is_zero(own):
            return None if _is_zero(so_far) else so_far
        if _is_zero(so_far):
            num_layers, *_ = so_far.aval.shape
            so_far = jnp.zeros((num_layers, *own.shape), own.dtype)
        return jax.lax.dynamic_update_index_in_dim(so_far, own, index, 0)

    return (jax.tree.map(put, *gradients, is_leaf=_is_zero),)


_cut.defvjp(_cut_forward, _cut_backward, symbolic_zeros=True)


@jax.custom_vjp
def _in_turn(arrays: Any) -> Any:
    """As given; backward, none of their gradients is used before all of them are there."""
    return arrays


def _in_turn_forward(arrays: Any) -> tuple[Any, None]:
    return jax.tree.map(lambda x: x.value, arrays), None


def _in_turn_backward(_: None, gradients: Any) -> tuple[Any]:
    leaves, structure = jax.tree.flatten(gradients, is_leaf=_is_zero)
    there = iter(jax.lax.optimization_barrier([g for g in leaves if not _is_zero(g)]))
    # What has no gradient gets none, instead of an array of zeros.
    return (jax.tree.unflatten(structure, [None if _is_zero(g) else next(there) for g in leaves]),)


_in_turn.defvjp(_in_turn_forward, _in_turn_backward, symbolic_zeros=True)


def _is_zero(gradient: Any) -> bool:
    return isinstance(gradient, SymbolicZero)


def walk(
    layers: Any,
    x_BTD: jax.Array,
    apply: Callable[[Any, jax.Array, jax.Array, int], tuple[jax.Array, dict[str, jax.Array]]],
    *,
    num_layers: int,
    period: int,
    policy: RematPolicy,
    select: Callable[[Any], Any] | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends `x_BTD` through all layers of a stacked module: a compiled pattern in a loop.

    Args:
      layers: what `stack` returned; of one layer that all share, or of num_layers.
      apply: (layer, x, index, place in the pattern) -> (y, scalars).
      num_layers: how often a layer is applied.
      period: length of the pattern of kinds that layers follow; divides num_layers.
      policy: what each layer's backward pass computes again.
      select: what is stored for a layer -> its weights. Only policy "none" keeps these, too.

    Returns:
      The last output, and each scalar summed over layers.
    """
    graphdef, stacked = _split(layers)
    shared = jax.tree.leaves(stacked)[0].shape[0] != num_layers

    def one_pattern(x_BTD: jax.Array, given: Any) -> tuple[jax.Array, list[dict]]:
        weights, first = given
        scalars = []
        for place in range(period):

            def one_layer(x_BTD, weights, index, place=place):
                # In here, as weights cut out before would be kept for the backward pass.
                own = jax.tree.map(lambda leaf: leaf[0 if shared else place], weights)
                if select is not None:
                    own = select(own)
                return apply(nnx.merge(graphdef, own), x_BTD, index, place)

            # A loop of one turn is none to the compiler.
            one_layer = rematerialized(one_layer, policy, in_scan=num_layers > period)
            x_BTD, found = one_layer(x_BTD, weights, first + place)
            x_BTD = token_by_token(x_BTD)
            scalars.append(found)
        return x_BTD, scalars

    firsts = jnp.arange(0, num_layers, period)
    if shared:
        x_BTD, scalars = jax.lax.scan(
            lambda x, first: one_pattern(x, (stacked, first)), x_BTD, firsts
        )
    else:
        patterns = jax.tree.map(
            lambda leaf: leaf.reshape(num_layers // period, period, *leaf.shape[1:]), stacked
        )
        x_BTD, scalars = jax.lax.scan(one_pattern, x_BTD, (patterns, firsts))
    totals: dict[str, jax.Array] = {}
    for found in scalars:
        totals |= {name: totals.get(name, 0) + jnp.sum(value) for name, value in found.items()}
    return x_BTD, totals


class Walked(NamedTuple):
    """What layers that were written out have given.

    Attributes:
      outputs: what the last layer handed on.
      scalars: summed over layers.
      states: of the mixers, one per layer.
    """

    outputs: tuple[Any, ...]
    scalars: dict[str, jax.Array]
    states: tuple[Any, ...]


def walk_written_out(
    layers: Any,
    first: Any,
    apply: Callable[
        [Any, tuple[Any, ...], int, Any], tuple[tuple[Any, ...], dict[str, jax.Array], Any]
    ],
    *,
    num_layers: int,
    policy: RematPolicy = "none",
    states: Sequence[Any] | None = None,
    in_turn: bool = False,
) -> Walked:
    """Sends `first` through all layers, each written out by itself.

    Programs that generate text walk like this, too: a loop would copy each layer's weights and
    state out of the stacked ones for every token, which takes as long as the products.

    Args:
      layers: what `stack` returned.
      apply: (layer, outputs so far, index, state or None) -> (outputs, scalars, state), where
        outputs are what the next layer reads, of this layer alone or of earlier ones, too.
      num_layers: how often a layer is applied; `layers` may hold one that all share.
      policy: what each layer's backward pass computes again. Outputs of layers are always kept.
      states: of each layer, or None before there are any.
      in_turn: on TPU a layer's backward pass waits for the weights' gradients of the layer after
        it. Where layers read many outputs, that compiler puts the products for all layers' weights
        off to the end, and keeps their operands of all layers until then. It does not do so where
        they read the last output alone, and waiting costs memory there (docs/mudd_cost.md). No
        effect on the result.
    """
    in_turn = in_turn and platform() == "tpu"
    outputs, totals, new_states = (first,), {}, []
    graphdefs, held = _each(layers, num_layers, in_turn)
    for index, graphdef in enumerate(graphdefs):
        weights, held, outputs = _take(index, held, outputs, in_turn)

        def one_layer(weights, outputs, state, graphdef=graphdef, index=index):
            return apply(nnx.merge(graphdef, weights), outputs, index, state)

        outputs, scalars, state = rematerialized(one_layer, policy, in_scan=False)(
            weights, outputs, None if states is None else states[index]
        )
        totals |= {name: totals.get(name, 0) + value for name, value in scalars.items()}
        new_states.append(state)
    return Walked(outputs, totals, tuple(new_states))


def keep_layers_apart(weights: dict) -> tuple[dict, ...]:
    """Stacked weights as one tree per layer, to be joined by `joined` inside a trace.

    Programs that read all weights for each token cannot afford to cut them out of an array. Each
    stacked array is deleted as soon as it is cut.
    """
    stacked, structure = jax.tree.flatten(weights)
    layers: list[list[jax.Array]] = [[] for _ in range(stacked[0].shape[0])]
    for leaf in stacked:
        for index, parts in enumerate(layers):
            parts.append(leaf[index])
        jax.block_until_ready([parts[-1] for parts in layers])
        leaf.delete()
    return tuple(jax.tree.unflatten(structure, parts) for parts in layers)


def joined(weights: Sequence[dict]) -> dict:
    """Inverse of `keep_layers_apart`, for use inside a trace.

    The compiler takes slices of what is stacked here from the parts themselves, so that nothing is
    copied as long as no loop walks the result.
    """
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


def _each(layers: Any, num_layers: int, in_turn: bool) -> tuple[list[Any], Any]:
    """Graph definition of each layer, in their order, and what `_take` takes their weights from."""
    if isinstance(layers, nnx.Dict):
        each = [_split(layers[str(index)]) for index in range(num_layers)]
        return [graphdef for graphdef, _ in each], [weights for _, weights in each]
    graphdef, stacked = _split(layers)
    shared = jax.tree.leaves(stacked)[0].shape[0] != num_layers
    return [graphdef] * num_layers, stacked if in_turn and not shared else _unstacked(stacked)


def _take(index: int, held: Any, outputs: Any, in_turn: bool) -> tuple[dict, Any, Any]:
    """Weights of a layer, those to take the next layer's from, and the outputs it is to read.

    Args:
      held: one tree of stacked weights, or a list of one tree per layer, or of one that all share.
    """
    if not in_turn:
        return held[index % len(held)], held, outputs
    if not isinstance(held, list):
        held, outputs = _in_turn((held, outputs))
        weights, held = _cut(index, held)  # pyright: ignore
        return weights, held, outputs
    held, place = list(held), index % len(held)
    held[place], outputs = _in_turn((held[place], outputs))
    return held[place], held, outputs


def _split(layers: Any) -> tuple[Any, dict]:
    graphdef, state = nnx.split(layers)
    return graphdef, nnx.to_pure_dict(state)
