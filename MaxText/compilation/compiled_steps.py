"""The train step, compiled for each batch shape of a run."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from MaxText.compilation import compilation_cache
from MaxText.layers.batch import Batch
from MaxText.training.state import TrainState
from MaxText.training.step import Metrics


class SavedSteps(NamedTuple):
    """Compiled steps in files, by the shapes of their batch."""

    load: Callable[[Any], Callable | None]
    save: Callable[[Any, jax.stages.Compiled, bool], None]  # shapes, step, from JAX's cache
    source: Literal["file", "cache"]  # compiled ahead of time, or by an earlier run


class ShapeSpecializedStep:
    """(state, batch) -> (state, metrics), compiled per batch shape."""

    def __init__(
        self,
        compile_for: Callable[[Batch], tuple[jax.stages.Compiled, float]],
        saved: SavedSteps | None = None,
        frozen: Mapping[str, Any] | None = None,
    ):
        """Creates a step without compiled programs.

        Args:
          compile_for: Batch shapes -> (compiled step, seconds).
          saved: Steps in files, tried first.
          frozen: Parameters that the objective reads and does not train, on the devices: a third
            argument of the compiled steps, if there are any.
        """
        self._compile_for = compile_for
        self._saved = saved
        self._frozen = (frozen,) if frozen else ()
        self._steps: dict[Hashable, Callable] = {}

    def fits(self, batch: Batch) -> bool:
        """Returns whether a step is compiled for batches of this shape."""
        return _key(batch) in self._steps

    def prepare(self, batch: Batch) -> dict[str, Any]:
        """Compiles for batches like this one, of arrays or jax.ShapeDtypeStruct.

        Returns:
          The fields of a "compile" event. `rows` is the global batch size; `source` is "" if
          compiled here, "cache" for a cache hit, "file" for an ahead-of-time program.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
        )
        began = time.perf_counter()
        saved = self._saved
        if saved and (step := saved.load(shapes)):
            seconds = time.perf_counter() - began
            source = saved.source
        else:
            hits = compilation_cache.thread_cache_hits()
            step, seconds = self._compile_for(shapes)
            source = "cache" if compilation_cache.thread_cache_hits() > hits else ""
            if saved:
                saved.save(shapes, step, bool(source))
        self._steps[_key(shapes)] = step
        rows, length = jax.tree.leaves(shapes)[0].shape
        shape = {"rows": rows, "length": length}
        return shape | {"compile_seconds": seconds, "source": source, "memory": memory_stats(step)}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Returns the new state and the metrics, by the step that `prepare` compiled.

        Returns at once: the devices may still be computing. Uses up (donates) the state.
        """
        return self._steps[_key(batch)](state, batch, *self._frozen)


def memory_stats(compiled: jax.stages.Compiled | Callable) -> dict[str, int]:
    """Returns bytes per device by XLA's memory analysis, if available.

    Temporaries are those at the peak: XLA's own sum is up to 49 % higher on TPU
    (docs/explanation/memory_model.md).
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    arguments = analysis.argument_size_in_bytes
    outputs = analysis.output_size_in_bytes
    temporaries = analysis.temp_size_in_bytes
    aliased = analysis.alias_size_in_bytes
    devices = jax.tree.leaves(compiled.input_shardings)[0].device_set
    if next(iter(devices)).platform != "cpu":  # CPU's peak omits temporaries
        temporaries = analysis.peak_memory_in_bytes - (arguments + outputs - aliased)
    return {
        "arguments": arguments,
        "outputs": outputs,
        "temporaries": temporaries,
        "aliased": aliased,
        "peak": arguments + outputs - aliased + temporaries,
    }


def _key(batch: Batch) -> Hashable:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(leaf.shape for leaf in leaves)
