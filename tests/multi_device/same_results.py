"""What a tiny model gives on any devices, and the comparison with other devices."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import ShardingPlan, make_sharding_plan
from MaxText.training.model_objective import abstract_frozen_params, read_frozen_params
from MaxText.training.objective import loss_sums, loss_totals
from MaxText.training.step import make_train_step
from tests.checkpointing.small_state import CONFIG, assert_bit_equal
from tests.checkpointing.small_state import start as start_run
from tests.small_models import made_for_training, noisy_params, random_batch, tiny_config

ROWS = 8
MIXED = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


def built(devices, family="llama2", **keys):
    """(configuration, model, sharding) of two layers."""
    given = {"base_num_kv_heads": 4, "base_num_decoder_layers": 2} | keys
    config = tiny_config(family, **given)
    sharding = make_sharding_plan(config.mesh, devices, config.model.pipeline)
    return config, Model(config.model), sharding


def fresh_parameters(model, sharding, noise=0.0):
    """Values that do not depend on the mesh: drawn on one device, then laid out."""
    params = jax.tree.map(np.asarray, noisy_params(model, noise))
    abstract = sharding.abstract_state(model.initialize, model.parameters)
    return jax.device_put(params, jax.tree.map(lambda x: x.sharding, abstract))


def loss_and_gradients(devices, family="llama2", rows=ROWS, noise=0.1, **keys):
    """Every loss, the gradients, and the text of the compiled program.

    `noise` is the standard deviation of what is added to parameters, so that all have an effect.
    """
    config, model, sharding = built(devices, family, **keys)
    params = fresh_parameters(model, sharding, noise)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    batch = random_batch(config, rows, documents=True)
    batch = sharding.to_global_batch(jax.tree.map(np.asarray, batch), rows)

    def run(params, batch):
        def loss(params):
            sums = loss_sums(model.merge(params), batch, config.model.objective, training=True)
            totals = loss_totals(model, batch)
            return sums.minimized(totals), sums.means(totals)

        return jax.grad(loss, has_aux=True)(params)

    compiled = sharding.jit(run, out_shardings=(shardings, None)).lower(params, batch).compile()
    gradients, losses = jax.block_until_ready(compiled(params, batch))
    return jax.tree.map(np.asarray, (losses, gradients)), gradients, compiled.as_text()


class Planned(NamedTuple):
    config: Any
    sharding: ShardingPlan
    step: Any
    initialize: Any
    state: Any  # abstract


def planned(devices, family="llama2", num_microbatches=1, **keys) -> Planned:
    config, model, sharding = built(
        devices, family, gradient_accumulation_steps=num_microbatches, **keys
    )
    schedule, optimizer, initialize = made_for_training(config, model)
    step = make_train_step(
        model,
        optimizer,
        schedule,
        num_microbatches=num_microbatches,
        optimizer_config=config.optimizer,
        offloads_opt_state=config.mesh.optimizer_memory_host_offload,
    )
    state = sharding.abstract_state(initialize, model.parameters)
    return Planned(config, sharding, step, initialize, state)


def train(devices, family="llama2", num_microbatches=1, **keys):
    """Losses and norms of gradients and parameters of three steps, and the state after them."""
    config, sharding, step, initialize, abstract = planned(
        devices, family, num_microbatches, **keys
    )
    state = sharding.init_state(initialize, abstract, seed=0)
    batches = [
        sharding.to_global_batch(
            jax.tree.map(np.asarray, random_batch(config, 16, seed, documents=True)), 16
        )
        for seed in range(3)
    ]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
    frozen = read_frozen_params(config.model, sharding)
    compiled, _ = sharding.compile_step(
        step,
        abstract,
        sharding.abstract_batch(shapes),
        None,
        abstract_frozen_params(config.model, sharding),
    )
    frozen_arguments = (frozen,) if frozen else ()
    numbers = []
    for batch in batches:
        # With many steps in flight the simulated devices may deadlock in a collective.
        state, metrics = jax.block_until_ready(compiled(state, batch, *frozen_arguments))
        numbers.append([float(metrics[name]) for name in ("loss", "grad_norm", "param_norm")])
    return np.array(numbers), state


def assert_same(found, expected, where):
    """Losses and gradients equal to 2e-5 of the largest number of an array."""

    def compare(path, actual, reference):
        place = f"{where} {jax.tree_util.keystr(path)}"
        largest = np.abs(reference).max() or 1.0
        # Sums in another order: up to 1.1e-5 with some initial weights.
        np.testing.assert_allclose(actual / largest, reference / largest, atol=2e-5, err_msg=place)

    jax.tree_util.tree_map_with_path(compare, found, expected)


def assert_read_as(state, other, folder):
    """A checkpoint of one state, read into the layout of another, has the same bits."""
    checkpoints = CheckpointManager(folder / "checkpoints", CheckpointingConfig())
    checkpoints.save(2, state, {"step": 3}, checkpoint_metadata(CONFIG, state.params))
    checkpoints.wait()
    start, _ = start_run(folder, state=other, initialize=pytest.fail)
    assert_bit_equal(start.state, jax.device_get(state))
    for got, asked in zip(jax.tree.leaves(start.state), jax.tree.leaves(other), strict=True):
        assert got.sharding == asked.sharding
