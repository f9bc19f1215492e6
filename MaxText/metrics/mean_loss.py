"""Mean losses between two reports, accumulated on the device."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_AVERAGED = ("loss", "lm_loss", "entmax_loss", "z_loss")


class MeanLoss:
    """Mean losses since the last report, without skipped steps unless all were skipped."""

    def __init__(self):
        self._sums: dict[str, Any] = {}
        self._count: Any = None
        self._updates = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        losses = {name: metrics[name] for name in _AVERAGED if name in metrics}
        skipped = metrics.get("skipped", np.zeros((), np.int32))
        if self._updates == 0:
            # Costs nothing if every step is reported.
            self._sums, self._count = losses, skipped
        elif self._updates == 1:
            self._sums, self._count = _add_second(self._sums, self._count, losses, skipped)
        else:
            self._sums, self._count = _add(self._sums, self._count, losses, skipped)
        self._updates += 1

    def take(self) -> dict[str, float]:
        """Blocks for the means and resets; empty if they equal the last step's losses."""
        sums, count, updates = jax.device_get((self._sums, self._count, self._updates))
        self.__init__()
        if updates < 2 or count == 0:
            return {}
        return {name: np.asarray(value).item() / int(count) for name, value in sums.items()}


@jax.jit
def _add_second(first: Any, first_skipped: Any, losses: Any, skipped: Any) -> Any:
    nothing = jax.tree.map(jnp.zeros_like, first)
    sums, count = _sum(nothing, jnp.int32(0), first, first_skipped)
    return _sum(sums, count, losses, skipped)


@jax.jit
def _add(sums: Any, count: Any, losses: Any, skipped: Any) -> Any:
    return _sum(sums, count, losses, skipped)


def _sum(sums: Any, count: Any, losses: Any, skipped: Any) -> tuple[Any, Any]:
    # A skipped step's loss may be NaN, which multiplication by zero would keep.
    added = jax.tree.map(lambda s, loss: s + jnp.where(skipped == 0, loss, 0.0), sums, losses)
    return added, count + (skipped == 0)
