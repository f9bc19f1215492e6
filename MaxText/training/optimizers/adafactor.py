"""Adafactor, with statistics of each layer."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_param_names
from MaxText.value_types import PyTree, TreeDef


@register("optimizer", "adafactor")
def adafactor(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018): updates relative to parameters.

    Statistics, clipping and scale are those of one parameter of one layer, as in GPT-Neo, whether
    layers are stacked or not. The experts of a layer are one parameter, as in Mesh TensorFlow: they
    share clipping and scale, and each has its own rows and columns unless there are more experts
    than rows.

    Unlike in GPT-Neo, the schedule and decoupled decay apply (its weight_decay is the decay of the
    second moment). Momentum precedes the learning rate.
    """
    options = config.adafactor
    scale_by_second_moment = optax.scale_by_factored_rms(
        decay_rate=options.decay_exponent,
        min_dim_size_to_factor=options.min_dim_size_to_factor,
        epsilon=options.epsilon_gradient,
    )
    transforms = (
        _factored_per_layer(scale_by_second_moment, parameters),
        _stateless_per_layer(optax.clip_by_block_rms(options.clipping_threshold), parameters),
        _stateless_per_layer(optax.scale_by_param_block_rms(options.epsilon_parameter), parameters),
    )
    if options.momentum:
        return optax.chain(*transforms, optax.ema(options.momentum, debias=False))
    return optax.chain(*transforms)


def _is_stacked(spec: ParamSpec) -> bool:
    """Returns whether the first dimension counts layers."""
    return spec.logical_axes[:1] == ("layers",)


def _stateless_per_layer(
    transform: optax.GradientTransformation, parameters: ParamSpecs
) -> optax.GradientTransformation:
    """Applies a transform without state to each layer's part of stacked parameters.

    For transforms that look at a whole array, such as a clip of its root mean square.
    """
    stacked = map_param_names(parameters, lambda name: _is_stacked(parameters[name]))

    def transformed(is_stacked: bool, update: jax.Array, parameter: jax.Array) -> jax.Array:
        """Applies the transform to an array, or to each layer of a stacked one."""

        def one_layer(update: jax.Array, parameter: jax.Array) -> PyTree:
            return transform.update(update, transform.init(parameter), parameter)[0]

        function = jax.vmap(one_layer) if is_stacked else one_layer
        return function(update, parameter)

    return optax.stateless(
        lambda updates, params: jax.tree.map(transformed, stacked, updates, params)
    )


def _factored_per_layer(
    transform: optax.GradientTransformation, parameters: ParamSpecs
) -> optax.GradientTransformation:
    """Applies optax.scale_by_factored_rms to each layer's part of stacked parameters.

    On its own, optax would take layers for a dimension of the matrix where there are more of them
    than rows or columns, and factor a stack of vectors. The state is that of optax, an
    optax.FactoredState; moments of stacked parameters begin with the layers.
    """
    stacked = map_param_names(parameters, lambda name: _is_stacked(parameters[name]))

    def moment_axes(parameter: jax.Array) -> optax.FactoredState:
        """Returns which moments have a dimension of layers (0); others are placeholders."""
        layer = jax.ShapeDtypeStruct(parameter.shape[1:], parameter.dtype)
        moments: Any = jax.eval_shape(transform.init, layer)
        is_factored = moments.v.shape != layer.shape
        factor_axis = 0 if is_factored else None
        whole_axis = None if is_factored else 0
        axes: dict[str, Any] = {"v_row": factor_axis, "v_col": factor_axis, "v": whole_axis}
        return optax.FactoredState(count=None, **axes)  # pyright: ignore[reportArgumentType]

    def init_one(is_stacked: bool, parameter: jax.Array) -> optax.OptState:
        """Returns the moments of one parameter, for stacked layers with a leading dimension."""
        if not is_stacked:
            return transform.init(parameter)
        return jax.vmap(transform.init, out_axes=moment_axes(parameter))(parameter)

    def update_one(
        is_stacked: bool, update: jax.Array, state: optax.FactoredState, parameter: jax.Array
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns one parameter's update and moments; stacked layers are updated one by one."""
        if not is_stacked:
            return transform.update(update, state, parameter)
        axes = moment_axes(parameter)
        over_layers = jax.vmap(transform.update, in_axes=(0, axes, 0), out_axes=(0, axes))
        return over_layers(update, state, parameter)

    def joined(
        states: Sequence[optax.OptState], structure: TreeDef, count: ArrayLike
    ) -> optax.FactoredState:
        """Returns one state of all parameters from one state for each."""
        moments = (
            jax.tree.unflatten(structure, [getattr(state, name) for state in states])
            for name in ("v_row", "v_col", "v")
        )
        return optax.FactoredState(count, *moments)

    def init(params: optax.Params) -> optax.FactoredState:
        """Returns the moments of all parameters and a count of 0."""
        leaves, structure = jax.tree.flatten(params)
        states = [init_one(*pair) for pair in zip(jax.tree.leaves(stacked), leaves, strict=True)]
        return joined(states, structure, jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.FactoredState]:
        """Returns updates and the new state, each parameter by `update_one`."""
        leaves, structure = jax.tree.flatten(updates)
        moments = zip(
            *(jax.tree.leaves(tree) for tree in (state.v_row, state.v_col, state.v)), strict=True
        )
        states = [optax.FactoredState(state.count, *arrays) for arrays in moments]
        results = [
            update_one(*arguments)
            for arguments in zip(
                jax.tree.leaves(stacked), leaves, states, jax.tree.leaves(params), strict=True
            )
        ]
        new_updates = jax.tree.unflatten(structure, [result for result, _ in results])
        count = optax.safe_increment(state.count)
        return new_updates, joined([new_state for _, new_state in results], structure, count)

    return optax.GradientTransformation(init, update)
