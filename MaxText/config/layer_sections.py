"""Keys of the parts of a layer, one section per part."""

from typing import Annotated, Literal, NamedTuple

from pydantic import PlainValidator

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    NamedSection,
    Natural,
    NonNegative,
    OtherThan,
    Positive,
    Section,
    key,
)
from MaxText.config.layer_plan import LayerKinds
from MaxText.config.registry import Name

Activation = Literal[
    "linear",
    "relu",
    "relu2",
    "gelu",
    "gelu_erf",
    "quick_gelu",
    "linear_plus_one",
    "silu",
    "swish",
    "tanh",
    "sigmoid",
    "elu",
    "selu",
    "celu",
    "softplus",
    "leaky_relu",
    "mish",
    "hard_swish",
    "soft_sign",
    "abs",
    "sin",
    "cos",
    "sign",
    "id",
    "lrelu001",
    "lrelu020",
    "triangle_relax",
    "square_relax",
    "spike",
    "spike2",
    "tanhshrink",
    "softsign",
    "bipolarsigmoid",
    "elish",
    "elish_gpt_neo",
    "arcsinh",
    "maxsig",
    "cosid",
    "minsin",
    "maxtanh",
    "tanhexp",
    "lisht",
    "seagull",
    "snake",
    "roottanh",
    "softplusmone",
]
# Over all features of a token, with learned numbers, or random in training: only in an MLP.
NotElementwise = Literal[
    "softmax",
    "logsoftmax",
    "aria",
    "prelu",
    "parcsinh",
    "psoftplus",
    "xielu",
    "proottanh",
    "rrelu",
]
MLPActivation = Literal[Activation, NotElementwise]


class Dimensions(NamedTuple):
    """Sizes shared by all parts, after `global_parameter_scale`.

    Letters used in shape comments: B batch, T query length, S key length, D emb_dim, N query
    heads, K key/value heads, H head_dim, F mlp_dim, V vocab_size, L num_layers.
    """

    emb_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    num_layers: int
    vocab_size: int
    max_target_length: int


class BlockConfig(Section):
    """Layer structure: mixer, norms and residual arrangement."""

    mixer: Annotated[str, Name("mixer")] = key("attention")
    """Token mixer of a layer, by the name of a registered part. attention_types and layer_kinds set
    it per layer."""
    parallel_mixer: Annotated[str, Name("mixer")] = key("none")
    """A second mixer, without softmax, beside attention in the same layer: both read one norm, and
    their outputs are added (Falcon-H1: mamba2)."""
    layer_pattern: str = key("")
    """One letter of layer_kinds per layer: a repeated cycle ("GGG*"), or a prefix, a cycle and a
    suffix ("DD(EE*)D"). Empty: all layers are alike."""
    layer_kinds: Annotated[LayerKinds, PlainValidator(LayerKinds.of)] = key(LayerKinds())
    """Meaning of the letters of layer_pattern: {letter: {key: value}}, with any keys of a layer's
    parts: {G: {mixer: linear_attention}, "*": {mixer: attention}}."""
    block_arrangement: Literal["sequential", "parallel"] = key("sequential")
    """sequential: x + attn(norm(x)), then x + mlp(norm(x)). parallel: x + attn(norm1(x)) +
    mlp(norm2(x)), as GPT-NeoX."""
    parallel_residual_shared_norm: bool = key(False, only_if={"block_arrangement": "parallel"})
    """Share one norm between both branches of a parallel layer (GPT-J, fused residuals of
    fattorib/transformer)."""
    norm_placement: Literal["pre", "post", "sandwich"] = key("pre")
    """Norms of a layer's branches. pre: x + f(norm(x)). post: x + norm(f(x)) (OLMo 2). sandwich:
    x + norm2(f(norm1(x))) (Gemma 2, GLM-4)."""
    normalization_type: Annotated[str, Name("norm")] = key("rms_norm")
    """Norms of branches. scale_norm: g x / |x| with a scalar g (Nguyen and Salazar 2019).
    scale_norm_centered: LayerNorm with a scalar scale and no bias (GPT-Neo's scalenorm)."""
    normalization_bias: bool = key(True, only_if={"normalization_type": "layer_norm"})
    """Whether LayerNorm has a bias."""
    normalization_layer_epsilon: Positive = key(1e-5, "Epsilon added to the variance in norms.")
    normalization_zero_centered: bool = key(False)
    """Store norm scales as their difference from 1 (Gemma): they start at 0, and weight decay pulls
    them to 1."""
    block_norm_parametric: bool = key(True, only_if={"use_rezero": False})
    """Give the norms of a layer scale and bias (TokenFormer: false). The final norm has keys
    of its own."""
    use_rezero: bool = key(False)
    """ReZero: multiply each branch by a learned scalar that starts at 0, without norms before
    branches."""
    use_macaron: bool = key(False, only_if={"block_arrangement": "sequential"})
    """Macaron: half a feed-forward before attention and half after it."""
    macaron_prenorm: bool = key(True, only_if="use_macaron")
    """Give the first half a norm and a gate like other branches; GPT-Neo has neither."""
    connection_type: Annotated[str, Name("connection", "auto")] = key("auto")
    """Input of a layer. residual: the previous output. dense: sums of all previous outputs. auto:
    dense if dense_conn=true, else residual."""
    residual_multiplier: Positive = key(1.0)
    """Factor of each branch before it is added to the residual stream (Granite)."""
    use_layer_scalar: bool = key(False)
    """Multiply the output of a layer by a learned scalar that starts at 1 (Gemma 4)."""
    share_layer_params: bool = key(False)
    """Share one set of parameters between all layers (ALBERT)."""


AttentionKind = Literal["global", "local", "linear", "none"]
MIXERS: dict[AttentionKind, str] = {
    "global": "attention",
    "local": "local_attention",
    "linear": "linear_attention",
    "none": "none",
}
SOFTMAX_MIXERS = ("attention", "local_attention", "latent_attention")
# Those with the same projections.
ATTENTION_MIXERS = ("attention", "local_attention", "linear_attention")
# Those with a state that the delta rule changes.
DELTA_MIXERS = ("gated_delta_net", "kda")
# Those with keys of RecurrentConfig.
RECURRENT_MIXERS = (*DELTA_MIXERS, "mamba2")

_ROTARY = {"position_embedding": "rotary"}
_SCALED = _ROTARY | {"rope_type": ["linear", "llama3.1", "yarn", "longrope"]}
_READS_ORIGINAL_LENGTH = {
    "rope_type": ["llama3.1", "yarn", "longrope"],
    "temperature_tuning_beta": OtherThan((0,)),
}
_LONGROPE = _ROTARY | {"rope_type": "longrope"}
_LLAMA = _ROTARY | {"rope_type": "llama3.1"}
_YARN = _ROTARY | {"rope_type": "yarn"}
_LEARNED = {"position_embedding": "learned"}


class PositionConfig(Section):
    """Position encoding."""

    position_embedding: Annotated[str, Name("position")] = key("rotary")
    """rotary rotates queries and keys; learned adds a table to the embedding, axial the mean of two
    smaller tables; alibi penalizes scores by distance."""
    axial_pos_shape: tuple[int, ...] = key((), only_if={"position_embedding": "axial"})
    """Rows (a, b) of the two tables; position p uses row p // b of the first and p % b of the
    second (GPT-Neo: axial_pos_emb)."""
    alibi_max_bias: Positive = key(8.0, only_if={"position_embedding": "alibi"})
    """ALiBi slope of head i of n is 2^(-alibi_max_bias i / n) (Press et al. 2022)."""
    trainable_position_size: int = key(-1, unit="tokens", only_if=_LEARNED, ge=-1)
    """Rows of the learned position table; -1 is max_target_length."""
    rope_max_timescale: float = key(10_000.0, "Rotary base (theta).", only_if=_ROTARY, gt=1)
    rope_type: Literal["default", "linear", "llama3.1", "yarn", "longrope", "proportional"] = key(
        "default", only_if=_ROTARY
    )
    """Rotary frequency scaling for long contexts. linear: divide all by rope_factor. llama3.1:
    divide low frequencies. yarn: the same with another transition, and scaled scores. longrope:
    divide each by its number in rope_short_factors or rope_long_factors, with scaled scores (Phi).
    proportional: the rotary_pct highest frequencies of a whole head, all others 0 (Gemma 4)."""
    rope_factor: float = key(8.0, only_if=_SCALED, ge=1)
    """Divisor of rotary frequencies (Llama 3.1: 8; Llama 3.2: 32)."""
    original_max_position_embeddings: Count = key(
        8192, unit="tokens", only_if=_ROTARY, only_if_any=_READS_ORIGINAL_LENGTH
    )
    """Context length before frequencies were scaled."""
    low_freq_factor: Positive = key(1.0, only_if=_LLAMA)
    """Rotations within the original length up to which a frequency is fully divided."""
    high_freq_factor: Positive = key(4.0, only_if=_LLAMA)
    """Rotations within the original length from which a frequency is unchanged."""
    beta_fast: Positive = key(32.0, only_if=_YARN)
    """Rotations within the original length from which a frequency is unchanged."""
    beta_slow: Positive = key(1.0, only_if=_YARN)
    """Rotations within the original length up to which a frequency is fully divided."""
    rope_truncate: bool = key(True, only_if=_YARN)
    """Round the ends of yarn's transition to whole pairs (gpt-oss: false)."""
    rope_attention_factor: float | None = key(
        None, gt=0, only_if=_ROTARY | {"rope_type": ["yarn", "longrope"]}
    )
    """Factor of sines and cosines. null is 0.1 ln(rope_factor) + 1 with yarn, and with longrope
    sqrt(1 + ln(rope_factor) / ln(original_max_position_embeddings))."""
    rope_short_factors: tuple[float, ...] = key((), only_if=_LONGROPE)
    """Divisors of the frequencies in documents up to original_max_position_embeddings, one for each
    pair of rotary dimensions."""
    rope_long_factors: tuple[float, ...] = key((), only_if=_LONGROPE)
    """Divisors of the frequencies in longer documents. In generation a prompt's length decides for
    its tokens, and the position of each new token for that token, as in transformers."""
    rope_pairs: Literal["halves", "adjacent"] = key("halves", only_if=_ROTARY)
    """Dimensions of a head that rotate as a pair. halves: i and i + R/2 of R rotary ones. adjacent:
    2i and 2i + 1 (Cohere, GLM-4, Llama 4)."""
    temperature_tuning_beta: NonNegative = key(0.0, only_if=_ROTARY)
    """Multiply the query at position t by 1 + beta ln(1 + floor(t /
    original_max_position_embeddings)) (Ministral 3: llama_4_scaling_beta); 0 disables."""
    rotary_pct: float = key(1.0, only_if=_ROTARY, gt=0, le=1)
    """Fraction of each head's dimensions that rotary rotates (GPT-NeoX: 0.25)."""
    rope_table_dtype: Literal["float32", "bfloat16", "float16"] = key("float32", only_if=_ROTARY)
    """Dtype to which sines and cosines are rounded. The released MUDDFormer was trained with
    bfloat16, MUDDPythia with float16."""


_PARALLEL_MIXER = {"parallel_mixer": OtherThan(("none",))}
_BLOCKED = {"attention": ["autoselected", "blocked"]}


class LinearAttentionConfig(NamedSection):
    """Layers of linear attention."""

    chunk: Count = key(64, "Chunk length. Does not change the result.", unit="tokens")
    epsilon: NonNegative = key(1e-6, "Epsilon added to the normalizer.")


class LatentAttentionConfig(Section):
    """Layers of latent attention (DeepSeek-V2, arXiv 2405.04434), with mixer=latent_attention.

    Their heads are base_num_query_heads. Biases of qkv_bias belong to the projections down.
    """

    q_lora_rank: Natural = key(0)
    """Width of the vector that queries are projected from, normalized; 0 projects them from the
    layer's input (DeepSeek-V2-Lite)."""
    kv_lora_rank: Count = key(512)
    """Width of the latent vector of a token, normalized, that the keys and values of all heads are
    projected from. The cache holds it, and the rotary slice of the keys."""
    qk_nope_head_dim: Count = key(128)
    """Width of the slice of each query and key without positions."""
    qk_rope_head_dim: Count = key(64)
    """Width of the slice that rotary positions rotate, the same for the keys of all heads. With
    position_embedding=none it is not rotated (Kimi Linear)."""
    v_head_dim: Count = key(128)
    """Width of each value."""
    mscale: NonNegative = key(1.0, only_if=_YARN)
    """With rope_type=yarn, scores are multiplied by (0.1 mscale ln(rope_factor) + 1)^2 (DeepSeek:
    mscale_all_dim, with rope_attention_factor=1); 0 disables."""


class AttentionConfig(Section):
    """The attention mixer."""

    attention_projections: Annotated[str, Name("projection")] = key("dense")
    """Projections to queries, keys, values and output: dense matrices, or Pattention over slots
    (TokenFormer)."""
    attention: Literal["autoselected", "dot_product", "blocked", "flash"] = key("autoselected")
    """Attention backend. blocked: causal in blocks of query rows, half the FLOPs of dot_product.
    flash: a kernel that keeps scores out of memory, splash attention on TPU, cuDNN on GPU.
    autoselected: flash if supported, else blocked."""
    attention_block_size: Count = key(128, unit="tokens", only_if=_BLOCKED)
    """Query rows per block."""
    context_parallel_strategy: Literal["all_gather", "ring"] = key("all_gather")
    """How queries meet keys of other devices where *_context_parallelism splits sequences.
    all_gather: every device gathers all keys and values of its sequences. ring: they go from device
    to device, and each keeps one part at a time (docs/how-to/shard_a_model.md)."""
    context_parallel_load_balance: bool = key(True, only_if={"context_parallel_strategy": "ring"})
    """Give each device of the ring tokens from both ends of the sequence, which halves the time of
    causal attention. Does not change the result."""
    causal: bool = key(True, "Mask later tokens. mlm_training=true turns it off.")
    qkv_bias: bool = key(False, "Biases of the query, key and value projections.")
    proj_bias: bool = key(False, "Bias of the attention output projection.")
    use_qk_norm: bool = key(False, "Norms of queries and keys.")
    qk_norm_type: Literal["rms_norm", "layer_norm"] = key("rms_norm", only_if="use_qk_norm")
    """Type of these norms; layer_norm has no bias."""
    qk_norm_scope: Literal["head", "separate", "joint"] = key("head", only_if="use_qk_norm")
    """head: normalize each head, with one scale for all heads (Qwen 3). separate: each head, with a
    scale for each (StableLM 2, Cohere). joint: all heads together (OLMo 2, MiniMax M2)."""
    qk_norm_with_scale: bool = key(True, only_if="use_qk_norm")
    """Give these norms a scale (Llama 4, nanochat: false)."""
    qk_norm_after_rotary: bool = key(False, only_if="use_qk_norm")
    """Normalize after rotary instead of before it (Hunyuan, nanochat)."""
    use_v_norm: bool = key(False, "RMSNorm without scale on each head of the values (Gemma 4).")
    share_kv_projections: bool = key(False)
    """Use the projection to keys for values, too, before norms and rotary (Gemma 4:
    attention_k_eq_v)."""
    attn_logits_soft_cap: NonNegative = key(0.0)
    """Soft cap c of attention scores: c * tanh(score / c); 0 disables."""
    attention_sinks: bool = key(False)
    """A learned score per head that takes part in the softmax without a value, so that a query may
    attend to nothing (gpt-oss). adamw_mask=[sinks] exempts it from weight decay."""
    attention_output_gate: bool = key(False)
    """Multiply the heads' outputs by sigmoid(W x) before the output projection, x the input of the
    layer's attention (Qiu et al. 2025; Qwen3-Next)."""
    attention_scale: float | None = key(None, gt=0)
    """Factor of attention scores; null is 1 / sqrt(head_dim). GPT-Neo: 1."""
    attention_in_multiplier: Positive = key(1.0, only_if=_PARALLEL_MIXER)
    """Factor of the input of attention beside a parallel_mixer (Falcon-H1)."""
    attention_out_multiplier: Positive = key(1.0, only_if=_PARALLEL_MIXER)
    """Factor of the output of attention beside a parallel_mixer (Falcon-H1)."""
    attention_types: tuple[tuple[tuple[AttentionKind, ...], int], ...] = key(())
    """Attention kinds per layer, as patterns and repetitions: [[[global, local], 12]] is 24
    alternating layers. local: the last sliding_window_size tokens. linear: constant cost per token
    (except with causal=false and several documents). none: a feed-forward alone. Empty: all
    global."""
    sliding_window_size: Count = key(256, unit="tokens")
    """Tokens that a query of a local layer sees, itself included; without a causal mask also as
    many after it."""
    linear_attention: LinearAttentionConfig = LinearAttentionConfig()
    latent_attention: LatentAttentionConfig = LatentAttentionConfig()
    num_mem_kv: Natural = key(0)
    """Learned keys and values that every token of a global layer also attends to."""
    gpt_neo_none_attention_bug: bool = key(False)
    """Double the residual stream in layers of kind none, as a bug of GPT-Neo does."""
    static_sgu: bool = key(False)
    """Static SGU: half of the channels skip attention and are summed over earlier tokens with fixed
    weights 1 / (distance + 2) (fattorib/transformer)."""
    static_sgu_kernel: Natural = key(128, unit="tokens", only_if="static_sgu")
    """Largest distance of the static SGU sum."""

    def kinds(self, num_layers: int) -> tuple[AttentionKind, ...]:
        """Returns the kind of each layer's attention by attention_types."""
        if not self.attention_types:
            return ("global",) * num_layers
        kinds: list[AttentionKind] = []
        for pattern, times in self.attention_types:
            count = min(times * len(pattern), num_layers - len(kinds))
            kinds.extend(pattern[i % len(pattern)] for i in range(count))
        return tuple(kinds)


class KimiDeltaAttentionConfig(Section):
    """Layers of Kimi Delta Attention (arXiv 2510.26692), with mixer=kda.

    They have linear_num_value_heads heads.
    """

    kda_lower_bound: float | None = key(None, lt=0)
    """Bound of the logarithm of a state's decay by one token: it is the bound times sigmoid of
    exp(A_log) times the rate, as in Ling 3 (HF: kda_lower_bound, -5 there). null has no bound: it
    is -exp(A_log) softplus(rate), as in Kimi Linear."""
    kda_lora_rank: Natural | None = key(None)
    """Rank of the projections to the decays and to the gate of outputs. null is
    linear_key_head_dim (Kimi Linear); 0 is one full matrix each (Ling 3)."""


class Mamba2Config(Section):
    """Layers of Mamba-2 (arXiv 2405.21060), with mixer=mamba2.

    Their heads are not those of attention.
    """

    mamba_n_heads: CountOrAuto = key(-1)
    """Heads; -1 is mamba_expand * emb_dim / mamba_d_head."""
    mamba_d_head: Count = key(64, "Width of a head.")
    mamba_d_state: Count = key(128)
    """Width of the state of each channel, which is that of B (keys) and C (queries)."""
    mamba_n_groups: Count = key(1)
    """Groups of heads that share B and C, and whose outputs are normalized together."""
    mamba_d_conv: Count = key(4, unit="tokens")
    """Tokens that the convolution of x, B and C sees."""
    mamba_expand: Count = key(2, only_if={"mamba_n_heads": -1})
    """Width of all heads together, in multiples of emb_dim."""
    mamba_chunk_size: Count = key(256, unit="tokens")
    """Tokens that are multiplied with each other; a state goes from chunk to chunk. No effect on
    the result besides rounding."""
    mamba_conv_bias: bool = key(True, "Bias of the convolution.")
    mamba_proj_bias: bool = key(False, "Biases of the projections.")
    mamba_rms_norm: bool = key(True)
    """Normalize the gated output, over the heads of a group together; without (Falcon-H1) it is
    only gated."""
    mamba_norm_before_gate: bool = key(False, only_if="mamba_rms_norm")
    """Normalize the output before its gate instead of after it."""
    time_step_limit: tuple[float, ...] = key(())
    """Smallest and largest time step; empty: no limits."""
    time_step_min: Positive = key(0.001)
    """Smallest time step at the start: dt_bias begins as the inverse softplus of log-uniform
    numbers from time_step_min to time_step_max."""
    time_step_max: Positive = key(0.1, "Largest time step at the start.")
    ssm_in_multiplier: Positive = key(1.0, "Factor of the mixer's input (Falcon-H1).")
    ssm_out_multiplier: Positive = key(1.0, "Factor of the mixer's output (Falcon-H1).")
    ssm_multipliers: tuple[float, ...] = key(())
    """Factors of the projections to z (gate), x, B, C and dt, biases included (Falcon-H1); empty:
    none."""

    def num_heads(self, emb_dim: int) -> int:
        """Returns the number of heads in a model of width `emb_dim`."""
        if self.mamba_n_heads != -1:
            return self.mamba_n_heads
        return self.mamba_expand * emb_dim // self.mamba_d_head


class RecurrentConfig(Section):
    """Recurrent mixers: layers with a state of fixed size instead of a KV cache.

    Their heads are not those of attention.
    """

    linear_num_key_heads: Count = key(16)
    """Heads of queries and keys in layers with mixer=gated_delta_net (MaxText:
    gdn_num_key_heads)."""
    linear_num_value_heads: Count = key(32)
    """Heads of values, a multiple of linear_num_key_heads: each key serves several values (MaxText:
    gdn_num_value_heads). With mixer=kda also the heads of queries and keys."""
    linear_key_head_dim: Count = key(128)
    """Width of each query and key (MaxText: gdn_key_head_dim)."""
    linear_value_head_dim: Count = key(128)
    """Width of each value, and of each output (MaxText: gdn_value_head_dim)."""
    linear_conv_kernel_dim: Count = key(4, unit="tokens")
    """Tokens that the convolution of queries, keys and values sees (MaxText:
    gdn_conv_kernel_dim)."""
    linear_chunk_size: Count = key(64, unit="tokens")
    """Tokens that are multiplied with each other; a state goes from chunk to chunk. No effect on
    the result besides rounding (MaxText: gdn_chunk_size)."""
    linear_allow_neg_eigval: bool = key(False)
    """Let a token change the state's answer to its key by up to twice the difference from its
    value, so that transitions of the state have eigenvalues from -1 to 1 (arXiv 2411.12537)."""
    linear_norm_epsilon: NonNegative | None = key(None)
    """Epsilon of the gated norm of outputs; null is normalization_layer_epsilon (OLMo hybrid:
    1e-5)."""
    kda: KimiDeltaAttentionConfig = KimiDeltaAttentionConfig()
    mamba2: Mamba2Config = Mamba2Config()


_MLP = {"feed_forward_type": "mlp"}


class FeedForwardConfig(Section):
    """The feed-forward part."""

    feed_forward_type: Annotated[str, Name("feed_forward")] = key("mlp")
    """mlp: a plain or gated MLP. pattention: Pattention over slots (TokenFormer). none: layers are
    only mixers (Mamba-2). Or the name of a registered part."""
    mlp_activations: tuple[MLPActivation, ...] = key(("silu", "linear"), only_if=_MLP)
    """One name is a plain MLP; two or more are gated: ["silu", "linear"] is SwiGLU. gelu is the
    tanh approximation, gelu_erf the exact one. elish is the paper's, x sigmoid(x) for x > 0;
    elish_gpt_neo is GPT-Neo's, x / (1 + e^x). aria, prelu, parcsinh, psoftplus, proottanh and xielu
    (Apertus) have learned scalars. [quick_gelu, linear_plus_one] with mlp_activations_limit is the
    GLU of gpt-oss."""
    mlp_activations_limit: NonNegative = key(0.0, only_if=_MLP)
    """Clamp what activations read: the first (the gate) from above at this limit, others on both
    sides (gpt-oss: 7); 0 disables."""
    mlp_multipliers: tuple[float, ...] = key((), only_if=_MLP | {"num_experts": 1})
    """Factors of an MLP's gate before its activation, and of the MLP's output (Falcon-H1); empty is
    [1, 1]."""
    ffn_bias: bool = key(False, "Biases of the feed-forward projections.")
    dynamic_mlp_dim: bool = key(False, only_if=_MLP)
    """Shift feed-forward width from early to late layers (MUDDFormer): from 0.5 mlp_dim in the
    first to 1.5 mlp_dim in the last, in multiples of mlp_dim_multiple."""
    mlp_dim_multiple: Count = key(128, only_if="dynamic_mlp_dim")
    """Multiple to which widths of dynamic_mlp_dim are rounded."""

    @property
    def is_random(self) -> bool:
        """Whether its activations draw random numbers in training."""
        return self.feed_forward_type == "mlp" and "rrelu" in self.mlp_activations

    def mlp_dims(self, dimensions: Dimensions) -> tuple[int, ...]:
        """Returns the hidden width F of each layer's MLP."""
        num_layers = dimensions.num_layers
        width = dimensions.mlp_dim
        if not self.dynamic_mlp_dim:
            return (width,) * num_layers
        step = self.mlp_dim_multiple
        last = max(num_layers - 1, 1)
        return tuple(round(width * (i / last + 0.5) / step) * step for i in range(num_layers))


_SEVERAL_EXPERTS = {"num_experts": OtherThan((1,))}


_TWO_EXPERTS = {"num_experts_per_tok": 2}
_SCORES_OF_ALL = {"routed_score_func": ["softmax", "sigmoid", "sqrtsoftplus"]}
_SHARED = {"shared_experts": OtherThan((0,))}
_GROUPS = {"n_routing_groups": OtherThan((-1,))}


class SecondExpertConfig(NamedSection):
    """A token's second expert."""

    ONLY_IF = _TWO_EXPERTS

    policy: Literal["all", "none", "threshold", "random"] = key("all")
    """Its use in training. threshold: if its gate exceeds the threshold. random: with probability
    gate / threshold (GPT-Neo)."""
    policy_eval: Literal["all", "none", "threshold"] = key("all", "As policy, outside training.")
    threshold: NonNegative = key(0.2, "Threshold of the policies.")


class MoEConfig(Section):
    """Mixture of experts in place of the MLP."""

    ONLY_IF = _SEVERAL_EXPERTS

    num_experts: Count = key(1, "Experts per layer; 1 is a dense MLP.", only_if=_MLP)
    num_experts_per_tok: Count = key(1, "Experts per token (top-k).")
    moe_layers: tuple[int, ...] | None = key(None)
    """Layers with experts, counted from 0; null is those of the next two keys."""
    first_num_dense_layers: Natural = key(0, only_if={"moe_layers": None})
    """Layers without experts before the first one with them (DeepSeek V3: 3)."""
    interleave_moe_layer_step: Count = key(1, only_if={"moe_layers": None})
    """Every how many layers one has experts, the last of them (Llama 4: layers 1, 3, 5, ... with
    2)."""
    moe_mlp_dim: CountOrAuto = key(-1, "Hidden width of an expert; -1 is mlp_dim.")
    moe_activations: tuple[Activation, ...] | None = key(None)
    """Activations of experts, as mlp_activations; null is mlp_activations (GPT-Neo: [relu])."""
    routed_score_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax"] = key(
        "softmax"
    )
    """Scores of the experts for a token, from the router's logits. The best are chosen, and their
    scores are their gates. sigmoid: DeepSeek V3. sqrtsoftplus: sqrt(softplus(x)), DeepSeek V4.
    topk_softmax: a softmax over the chosen logits alone (gpt-oss, Granite)."""
    norm_topk_prob: bool | None = key(None, only_if=_SCORES_OF_ALL)
    """Divide a token's gates by their sum; null is whether it has several (num_experts_per_tok)."""
    apply_router_weight_on_input: bool = key(False)
    """Multiply the input of an expert by its gate, not the output (Llama 4)."""
    routed_scaling_factor: Positive = key(1.0, "Factor of the gates (DeepSeek V3: 2.5).")
    n_routing_groups: CountOrAuto = key(-1)
    """Groups of consecutive experts; a token's experts are in its topk_routing_group best ones
    (DeepSeek V3: 8). -1: no groups."""
    topk_routing_group: CountOrAuto = key(-1, only_if=_GROUPS)
    """Groups that a token chooses from (DeepSeek V3: 4); -1 is all."""
    routing_group_score: Literal["max", "top2_sum"] = key("top2_sum", only_if=_GROUPS)
    """Score of a group: its best expert's (DeepSeek V2), or the sum of its best two (V3)."""
    routed_bias: bool = key(False)
    """A bias for each expert, added to the scores that experts are chosen by and not to gates
    (DeepSeek V3). It balances the load without a loss: routed_bias_update_rate."""
    routed_bias_update_rate: NonNegative = key(0.0, only_if={"routed_bias": True})
    """What a step adds to the biases of experts with a load below the mean, and subtracts from
    those above (DeepSeek V3: 0.001); 0 keeps them. Skipped steps and evaluation keep them, too."""
    router_bias: bool = key(False, "Bias of the router's logits (gpt-oss).")
    expert_bias: bool = key(False, "Biases of the experts (gpt-oss).")
    shared_experts: Natural = key(0)
    """Experts that every token visits, beside those of the router: one MLP of their width together
    (DeepSeek, Qwen3-Next: 1)."""
    shared_expert_mlp_dim: CountOrAuto = key(-1, only_if=_SHARED)
    """Hidden width of a shared expert; -1 is that of other experts."""
    shared_expert_gate: bool = key(False, only_if=_SHARED)
    """Multiply the output of the shared experts by sigmoid(x w), a number per token (Qwen)."""
    capacity_factor: float = key(-1.0, ge=-1)
    """Expert capacity in training: this factor times tokens / experts of a group; -1 is
    dropless."""
    eval_capacity_factor: float = key(-1.0, ge=-1)
    """Expert capacity in evaluation (GPT-Neo: 2). Generation never drops tokens."""
    moe_group_size: CountOrAuto = key(-1, unit="tokens")
    """Tokens of a group that share expert capacity, a part of a sequence; -1 is a whole
    sequence."""
    load_balance_loss_weight: NonNegative = key(0.01, "Weight of the load balance loss.")
    load_balance_choices: Literal["first", "all"] = key("first")
    """Choices of a token that the load balance loss counts: the first (GShard, Switch), or all
    (DeepSeek's loss of a sequence, 0.0001 in V3; 1 / num_experts_per_tok of transformers' loss)."""
    router_z_loss_weight: NonNegative = key(0.0)
    """Weight of the router z-loss, the squared log of the normalizer (ST-MoE: 0.001)."""
    moe_second: SecondExpertConfig = SecondExpertConfig()

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts, with more than one; layers are counted from 0."""
        if self.moe_layers is not None:
            return layer in self.moe_layers
        return (
            layer >= self.first_num_dense_layers
            and (layer + 1) % self.interleave_moe_layer_step == 0
        )

    def width(self, mlp_dim: int) -> int:
        """Returns the hidden width F of an expert, where a dense MLP has `mlp_dim`."""
        return mlp_dim if self.moe_mlp_dim == -1 else self.moe_mlp_dim

    def shared_width(self, mlp_dim: int) -> int:
        """Returns the hidden width of all shared experts together; 0 without any."""
        is_own = self.shared_expert_mlp_dim != -1
        width = self.shared_expert_mlp_dim if is_own else self.width(mlp_dim)
        return self.shared_experts * width

    @property
    def normalizes_gates(self) -> bool:
        """Whether the gates of a token are divided by their sum."""
        if self.routed_score_func == "topk_softmax":
            return False  # their sum is 1
        if self.norm_topk_prob is None:
            return self.num_experts_per_tok > 1
        return self.norm_topk_prob


_QKV_AND_OUTPUT = {"attention_projections": "pattention"}
_FEED_FORWARD = {"feed_forward_type": "pattention"}
_ANYWHERE = _QKV_AND_OUTPUT | _FEED_FORWARD
SlotNormalization = Literal[
    "l2_norm_gelu", "gelu_l2_norm", "l2_norm", "softmax", "gelu", "gelu_layer_norm"
]
_GELU = {"normalize_type": ["l2_norm_gelu", "gelu_l2_norm", "gelu", "gelu_layer_norm"]}
_L2 = {"normalize_type": ["l2_norm_gelu", "gelu_l2_norm", "l2_norm"]}
SlotPlace = Literal["qkv", "proj", "ffn"]


class ZoomDimsConfig(NamedSection):
    """zoom_dim of single places."""

    ONLY_IF = _L2

    qkv: float = key(-1.0, only_if=_QKV_AND_OUTPUT, ge=-1)
    """zoom_dim of query, key and value; -1 is zoom_dim."""
    proj: float = key(-1.0, only_if=_QKV_AND_OUTPUT, ge=-1)
    """zoom_dim of the output projection; -1 is zoom_dim."""
    ffn: float = key(-1.0, only_if=_FEED_FORWARD, ge=-1)
    """zoom_dim of the feed-forward; -1 is 4 * zoom_dim."""


class ScaleFactorsConfig(NamedSection):
    """Factors of Theta."""

    qkv: float = key(1.0, "Factor in query, key and value.", only_if=_QKV_AND_OUTPUT)
    proj: float = key(1.0, "Factor in the output projection.", only_if=_QKV_AND_OUTPUT)
    ffn: float = key(1.0, "Factor in the feed-forward.", only_if=_FEED_FORWARD)


class PattentionConfig(Section):
    """Pattention, attention to learned slots: y = Theta(x K) V (TokenFormer)."""

    slot_num: CountOrAuto = key(-1, only_if_any=_ANYWHERE)
    """Slots of each query, key, value and output projection; the feed-forward has 4 times as many.
    -1 is emb_dim."""
    qkv_slot_num: CountOrAuto = key(-1, only_if=_QKV_AND_OUTPUT)
    """Slots of each query, key and value projection; -1 is slot_num."""
    proj_slot_num: CountOrAuto = key(-1, only_if=_QKV_AND_OUTPUT)
    """Slots of the output projection; -1 is slot_num."""
    ffn_slot_num: CountOrAuto = key(-1, only_if=_FEED_FORWARD)
    """Slots of the feed-forward; -1 is 4 * slot_num."""
    normalize_type: SlotNormalization = key("l2_norm_gelu", only_if_any=_ANYWHERE)
    """Theta over the n slots. l2_norm_gelu: gelu(sqrt(n) a / (|a| + eps)). gelu_l2_norm: gelu
    first. l2_norm: no gelu. softmax: n times softmax. gelu_layer_norm: LayerNorm of gelu."""
    gelu_approximate: bool = key(True, only_if=_GELU, only_if_any=_ANYWHERE)
    """Use the tanh approximation of GELU (TokenFormer's JAX code); false is exact (its PyTorch
    code)."""
    score_norm_epsilon: float | None = key(None, only_if=_L2, only_if_any=_ANYWHERE, ge=0)
    """Epsilon added to the norm in Theta, outside the square root. null: 1e-5 with l2_norm_gelu,
    else 1e-8. TokenFormer's PyTorch code has 0."""
    zoom_dim: NonNegative = key(0.0, only_if=_L2, only_if_any=_ANYWHERE)
    """Replacement of n in sqrt(n), so that slots can be added without changing the scale; 4 times
    as much in the feed-forward. 0 is the number of slots."""
    zoom_dims: ZoomDimsConfig = ZoomDimsConfig()
    scale_factors: ScaleFactorsConfig = ScaleFactorsConfig()

    def num_slots(self, projection: SlotPlace, emb_dim: int) -> int:
        """Returns the slots of one Pattention, with every -1 replaced.

        Args:
          projection: The one in whose place it stands.
          emb_dim: Width of the model, which is the default.
        """
        num_slots: int = getattr(self, f"{projection}_slot_num")
        if num_slots != -1:
            return num_slots
        base = emb_dim if self.slot_num == -1 else self.slot_num
        return 4 * base if projection == "ffn" else base

    def fixed_zoom(self, projection: SlotPlace) -> float:
        """Returns what replaces n in sqrt(n) of Theta; 0 is the number of slots."""
        zoom: float = getattr(self.zoom_dims, projection)
        default = 4 * self.zoom_dim if projection == "ffn" else self.zoom_dim
        return default if zoom == -1 else zoom

    def zoom(self, projection: SlotPlace, emb_dim: int) -> float:
        """Returns n in sqrt(n) of Theta: fixed_zoom, or else the number of slots."""
        return self.fixed_zoom(projection) or self.num_slots(projection, emb_dim)


_DENSE = {"dense_conn": True}
_DYNAMIC = _DENSE | {"dense_dynamic": True}
Way = Literal["q", "k", "v", "r"]


class DenseSelectionConfig(NamedSection):
    """Numbers of dense_sparsity."""

    dilation: Count = key(2, unit="layers", only_if={"dense_sparsity": "dilated"})
    """Distance between summed outputs."""
    window: Count = key(8, unit="layers", only_if={"dense_sparsity": "window"})
    """Number of summed outputs besides the embedding."""
    outputs: tuple[int, ...] = key((), only_if={"dense_sparsity": "list"})
    """Summed outputs: 0 is the embedding, n the output of the n-th layer. Outputs of later layers
    are skipped."""


class DenseConfig(Section):
    """Weighted sums of all previous hidden states as layer inputs.

    MUDDFormer (Xiao et al. 2025, arXiv 2502.12170) and, with fixed weights and one stream,
    DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622).
    """

    ONLY_IF = _DENSE

    dense_conn: bool = key(False)
    """Dense connections (MUDDFormer): layers read weighted sums of the embedding and all previous
    layer outputs instead of the last output alone."""
    dense_streams: tuple[Way, ...] = key(("q", "k", "v", "r"))
    """Streams with their own depth-wise sum: any of q, k, v, r. A missing stream uses the sum of r,
    or the last output if r is missing."""
    dense_dynamic: bool = key(True, "Weights that depend on the last output, token by token.")
    dense_static: bool = key(True, "Learned weights that are the same for all tokens.")
    dense_sparsity: Literal["all", "dilated", "window", "list"] = key("all")
    """Outputs that are summed besides the last one. dilated: every dilation-th, counted back from
    it. window: the last outputs and the embedding. list: those of dense_selection."""
    dense_selection: DenseSelectionConfig = DenseSelectionConfig()
    dense_period: Count = key(1, unit="layers")
    """Layers from one sum to the next; other layers read the last output."""
    dense_target_layers: tuple[int, ...] | None = key(None, only_if={"dense_period": 1})
    """Layers, counted from 1, that are followed by a sum; null follows dense_period."""
    mudd_prenorm: bool = key(False)
    """Add a sum of normalized outputs, each with a learned scale, to the last output."""
    mudd_postnorm: Literal["none", "residual", "all"] = key("none")
    """Add a normalized sum, with a learned scale that starts at 0.001, to the last output: on
    stream r only (MUDDFormer's JAX code) or on all streams (its paper)."""
    dynamic_dense_act_cls: Activation = key("gelu", only_if=_DYNAMIC)
    """Activation between the two matmuls that compute dynamic weights. gelu as in MUDDFormer's JAX
    code; gelu_erf as in the released models."""
    dynamic_dense_hidden_round: Literal["none", "ceil", "reference"] = key(
        "reference", only_if=_DYNAMIC
    )
    """Hidden width of dynamic weights, streams * sources: unchanged, or rounded up to a multiple of
    64. reference always adds 64 to a multiple of 64, as MUDDFormer's code does."""
    dynamic_dense_last_layer_expand: Count = key(4, only_if=_DYNAMIC)
    """Factor of that width after the last layer, which has one stream."""
    dense_first_layer_norms: Literal["one", "each"] = key("each")
    """Norms of the first layer's queries, keys and values, which all read the embedding: one (the
    released models), or one each as in later layers (MUDDFormer's JAX code)."""
    dense_aggregation_impl: Literal["auto", "sum", "kernel"] = key("auto")
    """Implementation of the sums. Does not change the result."""
    dense_saved_aggregates: Natural = key(0)
    """Sums, counted back from the last layer's, whose results are saved for the backward pass
    instead of recomputed. Each takes a hidden state's memory for each way, and spares a read of its
    sources (docs/explanation/dense_connections.md). No effect on the result."""

    @property
    def mixes_attention_inputs(self) -> bool:
        """Whether queries, keys or values have separate inputs."""
        return self.dense_conn and any(stream in self.dense_streams for stream in "qkv")

    @property
    def adds(self) -> bool:
        """Whether sums are added to the last output instead of replacing it."""
        return self.mudd_prenorm or self.mudd_postnorm != "none"

    def stands_after(self, depth: int) -> bool:
        """Returns whether a sum follows the first `depth` layers."""
        if not self.dense_conn:
            return False
        if self.dense_target_layers is not None:
            return depth in self.dense_target_layers
        return depth % self.dense_period == 0

    def sources(self, depth: int) -> tuple[int, ...]:
        """Returns what the sum after the first `depth` layers adds up, in order.

        0 is the embedding, n the output of the n-th layer. The last output is always there.
        """
        if self.dense_sparsity == "dilated":
            chosen = set(range(depth, -1, -self.dense_selection.dilation))
        elif self.dense_sparsity == "window":
            chosen = {0, *range(max(depth + 1 - self.dense_selection.window, 0), depth + 1)}
        elif self.dense_sparsity == "list":
            chosen = {source for source in self.dense_selection.outputs if source <= depth}
        else:
            chosen = set(range(depth + 1))
        return tuple(sorted(chosen | {depth}))
