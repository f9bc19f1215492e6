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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.configuration.model_sections import RematPolicy
from MaxText.layers.connections import DenseConnections, Inputs
from MaxText.layers.depth_mixing import NO_NORMS, Norms, normalizes
from MaxText.layers.depth_reading import (
    Product,
    Read,
    Reading,
    Sources,
    Sum,
    differentiate,
    has_kernel,
    read,
)
from MaxText.layers.history_plan import Plan, SumWeights, parameters_of, plan_of, stacked_parameters
from MaxText.layers.history_weights import TokenWeights
from MaxText.layers.normalization import RMSNorm
from MaxText.layers.stack import rematerialized
from MaxText.parallelism.constraints import HIDDEN, constrain, platform, token_by_token

# (weights of a layer, its inputs, its index, its place in the pattern, arrays) -> (y, scalars)
Apply = Callable[[Any, Inputs, jax.Array, int, Any], tuple[jax.Array, dict[str, jax.Array]]]


class Unread(NamedTuple):
    """A sum that is to be read, and what its weights are made of if that is known already."""

    one: Sum
    product: Product | None


class Given(NamedTuple):
    """All that gradients are taken of."""

    x_BTD: jax.Array
    layers: Any
    sums: SumWeights
    last: SumWeights
    factors_JMD: jax.Array | None


class Segment(NamedTuple):
    """Layers one after another, and where a loop over them finds what is theirs.

    Attributes:
      num_layers: how many.
      counts_I: int32, states that each of their sums reads: its own, or more, whose weights are 0.
      first: number of the first one in the model.
      base: place of the embedding in the history.
      base_row: where its gradient stands.
      stored: place of the first one's weights among those given.
      stride: from there to those of the next layer.
      has_work: of one of several passes through these layers, whose gradients are added up: whether
        any comes of it, those that are given for it being 0 otherwise. None: it is the only pass.
    """

    num_layers: int
    counts_I: Any
    first: Any = 0
    base: Any = 0
    base_row: Any = 0
    stored: Any = 0
    stride: int = 1
    has_work: Any = None

    def place_of_weights(self, local: Any) -> Any:
        """Of a layer counted from the first one of the segment."""
        return self.stored + local * self.stride


class Gradients(NamedTuple):
    """Of what a segment is given: of weights, summed over its passes, and of hidden states.

    Attributes:
      of_given: of layers, of sums inside the loop, and of their norms' factors.
      of_rows: of states that sums read, [R, B, T, D], or all of them but the last.
      of_y_BTD: of the state that the segment ends with; afterwards of the one it begins with.
      made: the last sum, and what its weights are made of; no sums where that is not made so.
    """

    of_given: tuple[Any, SumWeights, jax.Array | None]
    of_rows: jax.Array
    of_y_BTD: jax.Array
    made: Read


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
    walk = Walk(layers, connections, plan, apply, x_BTD, policy)
    all_layers = Segment(walk.num_layers, plan.counts_J)
    shape = (walk.num_layers + 1, *x_BTD.shape)

    def forward(given: Given, arrays: Any, *, keep: bool):
        # Nothing reads a state before it is there.
        history_HBTD = with_state(jax.lax.empty(shape, x_BTD.dtype), given.x_BTD, 0)
        history_HBTD, scalars, kept = walk.forward(
            history_HBTD, given, arrays, all_layers, keep=keep
        )
        return (walk.last(history_HBTD, given), scalars), history_HBTD, kept

    @jax.custom_vjp
    def run(given: Given, arrays: Any):
        return forward(given, arrays, keep=False)[0]

    def run_forward(given: Given, arrays: Any):
        results, history_HBTD, kept = forward(given, arrays, keep=True)
        return results, (given, arrays, history_HBTD, kept)

    def run_backward(kept, gradients):
        given, arrays, history_HBTD, kept = kept
        of_result_BTD, of_scalars = gradients
        # The last sum reads every state that any does: its kernel writes what others add to.
        of_rows = None
        if not (walk.reading.kernel and plan.last == tuple(plan.row_of)):
            of_rows = jnp.zeros((plan.num_rows, *x_BTD.shape), x_BTD.dtype)
        before = walk.before(history_HBTD, given, kept, all_layers, len(plan.counts_J) - 1, -1)
        of_last, of_rows, of_y_BTD, made = walk.last_backward(
            history_HBTD, given, of_result_BTD, of_rows, before
        )
        none_yet = jax.tree.map(jnp.zeros_like, (given.layers, given.sums, given.factors_JMD))
        so_far = Gradients(none_yet, of_rows, of_y_BTD, made)
        found = walk.backward(history_HBTD, given, arrays, all_layers, kept, of_scalars, so_far)
        of_layers, of_sums, of_factors_JMD = found.of_given
        return Given(found.of_y_BTD, of_layers, of_sums, of_last, of_factors_JMD), None

    run.defvjp(run_forward, run_backward)
    return run(walk.given(x_BTD), arrays)


class Walk:
    """The loop forward and backward, and what both know when they are traced."""

    def __init__(
        self,
        layers: Any,
        connections: DenseConnections,
        plan: Plan,
        apply: Apply,
        state_BTD: jax.Array,
        policy: RematPolicy,
    ):
        self.graphdef, self.weights = nnx.split(layers)
        self.plan, self.apply = plan, apply
        self.policy: RematPolicy = policy
        self.connections, self.section = connections, connections.section
        self.num_layers = num_layers = connections.num_layers
        self.inner = connections.after[str(num_layers - plan.every)]
        self.outer = connections.after[str(num_layers)]
        mixing = self.section.dense_mixing
        kernel = mixing == "kernel" and has_kernel(state_BTD, len(plan.last), len(self.inner.ways))
        self.weigh = TokenWeights(self.inner, state_BTD, kernel=kernel)
        self.weigh_last = TokenWeights(self.outer, state_BTD, kernel=kernel)
        norms, self.factors_LMD = NO_NORMS, None
        if kernel and not self.section.adds and normalizes(mixing, state_BTD):
            norms, self.factors_LMD = _norms(layers, self.inner.ways)
        self.reading = Reading(
            len(self.inner.ways), float(np.mean(plan.counts_J)), norms, kernel, self.weigh.recipe
        )
        self.reading_last = Reading(
            len(self.outer.ways), len(plan.last), NO_NORMS, kernel, self.weigh_last.recipe
        )
        # By the backward pass of the sum after it, from the same read.
        self.made_before = kernel and plan.nested
        self.residuals: dict[int, Any] = {}

    def given(self, x_BTD: jax.Array) -> Given:
        """All parameters, as the modules hold them, and the embedding."""
        plan, factors_LMD = self.plan, self.factors_LMD
        return Given(
            x_BTD,
            nnx.to_pure_dict(self.weights),
            stacked_parameters(self.connections, plan),
            parameters_of(self.outer, len(plan.last)),
            None if factors_LMD is None else factors_LMD[:: plan.every],
        )

    def forward(
        self, history_HBTD: jax.Array, given: Given, arrays: Any, segment: Segment, *, keep: bool
    ):
        """The history with the segment's states, scalars, and what the backward pass reads."""
        plan = self.plan

        def one_turn(history_HBTD, local):
            kept_sums, kept_layers, all_scalars = [], [], []
            for place in range(plan.period):
                index = segment.first + local + place
                x_BTD = _at(history_HBTD, segment.base + index)
                read_BTD: Any = {"x": x_BTD}
                if place % plan.every == 0:
                    j, sources = self._sources(segment, (local + place) // plan.every)
                    own = _at(given.sums, j)
                    unread = self._sum(given, j, sources, x_BTD)
                    product = unread.product
                    kept_sums.append(None if product is None else product.inverse_rms_BT1)
                    found = read(history_HBTD, sources, unread.one, self.reading)
                    read_BTD = self._read(found.sums, x_BTD, own)
                weights = _at(given.layers, segment.place_of_weights(local + place))
                (y_BTD, scalars), kept = self._layer(
                    place, weights, read_BTD, index, arrays, segment, keep
                )
                kept_layers.append(kept)
                all_scalars.append(scalars)
                state_BTD = token_by_token(y_BTD)
                history_HBTD = with_state(history_HBTD, state_BTD, segment.base + index + 1)
            return history_HBTD, (all_scalars, (kept_sums, kept_layers) if keep else None)

        history_HBTD, (all_scalars, kept) = jax.lax.scan(
            one_turn, history_HBTD, self._turns(segment)
        )
        totals: dict[str, jax.Array] = {}
        for scalars in all_scalars:
            totals |= {name: totals.get(name, 0) + jnp.sum(x) for name, x in scalars.items()}
        return history_HBTD, totals, kept

    def last(self, history_HBTD: jax.Array, given: Given, base: Any = 0) -> jax.Array:
        """r of the sum after the last layer."""
        x_BTD = _at(history_HBTD, base + self.num_layers)
        sources = self._last_sources(base, 0)
        weights, _ = self.weigh_last.for_sum(given.last, x_BTD, len(self.plan.last) - 1, None)
        found = read(history_HBTD, sources, Sum(weights, sources.count), self.reading_last)
        return self._result(self._read(found.sums, x_BTD, given.last))

    def last_backward(
        self,
        history_HBTD: jax.Array,
        given: Given,
        of_result_BTD: jax.Array,
        of_rows: jax.Array | None,
        before: Unread | None = None,
        base: Any = 0,
        base_row: Any = 0,
    ) -> tuple[SumWeights, jax.Array, jax.Array, Read]:
        """Gradients of the last sum's parameters, of states that sums read and of the last state.

        Besides, the sum before the last layers, made again.

        Args:
          of_rows: gradients of states so far; None as in `differentiate`. Then those that are
            returned have no row for the last state.
          before: what that is made of; None where it is not made so.
        """
        x_BTD = _at(history_HBTD, base + self.num_layers)
        sources = self._last_sources(base, base_row)
        product = self.weigh_last.product(given.last, x_BTD)
        one = Sum(self.weigh_last(given.last, product), sources.count)
        sums = [jnp.zeros_like(x_BTD)]
        if self.outer.post_norms:
            sums = read(history_HBTD, sources, one, self.reading_last).sums
        _, vjp = jax.vjp(self._result, self._read(sums, x_BTD, given.last))
        (of_read,) = vjp(of_result_BTD)
        found = differentiate(
            history_HBTD, sources, one, of_read["sums"], of_rows, self.reading_last,
            **self._making(before),
        )  # fmt: skip
        of_last, of_x_BTD = self.weigh_last.backward(
            given.last, x_BTD, product, found.of_weights_BTE
        )
        of_last = of_last._replace(post_norms=of_read["post_norms"])
        of_row_BTD = found.of_last_BTD
        if of_row_BTD is None:
            of_row_BTD = _at(found.of_states_RBTD, base_row + self.plan.row_of[self.num_layers])
        of_y_BTD = _total(of_x_BTD, of_read.get("x"), of_row_BTD)
        return of_last, found.of_states_RBTD, of_y_BTD, _made(found.before, before)

    def backward(
        self,
        history_HBTD: jax.Array,
        given: Given,
        arrays: Any,
        segment: Segment,
        kept: Any,
        of_scalars: dict[str, jax.Array],
        so_far: Gradients,
    ) -> Gradients:
        """Gradients before the segment, from those after it."""
        plan = self.plan

        def with_own(stacked: Any, own: Any, index: Any) -> Any:
            if segment.has_work is None:
                return _put(stacked, own, index)
            return _put(stacked, jax.tree.map(jnp.add, _at(stacked, index), own), index)

        def one_turn(so_far: Gradients, given_of_turn):
            (of_layers, of_sums, of_factors), of_rows, of_y_BTD, made = so_far
            local, (kept_sums, kept_layers) = given_of_turn
            for place in reversed(range(plan.period)):
                here = local + place
                if place + 1 < plan.period and platform() == "tpu":
                    # As where layers are written out: see walk_written_out. All that this layer
                    # reads waits until the weights' gradients of the one after it are in place.
                    of_layers, of_y_BTD, made, here = jax.lax.optimization_barrier(
                        (of_layers, of_y_BTD, made, here)
                    )
                index = segment.first + here
                x_BTD = _at(history_HBTD, segment.base + index)
                place_of_weights = segment.place_of_weights(here)
                weights = _at(given.layers, place_of_weights)
                has_sum, which, i = (
                    place % plan.every == 0,
                    place // plan.every,
                    here // plan.every,
                )
                read_BTD: Any = {"x": x_BTD}
                if has_sum:
                    j, sources = self._sources(segment, i)
                    own = _at(given.sums, j)
                    if not self.made_before:
                        again = self._sum(given, j, sources, x_BTD, kept_sums[which])
                        made = self._made_again(history_HBTD, sources, again)
                    product = made.product
                    read_BTD = self._read(made.sums, x_BTD, own)
                before_BTD, of_y = (weights, read_BTD), (of_y_BTD, of_scalars)
                of_weights, of_read = self._layer_backward(
                    place, before_BTD, index, arrays, kept_layers[place], of_y
                )
                of_layers = with_own(of_layers, of_weights, place_of_weights)
                of_read = jax.tree.map(token_by_token, of_read)
                of_x_BTD, through_weights_BTD = of_read.get("x"), None
                if has_sum:
                    of_way_sums = of_read["sums"]
                    if platform() == "tpu":
                        # Or the compiler copies this state out of the history at once, and again
                        # in another layout, and both wait while the layer's backward pass runs.
                        index, i, of_way_sums = jax.lax.optimization_barrier(
                            (index, i, of_way_sums)
                        )
                    x_BTD = token_by_token(_at(history_HBTD, segment.base + index))
                    factors_MD = _at(given.factors_JMD, j)
                    one = Sum(self.weigh(own, product), sources.count, factors_MD)
                    before = self.before(history_HBTD, given, kept, segment, i - 1, which - 1)
                    found = differentiate(
                        history_HBTD, sources, one, of_way_sums, of_rows, self.reading,
                        **self._making(before),
                    )  # fmt: skip
                    of_rows, made = found.of_states_RBTD, _made(found.before, before)
                    of_own, through_weights_BTD = self.weigh.backward(
                        own, x_BTD, product, found.of_weights_BTE
                    )
                    of_own = of_own._replace(post_norms=of_read["post_norms"])
                    of_sums = with_own(of_sums, of_own, j)
                    of_factors = with_own(of_factors, found.of_factors_MD, j)
                of_row_BTD = None
                if plan.read_at(place):
                    row = segment.base_row + jnp.asarray(plan.rows_H)[index]
                    of_row_BTD = _at(of_rows, row)
                    if segment.has_work is not None:
                        of_row_BTD = jnp.where(segment.has_work, of_row_BTD, 0)
                of_y_BTD = token_by_token(_total(through_weights_BTD, of_x_BTD, of_row_BTD))
            return Gradients((of_layers, of_sums, of_factors), of_rows, of_y_BTD, made), None

        turns = (self._turns(segment), kept)
        return jax.lax.scan(one_turn, so_far, turns, reverse=True)[0]

    def _turns(self, segment: Segment) -> jax.Array:
        """The first layer of each turn, counted from that of the segment."""
        return jnp.arange(0, segment.num_layers, self.plan.period)

    def _sources(self, segment: Segment, i: jax.Array) -> tuple[jax.Array, Sources]:
        """The number among all sums of a segment's sum i, and what that reads."""
        places_JS = self.plan.places_JS
        j = segment.first // self.plan.every + i
        count = _at(jnp.asarray(segment.counts_I), i)
        places_S, rows_S = (
            _at(jnp.asarray(x), j) for x in (places_JS, self.plan.rows_H[places_JS])
        )
        return j, Sources(count, segment.base + places_S, segment.base_row + rows_S)

    def _last_sources(self, base: Any, base_row: Any) -> Sources:
        places_S = np.array(self.plan.last, np.int32)
        rows_S = self.plan.rows_H[places_S]
        return Sources(
            jnp.int32(len(places_S)), base + jnp.asarray(places_S), base_row + jnp.asarray(rows_S)
        )

    def made_before_end(
        self, history_HBTD: jax.Array, given: Given, kept: Any, segment: Segment
    ) -> Read:
        """A segment's last sum, as `backward` goes on with."""
        i = segment.num_layers // self.plan.every - 1
        before = self.before(history_HBTD, given, kept, segment, i, -1)
        if before is None:
            return Read([])
        _, sources = self._sources(segment, jnp.int32(i))
        return self._made_again(history_HBTD, sources, before)

    def before(
        self, history_HBTD: jax.Array, given: Given, kept: Any, segment: Segment, i: Any, which: int
    ) -> Unread | None:
        """What a segment's sum i, at this place of a turn, is made again of by the sum after it.

        None where sums are made again by themselves.
        """
        if not self.made_before:
            return None
        kept_sums, _ = kept
        i = jnp.maximum(i, 0)  # nothing reads what stands before the first sum
        j, sources = self._sources(segment, i)
        place = segment.base + segment.first + i * self.plan.every
        x_BTD = token_by_token(_at(history_HBTD, place))
        inverse_rms_BT1 = _at(kept_sums[which], i // len(kept_sums))
        return self._sum(given, j, sources, x_BTD, inverse_rms_BT1)

    def _making(self, before: Unread | None) -> dict[str, Any]:
        """Arguments of `differentiate`."""
        return {} if before is None else {"before": before.one, "reading_before": self.reading}

    def _sum(
        self,
        given: Given,
        j: jax.Array,
        sources: Sources,
        x_BTD: jax.Array,
        inverse_rms_BT1: jax.Array | None = None,
    ) -> Unread:
        """Sum j of all, which stands after the state x."""
        own = _at(given.sums, j)
        place = _at(jnp.asarray(self.plan.counts_J), j) - 1
        weights, product = self.weigh.for_sum(own, x_BTD, place, inverse_rms_BT1)
        return Unread(Sum(weights, sources.count, _at(given.factors_JMD, j)), product)

    def _made_again(self, history_HBTD: jax.Array, sources: Sources, again: Unread) -> Read:
        return _made(read(history_HBTD, sources, again.one, self.reading, product=True), again)

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

    def _layer(self, place: int, weights, read_BTD, index, arrays, segment: Segment, keep: bool):
        """A layer's output, and what `policy` keeps of it besides all that stands before it."""
        block = functools.partial(self._block, place, index, arrays)
        if not keep or self.policy == "full":
            return block(weights, read_BTD), []
        block = rematerialized(block, self.policy, in_scan=segment.num_layers > self.plan.period)
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


def _made(found: Read, unread: Unread | None) -> Read:
    """With what weights are made of, whoever has made that."""
    if unread is None or unread.product is None:
        return found
    return found._replace(product=unread.product)


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


def with_state(history_HBTD: jax.Array, x_BTD: jax.Array, index: Any) -> jax.Array:
    """The history with x as its state at `index`."""
    return constrain(_put(history_HBTD, x_BTD, index), None, *HIDDEN)


def _total(*gradients: jax.Array | None) -> jax.Array:
    """In float32, of those that are there, in their own format."""
    there = [g for g in gradients if g is not None]
    return functools.reduce(jnp.add, [g.astype(jnp.float32) for g in there]).astype(there[0].dtype)
