"""Storage and application of a stack of layers.

Layers whose parameters have the same shapes are stored as one, with a leading `layers` dimension.
Otherwise runs of like layers in a repeated cycle (config/layer_plan.py) are stacked as
`layers/cycle/<run>`, and other layers are stored as `layers/<number>`. Checkpoints do not depend on
whether layers are scanned or unrolled.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from MaxText.config.layer_plan import LayerPlan
from MaxText.config.model_sections import RematPolicy
from MaxText.layers.params import AbstractRngs
from MaxText.layers.part import Scalars
from MaxText.parallelism.logical_sharding import cast_in_loop, platform, with_token_major_layout

_PROJECTIONS = ("query_proj", "key_proj", "value_proj")
_PRODUCTS_OF_ATTENTION = (*_PROJECTIONS, "slot_scores", "out_proj")
SAVED_NAMES: dict[str, tuple[str, ...]] = {  # policy -> names that `capture.tag` gives
    "full": (),
    "minimal": (*_PRODUCTS_OF_ATTENTION, "mlpwi", "mlpwo"),
    "minimal_with_context": (*_PRODUCTS_OF_ATTENTION, "context", "mlpwi", "mlpwo"),
    "save_dot_except_mlp": _PRODUCTS_OF_ATTENTION,
    "save_dot_except_mlpwi": (*_PRODUCTS_OF_ATTENTION, "mlpwo"),
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ("out_proj",),
    "minimal_offloaded": (*_PRODUCTS_OF_ATTENTION, "mlpwi", "mlpwo"),
    "qkv_proj_offloaded": _PROJECTIONS,
}
_ALWAYS_SAVED = ("depth_product", "depth_aggregate")  # of dense connections, costly to recompute


def apply_remat(function: Callable, policy: RematPolicy, *, in_scan: bool) -> Callable:
    if policy == "none":
        return function
    if not policy.endswith("_offloaded"):
        keep = jax.checkpoint_policies.save_only_these_names(*_ALWAYS_SAVED, *SAVED_NAMES[policy])
    else:
        keep = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(_ALWAYS_SAVED),
            names_which_can_be_offloaded=list(SAVED_NAMES[policy]),
            offload_src="device",
            offload_dst="pinned_host",
        )
    # Inside a scan the loop itself keeps XLA from merging both computations.
    return jax.checkpoint(function, policy=keep, prevent_cse=not in_scan)


@jax.custom_vjp
def _unstacked(stacked: Any) -> list[Any]:
    """Splits a stacked tree into layers.

    Gradients of plain slices would each have the stacked size: on CPU, adding them up costs more
    than the layers themselves. So the gradient joins those of the layers instead.
    """
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    return [_take_layer(stacked, index) for index in range(num_layers)]


def _unstacked_forward(stacked: Any) -> tuple[list[Any], Any]:
    if platform() != "cpu":
        return _unstacked(stacked), None
    # With constant indices, XLA compiles kernels for each layer. The barrier hides the constants,
    # so that layers share kernels: GPT-2 with 6 layers compiles in 3/4 of the time.
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    indices = list(jax.lax.optimization_barrier(jnp.arange(num_layers)))
    take = jax.lax.dynamic_index_in_dim
    return [
        jax.tree.map(lambda leaf: take(leaf, index, keepdims=False), stacked)  # noqa: B023
        for index in indices
    ], indices


def _unstacked_backward(indices: Any, gradients: list[Any]) -> tuple[Any]:
    def join(*leaves: jax.Array) -> jax.Array:
        if indices is None or leaves[0].ndim < 2:  # XLA compiles each update of a vector
            return jnp.stack(leaves)
        stacked = jnp.zeros((len(leaves), *leaves[0].shape), leaves[0].dtype)
        for leaf, index in zip(leaves, indices, strict=True):
            stacked = jax.lax.dynamic_update_index_in_dim(stacked, leaf, index, 0)
        return stacked

    return (jax.tree.map(join, *gradients),)


_unstacked.defvjp(_unstacked_forward, _unstacked_backward)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The structure of a model's layers, and how they are stored."""

    plan: LayerPlan
    graphdefs: tuple[Any, ...]  # each layer's graph definition (nnx.split)
    is_stacked: bool  # whether one tree of stacked arrays holds all layers
    is_shared: bool  # whether all layers share their weights

    def layer_weights(
        self, weights: dict, unstack: Callable[[Any], list[dict]] = _unstacked
    ) -> list[dict]:
        """Returns each layer's weights; `unstack` splits a stacked tree."""
        indices = range(self.plan.num_layers)
        if self.is_stacked:
            rows = unstack(weights)
            return [rows[index % len(rows)] for index in indices]
        cycles = {name: unstack(stacked) for name, stacked in weights.get("cycle", {}).items()}
        places = map(self.plan.cycled, indices)
        return [
            weights[str(index)] if place is None else cycles[str(place[0])][place[1]]
            for index, place in zip(indices, places, strict=True)
        ]

    def join(self, layers: Sequence[dict]) -> dict:
        """Returns all layers' weights as they are stored, for use inside a trace.

        XLA reads slices of the result from its inputs: nothing is copied unless a loop reads it.
        """

        def stacked(chosen: Sequence[dict]) -> dict:
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *chosen)

        if self.is_stacked:
            return stacked(layers[:1] if self.is_shared else layers)
        plan = self.plan
        joined: dict[str, Any] = {str(index): layers[index] for index in plan.singles()}
        if plan.repeats:
            joined["cycle"] = {
                str(run): stacked([layers[index] for index in plan.layers_of(run)])
                for run in range(len(plan.runs))
            }
        return joined


def stack(
    make_layer: Callable[[int, nnx.Rngs], Any],
    plan: LayerPlan,
    rngs: nnx.Rngs,
    *,
    shared: bool = False,
) -> tuple[Any, Blueprint]:
    """Builds all layers as one: stacked, or an nnx.Dict if shapes differ."""
    first_layer = [
        plan.first_of(place[0]) if (place := plan.cycled(i)) else i for i in range(plan.num_layers)
    ]
    abstract = {index: make_layer(index, AbstractRngs()) for index in dict.fromkeys(first_layer)}
    graphdefs = {index: nnx.graphdef(layer) for index, layer in abstract.items()}
    shapes = [_shapes(layer) for layer in abstract.values()]
    is_stacked = all(other == shapes[0] for other in shapes)
    assert is_stacked or not shared, "layers that share parameters have different ones"
    blueprint = Blueprint(plan, tuple(graphdefs[i] for i in first_layer), is_stacked, shared)
    num_stored = 1 if shared else plan.num_layers
    draws = not isinstance(rngs, AbstractRngs)
    keys = jax.random.split(rngs.params(), num_stored) if draws else None

    def stacked(index: int, chosen: Sequence[int]) -> Any:
        def draw(key: jax.Array) -> dict:
            return weights_dict(make_layer(index, nnx.Rngs(params=key)))

        if keys is not None:
            # One vmap over keys: drawn one by one, deep models take seconds to compile.
            values = jax.vmap(draw)(keys[jnp.asarray(chosen)])
        else:
            values = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((len(chosen), *x.shape), x.dtype),
                weights_dict(abstract[index]),
            )
        layers = nnx.merge(graphdefs[index], values)
        for _, parameter in nnx.to_flat_state(nnx.state(layers)):
            axes = parameter.get_metadata()["logical_axes"]
            parameter.set_metadata(logical_axes=("layers", *axes))
        return layers

    if is_stacked:
        return stacked(0, range(num_stored)), blueprint
    layers = {
        str(i): abstract[i] if keys is None else make_layer(i, nnx.Rngs(params=keys[i]))
        for i in plan.singles()
    }
    if plan.repeats:
        runs = map(plan.layers_of, range(len(plan.runs)))
        layers["cycle"] = nnx.Dict({str(n): stacked(run[0], run) for n, run in enumerate(runs)})
    return nnx.Dict(layers), blueprint


def _shapes(layer: Any) -> list[Any]:
    flat = nnx.to_flat_state(nnx.state(layer))
    return [(path, p.shape, p.dtype, p.get_metadata()["logical_axes"]) for path, p in flat]


@jax.custom_vjp
def barrier_gradients(values: Any) -> Any:
    """Puts the gradients of `values` through one optimization barrier."""
    return values


def _barrier(gradients: Any) -> Any:
    leaves, structure = jax.tree.flatten(gradients, is_leaf=is_zero)
    barriered = iter(jax.lax.optimization_barrier([g for g in leaves if not is_zero(g)]))
    # None for a symbolic zero, instead of an array of zeros.
    return jax.tree.unflatten(structure, [None if is_zero(g) else next(barriered) for g in leaves])


# With symbolic zeros, arguments are pairs (value, perturbed).
barrier_gradients.defvjp(
    lambda values: (jax.tree.map(lambda x: x.value, values), None),
    lambda _, gradients: (_barrier(gradients),),
    symbolic_zeros=True,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sequential(index: int, weights: Any, carry: Any) -> tuple[Any, Any, Any]:
    """Returns a layer's weights, the remaining stack, and `carry`.

    In the backward pass a layer's gradients are written into the stacked ones as soon as the layer
    is done, as in a scan, not once those of all layers exist.
    """
    return _take_layer(weights, index), weights, carry


def _sequential_forward(index: int, *arguments: Any) -> tuple[Any, None]:
    return _sequential(index, *jax.tree.map(lambda x: x.value, arguments)), None


def _sequential_backward(index: int, _: None, gradients: Any) -> tuple[Any, Any]:
    def put(own: Any, accumulated: Any) -> Any:
        if is_zero(own):
            return accumulated
        if is_zero(accumulated):
            num_layers, *_ = accumulated.aval.shape
            accumulated = jnp.zeros((num_layers, *own.shape), own.dtype)
        return jax.lax.dynamic_update_index_in_dim(accumulated, own, index, 0)

    grad_weights, accumulated, grad_carry = gradients
    return _barrier((jax.tree.map(put, grad_weights, accumulated, is_leaf=is_zero), grad_carry))


_sequential.defvjp(_sequential_forward, _sequential_backward, symbolic_zeros=True)


def is_zero(gradient: Any) -> bool:
    return isinstance(gradient, SymbolicZero)


def apply_scanned(
    layers: Any,
    blueprint: Blueprint,
    carry: Any,
    apply: Callable[[Any, Any, jax.Array | int], tuple[Any, Scalars]],
    policy: RematPolicy,
) -> tuple[Any, Scalars]:
    """Applies all layers: repeats of the cycle in a scan, others unrolled."""
    weights = weights_dict(layers)
    plan = blueprint.plan
    totals: Scalars = {}

    def single(carry: Any, index: int) -> Any:
        def one_layer(carry, weights):
            if blueprint.is_stacked:
                weights = _take_layer(weights, 0 if blueprint.is_shared else index)
            return apply(nnx.merge(blueprint.graphdefs[index], weights), carry, index)

        own = weights if blueprint.is_stacked else weights[str(index)]
        carry, scalars = apply_remat(one_layer, policy, in_scan=False)(carry, own)
        _add(totals, scalars)
        return with_token_major_layout(carry)

    for index in range(plan.prefix):
        carry = single(carry, index)
    if plan.repeats:
        cycle = weights if blueprint.is_stacked else weights["cycle"]
        if blueprint.is_stacked and not (plan.is_whole or blueprint.is_shared):
            cycle = jax.tree.map(lambda leaf: leaf[plan.prefix : plan.end], weights)
        carry, scalars = scan_cycle(
            blueprint,
            cycle,
            carry,
            apply,
            policy,
            num_repeats=plan.repeats,
            first=plan.prefix,
        )
        _add(totals, scalars)
    for index in range(plan.end, plan.num_layers):
        carry = single(carry, index)
    return carry, totals


def scan_cycle(
    blueprint: Blueprint,
    weights: Any,  # of these layers
    carry: Any,
    apply: Callable[[Any, Any, Any], tuple[Any, Scalars]],
    policy: RematPolicy,
    *,
    num_repeats: int,
    first: jax.Array | int = 0,  # index of the first layer
    select: Callable[[Any], Any] | None = None,  # from stored weights to a layer's, inside remat
) -> tuple[Any, Scalars]:
    plan = blueprint.plan
    is_shared = blueprint.is_shared
    # Whether a layer slices its weights out of a whole cycle's, which an inner loop cannot do.
    in_layer = blueprint.is_stacked and (is_shared or max(plan.runs) == 1)

    def one_run(carry: Any, weights: Any, run: int, start: Any) -> tuple[Any, Scalars]:
        graphdef = blueprint.graphdefs[plan.first_of(run)]
        length = plan.runs[run]
        row = run if in_layer and not is_shared else 0
        weights = weights if in_layer else weights[run]

        def one_layer(carry, weights, index):
            # Sliced in here, or the slices would be saved for the backward pass.
            has_rows = is_shared or (length == 1 and plan.cycle > 1)
            own = _take_layer(weights, row) if has_rows else weights
            own = cast_in_loop(own)
            return apply(nnx.merge(graphdef, own if select is None else select(own)), carry, index)

        in_scan = num_repeats > 1 or length > 1  # XLA removes a loop of one iteration
        one_layer = apply_remat(one_layer, policy, in_scan=in_scan)
        if length == 1:
            carry, scalars = one_layer(carry, weights, start)
            return with_token_major_layout(carry), scalars

        def body(carry: Any, xs: Any) -> tuple[Any, Scalars]:
            own, offset = xs
            carry, scalars = one_layer(carry, weights if is_shared else own, start + offset)
            return with_token_major_layout(carry), scalars

        own = None if is_shared else weights
        carry, scalars = jax.lax.scan(body, carry, (own, jnp.arange(length)))
        return carry, jax.tree.map(jnp.sum, scalars)

    def one_cycle(carry: Any, xs: Any) -> tuple[Any, list[Scalars]]:
        own, start = xs
        scalars = []
        for run, length in enumerate(plan.runs):
            carry, found = one_run(carry, weights if is_shared else own, run, start)
            scalars.append(found)
            start = start + length
        return carry, scalars

    starts = first + jnp.arange(0, num_repeats * plan.cycle, plan.cycle)
    by_cycle = None
    if not is_shared:
        by_cycle = weights
        if plan.cycle > 1:
            by_cycle = jax.tree.map(
                lambda leaf: leaf.reshape(num_repeats, -1, *leaf.shape[1:]), weights
            )
        if not in_layer:
            by_cycle = _by_run(blueprint, by_cycle)
    carry, scalars = jax.lax.scan(one_cycle, carry, (by_cycle, starts))
    totals: Scalars = {}
    for found in scalars:
        _add(totals, {name: jnp.sum(value) for name, value in found.items()})
    return carry, totals


def _by_run(blueprint: Blueprint, weights: Any) -> list[Any]:
    """Splits weights by run, outside of the loop, to save no slices."""
    plan = blueprint.plan
    if not blueprint.is_stacked:
        return [weights[str(run)] for run in range(len(plan.runs))]
    ends = itertools.accumulate(plan.runs)
    return [
        jax.tree.map(lambda leaf: leaf[:, end - length : end], weights)  # noqa: B023
        for length, end in zip(plan.runs, ends, strict=True)
    ]


def _take_layer(weights: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], weights)


def _add(totals: Scalars, found: Scalars) -> None:
    for name, value in found.items():
        totals[name] = totals.get(name, 0) + value


def apply_unrolled(
    layers: Any,
    blueprint: Blueprint,
    carry: Any,
    apply: Callable[[Any, Any, int, Any], tuple[Any, Scalars, Any]],
    *,
    policy: RematPolicy = "none",
    states: Sequence[Any] | None = None,  # decode state of each layer
    sequential: bool = False,
) -> tuple[Any, Scalars, tuple[Any, ...]]:
    """Returns the last output, scalars summed over layers, and states.

    Generation uses this, too: a loop would copy each layer's weights and state out of the stacked
    ones for every token, which takes as long as the matmuls.

    With `sequential`, on TPU, a layer's backward pass waits for the weight gradients of the layer
    after it. With dense connections XLA otherwise postpones all of them to the end and keeps their
    operands until then; without them waiting costs memory
    (docs/explanation/dense_connections.md). Same result.
    """
    sequential = sequential and platform() == "tpu"
    totals = {}
    new_states = []
    weights = weights_dict(layers)
    if not sequential or blueprint.is_shared or not blueprint.is_stacked:
        weights = blueprint.layer_weights(weights)[: 1 if blueprint.is_shared else None]
    for index, graphdef in enumerate(blueprint.graphdefs):
        if sequential and not isinstance(weights, list):  # a stacked tree
            own, weights, carry = _sequential(index, weights, carry)  # pyright: ignore
        else:
            place = index % len(weights)
            if sequential:
                weights[place], carry = barrier_gradients((weights[place], carry))
            own = weights[place]

        def one_layer(weights, carry, state, graphdef=graphdef, index=index):
            return apply(nnx.merge(graphdef, weights), carry, index, state)

        carry, scalars, state = apply_remat(one_layer, policy, in_scan=False)(
            own, carry, None if states is None else states[index]
        )
        _add(totals, scalars)
        new_states.append(state)
    return carry, totals, tuple(new_states)


def weights_dict(layers: Any) -> dict:
    return nnx.to_pure_dict(nnx.state(layers))
