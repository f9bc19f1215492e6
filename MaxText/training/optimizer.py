"""Optimizers of optax, with weight decay and learning rate per parameter."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import traverse_util
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from MaxText.config.registry import register, registration
from MaxText.config.training_sections import OptimizerConfig
from MaxText.errors import UserError
from MaxText.layers.params import Params, UpdateRule
from MaxText.layers.part_outputs import Returned, check, is_pair, text_of
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.value_types import PyTree, TreeDef

ParamSpecs = Mapping[str, ParamSpec]

BASE_TRANSFORM = 1  # index in the chain of opt_type's transform, which holds moments and counts


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, parameters: ParamSpecs
) -> optax.GradientTransformation:
    """Chains clipping, the transform of opt_type, decay, multipliers, and learning rate.

    A parameter p with gradient g gets the update
    -learning_rate * multiplier * (transform(clip(g)) + decay * p), which the train step adds. One
    with an update rule gets that of its rule, without any of these.

    Args:
      config: Of the optimizer. Its patterns match anywhere in a parameter's name.
      schedule: Step to learning rate. The chain counts steps itself.
      parameters: Of the model, by name.

    Raises:
      UserError: No parameter is trainable.
    """
    patterns = config.trainable_parameters_mask
    selected = {
        name: spec for name, spec in parameters.items() if not patterns or _matches(patterns, name)
    }
    rules = updated_by_rule(selected)
    trained = {name: spec for name, spec in selected.items() if name not in rules}
    if not trained:
        raise UserError(
            f"trainable_parameters_mask={list(patterns)} matches none of the parameters: "
            f"{', '.join(parameters)}"
        )

    def decay(name: str) -> float:
        """Returns a parameter's weight decay: an override, else 0 if masked, else the default."""
        default = 0.0 if _matches(config.adamw_mask, name) else config.adam_weight_decay
        return _first_match(config.weight_decay_overrides, name, default)

    def decayed(update: jax.Array, parameter: jax.Array, scale: float) -> jax.Array:
        """Adds decoupled weight decay (Loshchilov and Hutter 2019) to an update."""
        return update + scale * parameter if scale else update

    decays = map_param_names(trained, decay)
    multipliers = map_param_names(
        trained, lambda name: _first_match(config.learning_rate_overrides, name, 1.0)
    )
    registered = registration("optimizer", config.opt_type)
    make = registered.load()
    transform = make(config.parts.of(make) or config, trained)  # a custom one gets its own keys
    if not registered.is_built_in:
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in trained.items()}
        _check_transform(make, transform, map_param_names(trained, shapes.__getitem__))
    # Always the same links: their indices (see BASE_TRANSFORM) are part of names in checkpoints.
    optimizer = optax.chain(
        _clipping(config),
        transform,
        optax.stateless(lambda updates, params: jax.tree.map(decayed, updates, params, decays)),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, multipliers)),
        optax.scale_by_learning_rate(schedule),
    )
    if len(trained) == len(parameters):
        return optimizer
    return _of_trained(optimizer, trained, rules)


class _TreeCheck(NamedTuple):
    """Two trees whose leaves have to agree in what `describe` says about them."""

    requirement: str  # "updates like the parameters"
    returned: PyTree
    expected: PyTree
    describe: Callable[[jax.ShapeDtypeStruct], str]


def _check_transform(
    function: Callable[..., Returned], transform: Returned, parameters: PyTree
) -> None:
    """Raises UserError if a custom optimizer's transform does not have the form of optax's.

    Args:
      function: What was registered, for the error.
      transform: What it returned.
      parameters: Shapes of the trained parameters.
    """
    has_methods = all(callable(getattr(transform, name, None)) for name in ("init", "update"))
    check(has_methods, function, "", transform, "an optax.GradientTransformation")
    state = jax.eval_shape(transform.init, parameters)
    result = jax.eval_shape(transform.update, parameters, state, parameters)
    check(is_pair(result), function, "update", result, "(updates, state)")
    updates, new_state = result
    # Shapes alone: optax.apply_updates casts updates.
    checks = (
        _TreeCheck("updates like the parameters", updates, parameters, _describe_shape),
        _TreeCheck("a state like that of init", new_state, state, text_of),
    )
    for tree_check in checks:
        returned = _describe_leaves(tree_check.returned, tree_check.describe)
        expected = _describe_leaves(tree_check.expected, tree_check.describe)
        for path in returned | expected:
            actual = returned.get(path, "nothing")
            required = expected.get(path, "nothing")
            requirement = f"{tree_check.requirement}: {path} {required}"
            check(actual == required, function, "update", f"{path} {actual}", requirement)


def _describe_shape(leaf: jax.ShapeDtypeStruct) -> str:
    """Returns the shape of a leaf as text, such as "[16, 64]"."""
    return f"{list(leaf.shape)}"


def _describe_leaves(
    tree: PyTree, describe: Callable[[jax.ShapeDtypeStruct], str]
) -> dict[str, str]:
    """Returns `describe(leaf)` of each leaf of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): describe(leaf) for path, leaf in leaves}


def updated_by_rule(parameters: ParamSpecs) -> dict[str, UpdateRule]:
    """Returns the rules of parameters that no optimizer trains, by their names."""
    return {name: spec.update_rule for name, spec in parameters.items() if spec.update_rule}


def _of_trained(
    optimizer: optax.GradientTransformation,
    trained: ParamSpecs,
    rules: Mapping[str, UpdateRule],
) -> optax.GradientTransformation:
    """Restricts `optimizer` to some parameters; others have no state.

    Args:
      optimizer: Of the trained parameters.
      trained: These, by name.
      rules: Of parameters that are updated from their statistics, which are their gradients; all
        others are frozen.
    """

    def pick(tree: PyTree) -> Params:
        """Returns the trained leaves of a tree like the parameters."""
        return map_param_names(trained, traverse_util.flatten_dict(tree, sep="/").__getitem__)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns updates of all parameters: 0 for frozen ones."""
        new_updates, state = optimizer.update(pick(updates), state, pick(params))
        gradients = cast(dict[str, jax.Array], traverse_util.flatten_dict(updates, sep="/"))
        values = cast(dict[str, jax.Array], traverse_util.flatten_dict(params, sep="/"))
        flat = {name: jnp.zeros_like(gradient) for name, gradient in gradients.items()}
        flat |= {name: rule(values[name], gradients[name]) for name, rule in rules.items()}
        flat |= traverse_util.flatten_dict(new_updates, sep="/")
        return traverse_util.unflatten_dict(flat, sep="/"), state

    return optax.GradientTransformation(lambda params: optimizer.init(pick(params)), update)


def scale_existing_slot_updates(
    optimizer: optax.GradientTransformation,
    parameters: ParamSpecs,
    existing_slots: Mapping[str, int] | None,
    factor: float,
) -> optax.GradientTransformation:
    """Multiplies updates of slots that were trained before the model grew.

    The state is that of `optimizer`, so a checkpoint does not depend on the factor.

    Args:
      optimizer: Of all parameters.
      parameters: By name.
      existing_slots: Number of leading slots trained before, by the name of their parameter.
      factor: Of their updates; 0 freezes them.
    """
    if factor == 1 or not existing_slots:
        return optimizer

    def scale(path: KeyPath, update: jax.Array) -> jax.Array:
        """Multiplies the leading slots of one parameter's update by `factor`."""
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name not in existing_slots:
            return update
        axis = parameters[name].logical_axes.index("slots")
        is_old = jax.lax.broadcasted_iota(jnp.int32, update.shape, axis) < existing_slots[name]
        # Not a product with 0, which would let NaN through.
        return jnp.where(is_old, jnp.zeros_like(update) if factor == 0 else factor * update, update)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = optimizer.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(optimizer.init, update)


def map_param_names(parameters: ParamSpecs, value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Returns a nested dict like the parameters, with `value_of(name)` as leaves."""
    return traverse_util.unflatten_dict({name: value_of(name) for name in parameters}, sep="/")


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Returns whether any of the regular expressions matches somewhere in a name."""
    return any(re.search(pattern, name) for pattern in patterns)


def _first_match(pairs: Sequence[tuple[str, float]], name: str, default: float) -> float:
    """Returns the value of the first pattern that matches somewhere in a name."""
    return next((value for pattern, value in pairs if re.search(pattern, name)), default)


def _clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns the clip of gradients, by global norm or by value.

    The global norm is that of all leaves together, so stacking of layers makes no difference.
    """
    threshold = config.gradient_clipping_threshold
    if threshold == 0:
        return optax.identity()
    if config.gradient_clipping_type == "value":
        return optax.clip(threshold)
    return optax.clip_by_global_norm(threshold)


@register("optimizer", "adamw")
def adamw(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Adam (Kingma and Ba 2015), or uncorrected as in BERT and GPT-Neo.

    Weight decay is a link of its own in the chain (`make_optimizer`), decoupled as in AdamW.

    Args:
      config: Of the optimizer. Without adam_bias_correction, the moments are not divided by
        1 - b^count.
      parameters: Not read: moments are like any parameter.
    """
    adam = optax.scale_by_adam(
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        eps_root=config.adam_eps_root,
        mu_dtype=config.mu_dtype or None,
    )
    if config.adam_bias_correction:
        return adam

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        """Updates as at an infinite count, where the correction is 1, and counts on its own."""
        # The correction divides by 1 - b^count, which is 1 after many updates.
        many = state._replace(count=jnp.full_like(state.count, jnp.iinfo(jnp.int32).max))
        new_state: Any
        updates, new_state = adam.update(updates, many, params)
        count = optax.safe_increment(state.count)
        return updates, state._replace(count=count, mu=new_state.mu, nu=new_state.nu)

    return optax.GradientTransformation(adam.init, update)


@register("optimizer", "lion")
def lion(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023): the sign of interpolated momentum."""
    mu_dtype = config.mu_dtype or None
    return optax.scale_by_lion(b1=config.adam_b1, b2=config.adam_b2, mu_dtype=mu_dtype)


@register("optimizer", "sgd")
def sgd(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Stochastic gradient descent, with momentum."""
    return optax.trace(decay=config.momentum, nesterov=config.nesterov)


@register("optimizer", "muon")
def muon(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest (Jordan et al. 2024).

    The momentum of a matrix is orthogonalized by Newton-Schulz iterations and scaled to an RMS of
    about 0.2. `_muon_dimensions` chooses the matrices.
    """
    # A learning rate of -1 makes optax's complete optimizer return its direction unchanged.
    return optax.contrib.muon(
        learning_rate=-1.0,
        beta=config.muon_beta,
        eps=config.adam_eps,
        mu_dtype=config.mu_dtype or None,
        nesterov=config.nesterov,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        adam_eps_root=config.adam_eps_root,
        muon_weight_dimension_numbers=map_param_names(
            parameters, lambda name: _muon_dimensions(parameters[name])
        ),
        # Updates as large as Adam's, to share its learning rate (Liu et al. 2025, equation 4).
        consistent_rms=0.2,
    )


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


def _muon_dimensions(spec: ParamSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the matrix dimensions; None leaves a parameter to Adam.

    Adam trains tables, norms, biases and the head (Jordan et al. 2024), and the second product of
    dense connections: in a 4-layer MUDDFormer, Muon there ended at a higher validation loss.
    """
    is_unsharded = not any(spec.logical_axes)
    if not spec.num_input_dims or "vocab" in spec.logical_axes or is_unsharded:
        return None
    # Stacked layers and experts are separate matrices.
    first = sum(name in ("layers", "exp") for name in spec.logical_axes)
    inputs = tuple(range(first, first + spec.num_input_dims))
    outputs = tuple(range(first + spec.num_input_dims, len(spec.shape)))
    return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)
