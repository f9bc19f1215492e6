"""The pure functions to compile: initialization and train step.

Arrays are global, for any number of devices: B counts the sequences of all of them, and a sum over
a batch is that of all. Nothing here communicates. XLA inserts the all-reduces and reduce-scatters
that the shardings of state and batch ask for (ShardingPlan in parallelism/mesh.py).

Legend: B sequences, T tokens.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from MaxText.config.training_sections import (
    GuardConfig,
    OptimizerConfig,
    ParameterAverageConfig,
)
from MaxText.layers.assembly.model import Model
from MaxText.layers.assembly.stack import Blueprint
from MaxText.layers.batch import Batch
from MaxText.layers.lowering.optimizer_update import (
    UpdateInputs,
    after_decision,
    compute_update_once,
    fetch_from_host,
    repeating_updates_saves_memory,
)
from MaxText.layers.params import Params
from MaxText.layers.part_scalars import PER_LAYER, Metric
from MaxText.parallelism.logical_sharding import split_batch
from MaxText.training import spike_guard
from MaxText.training.model_objective import FrozenParams
from MaxText.training.objective import LossSums, LossTotals, loss_sums, loss_totals
from MaxText.training.optimizer import COSTLY_OPTIMIZERS, updated_by_rule
from MaxText.training.parameter_average import initial_average, update_average
from MaxText.training.state import TrainState
from MaxText.training.stochastic_rounding import add_updates_stochastically
from MaxText.value_types import Tree

Metrics = dict[str, jax.Array]  # scalars by name, and arrays [L] of names that end in PER_LAYER
# (state, batch) -> (state, metrics); (state, batch, frozen parameters) for an objective with some.
TrainStep = Callable[..., tuple[TrainState, Metrics]]

_NO_GUARD = GuardConfig(skip_step_on_spikes=False)
_NO_AVERAGE = ParameterAverageConfig()
_DEFAULT_OPTIMIZER = OptimizerConfig()


class _Constants(NamedTuple):
    """What the losses of all microbatches of a step share."""

    totals: LossTotals  # of the whole global batch
    frozen: FrozenParams  # parameters that the objective reads


class _LossesAndGradients(NamedTuple):
    """Losses of a batch, or of a microbatch as its share of the batch; and their gradients."""

    losses: Metrics  # means, whose sum is minimized
    other_means: Metrics  # that are not minimized
    layer_metrics: dict[str, Metric]  # of layers, not yet divided
    # Of the sum of the losses, in the dtype of the parameters; the statistics of untrained weights.
    gradients: Params


_GradientFunction = Callable[[Params, Batch, _Constants, jax.Array | None], _LossesAndGradients]


def make_initialize(
    model: Model,
    optimizer: optax.GradientTransformation,
    guard: GuardConfig = _NO_GUARD,
    averaging: ParameterAverageConfig = _NO_AVERAGE,
) -> Callable[[jax.Array], TrainState]:
    """Returns a pure function from a random key to a fresh state.

    Args:
      model: With `auto` values resolved.
      optimizer: From `make_optimizer`; its state is part of the train state.
      guard: Of spikes; its state is None if it is disabled.
      averaging: Of parameters; the average is None if it is disabled.
    """

    def initialize(key: jax.Array) -> TrainState:
        params = model.initialize(key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            guard=spike_guard.initial_state(guard),
            average=initial_average(averaging, params),
        )

    return initialize


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    num_microbatches: int = 1,
    guard: GuardConfig = _NO_GUARD,
    optimizer_config: OptimizerConfig = _DEFAULT_OPTIMIZER,
    offloads_opt_state: bool = False,
    log_layer_metrics: bool = False,
) -> TrainStep:
    """Returns the train step, a pure function of state and batch.

    Losses are means over the whole global batch, so microbatches change only memory, rounding and
    dropout.

    Args:
      model: With `auto` values resolved.
      optimizer: Clips, scales by the learning rate and adds weight decay, too (make_optimizer).
      schedule: The learning rate of the optimizer. It is computed in two places. The chain of the
        optimizer counts steps in its own state, as optax's optimizers do, so that any of them can
        be used and checkpoints hold a complete optimizer. The step computes the learning rate
        again, from its own count, for the guard and the metrics. Both counts advance with every
        step, skipped ones included, and the cost is that of a few scalars.
      num_microbatches: Parts of a batch whose gradients are accumulated one by one.
      guard: Of spikes; as in make_initialize.
      optimizer_config: How updates are added (stochastic_rounding) and averaged
        (parameter_average). With a guard, TPUs compute an update again after the decision on it,
        which saves memory (`repeating_updates_saves_memory`), except those of COSTLY_OPTIMIZERS.
      offloads_opt_state: Whether the optimizer state is kept in host memory.
      log_layer_metrics: Whether there are metrics of each layer, arrays [L] named PER_LAYER.
    """
    objective = model.config.objective
    averaging = optimizer_config.parameter_average
    repeats_update = optimizer_config.opt_type not in COSTLY_OPTIMIZERS
    names_of_untrained = updated_by_rule(model.parameters).keys()

    def trained(tree: Tree) -> Tree:
        """Returns a tree like the parameters without those that have an update rule."""
        return _without(tree, names_of_untrained)

    def losses_and_gradients(
        params: Params, batch: Batch, constants: _Constants, dropout_key: jax.Array | None
    ) -> _LossesAndGradients:
        totals, frozen = constants

        def loss_function(params: Params) -> tuple[jax.Array, LossSums]:
            decoder = model.merge(params)
            sums = loss_sums(
                decoder,
                batch,
                objective,
                dropout_key,
                training=True,
                frozen=frozen,
                log_layer_metrics=log_layer_metrics,
            )
            return sums.minimized(totals), sums

        (_, sums), gradients = jax.value_and_grad(loss_function, has_aux=True)(params)
        return _LossesAndGradients(
            losses=sums.means(totals),
            other_means=sums.other_means(totals),
            layer_metrics=dict(sums.layer_metrics),
            gradients=gradients,
        )

    of_whole_batch = losses_and_gradients
    if num_microbatches > 1:
        of_whole_batch = _accumulated(losses_and_gradients, num_microbatches)

    def train_step(
        state: TrainState, batch: Batch, frozen: FrozenParams | None = None
    ) -> tuple[TrainState, Metrics]:
        """Returns the state after one step, and metrics of the step: scalars on the devices.

        `frozen` are the parameters that the objective reads and does not train.

        1. Losses and gradients of the batch. An offloaded optimizer state comes to the device
           after them, when activations have left it.
        2. The optimizer's update. It gets the raw gradients and clips them itself. Weights with
           an update rule have their statistics as gradients (layers/part_scalars.py).
        3. Norms of the raw gradients and of the update, for the metrics and the guard, without
           weights that have an update rule.
        4. The guard's decision whether to apply the update. It is made on the device, before
           anything is applied: a decision on the host would have to wait for the loss, and keep
           the old state until then.
        5. New parameters and optimizer state; the old ones if the update is skipped. The step
           counts in both cases, so that data and learning rate go on. The average of the
           parameters, if there is one, counts the result.
        """
        params = state.params
        opt_state = state.opt_state

        # 1. Losses and gradients.
        dropout_key = _dropout_key(model, state.step)
        constants = _Constants(loss_totals(model, batch), frozen or {})
        losses, other_means, layer_metrics, gradients = of_whole_batch(
            params, batch, constants, dropout_key
        )
        if offloads_opt_state:
            gradients, opt_state = fetch_from_host(gradients, opt_state)
        loss = jnp.asarray(_sum(losses))

        # 2. Update.
        learning_rate = jnp.asarray(schedule(state.step))
        updates, new_opt_state = optimizer.update(gradients, opt_state, params)
        updates = compute_update_once(updates)

        # 3. Norms.
        grad_norm = optax.tree.norm(trained(gradients))
        update_norm = optax.tree.norm(trained(updates))
        metrics = losses | other_means | {"grad_norm": grad_norm, "update_norm": update_norm}
        metrics |= {name: _mean(metric) for name, metric in layer_metrics.items()}
        layer_norms: Metrics = {}
        if log_layer_metrics:
            # Here, where the norms above read the same arrays, not after the repeated update.
            layer_norms = {
                "grad_norm": _norm_per_layer(model.blueprint, trained(gradients)),
                "update_norm": _norm_per_layer(model.blueprint, cast(Params, trained(updates))),
            }

        if state.guard is None:
            new_params = _add_updates(optimizer_config, params, updates, state.step)
            new_guard = None
        else:
            # 4. Decision.
            accept, new_guard, guard_metrics = spike_guard.decide(
                guard,
                state.guard,
                state.step,
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=grad_norm,
                update_norm=update_norm,
            )
            metrics |= guard_metrics
            # 5. Selection.
            # On TPU the update of step 2 again, of the same inputs: now it can be made in place.
            if repeats_update and repeating_updates_saves_memory():
                inputs = UpdateInputs(gradients, opt_state, params, accept)
                gradients, opt_state, params, accept = after_decision(inputs)
                updates, new_opt_state = optimizer.update(gradients, opt_state, params)
            new_params = spike_guard.select(
                accept, _add_updates(optimizer_config, params, updates, state.step), params
            )
            new_opt_state = spike_guard.select(accept, new_opt_state, opt_state)

        metrics |= {
            "loss": loss,
            "total_weights": constants.totals.target_weight,
            "param_norm": optax.tree.norm(trained(new_params)),
            "learning_rate": learning_rate,
        }
        metrics |= _with_param_norms(layer_norms, model.blueprint, trained(new_params))
        new_average = update_average(averaging, state.average, new_params, state.step)
        new_state = TrainState(state.step + 1, new_params, new_opt_state, new_guard, new_average)
        return new_state, metrics

    return train_step


def _dropout_key(model: Model, step: jax.Array) -> jax.Array | None:
    """Returns the random key of a step's dropout and routing; None for a model without any."""
    if not model.config.is_random:
        return None
    seed = model.config.initialization.init_weights_seed
    return jax.random.fold_in(jax.random.key(seed), step)


def _accumulated(
    losses_and_gradients: _GradientFunction, num_microbatches: int
) -> _GradientFunction:
    """Returns `losses_and_gradients` of a batch, computed one microbatch at a time.

    Each microbatch gets the totals of the whole batch, so that sums over microbatches are means
    over the batch, and a random key of its own. Gradients are added up in their own dtype.
    """

    def accumulate(
        params: Params, batch: Batch, constants: _Constants, dropout_key: jax.Array | None
    ) -> _LossesAndGradients:
        def add_microbatch(
            sums: _LossesAndGradients, microbatch_and_index: tuple[Batch, jax.Array]
        ) -> tuple[_LossesAndGradients, None]:
            microbatch, index = microbatch_and_index
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
            share = losses_and_gradients(params, microbatch, constants, key)
            return jax.tree.map(jnp.add, sums, share), None

        # [B, T] -> [microbatches, B / microbatches, T]
        microbatches = jax.tree.map(lambda x: split_batch(x, num_microbatches), batch)
        first = jax.tree.map(lambda x: x[0], microbatches)
        shapes = jax.eval_shape(losses_and_gradients, params, first, constants, dropout_key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        indices = jnp.arange(num_microbatches)
        return jax.lax.scan(add_microbatch, zeros, (microbatches, indices))[0]

    return accumulate


def _without(tree: Tree, names: Collection[str]) -> Tree:
    """Returns a tree like the parameters without those of some names."""
    if not names:
        return tree
    flat = traverse_util.flatten_dict(cast(Params, tree), sep="/")
    remaining = {name: leaf for name, leaf in flat.items() if name not in names}
    return cast(Tree, traverse_util.unflatten_dict(remaining, sep="/"))


def _add_updates(
    config: OptimizerConfig, params: Params, updates: optax.Updates, step: jax.Array
) -> Params:
    """Returns parameters + updates, in the dtype of the parameters."""
    if config.stochastic_rounding:
        return add_updates_stochastically(params, cast(Params, updates), step)
    return cast(Params, optax.apply_updates(params, updates))


def _sum(metrics: Metrics) -> jax.Array:
    return sum(metrics.values())  # type: ignore[return-value]


def _with_param_norms(layer_norms: Metrics, blueprint: Blueprint, params: Params) -> Metrics:
    """Returns metrics of each layer, [L]: norms, also of parameters, and the update ratio.

    A layer without parameters has the ratio 0.

    Args:
      layer_norms: Norms [L] of gradients and updates; empty if no metrics of layers are logged.
      blueprint: Of the layers.
      params: The new parameters.
    """
    if not layer_norms:
        return {}
    param_norm_L = _norm_per_layer(blueprint, params)
    has_params_L = param_norm_L > 0
    ratio_L = layer_norms["update_norm"] / jnp.where(has_params_L, param_norm_L, 1)
    update_ratio_L = jnp.where(has_params_L, ratio_L, 0)
    norms = layer_norms | {"param_norm": param_norm_L, "update_ratio": update_ratio_L}
    return {f"{name}{PER_LAYER}": norm_L for name, norm_L in norms.items()}


def _norm_per_layer(blueprint: Blueprint, tree: Params) -> jax.Array:
    """Returns the norm of each layer's part of a tree like the parameters, float32 [L]."""
    plan = blueprint.plan
    weights = tree["layers"]

    def squares(tree: Params, first_axis: int) -> jax.Array:
        """Returns the sum of squares of all leaves, over axes from `first_axis` on."""
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
        sums = [jnp.square(x).sum(tuple(range(first_axis, x.ndim))) for x in leaves]
        return jnp.asarray(sum(sums))

    if blueprint.is_stacked:
        return jnp.broadcast_to(jnp.sqrt(squares(weights, 1)), (plan.num_layers,))
    by_run = {run: squares(stacked, 1) for run, stacked in weights.get("cycle", {}).items()}
    squares_L = []
    for index in range(plan.num_layers):
        run_and_row = plan.cycled(index)
        if run_and_row is None:
            squares_L.append(squares(weights[str(index)], 0))
        else:
            run, row = run_and_row
            squares_L.append(by_run[str(run)][row])
    return jnp.sqrt(jnp.stack(squares_L))


def _mean(metric: Metric) -> jax.Array:
    """Returns a metric's mean; of an array [L], NaN for layers that did not return the metric."""
    if metric.total.ndim == 0:
        return metric.mean
    return jnp.where(metric.weight > 0, metric.mean, jnp.nan)
