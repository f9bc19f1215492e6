"""A small TokenFormer, and runs that grow from it."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.checkpointing import checkpoint_files
from MaxText.checkpointing.compatibility import checkpoint_metadata
from MaxText.checkpointing.manager import CheckpointManager
from MaxText.config.schema import Config, flatten
from MaxText.growth.resolve import ResolvedGrowth, resolve_growth
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.run.restore import RestoreResult
from MaxText.training.optimizer import make_optimizer, scale_existing_slot_updates
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.state import TrainState
from MaxText.training.step import make_initialize, make_train_step
from tests.checkpointing.small_state import start as start_run
from tests.small_models import random_batch, tiny_config

SMALL = {
    "base_num_kv_heads": 4,
    "slot_num": 6,
    "logits_via_embedding": True,
    "base_num_decoder_layers": 2,
    "max_target_length": 8,
}


def config_of(**keys: Any) -> Config:
    """A TokenFormer of 2 layers, width 32 and 6 slots (24 in the feed-forward)."""
    return tiny_config("tokenformer", **(SMALL | keys))


class Program:
    """What train.py makes of a configuration; nothing is compiled before it is used."""

    def __init__(self, model, schedule, optimizer):
        self.model = model
        self._initialize = make_initialize(model, optimizer)
        self._key = jax.random.key(model.config.initialization.init_weights_seed)
        step = make_train_step(model, optimizer, schedule)
        self.step = jax.jit(step)

    @functools.cached_property
    def state(self) -> TrainState:
        """A fresh state."""
        return jax.jit(self._initialize)(self._key)

    @functools.cached_property
    def abstract(self) -> TrainState:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(self._initialize, self._key),
        )

    def random_state(self, steps: int = 0, seed: int = 0) -> TrainState:
        """A state of random parameters, without compiling anything.

        Args:
          steps: that it counts; moments are random as well, unless it is 0.
        """
        generator = np.random.default_rng(seed)

        def number(path, leaf):
            values = np.full(leaf.shape, steps)
            if np.issubdtype(leaf.dtype, np.floating):
                is_params = path[0].name == "params"
                values = 0.3 * generator.normal(size=leaf.shape) * (is_params or steps > 0)
                if not is_params:
                    values = np.abs(values)
                elif path[-1].key == "scale":
                    values = 1 + values
            return jnp.asarray(values, leaf.dtype)

        return jax.tree_util.tree_map_with_path(number, self.abstract)


def program(config: Config, resolved: ResolvedGrowth | None = None) -> Program:
    """The program of a configuration, or of what growth made of it."""
    existing_slots = resolved.existing_slots if resolved else {}
    factor = resolved.existing_slots_lr_scale if resolved else 1.0
    return _program(
        config.model, config.optimizer, config.schedule, tuple(existing_slots.items()), factor
    )


@functools.cache  # tests grow to few models in many ways
def _program(section, optimizer_section, schedule_section, existing_slots, factor) -> Program:
    model = Model(section)
    schedule = learning_rate_schedule(schedule_section)
    optimizer = make_optimizer(optimizer_section, schedule, model.parameters)
    optimizer = scale_existing_slot_updates(
        optimizer, model.parameters, dict(existing_slots), factor
    )
    return Program(model, schedule, optimizer)


def save(folder: Path, config: Config, state: TrainState, extra: dict | None = None) -> Path:
    """Saves a state as a run's checkpoint; returns the run."""
    checkpoints = CheckpointManager(folder / "checkpoints", config.checkpoint)
    metadata = checkpoint_metadata(flatten(config), state.params) | (extra or {})
    step = int(state.step) - 1
    checkpoints.save(step, state, {"step": step + 1, "samples": 4 * (step + 1)}, metadata)
    checkpoints.wait()
    return folder


def trained(config: Config, steps: int = 2) -> TrainState:
    """A state of random numbers, as after some steps."""
    return program(config).random_state(steps)


class Grown(NamedTuple):
    """A run that has just grown."""

    resolved: ResolvedGrowth
    program: Program
    start: RestoreResult

    @property
    def params(self) -> dict[str, np.ndarray]:
        return by_name(self.start.state.params)


def grow(folder: Path, source: Path, **keys: Any) -> Grown:
    """Starts a run as train.py does."""
    return grow_by(folder, config_of(load_parameters_path=str(source), **keys))


def grow_from_random(folder: Path, source: Path, **keys: Any) -> Grown:
    """The same with random numbers for what is initialized, which compiles nothing."""
    config = config_of(load_parameters_path=str(source), **keys)
    return grow_by(folder, config, program(config).random_state(seed=1))


def grow_by(folder: Path, config: Config, fresh: TrainState | None = None) -> Grown:
    """The same for any configuration; `fresh` is the state that initializing gives."""
    checkpoints = CheckpointManager(folder / "checkpoints", config.checkpoint)
    resolved = resolve_growth(config, [checkpoints.stored(step) for step in checkpoints.steps()])
    made = program(resolved.config, resolved)
    section, keys = resolved.config.checkpoint, flatten(resolved.config)
    copied = functools.partial(jax.tree.map, lambda x: x.copy())
    start, _ = start_run(
        folder, section, made.abstract, keys, lambda: copied(fresh or made.state), resolved
    )
    return Grown(resolved, made, start)


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Arrays of nested dicts by name, on the host."""
    return {
        "/".join(entry.key for entry in path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def logits_of(model: Model, params: Any, batch: Batch) -> np.ndarray:
    """Logits of a batch."""

    @jax.jit
    def run(params, batch):
        decoder = model.merge(params)
        return decoder.logits(decoder.hidden_states(batch)[0])

    return np.asarray(run(params, batch))


def logits(config: Config, params: Any) -> np.ndarray:
    """Logits of a random batch."""
    return logits_of(Model(config.model), params, random_batch(config, 4, seed=9))


def stored_in(run: Path) -> checkpoint_files.StoredCheckpoint:
    """The newest checkpoint of a run."""
    return checkpoint_files.resolve_checkpoint(str(run), "test")
