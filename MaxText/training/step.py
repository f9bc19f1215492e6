"""The pure functions to compile: initialization and train step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from MaxText.config.training_sections import GuardConfig
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.parallelism.logical_sharding import platform, split_batch
from MaxText.training import spike_guard
from MaxText.training.objective import IN_NATS, loss_sums, num_tokens
from MaxText.training.state import TrainState

Metrics = dict[str, jax.Array]

# Metrics of a step that are no part of its loss, besides norms by layer, "grad_norm/layer_0".
_NOT_LOSSES = frozenset(
    ("log_z", "grad_norm", "update_norm", "param_norm", "learning_rate", "total_weights")
)

_NO_GUARD = GuardConfig(skip_step_on_spikes=False)


def make_initialize(
    model: Model, optimizer: optax.GradientTransformation, guard: GuardConfig = _NO_GUARD
) -> Callable[[jax.Array], TrainState]:
    """Returns a pure function from a random key to a fresh state."""

    def initialize(key: jax.Array) -> TrainState:
        params = model.initialize(key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            guard=spike_guard.initial_state(guard),
        )

    return initialize


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    num_microbatches: int = 1,  # parts of a batch whose gradients are accumulated one by one
    guard: GuardConfig = _NO_GUARD,  # as in make_initialize
    repeat_update: bool = True,
    offloads_opt_state: bool = False,  # whether it is kept in host memory
    log_layer_norms: bool = False,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the train step, a pure function of state and batch.

    Losses are means over the whole global batch, so microbatches change only memory, rounding and
    dropout.

    With a guard, `repeat_update` makes TPUs compute updates again, which saves the memory and
    traffic of new values next to the old ones. It costs the FLOPs of an update: few, except for
    muon. CPUs copy what passes a barrier and would save nothing.
    """
    objective = model.config.objective

    # totals: weight of targets, and tokens, of the global batch
    def loss_and_gradients(params, batch: Batch, totals, dropout_key):
        def loss_function(params):
            module = model.merge(params)
            sums = loss_sums(module, batch, objective, dropout_key, training=True)
            losses = sums.means(*totals)
            aux = {} if sums.log_z is None else {"log_z": sums.log_z / totals[0]}
            if sums.nats is not None:
                aux[IN_NATS] = sums.nats / totals[0]
            return sum(losses.values()), (losses, aux)

        (_, (losses, aux)), gradients = jax.value_and_grad(loss_function, has_aux=True)(params)
        return losses, aux, gradients

    def accumulate_gradients(params, batch: Batch, totals, dropout_key):
        def add_microbatch(sums, microbatch_and_index):
            microbatch, index = microbatch_and_index
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
            new = loss_and_gradients(params, microbatch, totals, key)
            return jax.tree.map(jnp.add, sums, new), None

        microbatches = jax.tree.map(lambda x: split_batch(x, num_microbatches), batch)
        first = jax.tree.map(lambda x: x[0], microbatches)
        shapes = jax.eval_shape(loss_and_gradients, params, first, totals, dropout_key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        indices = jnp.arange(num_microbatches)
        return jax.lax.scan(add_microbatch, zeros, (microbatches, indices))[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        dropout_key = None
        if model.config.is_random:
            seed = model.config.initialization.init_weights_seed
            dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
        total_weight = jnp.sum(batch.loss_mask_BT)
        # A batch of only padding has loss 0 and no gradient.
        totals = (jnp.maximum(total_weight, 1.0), num_tokens(batch))
        grad_fn = loss_and_gradients if num_microbatches == 1 else accumulate_gradients
        losses, aux, gradients = grad_fn(state.params, batch, totals, dropout_key)
        params = state.params
        opt_state = state.opt_state
        if offloads_opt_state:
            # Fetched once gradients exist and activations have left the device.
            gradients, opt_state = jax.lax.optimization_barrier((gradients, opt_state))
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        loss = jnp.asarray(sum(losses.values()))
        learning_rate = jnp.asarray(schedule(state.step))
        updates, new_opt_state = optimizer.update(gradients, opt_state, params)
        if platform() == "cpu":
            # XLA fuses multiplications into each of their users, so it would compute updates twice,
            # for their norm and the parameters. It never copies a division; the barrier hides that
            # this one does nothing.
            one = jax.lax.optimization_barrier(jnp.ones(()))
            updates = jax.tree.map(lambda x: x / one.astype(x.dtype), updates)
        norms = {"grad_norm": optax.tree.norm(gradients), "update_norm": optax.tree.norm(updates)}
        metrics = losses | aux | norms
        guard_state = None
        if state.guard is None:
            params = optax.apply_updates(params, updates)
            opt_state = new_opt_state
        else:
            accept, guard_state, decided = spike_guard.decide(
                guard, state.guard, state.step, loss=loss, learning_rate=learning_rate, **norms
            )
            if repeat_update and platform() == "tpu":
                # Computed after the decision, new values overwrite the old ones in place.
                gradients, opt_state, params, accept = jax.lax.optimization_barrier(
                    (gradients, opt_state, params, accept)
                )
                updates, new_opt_state = optimizer.update(gradients, opt_state, params)
            params = spike_guard.select(accept, optax.apply_updates(params, updates), params)
            opt_state = spike_guard.select(accept, new_opt_state, opt_state)
            metrics |= decided
        metrics |= {
            "loss": loss,
            "total_weights": total_weight,
            "param_norm": optax.tree.norm(params),
            "learning_rate": learning_rate,
        }
        if log_layer_norms:
            metrics |= _norm_per_layer(model, grad_norm=gradients, param_norm=params)
        return TrainState(state.step + 1, params, opt_state, guard_state), metrics

    return train_step


def is_loss(name: str) -> bool:
    """Returns whether a metric of a train step is its loss, a part of it, or a loss beside it.

    These are reported as means since the last report, so that the parts add up to the loss.
    """
    return "/" not in name and name not in _NOT_LOSSES and name not in spike_guard.METRICS


def _norm_per_layer(model: Model, **trees: Any) -> Metrics:
    """Returns the norm of each layer's part of trees, by name and layer."""
    return {
        f"{name}/layer_{number}": optax.tree.norm(layer)
        for name, tree in trees.items()
        for number, layer in enumerate(model.blueprint.layer_weights(tree["layers"]))
    }
