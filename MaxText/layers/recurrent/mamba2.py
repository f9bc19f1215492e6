"""Mamba-2, a selective state space model whose decay is one number per head.

    h_t = a_t h_(t-1) + dt_t B_t x_t^T,    y_t = h_t^T C_t + D x_t

with a_t = exp(-exp(A_log) dt_t) and time steps dt_t = softplus(W_dt u_t + dt_bias) of the input u_t
(Dao and Gu 2024, arXiv 2405.21060). x, B and C are projections of u_t, after a short convolution
and SiLU. Outputs are gated by SiLU(z) and normalized.

In the terms of attention, C are queries, B keys and x values. `state_space_dual` computes it so, in
chunks of tokens (section 6): within a chunk, products of tokens with tokens, masked by the decay
between them; from chunk to chunk, the states h. All are matrix products, and there is no inverse.

Legend: B sequences, T tokens, D emb_dim, N heads, H mamba_d_head, G groups, M = N/G heads of a
group, S mamba_d_state, P parts of a sequence, J chunks of a part, C tokens of a chunk.
"""

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.config.layer_sections import Dimensions, Mamba2Config
from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.registry import register
from MaxText.layers.capture import record, tag
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Dense, einsum_f32, scaled
from MaxText.layers.lowering.repeated_heads import repeat_heads
from MaxText.layers.normalization import rms_normalize
from MaxText.layers.params import Init, constant, param
from MaxText.layers.part import Flops
from MaxText.layers.recurrent.chunks import Chunks, DocumentMasks, constrain_heads, is_token
from MaxText.layers.recurrent.gates import inverse_softplus_of_log_uniform
from MaxText.layers.recurrent.recurrent_mixer import RecurrentMixer
from MaxText.layers.recurrent.short_convolution import ShortConvolution
from MaxText.layers.recurrent.state_passing import pass_decayed_states

_CHUNKS = (None, "activation_length", "activation_batch")  # logical axes of J, P and B


class Mamba2State(NamedTuple):
    """Decode state, float32.

    Attributes:
      newest: The newest inputs of the convolutions of x, B and C, [B, mamba_d_conv - 1, ...].
      memory_BNSH: h.
    """

    newest: tuple[jax.Array, ...]
    memory_BNSH: jax.Array


class StateSpaceInputs(NamedTuple):
    """Inputs of `state_space_dual`."""

    x_BTNH: jax.Array
    B_BTGS: jax.Array
    C_BTGS: jax.Array
    dt_BTN: jax.Array  # float32; 0 for tokens that leave the state as it is
    log_decay_BTN: jax.Array  # log a, float32


@register("mixer", "mamba2")
class Mamba2(RecurrentMixer):
    """Mamba-2 (formulas above)."""

    rows: ClassVar = {
        **dict.fromkeys(("x_proj", "B_proj", "C_proj", "dt_proj"), "query, key, value"),
        "z_proj": "attention gate",
        "out": "attention output",
    }
    not_recomputed: ClassVar = ("out",)

    def __init__(self, config: ModelConfig, init: Init, rngs: nnx.Rngs):
        """Declares projections, convolutions, decays and the norm.

        Args:
          config: Keys of the model.
          init: Sizes, initializers and dtypes.
          rngs: RNG streams that weights are drawn from.
        """
        keys = config.recurrent.mamba2
        D = init.dimensions.emb_dim
        N = keys.num_heads(D)
        H = keys.mamba_d_head
        G = keys.mamba_n_groups
        S = keys.mamba_d_state
        draw = init.initializers
        self.config = keys
        self.precision = init.precision
        self.dtype = init.dtype
        use_bias = keys.mamba_proj_bias
        dense = functools.partial(
            Dense, (D,), initializer=draw.kernel, init=init, rngs=rngs, use_bias=use_bias
        )
        to_heads = functools.partial(dense, (N, H), axes=("embed", "q_heads", "kv"))
        to_groups = functools.partial(dense, (G, S), axes=("embed", "kv_heads", None))
        self.z_proj = to_heads()
        self.x_proj = to_heads()
        self.B_proj = to_groups()
        self.C_proj = to_groups()
        # In float32, as its error would add up over the tokens that a state lasts.
        self.dt_proj = dense((N,), axes=("embed", "q_heads"), used_in=jnp.dtype(jnp.float32))
        convolution = functools.partial(
            ShortConvolution,
            init=init,
            rngs=rngs,
            width=keys.mamba_d_conv,
            use_bias=keys.mamba_conv_bias,
        )
        self.x_conv = convolution((N, H), ("q_heads", "kv"))
        self.B_conv = convolution((G, S), ("kv_heads", None))
        self.C_conv = convolution((G, S), ("kv_heads", None))
        of_heads = functools.partial(param, rngs, (N,), ("q_heads",), dtype=init.weight_dtype)
        self.A_log = of_heads(constant(np.log(np.arange(1, N + 1))))
        self.D = of_heads(constant(1.0))
        time_steps = keys.time_step_min, keys.time_step_max
        self.dt_bias = of_heads(inverse_softplus_of_log_uniform(*time_steps))
        epsilon = config.block.normalization_layer_epsilon
        self.norm = GatedGroupNorm((N, H), keys, epsilon, init, rngs)
        self.out = Dense(
            (N, H),
            (D,),
            ("q_heads", "kv", "embed"),
            draw.attention_output,
            init,
            rngs,
            use_bias=use_bias,
        )

    @classmethod
    def sharded_sizes(cls, layer: LayerConfig) -> dict[str, tuple[str, int]]:
        """Returns the numbers of heads and groups; see `Part.sharded_sizes`."""
        config = layer.config.recurrent.mamba2
        return {
            "mamba_n_heads": ("heads", config.num_heads(layer.dimensions.emb_dim)),
            "mamba_n_groups": ("kv_heads", config.mamba_n_groups),
        }

    @classmethod
    def flops(cls, config: ModelConfig, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns FLOPs of the state's updates and reads, and of products within chunks."""
        keys = config.recurrent.mamba2
        N = keys.num_heads(dimensions.emb_dim)
        H = keys.mamba_d_head
        G = keys.mamba_n_groups
        S = keys.mamba_d_state
        C = min(keys.mamba_chunk_size, length)
        filled = -(-length // C) * C / length  # with the tokens that fill the last chunk
        states = 4.0 * N * H * S
        within_chunks = 2.0 * C * (G * S + N * H)
        return {
            "state space": Flops(by_rule=states, hardware_flops=filled * (states + within_chunks))
        }

    @classmethod
    def state_bytes(
        cls, config: ModelConfig, dimensions: Dimensions, length: int, itemsize: int
    ) -> tuple[int, int]:
        """Returns bytes of a Mamba2State; see `Part.state_bytes`."""
        keys = config.recurrent.mamba2
        num_channels = keys.num_heads(dimensions.emb_dim) * keys.mamba_d_head
        num_convolved = num_channels + 2 * keys.mamba_n_groups * keys.mamba_d_state
        newest = (keys.mamba_d_conv - 1) * num_convolved
        return 0, 4 * (newest + num_channels * keys.mamba_d_state)

    def advance(
        self, x_BTD: jax.Array, state: Mamba2State | None, context: ForwardContext
    ) -> tuple[jax.Array, Mamba2State]:
        """Returns the output of further tokens, and the state after them.

        Args:
          x_BTD: Input.
          state: The state before the first token; None for the first of a sequence.
          context: Facts about the batch.
        """
        config = self.config
        length = x_BTD.shape[1]
        chunks = Chunks.of(x_BTD, config.mamba_chunk_size)
        u_BTD = scaled(x_BTD, config.ssm_in_multiplier)
        z_factor, x_factor, B_factor, C_factor, dt_factor = config.ssm_multipliers or (1.0,) * 5
        z_BTNH = scaled(tag(self.z_proj(u_BTD), "attention_gate"), z_factor)
        projected = (
            scaled(tag(self.x_proj(u_BTD), "value_proj"), x_factor),
            scaled(tag(self.B_proj(u_BTD), "key_proj"), B_factor),
            scaled(tag(self.C_proj(u_BTD), "query_proj"), C_factor),
        )
        dt_BTN, log_decay_BTN = self._time_steps(scaled(self.dt_proj(u_BTD), dt_factor))
        is_token_BT = is_token(context, length)
        if is_token_BT is not None:  # padding keeps the state
            dt_BTN = jnp.where(is_token_BT[..., None], dt_BTN, 0)
            log_decay_BTN = jnp.where(is_token_BT[..., None], log_decay_BTN, 0)
        newest = (None,) * 3 if state is None else state.newest
        convolutions = (self.x_conv, self.B_conv, self.C_conv)
        convolved = [
            convolution(x_BTX, context, state_BPX)
            for convolution, x_BTX, state_BPX in zip(convolutions, projected, newest, strict=True)
        ]
        heads_BTNH, B_BTGS, C_BTGS = (jax.nn.silu(y).astype(self.dtype) for y, _ in convolved)
        memory_BNSH = None if state is None else state.memory_BNSH
        inputs = StateSpaceInputs(heads_BTNH, B_BTGS, C_BTGS, dt_BTN, log_decay_BTN)
        y_BTNH, memory_BNSH = state_space_dual(
            inputs, memory_BNSH, chunks, context, precision=self.precision
        )
        y_BTNH += heads_BTNH.astype(jnp.float32) * self.D[...].astype(jnp.float32)[:, None]
        y_BTNH = tag(y_BTNH.astype(self.dtype), "context")
        y_BTD = tag(self.out(self.norm(y_BTNH, z_BTNH)), "out_proj")
        newest = tuple(state_BPX for _, state_BPX in convolved)
        return scaled(y_BTD, config.ssm_out_multiplier), Mamba2State(newest, memory_BNSH)

    def _time_steps(self, projected_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the time steps dt and the logarithms of decays, float32 [B, T, N] each.

        Args:
          projected_BTN: Projection of the input.
        """
        dt_bias_N = self.dt_bias[...].astype(jnp.float32)
        dt_BTN = jax.nn.softplus(projected_BTN.astype(jnp.float32) + dt_bias_N)
        if self.config.time_step_limit:
            dt_BTN = jnp.clip(dt_BTN, *self.config.time_step_limit)
        log_decay_BTN = -jnp.exp(self.A_log[...].astype(jnp.float32)) * dt_BTN
        record(dt_BTN, "time_step")
        record(jnp.exp(log_decay_BTN), "state_decay")
        return dt_BTN, log_decay_BTN


class GatedGroupNorm(nnx.Module):
    """RMS norm of y SiLU(z), over the heads of a group together.

    With mamba_norm_before_gate y is normalized before it is multiplied by the gate, and without
    mamba_rms_norm it is only multiplied. The scale is the factor itself, also where other norms of
    the model store its difference from 1.
    """

    rows = "norms"

    def __init__(
        self,
        shape: tuple[int, int],
        config: Mamba2Config,
        epsilon: float,
        init: Init,
        rngs: nnx.Rngs,
    ):
        """Declares the scale.

        Args:
          shape: N and H.
          config: Keys of the mixer.
          epsilon: Added to the mean square.
          init: Dtype of the scale.
          rngs: RNG streams that weights are drawn from.
        """
        self.config = config
        self.epsilon = epsilon
        axes = ("q_heads", "kv")
        declare = functools.partial(
            param, rngs, shape, axes, constant(1.0), dtype=init.weight_dtype
        )
        self.scale = declare() if config.mamba_rms_norm else None

    def __call__(self, y_BTNH: jax.Array, z_BTNH: jax.Array) -> jax.Array:
        """Returns the gated output, in the dtype of the gate.

        Args:
          y_BTNH: Output of the state space.
          z_BTNH: Gate, before its activation.
        """
        y = y_BTNH.astype(jnp.float32)
        gate = jax.nn.silu(z_BTNH.astype(jnp.float32))
        if self.scale is None:
            return (y * gate).astype(z_BTNH.dtype)
        if not self.config.mamba_norm_before_gate:
            y = y * gate
        *batch, num_heads, width = y.shape
        y_BTGMH = y.reshape(*batch, self.config.mamba_n_groups, -1, width)
        normalized = rms_normalize(y_BTGMH, None, self.epsilon, (-2, -1))
        y = normalized.reshape(*batch, num_heads, width) * self.scale[...].astype(jnp.float32)
        if self.config.mamba_norm_before_gate:
            y = y * gate
        return y.astype(z_BTNH.dtype)


def state_space_dual(
    inputs: StateSpaceInputs,
    memory_BNSH: jax.Array | None,
    chunks: Chunks,
    context: ForwardContext,
    *,
    precision: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns y without D x, float32 [B, T, N, H], and the last state (formulas of the module).

    Tokens see only their own document; the first continues the one of the state. Products have
    the dtype of x and are added up in float32; states and decays are float32.

    Args:
      inputs: Of all tokens.
      memory_BNSH: State before the first token; None is zeros.
      chunks: The division of the sequences; no effect on the result besides rounding.
      context: Has the documents.
      precision: Of the products.
    """
    product = functools.partial(einsum_f32, precision=precision)
    dtype = inputs.x_BTNH.dtype
    batch, _, num_heads, width = inputs.x_BTNH.shape
    num_groups, state_width = inputs.B_BTGS.shape[2:]
    x, B, C, dt, log_decay = map(chunks.split, inputs)
    masks = DocumentMasks.of(context, chunks)

    def by_group(x_JPBN: jax.Array) -> jax.Array:
        """Returns [J, P, B, G, M, ...] of heads [J, P, B, N, ...]."""
        return x_JPBN.reshape(*x_JPBN.shape[:3], num_groups, -1, *x_JPBN.shape[4:])

    def by_head(x_JPBGM: jax.Array) -> jax.Array:
        """Returns [J, P, B, N, ...] of heads [J, P, B, G, M, ...]."""
        x_JPBN = x_JPBGM.reshape(*x_JPBGM.shape[:3], num_heads, *x_JPBGM.shape[5:])
        return constrain_heads(x_JPBN, *_CHUNKS)

    # Logarithms of decays from the chunk's start. The exponent of a ratio is masked before exp, as
    # it overflows for a token that is not seen.
    total_JPBNC = jnp.cumsum(log_decay, axis=-1)
    log_ratio = total_JPBNC[..., :, None] - total_JPBNC[..., None, :]
    visible = masks.visible_JPBCC[:, :, :, None]
    decay_JPBNCC = jnp.exp(jnp.where(visible, log_ratio, -jnp.inf)) * dt[..., None, :]
    scores_JPBGCC = product("jpbgts,jpbgus->jpbgtu", C, B)
    scores = constrain_heads(decay_JPBNCC * repeat_heads(scores_JPBGCC, num_heads), *_CHUNKS)
    within = product("jpbntu,jpbnuh->jpbnth", scores.astype(dtype), x)

    # What enters the state, and what the state gives.
    remains = masks.remains_JPBC[:, :, :, None]
    log_rest = total_JPBNC[..., -1:] - total_JPBNC
    entering = jnp.exp(jnp.where(remains, log_rest, -jnp.inf)) * dt
    entering_x = by_group((x.astype(jnp.float32) * entering[..., None]).astype(dtype))
    added = by_head(product("jpbgus,jpbgmuh->jpbgmsh", B, entering_x))
    keeps_state = masks.keeps_state_JPB[..., None]
    chunk_decay = jnp.exp(total_JPBNC[..., -1]) * keeps_state
    if memory_BNSH is None:
        memory_BNSH = jnp.zeros((batch, num_heads, state_width, width), jnp.float32)
    before, last_BNSH = pass_decayed_states(chunk_decay[..., None, None], added, memory_BNSH)
    before = by_group(before.astype(dtype))
    from_state = by_head(product("jpbgts,jpbgmsh->jpbgmth", C, before))
    carried = jnp.exp(total_JPBNC) * masks.continues_JPBC[:, :, :, None]
    return chunks.merge(within + carried[..., None] * from_state), last_BNSH
