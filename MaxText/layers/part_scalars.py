"""The scalars that a part returns beside its output: losses, metrics and statistics.

A loss is an array, which is minimized. A `Metric` is reported and not minimized. A `Statistic` is
what the rule of an untrained weight reads (`param(update_rule=...)`). All are summed over layers,
microbatches and devices, idle stages of a pipeline left out.
"""

import dataclasses

import jax
import jax.numpy as jnp

from MaxText.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A mean that is reported and not minimized: total / weight, of all layers that return it.

    Attributes:
      total: Sum over the tokens of the batch, float32 scalar; or [L], of `by_layer`.
      weight: What the sum over layers and microbatches is divided by, float32 scalar: for a mean
        over tokens their number, without padding.
    """

    total: jax.Array
    weight: jax.Array

    @property
    def mean(self) -> jax.Array:
        """The mean; 0 without any weight."""
        has_weight = self.weight > 0
        return jnp.where(has_weight, self.total / jnp.where(has_weight, self.weight, 1), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistic:
    """What the update rule of a weight reads of a batch, as the weight's gradient.

    Sums over layers, microbatches, devices and stages exist for gradients, so the statistic takes
    their way: the loss gets a term that is 0, and whose gradient with respect to the weight is the
    statistic. The train step gives that gradient to the rule. It is no part of gradient norms.

    Attributes:
      term: The term of the loss, 0.
    """

    term: jax.Array

    @classmethod
    def of(cls, weight: jax.Array, statistic: jax.Array) -> "Statistic":
        """Returns the statistic of a weight.

        Args:
          weight: Its value, declared with an `update_rule`.
          statistic: Of its shape and dtype: a sum over the tokens of the batch.
        """
        difference = weight - jax.lax.stop_gradient(weight)  # 0, with the gradient of the weight
        return cls(jnp.sum(difference * jax.lax.stop_gradient(statistic)))


Losses = dict[str, jax.Array]  # by name, sums over tokens
Scalars = dict[str, jax.Array | Metric | Statistic]  # by name


def add_scalars(first: Scalars, second: Scalars) -> Scalars:
    """Returns the scalars of both, those of the same name as their sum.

    Raises:
      UserError: A name is a loss in one and a metric or statistic in the other.
    """
    sums: Scalars = {}
    for name in first.keys() & second.keys():
        if jax.tree.structure(first[name]) != jax.tree.structure(second[name]):
            raise UserError(f"a layer returned {name!r} as a loss and as a metric: rename one")
        sums[name] = jax.tree.map(jnp.add, first[name], second[name])
    return first | second | sums


def sum_scalars(stacked: jax.Array) -> jax.Array:
    """Returns the sum of a scalar, or of arrays [L], over the iterations of a loop."""
    return jnp.sum(stacked, axis=0)


PER_LAYER = "/layer"  # end of the names of metrics [L]; no part may give a name with a slash


def by_layer(scalars: Scalars, index: jax.Array | int, num_layers: int) -> Scalars:
    """Returns a layer's scalars, and beside each metric one that keeps layers apart.

    It has arrays [L], 0 but for the layer, so that all sums over layers, microbatches, devices and
    stages of a pipeline serve it, too.

    Args:
      scalars: Of one layer.
      index: Of the layer, from 0; an array inside a scan.
      num_layers: L.
    """
    is_layer_L = jnp.arange(num_layers) == index
    return scalars | {
        f"{name}{PER_LAYER}": jax.tree.map(lambda x: jnp.where(is_layer_L, x, 0), scalar)
        for name, scalar in scalars.items()
        if isinstance(scalar, Metric)
    }
