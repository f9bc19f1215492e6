"""Mixture of experts: a feed-forward of experts, few per token.

Legend: B sequences, T tokens, D emb_dim, E experts, F width of an expert, k experts per token, G
groups, S tokens of a group, C capacity of an expert for a group.
"""

import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from MaxText.config.layer_sections import MoEConfig
from MaxText.layers.capture import record, tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, dot_in_double, is_exact_on_cpu
from MaxText.layers.feed_forward.activations import ACTIVATIONS
from MaxText.layers.params import Init, Initializer, param
from MaxText.layers.part import Scalars
from MaxText.parallelism.logical_sharding import current_batch_axes, with_logical_constraint


def expert_capacity(config: MoEConfig, length: int, factor: float) -> tuple[int, int]:
    """Returns the tokens of a group and C; the factor counts tokens (GShard)."""
    group = length
    if config.moe_group_size != -1 and length % config.moe_group_size == 0:
        group = config.moe_group_size
    return group, max(min(group, int(group * factor / config.num_experts)), 1)


def _rows(x_ND: jax.Array, index_M: jax.Array) -> jax.Array:
    """Returns x[index], [M, D], zeros where the index is N."""
    return x_ND.at[index_M].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _take_rows(x_ND: jax.Array, index_M: jax.Array, uses_NR: jax.Array) -> jax.Array:
    """Returns the same as `_rows`.

    `uses` are the places in M that take a row, or M. So gradients are taken, not scattered: XLA for
    TPU expands the indices of a scatter to the size of the rows.
    """
    return _rows(x_ND, index_M)


_take_rows.defvjp(
    lambda x_ND, index_M, uses_NR: (_rows(x_ND, index_M), uses_NR),
    lambda uses_NR, dy_MD: (sum(_rows(dy_MD, use_N) for use_N in uses_NR.T), None, None),
)


def _places(index_M: jax.Array, size: int) -> jax.Array:
    """Returns the place in M of each number below `size`, or M."""
    number = index_M.shape[0]
    places = jnp.full((size,), number, jnp.int32)
    return places.at[index_M].set(jnp.arange(number, dtype=jnp.int32), mode="drop")


class Experts(nnx.Module):
    """E MLPs without biases, plain or gated, stacked along an expert axis."""

    def __init__(
        self, num_experts: int, width: int, activations: tuple[str, ...], init: Init, rngs: nnx.Rngs
    ):
        D = init.dimensions.emb_dim
        draw = init.initializers
        self.activations = activations
        self.dtype = init.dtype
        self.precision = init.precision
        self.dot_general = jax.lax.dot_general  # replaced in quantized layers
        self.is_quantizable = True
        many = len(activations) > 1
        self.input_names = [f"wi_{i}" if many else "wi" for i in range(len(activations))]

        def matrices(inputs: int, outputs: int, axes: tuple[str, str], initializer: Initializer):
            return param(
                rngs,
                (num_experts, inputs, outputs),
                ("exp", *axes),
                _for_each(initializer),
                dtype=init.weight_dtype,
                num_input_dims=1,
                used_in=init.dtype,
            )

        for name in self.input_names:
            setattr(self, name, matrices(D, width, ("embed", "mlp"), draw.kernel))
        self.wo = matrices(width, D, ("mlp", "embed"), draw.output)

    def inputs(self) -> list[jax.Array]:
        return [getattr(self, name)[...].astype(self.dtype) for name in self.input_names]

    def outputs(self) -> jax.Array:
        return self.wo[...].astype(self.dtype)

    def gated(self, branches: list[jax.Array]) -> jax.Array:
        return math.prod(
            (ACTIVATIONS[name](x) for name, x in zip(self.activations, branches, strict=True)),
            start=1,  # type: ignore[arg-type]
        )


class RoutedMoE(nnx.Module):
    """y = sum over a token's experts of gate * expert(x).

    Gates are the largest of p = softmax(x Wg), float32: p itself for one expert per token (Fedus et
    al. 2021), else divided by their sum (Lepikhin et al. 2020, Jiang et al. 2024).

    With a capacity factor an expert takes C = S * factor / E tokens of a group, first choices of
    earlier tokens first; the others stay on the residual stream. Without one no token is dropped.
    Groups are parts of a sequence, so drops do not depend on the rest of the batch. Generation
    drops nothing, as it sees a text in other groups than training.
    """

    rows: ClassVar = {"gate": "router", "experts": "feed-forward"}
    not_recomputed = ()  # gates read the output of each expert

    def __init__(self, config: MoEConfig, activations: tuple[str, ...], init: Init, rngs: nnx.Rngs):
        D = init.dimensions.emb_dim
        E = config.num_experts
        draw = init.initializers.kernel
        self.config = config
        used_in = jnp.dtype(jnp.float32)  # rounding could send a token to another expert
        self.gate = Dense((D,), (E,), ("embed", None), draw, init, rngs, used_in=used_in)
        width = init.dimensions.mlp_dim if config.moe_mlp_dim == -1 else config.moe_mlp_dim
        self.experts = Experts(E, width, config.moe_activations or activations, init, rngs)

    def __call__(self, x_BTD: jax.Array, context: ForwardContext) -> tuple[jax.Array, Scalars]:
        """Returns y_BTD, and losses summed over tokens without padding."""
        config = self.config
        batch, length, width = x_BTD.shape
        factor = config.capacity_factor if context.training else config.eval_capacity_factor
        group, capacity = expert_capacity(config, length, factor)
        if context.is_decoding or not context.drops_tokens:
            capacity = group
            found = current_batch_axes("activation_exp")
            if found is None or not found[1][0]:  # sharded experts need a capacity
                factor = -1.0
        x = x_BTD.reshape(-1, group, width)
        logits = self.gate(x)
        p = jax.nn.softmax(logits, axis=-1)
        record(p.reshape(batch, length, -1), "router_probabilities")
        is_token = jnp.ones(x.shape[:2], bool)
        if context.segments_BT is not None:
            is_token = (context.segments_BT > 0).reshape(x.shape[:2])
        gates, choices = jax.lax.top_k(p, config.num_experts_per_tok)
        if config.num_experts_per_tok > 1:
            gates = gates / (gates.sum(-1, keepdims=True) + 1e-9)
        routed = is_token[..., None] & self._policy(gates, context)
        scalars = self._auxiliary_losses(logits, p, choices, is_token)
        if factor < 0:
            y = self._dropless(x, gates, choices, routed)
        else:
            y = self._capacity_dispatch(x, gates, choices, routed, capacity)
        return y.reshape(batch, length, width), scalars

    def _policy(self, gates: jax.Array, context: ForwardContext) -> jax.Array:
        mask = jnp.ones(gates.shape, bool)
        if self.config.num_experts_per_tok != 2:
            return mask
        config = self.config.moe_second
        second = gates[..., 1]
        threshold = config.threshold
        policy = config.policy if context.training else config.policy_eval
        if policy == "none":
            use_second = jnp.zeros(second.shape, bool)
        elif policy == "threshold":
            use_second = second > threshold
        elif policy == "random":
            key = context.key_for(_ROUTING)
            assert key is not None, "training with a random policy has a key"
            use_second = jax.random.uniform(key, second.shape) < second / max(threshold, 1e-9)
        else:
            return mask
        return mask.at[..., 1].set(use_second)

    def _auxiliary_losses(
        self, logits: jax.Array, p: jax.Array, choices: jax.Array, is_token: jax.Array
    ) -> Scalars:
        """Returns weighted load balance and router z losses, summed over tokens.

        Load balance of a group: E sum_e f_e P_e, f_e the share of tokens whose first choice is e,
        P_e the mean of p_e (Lepikhin et al. 2020, section 2.2). Router z loss: logsumexp(logits)^2
        (Zoph et al. 2022, equation 5).
        """
        config = self.config
        num_experts = p.shape[-1]
        is_token = is_token[..., None].astype(jnp.float32)
        count = jnp.maximum(is_token.sum(1), 1.0)
        first = jax.nn.one_hot(choices[..., 0], num_experts) * is_token
        balance = num_experts * ((first.sum(1) / count) * ((p * is_token).sum(1) / count)).sum(-1)
        balance = (balance * is_token.sum((1, 2))).sum()
        scalars = {"moe_lb_loss": config.load_balance_loss_weight * balance}
        if config.router_z_loss_weight:
            z = jnp.square(jax.nn.logsumexp(logits, axis=-1)) * is_token[..., 0]
            scalars["moe_z_loss"] = config.router_z_loss_weight * z.sum()
        return scalars

    def _capacity_dispatch(
        self, x: jax.Array, gates: jax.Array, choices: jax.Array, routed: jax.Array, capacity: int
    ) -> jax.Array:
        num_groups, group, width = x.shape
        num_experts = self.config.num_experts
        experts = self.experts
        expert_load = jnp.zeros((num_groups, num_experts), jnp.int32)
        slots = []
        for choice in range(choices.shape[-1]):
            expert_mask = jax.nn.one_hot(choices[..., choice], num_experts, dtype=jnp.int32)
            expert_mask = expert_mask * routed[..., choice, None]
            queue_positions = jnp.cumsum(expert_mask, axis=1) - expert_mask + expert_load[:, None]
            position_in_expert = (queue_positions * expert_mask).sum(-1)
            fits = routed[..., choice] & (position_in_expert < capacity)
            expert_load = expert_load + (expert_mask * fits[..., None]).sum(1)
            slot = choices[..., choice] * capacity + position_in_expert
            slots.append(jnp.where(fits, slot, num_experts * capacity))

        slots_GP = jnp.concatenate(slots, axis=1)  # P: pairs of a choice and a token
        places = functools.partial(_places, size=num_experts * capacity)
        pairs_GN = jax.vmap(places)(slots_GP)  # N: slots
        tokens_GN = jnp.where(pairs_GN < slots_GP.shape[1], pairs_GN % group, group)
        filled = jax.vmap(_take_rows)(x, tokens_GN, jnp.stack(slots, axis=-1))
        filled = filled.reshape(num_groups, num_experts, capacity, width)
        # Resharded from groups to experts and back; slots of an expert shard like tokens.
        by_group = ("activation_batch", None, "activation_length", "activation_embed")
        by_expert = ("activation_groups", "activation_exp", "activation_length", "activation_embed")
        filled = with_logical_constraint(with_logical_constraint(filled, *by_group), *by_expert)
        dot = experts.dot_general
        if dot is jax.lax.dot_general and is_exact_on_cpu(experts.precision, filled):
            dot = dot_in_double
        einsum = functools.partial(jnp.einsum, precision=experts.precision, _dot_general=dot)
        branches = [
            tag(einsum("gecd,edf->gecf", filled, kernel), "mlpwi") for kernel in experts.inputs()
        ]
        hidden = with_logical_constraint(experts.gated(branches), *by_expert[:3], "activation_mlp")
        out = tag(einsum("gecf,efd->gecd", hidden, experts.outputs()), "mlpwo")
        out = with_logical_constraint(with_logical_constraint(out, *by_expert), *by_group)
        out = out.reshape(num_groups, num_experts * capacity, width)

        rows = jax.vmap(_take_rows)(out, slots_GP, pairs_GN[..., None])
        return sum(
            gates[..., choice, None].astype(x.dtype) * y
            for choice, y in enumerate(jnp.split(rows, len(slots), axis=1))
        )  # type: ignore[return-value]

    def _dropless(
        self, x: jax.Array, gates: jax.Array, choices: jax.Array, routed: jax.Array
    ) -> jax.Array:
        experts = self.experts
        num_experts = self.config.num_experts
        per_token = choices.shape[-1]

        def on_one_device(x, gates, choices, routed, wi, wo, tensor_axes=()):
            tokens = x.reshape(-1, x.shape[-1])
            choices = choices.reshape(-1)
            order = jnp.argsort(choices, stable=True)
            sizes = jnp.bincount(choices, length=num_experts).astype(jnp.int32)
            places = _places(order, order.size)
            rows = _take_rows(tokens, order // per_token, places.reshape(-1, per_token))
            product = lambda a, b: jax.lax.ragged_dot(  # noqa: E731
                a, b, sizes, precision=experts.precision
            )
            branches = [tag(product(rows, kernel), "mlpwi") for kernel in wi]
            out = tag(product(experts.gated(branches), wo), "mlpwo")
            if tensor_axes:
                out = jax.lax.psum(out, tensor_axes)
            weights = (gates * routed).reshape(-1)[order]
            out = out * weights[:, None].astype(out.dtype)
            y = _take_rows(out, places, order[:, None]).reshape(-1, per_token, x.shape[-1])
            return y.sum(1).reshape(x.shape)

        operands = (x, gates, choices, routed, experts.inputs(), experts.outputs())
        found = current_batch_axes("activation_batch", "activation_length", "activation_mlp")
        if found is None:
            return on_one_device(*operands)
        mesh, (batch_axes, length_axes, tensor_axes) = found
        if x.shape[1] % math.prod(mesh.shape[axis] for axis in length_axes):
            length_axes = ()
        if experts.wo.shape[1] % math.prod(mesh.shape[axis] for axis in tensor_axes):
            tensor_axes = ()  # a width that the axes do not divide is replicated
        rows = PartitionSpec(batch_axes, length_axes)
        columns = PartitionSpec(None, None, tensor_axes)
        return jax.shard_map(
            lambda *operands: on_one_device(*operands, tensor_axes=tensor_axes),
            mesh=mesh,
            in_specs=(rows, rows, rows, rows, columns, PartitionSpec(None, tensor_axes)),
            out_specs=rows,
            check_vma=False,
        )(*operands)


_ROUTING = 9  # RNG stream id within a layer; block.py has the others


def _for_each(initializer: Initializer) -> Initializer:
    def initialize(key, shape, num_input_dims, dtype):
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: initializer(key, shape[1:], num_input_dims, dtype))(keys)

    return initialize
