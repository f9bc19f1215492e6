"""Mixture of experts: a feed-forward of experts, few per token.

A router chooses K of E experts for each token. `RoutedMoE` then computes the experts in one of two
ways: with a capacity, each expert has a fixed number of slots for tokens of a group (GShard, Switch
Transformer), which experts on other devices need; without one, tokens are sorted by expert and no
token is dropped (MegaBlocks).

Legend: B sequences, T tokens, D emb_dim, E experts, F width of an expert, K experts per token, G
groups, S tokens of a group, C capacity of an expert for a group, P = K * S pairs of a choice and a
token, L = E * C slots.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from MaxText.config.layer_sections import FeedForwardConfig, MoEConfig
from MaxText.layers.capture import record, tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, dot_in_double, is_exact_on_cpu
from MaxText.layers.feed_forward.activations import ACTIVATIONS, clamped
from MaxText.layers.lowering.gathers import inverse_index, take_rows
from MaxText.layers.params import Init, Initializer, for_each_expert, param, zeros
from MaxText.layers.part_scalars import Metric, Scalars, Statistic
from MaxText.parallelism.logical_sharding import axes_of_current_mesh, with_logical_constraint

_ROUTING = 9  # RNG stream id within a layer; block.py has the others


# routed_score_func -> scores of one expert, whatever the others' logits.
_POSITIVE_SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    # The gradient of a root at 0, to which softplus underflows, is infinite.
    "sqrtsoftplus": lambda logits: jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), _SMALLEST)),
}
_SMALLEST = jnp.finfo(jnp.float32).tiny
_SUM_EPSILON = 1e-20  # added to sums of these scores, which may underflow


class ExpertCapacity(NamedTuple):
    """Room of the experts for a group of tokens."""

    group: int  # S
    slots: int  # C


@dataclasses.dataclass(frozen=True)
class BalanceLoad:
    """The rule of the correction bias of experts: b_e += rate * sign(mean load - load_e).

    Experts with more choices than the others become less likely to be chosen. There is no loss, and
    so no gradient that disturbs the model (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    Attributes:
      rate: What is added or subtracted in a step (DeepSeek V3: 0.001); 0 keeps the bias.
    """

    rate: float

    def __call__(self, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
        """Returns what is added to a bias; any dimensions before E are those of layers.

        Args:
          bias_E: The bias.
          load_E: How many choices of tokens each expert got in the step.
        """
        # E * load_e against their sum: whole numbers, unlike the mean.
        difference_E = load_E.sum(-1, keepdims=True) - load_E.shape[-1] * load_E
        return self.rate * jnp.sign(difference_E)


class _Routing(NamedTuple):
    """The experts of each token; `_dropless_on_one_device` has those of one device."""

    gates_GSK: jax.Array  # factors of the experts' outputs, float32
    experts_GSK: jax.Array  # chosen experts, best first, int32
    is_routed_GSK: jax.Array  # False for padding and for choices that the policy leaves out


class _ExpertWeights(NamedTuple):
    """Kernels and biases of all experts, in the dtype of activations."""

    wi: list[jax.Array]  # kernels [E, D, F] of each activation
    wo: jax.Array  # kernels [E, F, D] back to the residual stream
    wi_biases: list[jax.Array] | None = None  # [E, F] of each activation
    wo_bias: jax.Array | None = None  # [E, D]


def group_size(config: MoEConfig, length: int) -> int:
    """Returns S: moe_group_size if that divides a sequence of `length` tokens, else all of it."""
    if config.moe_group_size != -1 and length % config.moe_group_size == 0:
        return config.moe_group_size
    return length


def expert_capacity(config: MoEConfig, length: int, factor: float) -> ExpertCapacity:
    """Returns S and C = S * factor / E, at least 1 and at most S.

    Args:
      config: E, and the size of a group.
      length: Tokens of a sequence.
      factor: Capacity factor. It counts tokens, as in GShard (Lepikhin et al. 2020), not pairs of a
        token and an expert.
    """
    group = group_size(config, length)
    slots = max(min(group, int(group * factor / config.num_experts)), 1)
    return ExpertCapacity(group, slots)


def _within_best_groups(scores_GSE: jax.Array, config: MoEConfig) -> jax.Array:
    """Returns the scores, with -inf for experts outside of a token's best groups.

    Args:
      scores_GSE: Scores of the experts.
      config: Number of groups, how many a token chooses from, and the score of a group.
    """
    num_groups = config.n_routing_groups
    num_chosen = num_groups if config.topk_routing_group == -1 else config.topk_routing_group
    scores_GSnE = scores_GSE.reshape(*scores_GSE.shape[:2], num_groups, -1)
    best_GSnk, _ = jax.lax.top_k(scores_GSnE, 1 if config.routing_group_score == "max" else 2)
    _, groups_GSk = jax.lax.top_k(best_GSnk.sum(-1), num_chosen)
    is_chosen_GSn = jax.nn.one_hot(groups_GSk, num_groups, dtype=jnp.bool).any(-2)
    chosen_GSnE = jnp.where(is_chosen_GSn[..., None], scores_GSnE, -jnp.inf)
    return chosen_GSnE.reshape(scores_GSE.shape)


class Experts(nnx.Module):
    """E MLPs, plain or gated, stacked along an expert axis.

    Kernels of expert e are wi_i[e], [D, F], and wo[e], [F, D]; biases are wi_i_bias[e], [F], and
    wo_bias[e], [D].
    """

    def __init__(
        self, config: MoEConfig, feed_forward: FeedForwardConfig, init: Init, rngs: nnx.Rngs
    ):
        """Declares the matrices.

        Args:
          config: Number of experts E, their width F and activations.
          feed_forward: Activations if experts have none of their own, and the limit of activations.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        num_experts = config.num_experts
        width = config.width(init.dimensions.mlp_dim)
        activations = config.moe_activations or feed_forward.mlp_activations
        D = init.dimensions.emb_dim
        draw = init.initializers
        self.activations = activations
        self.limit = feed_forward.mlp_activations_limit
        self.dtype = init.dtype
        self.precision = init.precision
        self.dot_general = jax.lax.dot_general  # replaced in quantized layers
        self.is_quantizable = True
        self.input_names = input_kernel_names(activations)

        def matrices(
            inputs: int, outputs: int, axes: tuple[str, str], initializer: Initializer
        ) -> nnx.Param:
            return param(
                rngs,
                (num_experts, inputs, outputs),
                ("exp", *axes),
                for_each_expert(initializer),
                dtype=init.weight_dtype,
                num_input_dims=1,
                used_in=init.dtype,
            )

        for name in self.input_names:
            setattr(self, name, matrices(D, width, ("embed", "mlp"), draw.kernel))
        self.wo = matrices(width, D, ("mlp", "embed"), draw.output)
        self.has_biases = config.expert_bias
        if self.has_biases:
            dtype = init.weight_dtype
            for name in self.input_names:
                bias = param(rngs, (num_experts, width), ("exp", "mlp"), zeros, dtype=dtype)
                setattr(self, f"{name}_bias", bias)
            self.wo_bias = param(rngs, (num_experts, D), ("exp", "embed"), zeros, dtype=dtype)

    def weights(self) -> _ExpertWeights:
        """Returns the weights in the dtype of activations."""

        def cast(name: str) -> jax.Array:
            return getattr(self, name)[...].astype(self.dtype)

        weights = _ExpertWeights(wi=[cast(name) for name in self.input_names], wo=cast("wo"))
        if not self.has_biases:
            return weights
        wi_biases = [cast(f"{name}_bias") for name in self.input_names]
        return weights._replace(wi_biases=wi_biases, wo_bias=cast("wo_bias"))

    def gated(self, branches: Sequence[jax.Array]) -> jax.Array:
        """Returns the product of the activated branches, one per activation."""
        activated = [
            ACTIVATIONS[name](clamped(x, index, self.limit))
            for index, (name, x) in enumerate(zip(self.activations, branches, strict=True))
        ]
        return math.prod(activated, start=1)  # type: ignore[arg-type]


def input_kernel_names(activations: Sequence[str]) -> list[str]:
    """Returns the names of the kernels before each activation: wi, or wi_0, wi_1, ..."""
    if len(activations) == 1:
        return ["wi"]
    return [f"wi_{i}" for i in range(len(activations))]


class RoutedMoE(nnx.Module):
    """A feed-forward of experts: y = sum over a token's experts of gate * expert(x).

    A token goes to the K experts of the largest scores, and its gates are these scores, float32.
    With x Wg the logits of the router, scores are softmax(x Wg), sigmoid(x Wg) (DeepSeek-AI 2024,
    V3), sqrt(softplus(x Wg)) (V4), or the logits, whose softmax over the chosen ones are the gates
    (gpt-oss). Gates are divided by their sum if a token has several experts (Lepikhin et al. 2020,
    Jiang et al. 2024), or as `norm_topk_prob` says, and multiplied by `routed_scaling_factor`. With
    `apply_router_weight_on_input` they multiply the experts' inputs: y = sum expert(gate * x).

    With groups, only experts of the best groups of consecutive experts are chosen, so that a token
    visits few devices (DeepSeek-AI 2024, V2, section 2.2.2). A correction bias is added to the
    scores that experts and groups are chosen by, and not to gates (`BalanceLoad`). Shared experts
    are one MLP that every token visits, whose output is added (Dai et al. 2024, section 3.2).

    With a capacity factor an expert takes C = S * factor / E tokens of a group, first choices of
    earlier tokens first; the others stay on the residual stream. Without one no token is dropped.
    Groups are parts of a sequence, so drops do not depend on the rest of the batch. Generation
    drops nothing, as it sees a text in other groups than training.
    """

    rows: ClassVar = {
        "gate": "router",
        "gate_correction_bias": "router",
        "experts": "feed-forward",
        "shared_experts": "feed-forward",
    }
    not_recomputed = ("shared_experts",)  # gates read the output of other experts

    def __init__(
        self,
        config: MoEConfig,
        feed_forward: FeedForwardConfig,
        init: Init,
        rngs: nnx.Rngs,
        *,
        shared_experts: nnx.Module | None = None,
    ):
        """Declares the weights of the router and the experts.

        Args:
          config: Number of experts, their sizes, and the way tokens are routed.
          feed_forward: Activations if experts have none of their own, and the limit of activations.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
          shared_experts: MLP that every token visits, a feed-forward part; None for none.
        """
        D = init.dimensions.emb_dim
        E = config.num_experts
        draw = init.initializers.kernel
        self.config = config
        used_in = jnp.dtype(jnp.float32)  # rounding could send a token to another expert
        self.gate = Dense(
            (D,),
            (E,),
            ("embed", None),
            draw,
            init,
            rngs,
            use_bias=config.router_bias,
            used_in=used_in,
            readout=True,
        )
        self.gate_correction_bias = _correction_bias(config, rngs) if config.routed_bias else None
        self.experts = Experts(config, feed_forward, init, rngs)
        self.shared_experts = shared_experts

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns y_BTD, and losses, metrics and the experts' load, without padding."""
        batch, length, width = x_BTD.shape
        capacity = self._capacity(length, context)
        x_GSD = x_BTD.reshape(-1, group_size(self.config, length), width)
        logits_GSE = self.gate(x_GSD)
        p_GSE, scores_GSE = self._scores(logits_GSE)
        record(logits_GSE.reshape(batch, length, -1), "router_logits")
        record(p_GSE.reshape(batch, length, -1), "router_probabilities")
        is_token_GS = jnp.ones(x_GSD.shape[:2], bool)
        if context.segments_BT is not None:
            is_token_GS = (context.segments_BT > 0).reshape(x_GSD.shape[:2])
        routing = self._route(scores_GSE, is_token_GS, context)
        scalars = self._auxiliary_losses(logits_GSE, p_GSE, routing.experts_GSK, is_token_GS)
        if capacity is None:
            y_GSD = self._dropless(x_GSD, routing)
            num_computed = routing.is_routed_GSK.sum()
        else:
            y_GSD, num_computed = self._capacity_dispatch(x_GSD, routing, capacity)
        load_E = _load(routing, self.config.num_experts)
        num_choices = self.config.num_experts_per_tok * is_token_GS.sum(dtype=jnp.float32)
        dropped = Metric(num_choices - num_computed, num_choices)
        scalars |= _routing_metrics(p_GSE, load_E, is_token_GS) | {"moe_dropped": dropped}
        if context.log_layer_metrics:
            min_load_ratio = load_E.shape[0] * load_E.min() / jnp.maximum(load_E.sum(), 1)
            num_tokens = is_token_GS.sum(dtype=jnp.float32)
            scalars["moe_min_load_ratio"] = Metric(num_tokens * min_load_ratio, num_tokens)
        if self.gate_correction_bias is not None:
            scalars["moe_load"] = Statistic.of(self.gate_correction_bias[...], load_E)
        y_BTD = y_GSD.reshape(batch, length, width)
        if self.shared_experts is not None:
            shared_BTD, _ = self.shared_experts(x_BTD, context)
            y_BTD = y_BTD + shared_BTD
        return y_BTD, scalars

    def _capacity(self, length: int, context: ForwardContext) -> int | None:
        """Returns C, or None to compute experts without a capacity."""
        config = self.config
        factor = config.capacity_factor if context.training else config.eval_capacity_factor
        if factor < 0:
            return None
        if context.is_decoding or not context.drops_tokens:
            mesh_axes = axes_of_current_mesh("activation_exp")
            has_sharded_experts = mesh_axes is not None and bool(mesh_axes[1][0])
            # Sharded experts need a capacity: room for all tokens.
            return group_size(config, length) if has_sharded_experts else None
        return expert_capacity(config, length, factor).slots

    def _scores(self, logits_GSE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns probabilities, which sum to 1, and the scores that experts are chosen by.

        Args:
          logits_GSE: Of the router, float32.
        """
        score_func = self.config.routed_score_func
        if score_func in _POSITIVE_SCORES:
            scores_GSE = _POSITIVE_SCORES[score_func](logits_GSE)
            sum_GS1 = scores_GSE.sum(-1, keepdims=True)
            return scores_GSE / (sum_GS1 + _SUM_EPSILON), scores_GSE
        p_GSE = jax.nn.softmax(logits_GSE, axis=-1)
        return p_GSE, logits_GSE if score_func == "topk_softmax" else p_GSE

    def _route(
        self, scores_GSE: jax.Array, is_token_GS: jax.Array, context: ForwardContext
    ) -> _Routing:
        """Returns the experts of each token.

        Args:
          scores_GSE: Scores of the experts, float32.
          is_token_GS: False for padding, which no expert computes.
          context: Facts about the batch.
        """
        config = self.config
        choice_GSE = scores_GSE  # what experts are chosen by
        if self.gate_correction_bias is not None:
            choice_GSE = choice_GSE + jax.lax.stop_gradient(self.gate_correction_bias[...])
        if config.n_routing_groups != -1:
            choice_GSE = _within_best_groups(choice_GSE, config)
        gates_GSK, experts_GSK = jax.lax.top_k(choice_GSE, config.num_experts_per_tok)
        if self.gate_correction_bias is not None:
            gates_GSK = jnp.take_along_axis(scores_GSE, experts_GSK, axis=-1)
        if config.routed_score_func == "topk_softmax":
            gates_GSK = jax.nn.softmax(gates_GSK, axis=-1)
        if config.normalizes_gates:
            epsilon = 1e-9 if config.routed_score_func == "softmax" else _SUM_EPSILON
            gates_GSK = gates_GSK / (gates_GSK.sum(-1, keepdims=True) + epsilon)
        is_routed_GSK = is_token_GS[..., None] & self._policy(gates_GSK, context)
        if config.routed_scaling_factor != 1:
            gates_GSK = gates_GSK * config.routed_scaling_factor
        return _Routing(gates_GSK, experts_GSK, is_routed_GSK)

    def _policy(self, gates_GSK: jax.Array, context: ForwardContext) -> jax.Array:
        """Returns which choices are routed: all, or second ones by `moe_second` (GShard)."""
        mask_GSK = jnp.ones(gates_GSK.shape, bool)
        if self.config.num_experts_per_tok != 2:
            return mask_GSK
        config = self.config.moe_second
        second_GS = gates_GSK[..., 1]
        threshold = config.threshold
        policy = config.policy if context.training else config.policy_eval
        if policy == "none":
            use_second = jnp.zeros(second_GS.shape, bool)
        elif policy == "threshold":
            use_second = second_GS > threshold
        elif policy == "random":
            key = context.key_for(_ROUTING)
            assert key is not None, "training with a random policy has a key"
            use_second = jax.random.uniform(key, second_GS.shape) < second_GS / max(threshold, 1e-9)
        else:
            return mask_GSK
        return mask_GSK.at[..., 1].set(use_second)

    def _auxiliary_losses(
        self,
        logits_GSE: jax.Array,
        p_GSE: jax.Array,
        experts_GSK: jax.Array,
        is_token_GS: jax.Array,
    ) -> Scalars:
        """Returns weighted load balance and router z losses, summed over tokens.

        Load balance of a group: E sum_e f_e P_e, f_e the share of tokens whose first choice is e
        (Lepikhin et al. 2020, section 2.2), or the share of all choices that are e, P_e the mean of
        p_e. Both are 1 for a router without preferences. Router z loss: logsumexp(logits)^2
        (Zoph et al. 2022, equation 5).
        """
        config = self.config
        num_experts = p_GSE.shape[-1]
        is_token = is_token_GS[..., None].astype(jnp.float32)
        count_G1 = jnp.maximum(is_token.sum(1), 1.0)
        if config.load_balance_choices == "all":
            choices_GSE = jax.nn.one_hot(experts_GSK, num_experts).mean(2) * is_token
        else:
            choices_GSE = jax.nn.one_hot(experts_GSK[..., 0], num_experts) * is_token
        share_GE = choices_GSE.sum(1) / count_G1
        mean_p_GE = (p_GSE * is_token).sum(1) / count_G1
        balance_G = num_experts * (share_GE * mean_p_GE).sum(-1)
        balance = (balance_G * is_token.sum((1, 2))).sum()
        losses: Scalars = {"moe_lb_loss": config.load_balance_loss_weight * balance}
        if config.router_z_loss_weight:
            z_GS = jnp.square(jax.nn.logsumexp(logits_GSE, axis=-1)) * is_token[..., 0]
            losses["moe_z_loss"] = config.router_z_loss_weight * z_GS.sum()
        return losses

    def _capacity_dispatch(
        self, x_GSD: jax.Array, routing: _Routing, capacity: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns y_GSD with C slots of each expert for the tokens of a group, and filled slots.

        Tokens are copied to the slots of their experts, the slots are sent to the devices of the
        experts and back, and each token sums what its experts made (Lepikhin et al. 2020). Dispatch
        and combination are gathers in place of GShard's one-hot products.

        Args:
          x_GSD: Tokens.
          routing: Their experts.
          capacity: C.
        """
        num_groups, group, width = x_GSD.shape
        num_experts = self.config.num_experts
        num_slots = num_experts * capacity
        slots_GS = self._assign_slots(routing, capacity)  # one array for each choice
        slots_GP = jnp.concatenate(slots_GS, axis=1)
        pairs_GL = jax.vmap(functools.partial(inverse_index, size=num_slots))(slots_GP)
        is_filled_GL = pairs_GL < slots_GP.shape[1]
        tokens_GL = jnp.where(is_filled_GL, pairs_GL % group, group)
        filled_GLD = jax.vmap(take_rows)(x_GSD, tokens_GL, jnp.stack(slots_GS, axis=-1))
        if self.config.apply_router_weight_on_input:
            # An empty slot has zeros, whatever its gate.
            gates_GP = jnp.moveaxis(routing.gates_GSK, -1, 1).reshape(num_groups, -1)
            gates_GL = jnp.take_along_axis(gates_GP, pairs_GL, axis=1, mode="clip")
            filled_GLD = filled_GLD * gates_GL[..., None].astype(x_GSD.dtype)
        filled_GECD = filled_GLD.reshape(num_groups, num_experts, capacity, width)

        out_GECD = self._run_experts(filled_GECD)

        out_GLD = out_GECD.reshape(num_groups, num_slots, width)
        out_GPD = jax.vmap(take_rows)(out_GLD, slots_GP, pairs_GL[..., None])
        out_KGSD = jnp.split(out_GPD, len(slots_GS), axis=1)
        if not self.config.apply_router_weight_on_input:
            out_KGSD = [
                routing.gates_GSK[..., choice, None].astype(x_GSD.dtype) * out_GSD
                for choice, out_GSD in enumerate(out_KGSD)
            ]
        y_GSD = sum(out_KGSD)
        return y_GSD, is_filled_GL.sum()  # type: ignore[return-value]

    def _assign_slots(self, routing: _Routing, capacity: int) -> list[jax.Array]:
        """Returns the slot of each token, int32 [G, S] for each choice; L if it has none.

        First choices of earlier tokens come first, then second choices. Expert e has the slots e C
        to e C + C - 1.
        """
        num_groups, _, num_choices = routing.experts_GSK.shape
        num_experts = self.config.num_experts
        expert_load = jnp.zeros((num_groups, num_experts), jnp.int32)
        slots_GS = []
        for choice in range(num_choices):
            experts_GS = routing.experts_GSK[..., choice]
            is_routed_GS = routing.is_routed_GSK[..., choice]
            expert_mask = jax.nn.one_hot(experts_GS, num_experts, dtype=jnp.int32)
            expert_mask = expert_mask * is_routed_GS[..., None]
            queue_positions = jnp.cumsum(expert_mask, axis=1) - expert_mask + expert_load[:, None]
            position_in_expert = (queue_positions * expert_mask).sum(-1)
            fits = is_routed_GS & (position_in_expert < capacity)
            expert_load = expert_load + (expert_mask * fits[..., None]).sum(1)
            slot = experts_GS * capacity + position_in_expert
            slots_GS.append(jnp.where(fits, slot, num_experts * capacity))
        return slots_GS

    def _run_experts(self, x_GECD: jax.Array) -> jax.Array:
        """Returns the experts' outputs for their slots, [G, E, C, D].

        Resharded from groups to experts and back; slots of an expert shard like tokens.
        """
        experts = self.experts
        by_group = ("activation_batch", None, "activation_length", "activation_embed")
        by_expert = ("activation_groups", "activation_exp", "activation_length", "activation_embed")
        x_GECD = with_logical_constraint(with_logical_constraint(x_GECD, *by_group), *by_expert)
        dot = experts.dot_general
        if dot is jax.lax.dot_general and is_exact_on_cpu(experts.precision, x_GECD):
            dot = dot_in_double
        einsum = functools.partial(jnp.einsum, precision=experts.precision, _dot_general=dot)
        weights = experts.weights()
        branches = [einsum("gecd,edf->gecf", x_GECD, kernel) for kernel in weights.wi]
        if weights.wi_biases is not None:
            branches = [
                branch_GECF + bias_EF[:, None]
                for branch_GECF, bias_EF in zip(branches, weights.wi_biases, strict=True)
            ]
        branches = [tag(branch_GECF, "mlpwi") for branch_GECF in branches]
        h_GECF = with_logical_constraint(experts.gated(branches), *by_expert[:3], "activation_mlp")
        out_GECD = einsum("gecf,efd->gecd", h_GECF, weights.wo)
        if weights.wo_bias is not None:
            out_GECD = out_GECD + weights.wo_bias[:, None]
        out_GECD = tag(out_GECD, "mlpwo")
        return with_logical_constraint(with_logical_constraint(out_GECD, *by_expert), *by_group)

    def _dropless(self, x_GSD: jax.Array, routing: _Routing) -> jax.Array:
        """Returns y_GSD without a capacity: every expert computes all of its tokens.

        Each device computes its own tokens with all experts, split over the tensor axes if these
        divide F.

        Args:
          x_GSD: Tokens.
          routing: Their experts.
        """
        experts = self.experts
        weights = experts.weights()
        operands = (x_GSD, routing, weights)
        mesh_axes = axes_of_current_mesh("activation_batch", "activation_length", "activation_mlp")
        if mesh_axes is None:
            return self._dropless_on_one_device(*operands)
        mesh, (batch_axes, length_axes, tensor_axes) = mesh_axes
        if x_GSD.shape[1] % math.prod(mesh.shape[axis] for axis in length_axes):
            length_axes = ()
        if experts.wo.shape[1] % math.prod(mesh.shape[axis] for axis in tensor_axes):
            tensor_axes = ()  # a width that the axes do not divide is replicated
        by_token = PartitionSpec(batch_axes, length_axes)
        by_width = weights._replace(
            wi=PartitionSpec(None, None, tensor_axes),
            wo=PartitionSpec(None, tensor_axes),
            wi_biases=PartitionSpec(None, tensor_axes),
            wo_bias=PartitionSpec(),
        )
        return jax.shard_map(
            functools.partial(self._dropless_on_one_device, tensor_axes=tensor_axes),
            mesh=mesh,
            in_specs=(by_token, by_token, by_width),
            out_specs=by_token,
            check_vma=False,
        )(*operands)

    def _dropless_on_one_device(
        self,
        x_GSD: jax.Array,
        routing: _Routing,
        weights: _ExpertWeights,
        tensor_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        """Returns y_GSD of a device's tokens, sorted by expert for ragged products.

        Args:
          x_GSD: Tokens of this device.
          routing: Their experts.
          weights: Of all experts.
          tensor_axes: Mesh axes that divide F: outputs are summed over them.
        """
        experts = self.experts
        num_choices = routing.experts_GSK.shape[-1]
        width = x_GSD.shape[-1]
        expert_of_pair = routing.experts_GSK.reshape(-1)
        order = jnp.argsort(expert_of_pair, stable=True)
        sizes = jnp.bincount(expert_of_pair, length=self.config.num_experts).astype(jnp.int32)
        position_of_pair = inverse_index(order, order.size)
        sorted_tokens = take_rows(
            x_GSD.reshape(-1, width),
            order // num_choices,
            position_of_pair.reshape(-1, num_choices),
        )
        is_routed = routing.is_routed_GSK.reshape(-1)[order]
        gates = routing.gates_GSK.reshape(-1)[order]
        if self.config.apply_router_weight_on_input:
            sorted_tokens = sorted_tokens * gates[:, None].astype(sorted_tokens.dtype)
            gates = jnp.ones_like(gates)
        ragged_dot = functools.partial(
            jax.lax.ragged_dot, group_sizes=sizes, precision=experts.precision
        )
        branches = [ragged_dot(sorted_tokens, kernel) for kernel in weights.wi]
        if weights.wi_biases is not None:
            branches = [
                branch + bias_EF[expert_of_pair[order]]
                for branch, bias_EF in zip(branches, weights.wi_biases, strict=True)
            ]
        branches = [tag(branch, "mlpwi") for branch in branches]
        out = tag(ragged_dot(experts.gated(branches), weights.wo), "mlpwo")
        if tensor_axes:
            out = jax.lax.psum(out, tensor_axes)
        if weights.wo_bias is not None:
            out = out + weights.wo_bias[expert_of_pair[order]]
        out = out * (gates * is_routed)[:, None].astype(out.dtype)
        y = take_rows(out, position_of_pair, order[:, None]).reshape(-1, num_choices, width)
        return y.sum(1).reshape(x_GSD.shape)


def _correction_bias(config: MoEConfig, rngs: nnx.Rngs) -> nnx.Param:
    """Declares the bias of each expert that balances their load, float32 [E], 0 at first."""
    rule = BalanceLoad(config.routed_bias_update_rate)
    dtype = jnp.dtype(jnp.float32)
    shape = (config.num_experts,)
    return param(rngs, shape, (None,), zeros, dtype=dtype, used_in=dtype, update_rule=rule)


def _load(routing: _Routing, num_experts: int) -> jax.Array:
    """Returns how many choices each expert got, before any are dropped, float32 [E]."""
    chosen_GSKE = routing.experts_GSK[..., None] == jnp.arange(num_experts)
    chosen_GSKE &= routing.is_routed_GSK[..., None]
    return chosen_GSKE.sum((0, 1, 2), dtype=jnp.float32)


def _routing_metrics(p_GSE: jax.Array, load_E: jax.Array, is_token_GS: jax.Array) -> Scalars:
    """Returns what is reported about the choices of the router, means over tokens.

      moe_max_load_ratio   load of the expert with the most choices, relative to the mean load; 1 is
                           balanced. Of the tokens that go through a layer together (a microbatch).
      moe_router_entropy   entropy of a token's probabilities in nats, at most log E

    Args:
      p_GSE: Probabilities of the experts.
      load_E: Choices of each expert.
      is_token_GS: False for padding.
    """
    num_tokens = is_token_GS.sum(dtype=jnp.float32)
    max_load_ratio = load_E.shape[0] * load_E.max() / jnp.maximum(load_E.sum(), 1)
    entropy_GS = -jax.scipy.special.xlogy(p_GSE, p_GSE).sum(-1)
    return {
        "moe_max_load_ratio": Metric(num_tokens * max_load_ratio, num_tokens),
        "moe_router_entropy": Metric((entropy_GS * is_token_GS).sum(), num_tokens),
    }
