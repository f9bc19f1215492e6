"""Keys that choose and size the model. Each class is handed to the part of the model it names."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from MaxText.configuration.keys import Section, key

Activation = Literal[
    "linear", "relu", "relu2", "gelu", "gelu_erf", "silu", "swish", "tanh", "sigmoid", "elu",
    "selu", "celu", "softplus", "leaky_relu", "mish", "hard_swish", "soft_sign",
]  # fmt: skip

RematPolicy = Literal[
    "auto", "none", "full", "minimal", "minimal_with_context", "minimal_offloaded",
    "save_dot_except_mlp", "save_dot_except_mlpwi", "save_qkv_proj", "save_out_proj",
    "qkv_proj_offloaded",
]  # fmt: skip


class Dimensions(NamedTuple):
    """The sizes that parts agree on, after `global_parameter_scale` is applied.

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


class Shape(Section):
    """Sizes of the model."""

    decoder_block: str = key(
        "llama2",
        "Family whose part choices are the defaults: a file of configs/decoder_blocks/.",
    )
    global_parameter_scale: int = key(
        1, "Power of two by which the base_* sizes are scaled up to multiply the parameters.", ge=1
    )
    base_emb_dim: int = key(2048, "Width of the residual stream before scaling.", ge=1)
    base_num_query_heads: int = key(16, "Query heads before scaling.", ge=1)
    base_num_kv_heads: int = key(
        16, "Key/value heads before scaling; fewer than query heads is grouped-query.", ge=1
    )
    base_mlp_dim: int = key(
        7168, "Hidden width of the feed-forward before scaling.", ge=1,
        only_if={"feed_forward_type": ["mlp"]},
    )  # fmt: skip
    base_num_decoder_layers: int = key(16, "Layers before scaling.", ge=1)
    head_dim: int = key(128, "Width of one head; -1 is emb_dim / query heads.", ge=-1)
    vocab_size: int = key(32_000, "Rows of the token table, padding rows included.", ge=1)
    max_target_length: int = key(2048, "Sequence length of a training window.", unit="tokens", ge=1)

    @property
    def dimensions(self) -> Dimensions:
        """Sizes after scaling; MaxText's split of a power of two over heads, MLP, width, depth."""
        log2_scale = self.global_parameter_scale.bit_length() - 1
        third, rest = divmod(log2_scale, 3)
        emb_scale = 2 ** (third + (rest > 1))
        head_scale = mlp_scale = 2 ** (third + (rest > 0))
        emb_dim = self.base_emb_dim * emb_scale
        num_query_heads = self.base_num_query_heads * head_scale
        return Dimensions(
            emb_dim=emb_dim,
            num_query_heads=num_query_heads,
            num_kv_heads=self.base_num_kv_heads * head_scale,
            head_dim=emb_dim // num_query_heads if self.head_dim == -1 else self.head_dim,
            mlp_dim=self.base_mlp_dim * mlp_scale,
            num_layers=self.base_num_decoder_layers * 2**third,
            vocab_size=self.vocab_size,
            max_target_length=self.max_target_length,
        )


class Embedding(Section):
    """From tokens to the first hidden state."""

    scale_embedding: bool = key(
        False,
        "Multiply the rows of the token table by sqrt(emb_dim) when they are looked up (Gemma). "
        "embedding_init_std should be small then.",
    )


class Block(Section):
    """How a layer arranges its mixer and its feed-forward."""

    block_arrangement: Literal["sequential", "parallel"] = key(
        "sequential",
        "sequential: x + attn(norm(x)), then x + mlp(norm(x)). "
        "parallel: x + attn(norm1(x)) + mlp(norm2(x)), as GPT-NeoX.",
    )
    normalization_type: Literal["rms_norm", "layer_norm"] = key(
        "rms_norm", "Norm before each part."
    )
    normalization_bias: bool = key(
        True, "Whether LayerNorm has a bias.", only_if={"normalization_type": ["layer_norm"]}
    )
    normalization_layer_epsilon: float = key(1e-5, "Added to the variance inside norms.", gt=0)
    normalization_zero_centered: bool = key(
        False,
        "Store the scale of every norm as its difference from 1 (Gemma): it starts at 0, and "
        "weight decay pulls the norm to 1 instead of 0.",
    )
    block_norm_parametric: bool = key(
        True,
        "Whether the norms before the parts of a layer have scale and bias (TokenFormer: false). "
        "The final norm always has.",
    )


_ROTARY: dict[str, Iterable[Any]] = {"position_embedding": ["rotary"]}


class Position(Section):
    """How the model knows where a token stands."""

    position_embedding: Literal["rotary", "learned", "none"] = key(
        "rotary", "rotary turns queries and keys; learned adds a table to the embedding."
    )
    trainable_position_size: int = key(
        -1,
        "Rows of the learned position table; -1 is max_target_length.",
        unit="tokens",
        only_if={"position_embedding": ["learned"]},
        ge=-1,
    )
    rope_max_timescale: float = key(10_000.0, "Rotary base (theta).", only_if=_ROTARY, gt=1)
    rope_type: Literal["default", "linear", "llama3.1", "yarn"] = key(
        "default",
        "Rotary frequencies for long texts. linear: all divided by rope_factor. llama3.1: those "
        "that turn rarely. yarn: the same with another transition, and larger scores.",
        only_if=_ROTARY,
    )
    rope_factor: float = key(
        8.0,
        "Divides rotary frequencies (Llama 3.1: 8; Llama 3.2: 32).",
        only_if=_ROTARY | {"rope_type": ["linear", "llama3.1", "yarn"]},
        ge=1,
    )
    original_max_position_embeddings: int = key(
        8192,
        "Length of the texts before frequencies were changed.",
        unit="tokens",
        only_if=_ROTARY | {"rope_type": ["llama3.1", "yarn"]},
        ge=1,
    )
    low_freq_factor: float = key(
        1.0,
        "Turns in the original length up to which a frequency is divided in full.",
        only_if=_ROTARY | {"rope_type": ["llama3.1"]},
        gt=0,
    )
    high_freq_factor: float = key(
        4.0,
        "Turns in the original length from which a frequency stays as it is.",
        only_if=_ROTARY | {"rope_type": ["llama3.1"]},
        gt=0,
    )
    beta_fast: float = key(
        32.0,
        "Turns in the original length from which a frequency stays as it is.",
        only_if=_ROTARY | {"rope_type": ["yarn"]},
        gt=0,
    )
    beta_slow: float = key(
        1.0,
        "Turns in the original length up to which a frequency is divided in full.",
        only_if=_ROTARY | {"rope_type": ["yarn"]},
        gt=0,
    )
    rotary_pct: float = key(
        1.0,
        "Share of each head's dimensions that rotary turns (GPT-NeoX: 0.25).",
        only_if=_ROTARY,
        gt=0,
        le=1,
    )


class Attention(Section):
    """The attention mixer."""

    attention_projections: Literal["dense", "pattention"] = key(
        "dense",
        "What makes queries, keys, values and the output: matrices, or Pattention over slots "
        "(TokenFormer).",
    )
    attention: Literal["autoselected", "dot_product", "blocked"] = key(
        "autoselected",
        "Backend. blocked: causal in blocks of query rows, half the products of dot_product.",
    )
    attention_block_size: int = key(
        128, "Query rows of a block.", unit="tokens", ge=1,
        only_if={"attention": ["autoselected", "blocked"]},
    )  # fmt: skip
    causal: bool = key(
        True,
        "Attend to earlier tokens only. mlm_training=true switches it off.",
    )
    qkv_bias: bool = key(False, "Biases on the query, key and value projections.")
    proj_bias: bool = key(False, "Bias on the attention output projection.")
    use_qk_norm: bool = key(False, "RMSNorm with scale over each head of q and k, before rotary.")
    attn_logits_soft_cap: float = key(
        0.0, "Caps attention scores at c * tanh(score / c); 0 is off.", ge=0
    )


class FeedForward(Section):
    """The feed-forward part."""

    feed_forward_type: Literal["mlp", "pattention"] = key(
        "mlp", "An MLP, plain or gated, or Pattention over slots (TokenFormer)."
    )
    mlp_activations: tuple[Activation, ...] = key(
        ("silu", "linear"),
        'One name is a plain MLP; two or more are gated: ["silu", "linear"] is SwiGLU. '
        "gelu is the tanh approximation, gelu_erf the exact one.",
        only_if={"feed_forward_type": ["mlp"]},
    )
    ffn_bias: bool = key(False, "Biases on the feed-forward projections.")


_QKV_AND_OUTPUT: dict[str, Iterable[Any]] = {"attention_projections": ["pattention"]}
_FEED_FORWARD: dict[str, Iterable[Any]] = {"feed_forward_type": ["pattention"]}
_ANYWHERE = _QKV_AND_OUTPUT | _FEED_FORWARD
_L2: dict[str, Iterable[Any]] = {"normalize_type": ["l2_norm_gelu", "gelu_l2_norm", "l2_norm"]}

SlotPlace = Literal["qkv", "proj", "ffn"]


class Pattention(Section):
    """Pattention, attention from tokens to learned slots: y = Theta(x K) V (TokenFormer)."""

    slot_num: int = key(
        -1,
        "Slots of each of query, key, value and the output projection; the feed-forward has 4 "
        "times as many. -1 is emb_dim.",
        only_if_any=_ANYWHERE,
        ge=-1,
    )
    qkv_slot_num: int = key(
        -1, "Slots of each of query, key and value; -1 is slot_num.", only_if=_QKV_AND_OUTPUT, ge=-1
    )
    proj_slot_num: int = key(
        -1, "Slots of the output projection; -1 is slot_num.", only_if=_QKV_AND_OUTPUT, ge=-1
    )
    ffn_slot_num: int = key(
        -1, "Slots of the feed-forward; -1 is 4 * slot_num.", only_if=_FEED_FORWARD, ge=-1
    )
    normalize_type: Literal[
        "l2_norm_gelu", "gelu_l2_norm", "l2_norm", "softmax", "gelu", "gelu_layer_norm"
    ] = key(
        "l2_norm_gelu",
        "Theta, over the slots: l2_norm_gelu is gelu(sqrt(n) a / (|a| + eps)), gelu_l2_norm takes "
        "gelu first, l2_norm has none; softmax is n times softmax; gelu_layer_norm a LayerNorm of "
        "gelu. n is the number of slots.",
        only_if_any=_ANYWHERE,
    )
    gelu_approximate: bool = key(
        True,
        "gelu by tanh, as TokenFormer's JAX code; false is the exact one, as its PyTorch code.",
        only_if={
            "normalize_type": ["l2_norm_gelu", "gelu_l2_norm", "gelu", "gelu_layer_norm"]
        },
        only_if_any=_ANYWHERE,
    )  # fmt: skip
    score_norm_epsilon: float | None = key(
        None,
        "Added to the norm of Theta, outside its root. null: 1e-5 with l2_norm_gelu, else 1e-8. "
        "TokenFormer's PyTorch code has 0.",
        only_if=_L2,
        only_if_any=_ANYWHERE,
        ge=0,
    )
    zoom_dim: float = key(
        0.0,
        "Number that stands for n in sqrt(n), so that slots can be added without a change of "
        "scale; 4 times as much in the feed-forward. 0 is the number of slots.",
        only_if=_L2,
        only_if_any=_ANYWHERE,
        ge=0,
    )
    qkv_zoom_dim: float = key(
        -1.0, "That of query, key and value; -1 is zoom_dim.", only_if=_QKV_AND_OUTPUT | _L2, ge=-1
    )
    proj_zoom_dim: float = key(
        -1.0, "That of the output projection; -1 is zoom_dim.", only_if=_QKV_AND_OUTPUT | _L2, ge=-1
    )
    ffn_zoom_dim: float = key(
        -1.0, "That of the feed-forward; -1 is 4 * zoom_dim.", only_if=_FEED_FORWARD | _L2, ge=-1
    )
    qkv_scale_factor: float = key(
        1.0, "Multiplies Theta in query, key and value.", only_if=_QKV_AND_OUTPUT
    )
    proj_scale_factor: float = key(
        1.0, "Multiplies Theta in the output projection.", only_if=_QKV_AND_OUTPUT
    )
    ffn_scale_factor: float = key(
        1.0, "Multiplies Theta in the feed-forward.", only_if=_FEED_FORWARD
    )

    def num_slots(self, place: SlotPlace, emb_dim: int) -> int:
        """Slots of one Pattention at a place, every -1 replaced."""
        own: int = getattr(self, f"{place}_slot_num")
        if own != -1:
            return own
        base = emb_dim if self.slot_num == -1 else self.slot_num
        return 4 * base if place == "ffn" else base

    def zoom(self, place: SlotPlace, emb_dim: int) -> float:
        """What stands for n in sqrt(n) at a place: fixed, or the number of slots there."""
        own: float = getattr(self, f"{place}_zoom_dim")
        if own == -1:
            own = 4 * self.zoom_dim if place == "ffn" else self.zoom_dim
        return own or self.num_slots(place, emb_dim)


class Head(Section):
    """From the last hidden state to logits."""

    logits_via_embedding: bool = key(False, "Tie the output head to the token table.")
    normalize_embedding_logits: bool = key(
        True,
        "Divide tied logits by sqrt(emb_dim).",
        only_if={"logits_via_embedding": [True]},
    )
    logits_dot_in_fp32: bool = key(False, "Multiply by the head in float32 whatever dtype is.")
    final_logits_soft_cap: float = key(0.0, "Caps logits at c * tanh(logit / c); 0 is off.", ge=0)


class Objective(Section):
    """What is minimised."""

    z_loss_multiplier: float = key(
        0.0,
        "Weight of log(Z)^2, which keeps the logits' normaliser near 1 (PaLM, section 5).",
        ge=0,
    )
    num_vocab_tiling: int = key(
        1,
        "Chunks of the sequence in which logits and loss are computed, so that [B,T,V] never "
        "exists.",
        ge=1,
    )


DROPOUT_PLACES = ("embedding", "attention", "residual", "path")


class Dropout(Section):
    """Dropout rates. The three specific ones take dropout_rate where they are null."""

    enable_dropout: bool = key(True, "Master switch; false makes training deterministic.")
    dropout_rate: float = key(0.0, "Rate for every place that has none of its own.", ge=0, lt=1)
    embedding_dropout_rate: float | None = key(None, "On the embedding output.", ge=0, lt=1)
    attention_dropout_rate: float | None = key(None, "On attention probabilities.", ge=0, lt=1)
    residual_dropout_rate: float | None = key(
        None, "On what attention and feed-forward add to the residual stream.", ge=0, lt=1
    )
    drop_path: float = key(
        0.0,
        "Probability that a sequence leaves out what a part of a layer adds to the residual "
        "stream, each on its own (stochastic depth).",
        ge=0,
        lt=1,
    )
    drop_path_schedule: Literal["constant", "linear"] = key(
        "constant", "linear: from 0 in the first layer to drop_path in the last."
    )

    def rate(self, place: str) -> float:
        """The rate in force at one of DROPOUT_PLACES; 0 when dropout is switched off."""
        if not self.enable_dropout:
            return 0.0
        if place == "path":
            return self.drop_path
        own: float | None = getattr(self, f"{place}_dropout_rate")
        return self.dropout_rate if own is None else own


class Initialization(Section):
    """Starting values of the weights."""

    weight_init: Literal[
        "fan_in", "gpt2", "neox", "xavier", "xavier_uniform", "normal", "tokenformer", "wang"
    ] = key(
        "fan_in",
        "fan_in: N(0, 1/fan_in) truncated. gpt2: N(0, init_std), outputs / sqrt(2 layers). "
        "neox: small init sqrt(2/5d), outputs 2/(layers sqrt(d)). xavier: 2/(fan_in+fan_out). "
        "tokenformer: fan_in, not truncated in attention. wang: N(0, init_std), outputs and value "
        "slots 2/(layers sqrt(d)).",
    )
    init_std: float = key(
        0.02, "Standard deviation.", only_if={"weight_init": ["gpt2", "normal", "wang"]}, gt=0
    )
    embedding_init_std: float | None = key(
        None,
        "Standard deviation of token and position tables; null: 1 with fan_in, tokenformer and "
        "xavier, else that of weight_init.",
        gt=0,
    )
    init_weights_seed: int = key(0, "Seed of the initial weights and of dropout.", ge=0)


class Numerics(Section):
    """Number formats."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = key(
        "auto",
        "Activations. auto: float32 on CPU, where bfloat16 takes twice the time; else bfloat16.",
    )
    weight_dtype: Literal["float32", "bfloat16"] = key("float32", "Parameters.")
    matmul_precision: Literal["default", "high", "highest"] = key(
        "default", "Precision of matrix products for float32 inputs on accelerators."
    )


class Memory(Section):
    """Compile time and memory against speed. No effect on the result."""

    scan_layers: Literal["auto"] | bool = key(
        "auto",
        "One compiled layer walked by a scan (true) or all layers written out (false). "
        "auto: written out for few small layers on CPU, else scanned.",
    )
    remat_policy: RematPolicy = key(
        "auto",
        "What the backward pass computes again. full: all of a layer; minimal: all but matrix "
        "products; none: nothing. auto: none for written-out layers on CPU, else full.",
    )


class Model(Section):
    """Everything about the model."""

    shape: Shape = Shape()
    embedding: Embedding = Embedding()
    block: Block = Block()
    position: Position = Position()
    attention: Attention = Attention()
    feed_forward: FeedForward = FeedForward()
    pattention: Pattention = Pattention()
    head: Head = Head()
    objective: Objective = Objective()
    dropout: Dropout = Dropout()
    initialization: Initialization = Initialization()
    numerics: Numerics = Numerics()
    memory: Memory = Memory()
