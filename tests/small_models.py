"""Tiny models and batches that tests share."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.config.schema import Config
from MaxText.config.training_sections import GuardConfig
from MaxText.conformance import subject as conformance
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule, weight_decay_schedule
from MaxText.training.step import make_initialize, make_train_step

TINY = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 3,
    "vocab_size": 64,
    "max_target_length": 16,
    "dtype": "float32",
    "scan_layers": True,
    "remat_policy": "none",
    "dataset_type": "synthetic",
    "steps": 10,
    "learning_rate": 1e-2,
    "warmup_steps_fraction": 0.0,
}


VALUE_RESIDUAL = {
    "import_modules": ["examples/value_residual.py"],
    "connection_type": "value_residual",
    "mixer": "value_residual_attention",
}


def some_quick(rows: Iterable[Any], every: int) -> list[Any]:
    """Rows of a test: one in `every` for the default suite, the others with the slow tests."""
    return [
        row if index % every == 0 else _slow(*row) if isinstance(row, tuple) else _slow(row)
        for index, row in enumerate(rows)
    ]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def tiny_config(decoder_block: str = "llama2", **keys: Any) -> Config:
    """A configuration of three layers of width 32."""
    given = TINY | {"decoder_block": decoder_block} | keys
    default = "pattention" if decoder_block.startswith("tokenformer") else "mlp"
    if given.get("feed_forward_type", default) == "pattention":
        del given["base_mlp_dim"]  # the number of slots takes its place
    return load_config(**given)


def random_batch(config: Config, rows: int, seed: int = 0, documents: bool = False) -> Batch:
    """Random tokens and uneven weights; with `documents`, two documents in each row."""
    return conformance.random_batch(config, rows, seed, documents=documents)


def assert_close(found: Any, expected: Any, atol: float, rtol: float = 1e-6) -> None:
    """Asserts that trees are equal to these tolerances."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), found, expected)


def random_params(model: Model, scale: float = 1.0, seed: int = 0):
    """Normal numbers for all parameters, without compiling anything."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda x: jnp.asarray(scale * draw(size=x.shape), x.dtype), model.abstract)


def noisy_params(model: Model, noise: float):
    """Initial parameters plus normal numbers, so that parts that start at 0 have an effect."""
    draw, params = np.random.default_rng(0).normal, jax.jit(model.initialize)(jax.random.key(0))
    return jax.tree.map(lambda x: x + noise * draw(size=x.shape).astype(x.dtype), params)


def made_for_training(config: Config, model: Model, *guard: GuardConfig):
    """(learning rate schedule, optimizer, initializer of a state) of a configuration."""
    schedule = learning_rate_schedule(config.schedule)
    decay_schedule = weight_decay_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters, decay_schedule)
    averaging = config.optimizer.parameter_average
    initialize = make_initialize(model, optimizer, *guard, averaging=averaging)
    return schedule, optimizer, initialize


def trainer(config: Config, num_microbatches: int = 1, **keys: Any):
    """(model, fresh state, jitted train step) of a configuration."""
    model = Model(config.model)
    schedule, optimizer, initialize = made_for_training(config, model)
    state = jax.jit(initialize)(jax.random.key(0))
    step = make_train_step(
        model,
        optimizer,
        schedule,
        num_microbatches=num_microbatches,
        optimizer_config=config.optimizer,
        **keys,
    )
    return model, state, jax.jit(step)
