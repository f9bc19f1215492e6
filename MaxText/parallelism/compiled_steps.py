"""The train step compiled for each shape of batch that a run sees."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from MaxText.parallelism import compilation_cache


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What compiling for one shape of batch gave.

    Attributes:
      rows: of the batch, over all devices.
      length: tokens of a row.
      compile_seconds: wall time.
      source: "" where it was compiled here, "cache" where jax had a whole program on disk, "file"
        for one that train_compile.py made.
      memory: bytes on each device: arguments, outputs, temporaries, aliased (arguments whose memory
        becomes an output's) and peak (all of them at once); empty where the backend does not say.
    """

    rows: int
    length: int
    compile_seconds: float
    source: str
    memory: dict[str, int]


class CompiledSteps:
    """(state, batch) -> (state, metrics) for batches of any shape, each compiled once.

    A run with one shape compiles before its first step; one whose batches grow compiles again when
    the first batch of another shape comes.
    """

    def __init__(
        self,
        compile_for: Callable[[Any], tuple[Callable, float]],
        saved_for: Callable[[Any], Callable | None] | None = None,
    ):
        """
        Args:
          compile_for: shapes of a batch -> the compiled step and the seconds that took.
          saved_for: shapes of a batch -> the step that was compiled ahead of time, or None.
        """
        self._compile_for = compile_for
        self._saved_for = saved_for or (lambda shapes: None)
        self._steps: dict[Any, Callable] = {}

    def fits(self, batch: Any) -> bool:
        """Whether the step is compiled for batches of this shape."""
        return _key(batch) in self._steps

    def prepare(self, batch: Any) -> Compilation:
        """Compiles for batches like this one, which may be arrays or jax.ShapeDtypeStruct."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
        )
        began = time.perf_counter()
        step = self._saved_for(shapes)
        if step is not None:
            seconds, source = time.perf_counter() - began, "file"
        else:
            hits = compilation_cache.hits_of_this_thread()
            step, seconds = self._compile_for(shapes)
            source = "cache" if compilation_cache.hits_of_this_thread() > hits else ""
        self._steps[_key(shapes)] = step
        rows, length = jax.tree.leaves(shapes)[0].shape
        return Compilation(rows, length, seconds, source, memory_of(step))

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return self._steps[_key(batch)](state, batch)


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes that a compiled program needs on each device, by the compiler's own analysis.

    Temporaries are those at the peak. All that there are of a TPU program whose state takes the old
    one's place are up to 49 % more (docs/plan.md).
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    arguments, outputs = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    temporaries, aliased = analysis.temp_size_in_bytes, analysis.alias_size_in_bytes
    if _platform_of(compiled) != "cpu":  # there the peak leaves temporaries out
        temporaries = analysis.peak_memory_in_bytes - (arguments + outputs - aliased)
    return {
        "arguments": arguments,
        "outputs": outputs,
        "temporaries": temporaries,
        "aliased": aliased,
        "peak": arguments + outputs - aliased + temporaries,
    }


def _platform_of(compiled: Any) -> str:
    sharding = jax.tree.leaves(compiled.input_shardings)[0]
    return next(iter(sharding.device_set)).platform


def _key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(leaf.shape for leaf in leaves)
