"""The optimizer of a run: a rule of optimizers/, with decay and learning rate per parameter."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.tree_util import KeyPath

from MaxText.config.registry import registration
from MaxText.config.training_sections import OptimizerConfig
from MaxText.errors import UserError
from MaxText.layers.params import Params, UpdateRule
from MaxText.layers.part_outputs import Returned, check, is_pair, text_of
from MaxText.training.multipliers import weight_multipliers, with_epsilons
from MaxText.training.optimizers.hyperball import keep_norms, matrices_of_constant_norm
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_param_names
from MaxText.training.stochastic_rounding import with_second_moments_in
from MaxText.value_types import PyTree

# Values of opt_type whose updates multiply matrices.
COSTLY_OPTIMIZERS = frozenset(("muon", "muonh", "normuon", "soap"))
# Indices in the chain of the links with a state.
BASE_TRANSFORM = 1  # opt_type's transform, which holds moments and counts
_LEARNING_RATE = 4  # counts steps, skipped ones included


def make_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    parameters: ParamSpecs,
    decay_schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    """Chains clipping, the transform of opt_type, decay, multipliers, and learning rate.

    A parameter p with gradient g gets the update
    -learning_rate * multiplier * (transform(clip(g)) + decay * p), which the train step adds. One
    with an update rule gets that of its rule, without any of these. MuonH and AdamH then scale
    matrices back to their norms, and have no decay of these. A parametrization multiplies the
    multiplier, the decay, and the transform's epsilon (multipliers.py).

    Args:
      config: Of the optimizer. Its patterns match anywhere in a parameter's name.
      schedule: Step to learning rate. The chain counts steps itself.
      parameters: Of the model, by name.
      decay_schedule: Step to a factor of the weight decay; None for 1.

    Raises:
      UserError: No parameter is trainable, or a parametrization has no rule for opt_type.
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

    scales = weight_multipliers(config, trained)
    constant_norms = matrices_of_constant_norm(config, trained)

    def decay(name: str) -> float:
        """Returns a parameter's weight decay: an override, else 0 if masked, else the default."""
        if name in constant_norms:
            return 0.0
        is_masked = _matches(config.adamw_mask, name) or trained[name].weight_class == "vector"
        default = 0.0 if is_masked else config.adam_weight_decay
        value = _first_match(config.weight_decay_overrides, name, default)
        return value * scales[name].weight_decay

    decays = map_param_names(trained, decay)

    def rate_multiplier(name: str) -> float:
        """Returns the multiplier of a parameter's learning rate."""
        override = _first_match(config.learning_rate_overrides, name, 1.0)
        return override * scales[name].learning_rate

    multipliers = map_param_names(trained, rate_multiplier)
    registered = registration("optimizer", config.opt_type)
    make = registered.load()
    transform = make(config.parts.of(make) or config, trained)  # a custom one gets its own keys
    if not registered.is_built_in:
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in trained.items()}
        _check_transform(make, transform, map_param_names(trained, shapes.__getitem__))
    if config.nu_dtype:
        transform = with_second_moments_in(transform, config.nu_dtype)
    transform = with_epsilons(transform, scales, trained)
    # Always the same links: their indices (see BASE_TRANSFORM) are part of names in checkpoints.
    chain = optax.chain(
        _clipping(config),
        transform,
        _add_weight_decay(decays, decay_schedule, is_cautious=config.cautious_weight_decay),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, multipliers)),
        optax.scale_by_learning_rate(schedule),
        keep_norms(config, trained),
    )
    optimizer = _with_step(chain)
    if len(trained) == len(parameters):
        return optimizer
    return _of_trained(optimizer, trained, rules)


def _add_weight_decay(
    decays: PyTree, decay_schedule: optax.Schedule | None, *, is_cautious: bool
) -> optax.GradientTransformationExtraArgs:
    """Adds decoupled weight decay (Loshchilov and Hutter 2019) to updates.

    Args:
      decays: Weight decay of each parameter.
      decay_schedule: Step to a factor of all; None for 1.
      is_cautious: Whether to decay only elements whose update reduces their size, too (Chen et al.
        2025, "Cautious weight decay", algorithm 1).

    Returns:
      A transform whose `update` needs the argument `step`, int32.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: jax.Array,
    ) -> tuple[optax.Updates, optax.OptState]:
        factor = None if decay_schedule is None else decay_schedule(extra_args["step"])

        def decayed(update: jax.Array, parameter: jax.Array, decay: float) -> jax.Array:
            if not decay:
                return update
            # Not yet subtracted: an update of the parameter's sign reduces it.
            decaying = (
                jnp.where(update * parameter >= 0, parameter, 0) if is_cautious else parameter
            )
            if factor is None:
                return update + decay * decaying
            return update + jnp.asarray(decay * factor, update.dtype) * decaying

        return jax.tree.map(decayed, updates, params, decays), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _with_step(chain: optax.GradientTransformationExtraArgs) -> optax.GradientTransformation:
    """Passes the step that the learning rate's link counts to all links, as `step`.

    So links that depend on the step have no counts of their own, whose presence would change the
    names in checkpoints.
    """

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return chain.update(updates, state, params, step=state[_LEARNING_RATE].count)

    return optax.GradientTransformation(chain.init, update)


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
