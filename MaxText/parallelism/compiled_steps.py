"""The train step compiled for each shape of batch that a run sees."""

from collections.abc import Callable
from typing import Any

import jax


class CompiledSteps:
    """(state, batch) -> (state, metrics) for batches of any shape, each compiled once.

    A run with one shape compiles before its first step; one whose batches grow compiles again when
    the first batch of another shape comes, and says so.
    """

    def __init__(
        self,
        compile_for: Callable[[Any], tuple[Callable, float]],
        show: Callable[[str], None],
    ):
        """
        Args:
          compile_for: shapes of a batch -> the compiled step and the seconds that took.
          show: takes a line about each further compilation.
        """
        self._compile_for = compile_for
        self._show = show
        self._steps: dict[Any, Callable] = {}

    def prepare(self, shapes: Any) -> float:
        """Compiles for batches of these shapes; returns the seconds it took."""
        step, seconds = self._compile_for(shapes)
        self._steps[_key(shapes)] = step
        return seconds

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        key = _key(batch)
        if key not in self._steps:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
            )
            seconds = self.prepare(shapes)
            rows, length = jax.tree.leaves(batch)[0].shape
            self._show(f"Compiled the train step for {rows} x {length} in {seconds:.1f} s")
        return self._steps[key](state, batch)


def _key(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(leaf.shape for leaf in leaves)
