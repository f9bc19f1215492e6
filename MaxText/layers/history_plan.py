"""Sums over depth as arrays for a loop: which states they read, and their parameters stacked.

Legend: D emb_dim, L layers, H = L + 1 states, S sources of a sum at most, J sums inside the loop,
C ways, E weights of a token, K hidden width of what makes these weights.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.layers.connections import DenseConnections, DepthSum
from MaxText.layers.depth_reading import num_lanes, padded


class Plan(NamedTuple):
    """Which states the sums read, as arrays for a loop. Sum j stands after j * every layers.

    Before the first layer stands a sum, too, of the embedding alone and with weight 1.

    Attributes:
      period: layers of one turn of the loop.
      every: layers from one sum to the next.
      counts_J: sources of each sum inside the loop.
      places_JS: which states; what stands behind the count is 0.
      last: sources of the sum after the last layer.
      row_of: state -> where its gradient stands, for states that sums read.
      rows_H: the same as an array, 0 for states that no sum reads.
      nested: whether each sum's sources begin with all those of the sum before.
    """

    period: int
    every: int
    counts_J: np.ndarray
    places_JS: np.ndarray
    last: tuple[int, ...]
    row_of: dict[int, int]
    rows_H: np.ndarray
    nested: bool

    @property
    def num_rows(self) -> int:
        """Of the gradients of states."""
        return len(self.row_of)

    def read_at(self, place: int) -> bool:
        """Whether sums read the states before the layers at this place of a turn."""
        return place in self.row_of


def plan_of(connections: DenseConnections, period: int) -> Plan:
    """The plan of layers whose kinds repeat after `period` of them."""
    section, num_layers = connections.section, connections.num_layers
    every = section.dense_period
    period = math.lcm(period, every)
    sources = [section.sources(depth) for depth in range(0, num_layers, every)]
    last = section.sources(num_layers)
    counts_J = np.array([len(one) for one in sources], np.int32)
    places_JS = np.zeros((len(sources), counts_J.max()), np.int32)
    for j, one in enumerate(sources):
        places_JS[j, : len(one)] = one
    # All states at a place of a turn have a row, or none of them.
    read = {place % period for one in (*sources, last) for place in one}
    row_of = {}
    for place in range(num_layers + 1):
        if place % period in read:
            row_of[place] = len(row_of)
    pairs = zip(sources, [*sources[1:], last], strict=True)
    nested = all(later[: len(earlier)] == earlier for earlier, later in pairs)
    rows_H = np.array([row_of.get(place, 0) for place in range(num_layers + 1)], np.int32)
    return Plan(period, every, counts_J, places_JS, last, row_of, rows_H, nested)


class SumWeights(NamedTuple):
    """Parameters of sums, of all of one loop or of a single one; J is absent then.

    What a sum lacks of the largest one is 0, so that it has no effect.

    Attributes:
      fixed_JE: float32 weights that are the same everywhere.
      wi_JDK: None without weights that depend on the token.
      wo_JKE: the same.
      post_norms: way -> the factors [J, D] of the norm that its sum goes through.
    """

    fixed_JE: jax.Array
    wi_JDK: jax.Array | None
    wo_JKE: jax.Array | None
    post_norms: dict[str, jax.Array]


def parameters_of(one: DepthSum, num_sources: int) -> SumWeights:
    """Of one sum, with room for so many sources."""
    C, S = len(one.ways), len(one.sources)
    E = num_lanes(num_sources, C)

    def laid_out(x_CS: jax.Array) -> jax.Array:
        """[..., C, S] -> [..., E]"""
        x_SC = jnp.swapaxes(x_CS, -1, -2)
        before = [(0, 0)] * (x_SC.ndim - 2)
        x_SC = jnp.pad(x_SC, [*before, (0, num_sources - S), (0, padded(C) - C)])
        flat = x_SC.reshape(*x_SC.shape[:-2], -1)
        return jnp.pad(flat, [*before, (0, E - flat.shape[-1])])

    wi_DK = wo_KE = None
    if one.wi is not None and one.wo is not None:
        wi_DK, wo_KE = one.wi.kernel[...], laid_out(one.wo.kernel[...])
    post_norms = {way: norm.factors() for way, norm in one.post_norms.items()}
    return SumWeights(laid_out(one.fixed()), wi_DK, wo_KE, post_norms)


def stacked_parameters(connections: DenseConnections, plan: Plan) -> SumWeights:
    """Of all sums inside the loop, that before the first layer being the identity."""
    num_sums, num_sources = plan.places_JS.shape
    depths = [str(j * plan.every) for j in range(1, num_sums)]
    found = [parameters_of(connections.after[depth], num_sources) for depth in depths]
    hidden = max((one.wi_JDK.shape[1] for one in found if one.wi_JDK is not None), default=0)

    def widened(one: SumWeights) -> SumWeights:
        if one.wi_JDK is None or one.wo_JKE is None:
            return one
        missing = hidden - one.wi_JDK.shape[1]
        wi_DK = jnp.pad(one.wi_JDK, ((0, 0), (0, missing)))
        return one._replace(wi_JDK=wi_DK, wo_JKE=jnp.pad(one.wo_JKE, ((0, missing), (0, 0))))

    found = [widened(one) for one in found]
    first = jax.tree.map(jnp.zeros_like, found[0])
    if not connections.section.adds:
        num_ways = len(connections.section.dense_ways)
        first = first._replace(fixed_JE=first.fixed_JE.at[:num_ways].set(1.0))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), first, *found)
