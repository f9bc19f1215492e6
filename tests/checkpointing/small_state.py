"""A train state of a few kilobytes with the structures that real optimizers have."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.training_sections import CheckpointingConfig
from MaxText.growth.resolve import ResolvedGrowth
from MaxText.run.restore import RestoreResult, restore_or_initialize
from MaxText.training.state import TrainState

CONFIG = {"base_emb_dim": 8, "opt_type": "adamw", "steps": 10, "mlp_activations": ("silu",)}

optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
)


def fresh_state(seed: int = 0, width: int = 8, rows: int = 16) -> TrainState:
    """Random parameters; rows scales the size of the state."""
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "decoder": {
            "wi": jax.random.normal(keys[0], (3, rows, width)),
            "scale": jnp.ones(width, jnp.bfloat16),
        },
        "token_embedder": jax.random.normal(keys[1], (32, width)),
    }
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def _update(state: TrainState) -> TrainState:
    gradients = jax.tree.map(lambda x: 0.1 * x + 0.01, state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)


update = jax.jit(_update, donate_argnums=0)


def on_host(state: TrainState) -> TrainState:
    """A copy that shares no memory with the state."""
    return jax.tree.map(lambda x: np.array(x, copy=True), state)


def assert_bit_equal(got: TrainState, wanted: TrainState) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def start(
    folder: Path,
    section: CheckpointingConfig | None = None,
    state: TrainState | None = None,
    config: Mapping[str, Any] = CONFIG,
    initialize: Callable[[], TrainState] | None = None,
    resolved: ResolvedGrowth | None = None,
) -> tuple[RestoreResult, list[str]]:
    """Starts a run with checkpoints in `folder`: (Start, printed lines)."""
    section, lines = section or CheckpointingConfig(), []
    state = fresh_state() if state is None else state
    checkpoints = CheckpointManager(folder / "checkpoints", section)
    result = restore_or_initialize(
        checkpoints, section, abstract(state), initialize or (lambda: state), config, lines.append,
        resolved=resolved,
    )  # fmt: skip
    return result, lines
