"""Our train step for benchmarks, and the timing of alternatives in turn."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from MaxText.config.loading import load_config
from MaxText.layers.batch import Batch, batch_shapes
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.assembly import setup_train


class CompiledStep(NamedTuple):
    """A compiled step; `one_step` runs it on existing devices."""

    program: Any
    seconds: float
    cpu_seconds: float  # of all threads of this process, so that other load counts little
    one_step: Callable[[], Any]


def compiled_step(keys: Mapping[str, Any], devices: Sequence[Any]) -> CompiledStep:
    """Compiles the step of train.py, without its guard, on random ids."""
    config = load_config(
        **{"dataset_type": "synthetic", "steps": 1000, "skip_step_on_spikes": False, **keys}
    )
    sharding = make_sharding_plan(config.mesh, devices, config.model.pipeline)
    setup = setup_train(config, sharding)
    for choice in setup.auto_choices:
        print(f"    {choice}")
    shape = setup.model.config.shape
    rows = round(keys["per_device_batch_size"] * len(devices))
    shapes = batch_shapes(rows, shape.max_target_length, with_documents=False)
    began = time.process_time()
    program, seconds = sharding.compile_step(
        setup.step, setup.abstract_state, sharding.abstract_batch(shapes), setup.compiler_options
    )
    cpu_seconds = time.process_time() - began
    carried: list[Any] = []

    def one_step() -> None:
        if not carried:
            ids = random_ids(shape.vocab_size, rows, shape.max_target_length)
            batch = Batch(ids[:, :-1], ids[:, 1:], np.ones(shapes.loss_mask_BT.shape, np.float32))
            carried.append(sharding.init_state(setup.initialize, setup.abstract_state, seed=0))
            carried.append(sharding.to_global_batch(batch, rows))
        carried[0], _ = jax.block_until_ready(program(*carried))

    return CompiledStep(program, seconds, cpu_seconds, one_step)


def random_ids(vocabulary: int, rows: int, length: int) -> np.ndarray:
    """Returns ids of sequences and of their last targets."""
    return np.random.default_rng(0).integers(0, vocabulary, (rows, length + 1), np.int32)


def interleaved_seconds(
    sides: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, np.ndarray]:
    """Returns each side's seconds per round, after one round to warm up.

    Ratios within a round do not see drifts of the machine's speed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: np.array(taken) for name, taken in seconds.items()}


def ratio_words(ratios: np.ndarray) -> str:
    """Describes ratios of all rounds."""
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"median {middle:.3f}, quartiles {low:.3f} to {high:.3f} ({len(ratios)} rounds)"
