"""A scan over layers that read sums of all hidden states before them.

Written out, each layer reads another number of states, and compiling takes as long as there are
layers. Here the states are one array, the history, that the loop carries and writes into, and a sum
reads as many of them as its turn has (Xiao et al. 2025, arXiv 2502.12170, figure 2, as a loop). The
backward pass is our own: automatic gradients would keep that array once for each layer. It carries
the gradients of all states in one array, too, and adds to them in place.

Legend: B sequences, T tokens, D emb_dim, L layers, H = L + 1 states, S sources of a sum at most,
J sums inside the loop, C ways, M of them with a norm, E weights of a token, K hidden width of what
makes these weights.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.configuration.model_sections import RematPolicy
from MaxText.layers.activations import ACTIVATIONS
from MaxText.layers.connections import (
    DenseConnections,
    DepthSum,
    Inputs,
    product_of_normalized_backward,
    product_of_normalized_forward,
)
from MaxText.layers.depth_mixing import NO_NORMS, Norms, normalizes
from MaxText.layers.depth_reading import (
    Reading,
    Sources,
    Sum,
    differentiate,
    has_kernel,
    num_lanes,
    padded,
    read,
)
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.stack import rematerialized
from MaxText.parallelism.constraints import constrain, platform

# (weights of a layer, its inputs, its index, its place in the pattern, arrays) -> (y, scalars)
Apply = Callable[[Any, Inputs, jax.Array, int, Any], tuple[jax.Array, dict[str, jax.Array]]]
_STATE = ("activation_batch", "activation_length", "activation_embed")


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


def _parameters_of(one: DepthSum, num_sources: int) -> SumWeights:
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


def _stacked_parameters(connections: DenseConnections, plan: Plan) -> SumWeights:
    """Of all sums inside the loop, that before the first layer being the identity."""
    num_sums, num_sources = plan.places_JS.shape
    depths = [str(j * plan.every) for j in range(1, num_sums)]
    found = [_parameters_of(connections.after[depth], num_sources) for depth in depths]
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


class _Kept(NamedTuple):
    """What a sum keeps for the backward pass besides hidden states: few numbers of each token."""

    weights_BTE: jax.Array
    product_BTK: jax.Array | None
    inverse_rms_BT1: jax.Array | None


class _Given(NamedTuple):
    """All that gradients are taken of."""

    x_BTD: jax.Array
    layers: Any
    sums: SumWeights
    last: SumWeights
    factors_JMD: jax.Array | None


def walk_with_history(
    layers: Any,
    connections: DenseConnections,
    x_BTD: jax.Array,
    apply: Apply,
    arrays: Any,
    *,
    period: int,
    policy: RematPolicy,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends `x_BTD` through all layers, each with the sums that it reads, and the last sum.

    Args:
      layers: what `stack` returned, of layers that are alike.
      apply: makes a layer's output. It may read no traced values besides its arguments.
      arrays: what it reads besides inputs; nothing of it has a gradient.
      period: length of the pattern of kinds that layers follow.
      policy: what each layer's backward pass computes again. Sums are always made again.

    Returns:
      r of the sum after the last layer, and each scalar summed over layers.
    """
    plan = plan_of(connections, period)
    walk = _Walk(layers, connections, plan, apply, x_BTD, policy)

    @jax.custom_vjp
    def run(given: _Given, arrays: Any):
        return walk.forward(given, arrays, keep=False)[0]

    def run_forward(given: _Given, arrays: Any):
        results, history, kept = walk.forward(given, arrays, keep=True)
        return results, (given, arrays, history, kept)

    def run_backward(kept, gradients):
        given, arrays, history_HBTD, rest = kept
        return walk.backward(given, arrays, history_HBTD, rest, gradients), None

    run.defvjp(run_forward, run_backward)
    return run(walk.given, arrays)


class _Walk:
    """The loop forward and backward, and what both know when they are traced."""

    def __init__(
        self,
        layers: Any,
        connections: DenseConnections,
        plan: Plan,
        apply: Apply,
        x_BTD: jax.Array,
        policy: RematPolicy,
    ):
        self.graphdef, state = nnx.split(layers)
        self.plan, self.apply = plan, apply
        self.policy: RematPolicy = policy
        self.section = section = connections.section
        self.num_layers = num_layers = connections.num_layers
        self.num_turns = num_layers // plan.period
        self.inner = connections.after[str(num_layers - plan.every)]
        self.outer = connections.after[str(num_layers)]
        kernel = section.dense_mixing == "kernel" and has_kernel(x_BTD, len(plan.last))
        norms, factors_LMD = NO_NORMS, None
        if kernel and not section.adds and normalizes(section.dense_mixing, x_BTD):
            norms, factors_LMD = _norms(layers, self.inner.ways)
        self.reading = Reading(len(self.inner.ways), float(np.mean(plan.counts_J)), norms, kernel)
        self.reading_last = Reading(len(self.outer.ways), len(plan.last), kernel=kernel)
        # By the backward pass of the sum after it, from the same read.
        self.made_before = kernel and plan.nested
        self.residuals: dict[int, Any] = {}
        self.given = _Given(
            x_BTD,
            nnx.to_pure_dict(state),
            _stacked_parameters(connections, plan),
            _parameters_of(self.outer, len(plan.last)),
            None if factors_LMD is None else factors_LMD[:: plan.every],
        )

    def forward(self, given: _Given, arrays: Any, *, keep: bool):
        """The results, the history, and what else the backward pass reads."""
        plan, num_layers = self.plan, self.num_layers
        shape, dtype = given.x_BTD.shape, given.x_BTD.dtype
        # Nothing reads a state before it is there.
        history_HBTD = jax.lax.empty((num_layers + 1, *shape), dtype)
        history_HBTD = _with_state(history_HBTD, given.x_BTD, 0)

        def one_turn(history_HBTD, first):
            kept_sums, kept_layers, found = [], [], []
            for place in range(plan.period):
                index = first + place
                x_BTD = _at(history_HBTD, index)
                read_BTD: Any = {"x": x_BTD}
                if place % plan.every == 0:
                    j = index // plan.every
                    own = _at(given.sums, j)
                    weights_BTE, kept = self._weigh(self.inner, own, x_BTD)
                    kept_sums.append(kept)
                    sources = self._sources(j)
                    one = Sum(weights_BTE, sources.count, _at(given.factors_JMD, j))
                    sums = read(history_HBTD, sources, one, self.reading)
                    read_BTD = self._read(sums, x_BTD, own)
                weights = _at(given.layers, index)
                (y_BTD, scalars), kept = self._layer(place, weights, read_BTD, index, arrays, keep)
                kept_layers.append(kept)
                found.append(scalars)
                history_HBTD = _with_state(history_HBTD, y_BTD, index + 1)
            return history_HBTD, (found, (kept_sums, kept_layers) if keep else None)

        history_HBTD, (found, kept) = jax.lax.scan(one_turn, history_HBTD, self._firsts())
        totals: dict[str, jax.Array] = {}
        for scalars in found:
            totals |= {name: totals.get(name, 0) + jnp.sum(x) for name, x in scalars.items()}
        x_BTD = history_HBTD[num_layers]
        weights_BTE, kept_last = self._weigh(self.outer, given.last, x_BTD)
        sources = self._last_sources()
        sums = read(history_HBTD, sources, Sum(weights_BTE, sources.count), self.reading_last)
        result_BTD = self._result(self._read(sums, x_BTD, given.last))
        return (result_BTD, totals), history_HBTD, (kept, kept_last)

    def backward(self, given: _Given, arrays: Any, history_HBTD, kept, gradients) -> _Given:
        """Gradients of all that is given."""
        plan = self.plan
        kept, kept_last = kept
        of_result_BTD, of_scalars = gradients

        x_BTD = history_HBTD[self.num_layers]
        sources = self._last_sources()
        one = Sum(kept_last.weights_BTE, sources.count)
        sums = [jnp.zeros_like(x_BTD)]
        if self.outer.post_norms:
            sums = read(history_HBTD, sources, one, self.reading_last)
        _, vjp = jax.vjp(self._result, self._read(sums, x_BTD, given.last))
        (of_read,) = vjp(of_result_BTD)
        before = self._before(given, kept, len(plan.counts_J) - 1, -1)
        whole = self.reading.kernel and len(plan.last) == plan.num_rows
        accumulated: Any = plan.num_rows
        if not whole:
            accumulated = jnp.zeros((plan.num_rows, *x_BTD.shape), x_BTD.dtype)
        found = differentiate(
            history_HBTD, sources, one, of_read["sums"], accumulated, self.reading_last, **before
        )
        of_last, of_x_BTD = self._weigh_backward(
            self.outer, given.last, x_BTD, kept_last, found.of_weights_BTE
        )
        of_last = of_last._replace(post_norms=of_read["post_norms"])
        of_rows = found.of_states_RBTD
        of_y_BTD = _total(of_x_BTD, of_read.get("x"), of_rows[plan.row_of[self.num_layers]])

        def one_turn(carry, given_of_turn):
            of_rows, of_y_BTD, sums, so_far = carry
            first, (kept_sums, kept_layers) = given_of_turn
            of_layers, of_sums, of_factors = so_far
            for place in reversed(range(plan.period)):
                index = first + place
                x_BTD = _at(history_HBTD, index)
                weights = _at(given.layers, index)
                has_sum, which, j = (
                    place % plan.every == 0,
                    place // plan.every,
                    index // plan.every,
                )
                read_BTD: Any = {"x": x_BTD}
                if has_sum:
                    own, sources = _at(given.sums, j), self._sources(j)
                    weights_BTE = kept_sums[which].weights_BTE
                    one = Sum(weights_BTE, sources.count, _at(given.factors_JMD, j))
                    if not self.made_before:
                        sums = read(history_HBTD, sources, one, self.reading)
                    read_BTD = self._read(sums, x_BTD, own)
                before_BTD, of_y = (weights, read_BTD), (of_y_BTD, of_scalars)
                of_weights, of_read = self._layer_backward(
                    place, before_BTD, index, arrays, kept_layers[place], of_y
                )
                if plan.period > 1 and platform() == "tpu":
                    # As where layers are written out: see walk_written_out.
                    of_weights, of_read = jax.lax.optimization_barrier((of_weights, of_read))
                of_layers = _put(of_layers, of_weights, index)
                of_x_BTD, through_weights_BTD = of_read.get("x"), None
                if has_sum:
                    before = self._before(given, kept, j - 1, which - 1)
                    found = differentiate(
                        history_HBTD, sources, one, of_read["sums"], of_rows, self.reading, **before
                    )
                    of_rows, sums = found.of_states_RBTD, found.before
                    of_own, through_weights_BTD = self._weigh_backward(
                        self.inner, own, x_BTD, kept_sums[which], found.of_weights_BTE
                    )
                    of_own = of_own._replace(post_norms=of_read["post_norms"])
                    of_sums = _put(of_sums, of_own, j)
                    of_factors = _put(of_factors, found.of_factors_MD, j)
                of_row_BTD = None
                if plan.read_at(place):
                    of_row_BTD = _at(of_rows, jnp.asarray(plan.rows_H)[index])
                of_y_BTD = _total(through_weights_BTD, of_x_BTD, of_row_BTD)
            so_far = (of_layers, of_sums, of_factors)
            return (of_rows, of_y_BTD, sums if self.made_before else [], so_far), None

        so_far = jax.tree.map(jnp.zeros_like, (given.layers, given.sums, given.factors_JMD))
        carry = (of_rows, of_y_BTD, found.before, so_far)
        (_, of_y_BTD, _, so_far), _ = jax.lax.scan(
            one_turn, carry, (self._firsts(), kept), reverse=True
        )
        of_layers, of_sums, of_factors_JMD = so_far
        return _Given(of_y_BTD, of_layers, of_sums, of_last, of_factors_JMD)

    def _firsts(self) -> jax.Array:
        """The first layer of each turn."""
        return jnp.arange(0, self.num_layers, self.plan.period)

    def _sources(self, j: jax.Array) -> Sources:
        places_JS = self.plan.places_JS
        arrays = (self.plan.counts_J, places_JS, self.plan.rows_H[places_JS])
        return Sources(*(_at(jnp.asarray(x), j) for x in arrays))

    def _last_sources(self) -> Sources:
        places_S = np.array(self.plan.last, np.int32)
        rows_S = self.plan.rows_H[places_S]
        return Sources(jnp.int32(len(places_S)), jnp.asarray(places_S), jnp.asarray(rows_S))

    def _before(self, given: _Given, kept: Any, j: Any, which: int) -> dict[str, Any]:
        """What sum j is made again of, which was made at this sum of its turn, or of the last."""
        if not self.made_before:
            return {}
        kept_sums, _ = kept
        j = jnp.maximum(j, 0)  # nothing reads what stands before the first sum
        weights_BTE = _at(kept_sums[which].weights_BTE, j // len(kept_sums))
        count = jnp.asarray(self.plan.counts_J)[j]
        one = Sum(weights_BTE, count, _at(given.factors_JMD, j))
        return {"before": one, "reading_before": self.reading}

    def _weigh(self, of: DepthSum, own: SumWeights, x_BTD: jax.Array) -> tuple[jax.Array, "_Kept"]:
        """Weights [B, T, E] of a sum after the state x, and what their gradients need."""
        if of.norm is None or own.wi_JDK is None:
            shape = (*x_BTD.shape[:2], own.fixed_JE.shape[-1])
            weights_BTE = jnp.broadcast_to(own.fixed_JE, shape)
            return weights_BTE, _Kept(weights_BTE, None, None)
        _, kept = product_of_normalized_forward(
            x_BTD, own.wi_JDK.astype(x_BTD.dtype), of.norm.epsilon, self._precision(of)
        )
        _, _, inverse_rms_BT1, product_BTK = kept
        weights_BTE = self._weights(of, own, (inverse_rms_BT1 * product_BTK).astype(x_BTD.dtype))
        return weights_BTE, _Kept(weights_BTE, product_BTK, inverse_rms_BT1)

    def _weigh_backward(
        self, of: DepthSum, own: SumWeights, x_BTD: jax.Array, kept: "_Kept", of_weights_BTE
    ) -> tuple[SumWeights, jax.Array | None]:
        """Gradients of the parameters, and of x."""
        if own.wi_JDK is None or of.norm is None:
            of_fixed_E = jnp.sum(of_weights_BTE, axis=(0, 1))
            return SumWeights(of_fixed_E, None, None, {}), None
        assert kept.inverse_rms_BT1 is not None
        assert kept.product_BTK is not None
        y_BTK = (kept.inverse_rms_BT1 * kept.product_BTK).astype(x_BTD.dtype)
        _, vjp = jax.vjp(functools.partial(self._weights, of), own, y_BTK)
        of_own, of_y_BTK = vjp(of_weights_BTE)
        kernel_DK = own.wi_JDK.astype(x_BTD.dtype)
        of_x_BTD, of_kernel_DK = product_of_normalized_backward(
            of.norm.epsilon,
            self._precision(of),
            (x_BTD, kernel_DK, kept.inverse_rms_BT1, kept.product_BTK),
            of_y_BTK,
        )
        return of_own._replace(wi_JDK=of_kernel_DK.astype(own.wi_JDK.dtype)), of_x_BTD

    def _weights(self, of: DepthSum, own: SumWeights, y_BTK: jax.Array) -> jax.Array:
        assert own.wo_JKE is not None
        hidden_BTK = ACTIVATIONS[self.section.dense_activation](y_BTK)
        moving_BTE = jnp.einsum(
            "btk,ke->bte",
            hidden_BTK,
            own.wo_JKE.astype(hidden_BTK.dtype),
            precision=self._precision(of),
        )
        return own.fixed_JE + moving_BTE.astype(jnp.float32)

    def _precision(self, of: DepthSum) -> Any:
        return None if of.wi is None else of.wi.precision

    def _read(self, sums: list[jax.Array], x_BTD: jax.Array, own: SumWeights) -> dict[str, Any]:
        """What stands before a layer: only what is read, since all of it has a gradient."""
        found: dict[str, Any] = {"sums": sums, "post_norms": own.post_norms}
        if self.section.adds or "r" not in self.section.dense_ways:
            found["x"] = x_BTD
        return found

    def _result(self, read_BTD: dict[str, Any]) -> jax.Array:
        """r after the last layer."""
        return self.outer.outputs(
            read_BTD["sums"], read_BTD.get("x"), read_BTD["post_norms"], NO_NORMS
        )["r"]

    def _inputs(self, read_BTD: dict[str, Any]) -> Inputs:
        if "sums" not in read_BTD:
            return Inputs.all(read_BTD["x"])
        x_BTD: Any = read_BTD.get("x")
        outputs = self.inner.outputs(
            read_BTD["sums"], x_BTD, read_BTD["post_norms"], self.reading.norms
        )
        rest = outputs.get("r", x_BTD)
        return Inputs(*(outputs.get(way, rest) for way in Inputs._fields))

    def _block(self, place: int, index, arrays, weights, read_BTD):
        layer = nnx.merge(self.graphdef, weights)
        return self.apply(layer, self._inputs(read_BTD), index, place, arrays)

    def _layer(self, place: int, weights, read_BTD, index, arrays, keep: bool):
        """A layer's output, and what `policy` keeps of it besides all that stands before it."""
        block = functools.partial(self._block, place, index, arrays)
        if not keep or self.policy == "full":
            return block(weights, read_BTD), []
        block = rematerialized(block, self.policy, in_scan=self.num_turns > 1)
        results, vjp = jax.vjp(block, weights, read_BTD)
        leaves, structure = jax.tree.flatten(vjp)
        # What stands before the layer is there in the backward pass, too, or is made again.
        known = {
            id(x): i for i, x in enumerate(jax.tree.leaves((weights, read_BTD, index, arrays)))
        }
        origins = [known.get(id(leaf)) for leaf in leaves]
        self.residuals[place] = (structure, origins)
        kept = [leaf for leaf, i in zip(leaves, origins, strict=True) if i is None]
        return results, kept

    def _layer_backward(self, place: int, given, index, arrays, kept, gradients):
        """Gradients of what is given: the weights, and what stands before the layer."""
        weights, read_BTD = given
        if self.policy == "full":
            block = functools.partial(self._block, place, index, arrays)
            _, vjp = jax.vjp(block, weights, read_BTD)
            return vjp(gradients)
        structure, origins = self.residuals[place]
        known = jax.tree.leaves((weights, read_BTD, index, arrays))
        rest = iter(kept)
        leaves = [next(rest) if i is None else known[i] for i in origins]
        return jax.tree.unflatten(structure, leaves)(gradients)


def _norms(layers: Any, ways: Sequence[str]) -> tuple[Norms, jax.Array | None]:
    """Norms of stacked layers that a kernel can do along with sums, and their factors [L, M, D]."""
    of_ways = [(place, layers.norms_of_ways.get(way)) for place, way in enumerate(ways)]
    chosen = [(place, norm) for place, norm in of_ways if isinstance(norm, RMSNorm)]
    if not chosen:
        return NO_NORMS, None
    places, modules = zip(*chosen, strict=True)
    num_layers = jax.tree.leaves(nnx.state(layers))[0].shape[0]
    factors = [jnp.broadcast_to(norm.factors(), (num_layers, norm.size)) for norm in modules]
    return Norms(places, modules[0].epsilon), jnp.stack(factors, axis=1)


def _at(stacked: Any, index: Any) -> Any:
    """One of each array's leading dimension."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _put(stacked: Any, own: Any, index: Any) -> Any:
    """The reverse of `_at`, in place."""
    return jax.tree.map(
        lambda x, one: jax.lax.dynamic_update_index_in_dim(x, one, index, 0), stacked, own
    )


def _with_state(history_HBTD: jax.Array, x_BTD: jax.Array, index: Any) -> jax.Array:
    return constrain(_put(history_HBTD, x_BTD, index), None, *_STATE)


def _total(*gradients: jax.Array | None) -> jax.Array:
    """In float32, of those that are there, in their own format."""
    there = [g for g in gradients if g is not None]
    return functools.reduce(jnp.add, [g.astype(jnp.float32) for g in there]).astype(there[0].dtype)
