"""Checks of training: initialization, resuming, several devices, updates of an optimizer.

Each function returns a description of the problem, or None.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.schema import Config
from MaxText.config.values import to_yaml
from MaxText.conformance.comparison import describe_difference, pair_arrays
from MaxText.conformance.subject import Subject, random_batch
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule, weight_decay_schedule
from MaxText.training.state import TrainState
from MaxText.training.step import TrainStep, make_initialize, make_train_step

MESHES: tuple[dict[str, int], ...] = (
    {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
)


def make_trainer(config: Config) -> tuple[Model, Callable[[jax.Array], TrainState], TrainStep]:
    """Returns a model, its train state initializer and its train step."""
    model = Model(config.model)
    schedule = learning_rate_schedule(config.schedule)
    decay_schedule = weight_decay_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters, decay_schedule)
    averaging = config.optimizer.parameter_average
    step = make_train_step(model, optimizer, schedule, optimizer_config=config.optimizer)
    return model, make_initialize(model, optimizer, averaging=averaging), step


def initialization(subject: Subject) -> str | None:
    """Checks that two initializations from one key are finite and equal."""
    draws = (jax.jit(make_trainer(subject.config)[1])(jax.random.key(0)) for _ in range(2))
    for name, array, second_draw in pair_arrays(*draws):
        if not np.isfinite(array).all():
            return f"{name} does not start with finite numbers"
        if not np.array_equal(array, second_draw):
            return f"{name} differs between two initializations from one key"
    return None


def eight_devices(subject: Subject) -> str | None:
    """Compares loss and gradients on several meshes with one device."""
    devices = jax.devices()
    if len(devices) < 8:
        return None
    batch = random_batch(subject.config, 8)
    loss = functools.partial(subject.loss, model=subject.models[0], batch=batch)
    expected = jax.jit(jax.value_and_grad(loss))(subject.params)
    for sizes in MESHES:
        config = subject.load_config(**sizes)
        sharding = make_sharding_plan(config.mesh, devices[:8])
        model = Model(config.model)
        shardings = sharding.abstract_state(model.initialize, model.parameters)
        params = jax.tree.map(
            lambda x, to: jax.device_put(x, to.sharding), subject.params, shardings
        )
        placed = sharding.to_global_batch(jax.tree.map(np.asarray, batch), 8)
        loss = functools.partial(subject.loss, model=model, batch=placed)
        actual = sharding.jit(jax.value_and_grad(loss))(params)
        if problem := describe_difference(actual, expected, 1e-5, 1e-4):
            return f"with {to_yaml(sizes)}, {problem}"
    return None


def resume(subject: Subject) -> str | None:
    """Checks a step from a saved state for equal bits in a new program."""
    config = subject.load_config(learning_rate=0.01, steps=4)
    _, initialize, step = make_trainer(config)
    step = jax.jit(step)
    state, _ = step(jax.jit(initialize)(jax.random.key(0)), subject.batch, subject.frozen)
    saved = jax.tree.map(np.asarray, state)
    continued, _ = step(state, subject.batch, subject.frozen)
    resumed_step = jax.jit(make_trainer(config)[2])
    saved = jax.tree.map(jnp.asarray, saved)
    resumed, _ = resumed_step(saved, subject.batch, subject.frozen)
    for name, continued_array, resumed_array in pair_arrays(continued, resumed):
        if not np.array_equal(continued_array, resumed_array):
            return f"{name} differs after a resumed step"
    return None


def updates(subject: Subject) -> str | None:
    """Checks steps: finite, moving all parameters, reducing the loss."""
    _, initialize, step = make_trainer(subject.load_config(learning_rate=0.003, steps=8))
    step = jax.jit(step)
    first = jax.jit(initialize)(jax.random.key(0))
    state = first
    losses = []
    for _ in range(8):
        state, metrics = step(state, subject.batch)
        losses.append(float(metrics["loss"]))
    for name, initial, trained in pair_arrays(first, state):
        if not np.isfinite(trained).all():
            return f"{name} is not finite after 8 steps"
        if (initial.shape, initial.dtype) != (trained.shape, trained.dtype):
            before = f"{initial.dtype}{initial.shape}"
            return f"{name} was {before}, and is {trained.dtype}{trained.shape} now"
    for name, initial, trained in pair_arrays(first.params, state.params):
        if np.array_equal(initial, trained):
            return f"{name} does not change"
    if not losses[-1] < losses[0]:
        return f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f} in 8 steps on one batch"
    return None


def updates_on_eight_devices(subject: Subject) -> str | None:
    """Compares updates of two steps on several meshes with one device."""
    devices = jax.devices()
    batch = random_batch(subject.config, 8)
    if len(devices) < 8:
        return None

    def moved(**sizes: int) -> dict[str, np.ndarray]:
        """Returns the change of each parameter in two steps on a mesh of these sizes."""
        config = subject.load_config(learning_rate=0.01, steps=4, **sizes)
        sharding = make_sharding_plan(config.mesh, devices[: math.prod(sizes.values())])
        model, initialize, step = make_trainer(config)
        abstract = sharding.abstract_state(initialize, model.parameters)
        state = sharding.init_state(initialize, abstract, 0)
        initial_params = jax.tree.map(np.asarray, state.params)
        placed = sharding.to_global_batch(jax.tree.map(np.asarray, batch), 8)
        shapes = sharding.abstract_batch(jax.eval_shape(lambda: placed))
        step, _ = sharding.compile_step(step, abstract, shapes)
        for _ in range(2):
            state, _ = step(state, placed)
        return {
            name: final - initial
            for name, final, initial in pair_arrays(state.params, initial_params)
        }

    expected = moved()
    for sizes in MESHES:
        actual = moved(**sizes)
        for name, expected_update in expected.items():
            # On average, because normalized updates magnify rounding of small gradients.
            error = np.abs(actual[name] - expected_update).mean() / np.abs(expected_update).mean()
            if not error <= 0.02:
                return f"with {to_yaml(sizes)}, updates of {name} differ by {error:.0%}"
    return None
