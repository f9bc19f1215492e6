"""Keys of the model, one section per part."""

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator

from MaxText.config.base_shape import BaseShape
from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    NamedSection,
    Natural,
    NonNegative,
    OtherThan,
    Positive,
    Section,
    key,
)
from MaxText.config.layer_plan import (
    LayerKinds,
    LayerPlan,
    PipelineSchedule,
    letters,
    plan_layers,
)
from MaxText.config.layer_sections import (
    MIXERS,
    AttentionConfig,
    BlockConfig,
    DenseConfig,
    Dimensions,
    FeedForwardConfig,
    MoEConfig,
    PattentionConfig,
    PositionConfig,
    RecurrentConfig,
)
from MaxText.config.part_sections import ObjectiveParts, Parts
from MaxText.config.problems import ConfigIssue, InvalidCombinationError
from MaxText.config.registry import Name, lookup, registration

RematPolicy = Literal[
    "auto",
    "none",
    "full",
    "minimal",
    "minimal_with_context",
    "minimal_offloaded",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
]

WeightInit = Literal[
    "fan_in", "gpt2", "neox", "xavier", "xavier_uniform", "normal", "tokenformer", "wang", "gpt_neo"
]

# (key, value) where a layer has another value than the model; also mlp_dim.
Overrides = tuple[tuple[str, Any], ...]

# Remedy in messages about layers that cannot be split into stages.
NO_STAGES = "ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1"


class ShapeConfig(Section):
    """Model sizes."""

    decoder_block: str = key("llama2")
    """Model family that sets default part choices: a file of configs/decoder_blocks/."""
    # Upper bounds are far beyond any model: they catch typos before shapes exhaust memory.
    global_parameter_scale: int = key(1, ge=1, le=2**20)
    """Power of two that scales the base_* sizes to multiply the parameters."""
    base_emb_dim: int = key(2048, ge=1, le=1_000_000)
    """Width of the residual stream before scaling."""
    base_num_query_heads: int = key(16, "Query heads before scaling.", ge=1, le=100_000)
    base_num_kv_heads: int = key(16, ge=1, le=100_000)
    """Key/value heads before scaling; fewer than query heads is grouped-query attention."""
    base_mlp_dim: int = key(7168, ge=1, le=10_000_000, only_if={"feed_forward_type": "mlp"})
    """Hidden width of the feed-forward before scaling."""
    base_num_decoder_layers: int = key(16, "Layers before scaling.", ge=1, le=10_000)
    head_dim: CountOrAuto = key(128, "Width of a head; -1 is emb_dim / query heads.", le=1_000_000)
    vocab_size: int = key(32_000, ge=1, le=2**31 - 1)
    """Rows of the token table, including padding rows."""
    max_target_length: int = key(2048, unit="tokens", ge=1, le=2**31 - 1)
    """Sequence length in training."""

    @property
    def dimensions(self) -> Dimensions:
        """Sizes after scaling, by MaxText's split of a power of two."""
        log2_scale = self.global_parameter_scale.bit_length() - 1
        # Doublings go in turn to heads and MLP, to the width, and to layers.
        third, remainder = divmod(log2_scale, 3)
        emb_scale = 2 ** (third + 1 if remainder > 1 else third)
        head_scale = mlp_scale = 2 ** (third + 1 if remainder > 0 else third)
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


class EmbeddingConfig(Section):
    """Token embedding."""

    scale_embedding: bool = key(False)
    """Multiply token embeddings by sqrt(emb_dim) (Gemma). Use a small embedding_init_std with
    it."""
    embedding_multiplier: Positive = key(1.0)
    """Factor of token embeddings, not of a tied head (Granite)."""
    hidden_size_per_layer_input: Natural = key(0)
    """Per-layer embeddings: each layer also reads a vector of this width, from a table of its own
    and a projection of the token embedding (Gemma 4, E2B and E4B: 256); 0 disables."""
    vocab_size_per_layer_input: CountOrAuto = key(
        -1, only_if={"hidden_size_per_layer_input": OtherThan((0,))}
    )
    """Rows of the table of per-layer embeddings; -1 is vocab_size."""
    embedding_norm: bool = key(False)
    """Norm of the embedding, of normalization_type, positions included (BLOOM, nanochat)."""
    embedding_norm_parametric: bool = key(True, only_if="embedding_norm")
    """Give that norm scale and bias (nanochat: false)."""


_TIED = "logits_via_embedding"


class HeadConfig(Section):
    """Output head."""

    head_type: Annotated[str, Name("head", "auto")] = key("auto")
    """linear: a matrix or the tied token table. auto: linear, or head_qk if head_qk=true."""
    logits_via_embedding: bool = key(False, "Tie the output head to the token table.")
    logits_bias: bool = key(False, only_if={"logits_via_embedding": False})
    """Bias of an untied output head."""
    final_norm: bool = key(True, "Norm after the last layer.")
    final_normalization_type: Annotated[str, Name("norm", "auto")] = key(
        "auto", only_if="final_norm"
    )
    """Type of the final norm; auto is normalization_type."""
    final_norm_parametric: bool = key(True, only_if="final_norm")
    """Give the final norm scale and bias (nanochat: false)."""
    head_qk: bool = key(False, only_if={"head_type": ["auto", "head_qk"]})
    """Head-QK: add to the logit of each id the scores between the current token and earlier tokens
    with that id (fattorib/transformer)."""
    head_qk_dim: Count = key(256, only_if_any={"head_qk": [True], "head_type": ["head_qk"]})
    """Width of the queries and keys of Head-QK."""
    normalize_embedding_logits: bool = key(True, only_if=_TIED)
    """Divide tied logits by sqrt(emb_dim)."""
    logits_embedding_dtype: Literal["auto", "bfloat16"] = key("auto", only_if=_TIED)
    """Dtype to which a tied token table is rounded for logits; auto: none. bfloat16 matches
    TokenFormer's JAX program, whatever dtype is."""
    logits_dot_in_fp32: bool = key(False)
    """Compute the head's matmul in float32, whatever dtype is."""
    logits_scaling: Positive = key(1.0)
    """Divisor of logits, before their soft cap (Granite; Cohere's logit_scale is its inverse)."""
    final_logits_soft_cap: NonNegative = key(0.0)
    """Soft cap c of logits: c * tanh(logit / c); 0 disables."""

    @property
    def name(self) -> str:
        """The registered head that head_type and head_qk choose."""
        if self.head_type != "auto":
            return self.head_type
        return "head_qk" if self.head_qk else "linear"


_MULTI_TOKEN = "multi_token_prediction"
_CROSS_ENTROPIES = ["cross_entropy", _MULTI_TOKEN]


class ObjectiveConfig(Section):
    """Training objective."""

    loss_type: Annotated[str, Name("objective")] = key("cross_entropy")
    """entmax: alpha-entmax loss, which gives most ids probability 0 (Peters et al. 2019; GPT-Neo:
    entmax_loss). lm_loss beside it is the cross entropy of softmax(logits); decode with
    decode_filters.entmax_alpha. multi_token_prediction: what cross_entropy becomes with
    mtp_num_layers > 0."""
    entmax_alpha: float = key(1.3, ge=1, le=2, only_if={"loss_type": "entmax"})
    """Alpha, from 1 (softmax) to 2 (sparsemax)."""
    mtp_num_layers: Natural = key(0, only_if={"loss_type": _CROSS_ENTROPIES})
    """Multi-token prediction: further tokens that each position predicts, every one with a block of
    its own, which inference does not use (DeepSeek-V3, section 2.2); 0 disables."""
    mtp_loss_scaling_factor: NonNegative = key(0.1, only_if={"mtp_num_layers": OtherThan((0,))})
    """Factor of the mean cross entropy of these tokens in the loss (DeepSeek-V3: 0.3, then 0.1)."""
    z_loss_multiplier: NonNegative = key(0.0, only_if={"loss_type": _CROSS_ENTROPIES})
    """Weight of the z-loss log(Z)^2, which keeps the softmax normalizer near 1 (PaLM, section 5).
    Entmax has no normalizer."""
    num_vocab_tiling: Count = key(1)
    """Sequence chunks in which logits and loss are computed, so that [B,T,V] is never
    materialized."""
    parts: ObjectiveParts = ObjectiveParts()

    @property
    def name(self) -> str:
        """The registered objective that loss_type and mtp_num_layers choose."""
        if self.loss_type == "cross_entropy" and self.mtp_num_layers > 0:
            return _MULTI_TOKEN
        return self.loss_type


_DROPS_PATHS = {"drop_path": OtherThan((0,))}
DROPOUT_PLACES = ("embedding", "attention", "residual", "path")


class DropoutRatesConfig(NamedSection):
    """Dropout rates of single places."""

    embedding: float | None = key(None, ge=0, lt=1)
    """Dropout rate of the embedding output; null is dropout_rate."""
    attention: float | None = key(None, ge=0, lt=1)
    """Dropout rate of attention probabilities; null is dropout_rate."""
    residual: float | None = key(None, ge=0, lt=1)
    """Dropout rate of branch outputs before the residual addition; null is dropout_rate."""


class DropoutConfig(Section):
    """Dropout rates."""

    enable_dropout: bool = key(True, "Apply dropout; false sets all rates to 0.")
    dropout_rate: Fraction = key(0.0, "Default dropout rate.")
    dropout_rates: DropoutRatesConfig = DropoutRatesConfig()
    drop_path: Fraction = key(0.0)
    """Probability that a sequence skips a branch of a layer (stochastic depth)."""
    drop_path_schedule: Literal["constant", "linear"] = key("constant", only_if=_DROPS_PATHS)
    """linear: increase from 0 in the first layer to drop_path in the last."""

    def rate(self, dropout_place: str) -> float:
        """Returns the rate at one of DROPOUT_PLACES; 0 if dropout is disabled."""
        if not self.enable_dropout:
            return 0.0
        if dropout_place == "path":
            return self.drop_path
        rate: float | None = getattr(self.dropout_rates, dropout_place)
        return self.dropout_rate if rate is None else rate


_NORMAL = {"weight_init": ["normal", "gpt_neo"]}


class InitScaleConfig(NamedSection):
    """Divisors of the standard deviation."""

    ONLY_IF = _NORMAL

    depth: bool = key(False)
    """Divide output projections by sqrt(layers) (GPT-Neo: scale_by_depth, for the feed-forward
    only)."""
    fan_in: bool = key(False)
    """Also divide by sqrt(fan_in) (GPT-Neo: scale_by_in, for the feed-forward only)."""


class InitConfig(Section):
    """Weight initialization."""

    weight_init: WeightInit = key("fan_in")
    """fan_in: N(0, 1/fan_in) truncated. gpt2: N(0, init_std), outputs / sqrt(2 layers). neox: small
    init sqrt(2/5d), outputs 2/(layers sqrt(d)). xavier: 2/(fan_in+fan_out). tokenformer: fan_in,
    not truncated in attention. wang: N(0, init_std), outputs and value slots 2/(layers sqrt(d)).
    gpt_neo: N(0, init_std), attention 1/sqrt(d), its queries 1/sqrt(d head_dim)."""
    init_std: Positive = key(0.02, only_if={"weight_init": ["gpt2", "normal", "wang", "gpt_neo"]})
    """Standard deviation of the initial weights."""
    init_scale_by: InitScaleConfig = InitScaleConfig()
    embedding_init_std: float | None = key(None, gt=0)
    """Standard deviation of token and position tables; null: 1 with fan_in, tokenformer and xavier,
    else that of weight_init."""
    init_weights_seed: Natural = key(0, "Seed of the initial weights and of dropout.")


Parametrization = Literal["standard", "mup", "completep", "hyperp"]
DEPTH_PARAMETRIZATIONS = ("completep", "hyperp")  # with a rule for depth


class ParametrizationConfig(Section):
    """Transfer of hyper-parameters from a small model."""

    parametrization: Parametrization = key("standard")
    """Scaling of initial weights, learning rates, epsilons, weight decay and multipliers with the
    sizes of the model over those of base_shape. standard: none. mup: with width (Yang et al. 2022).
    completep: with width and depth (Dey et al. 2025). hyperp: as completep, for optimizers of fixed
    norm, muonh and adamh (2026)."""
    base_shape: Annotated[BaseShape, PlainValidator(BaseShape.of)] = key(
        BaseShape(), only_if={"parametrization": OtherThan(("standard",))}
    )
    """Sizes of the model at which hyper-parameters were tuned, such as {base_emb_dim: 256,
    base_mlp_dim: 1024, base_num_query_heads: 4, base_num_kv_heads: 4}; others are those of this
    model, before global_parameter_scale."""
    depth_exponent: float = key(
        1.0, ge=0.5, le=1.0, only_if={"parametrization": [*DEPTH_PARAMETRIZATIONS]}
    )
    """a of the depth rule: residual branches are multiplied by (layers / base layers)^-a."""


Quantization = Literal["", "int8", "fp8"]


class NumericsConfig(Section):
    """Dtypes and matmul precision."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = key("auto")
    """Dtype of activations. auto: float32 on CPU, where bfloat16 is half as fast; else bfloat16."""
    weight_dtype: Literal["float32", "bfloat16"] = key("float32", "Dtype of parameters.")
    matmul_precision: Literal["default", "high", "highest"] = key("default")
    """Precision of matmuls with float32 inputs. On accelerators: of the products. On CPU, where
    products are float32 in any case, highest adds them up in float64 and computes attention by the
    plain formula: for comparisons with other programs, and slow."""
    quantization: Quantization = key("")
    """Train with quantized matmuls in mixers and feed-forwards: int8 (TPU) or fp8 (GPU with compute
    capability 8.9 or newer). Embeddings, head, attention scores, norms and expert routers are not
    quantized."""
    quantization_rules: tuple[tuple[str, Quantization], ...] = key(())
    """Pairs [regular expression, int8 | fp8 | ''] that choose quantization by module path in a
    layer, such as [['mlp/wo', ''], ['self_attention/.*', 'int8']]; the first full match wins, and
    the others follow `quantization`."""

    def quantization_of(self, path: str) -> Quantization:
        """Returns the quantization of a module by its path within a layer."""
        for pattern, kind in self.quantization_rules:
            if re.fullmatch(pattern, path):
                return kind
        return self.quantization


class MemoryConfig(Section):
    """Layer scan and rematerialization. They do not change the result."""

    scan_layers: Literal["auto"] | bool = key("auto")
    """Scan over one compiled layer (true) or unroll all layers (false). auto: unroll few small
    layers on CPU, layers that differ, and with dense_conn; else scan."""
    remat_policy: RematPolicy = key("auto")
    """Rematerialization in the backward pass. full: recompute whole layers; minimal: all but
    matmuls; none: nothing. auto: full; on CPU minimal, or none for unrolled layers."""


_STAGES = {f"{network}_pipeline_parallelism": OtherThan((1,)) for network in ("ici", "dcn")}


class PipelineConfig(Section):
    """Pipeline schedule on a mesh with several stages."""

    num_pipeline_microbatches: CountOrAuto = key(-1, only_if_any=_STAGES)
    """Microbatches that flow through the stages, split from a microbatch of gradient accumulation;
    -1: number of stages. More of them shrink the pipeline bubble."""
    num_pipeline_repeats: CountOrAuto = key(-1, only_if_any=_STAGES)
    """Passes of a sequence through all stages (circular schedule); -1: derived from
    num_layers_per_pipeline_stage. More of them shrink the pipeline bubble."""
    num_layers_per_pipeline_stage: CountOrAuto = key(-1, only_if_any=_STAGES)
    """Layers that a stage computes before the next stage; -1: derived from num_pipeline_repeats, or
    one cycle of layer kinds if that is -1 too."""

    def microbatches(self, num_stages: int) -> int:
        """Returns the microbatches in flight, by default as many as stages."""
        num_microbatches = self.num_pipeline_microbatches
        return num_stages if num_microbatches == -1 else num_microbatches


def _stages_error(message: str, keys: tuple[str, ...] = ()) -> InvalidCombinationError:
    """Returns the error of layers that cannot be split into stages; the remedy is one stage."""
    issue = ConfigIssue(message=message, remedies=(NO_STAGES,), keys=(*keys, *_STAGES))
    return InvalidCombinationError(issue)


class ModelConfig(Section):
    """All keys of the model, by part, and what follows from several parts together."""

    shape: ShapeConfig = ShapeConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    block: BlockConfig = BlockConfig()
    position: PositionConfig = PositionConfig()
    attention: AttentionConfig = AttentionConfig()
    recurrent: RecurrentConfig = RecurrentConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    mixture_of_experts: MoEConfig = MoEConfig()
    pattention: PattentionConfig = PattentionConfig()
    dense_connections: DenseConfig = DenseConfig()
    head: HeadConfig = HeadConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    dropout: DropoutConfig = DropoutConfig()
    initialization: InitConfig = InitConfig()
    parametrization: ParametrizationConfig = ParametrizationConfig()
    numerics: NumericsConfig = NumericsConfig()
    memory: MemoryConfig = MemoryConfig()
    pipeline: PipelineConfig = PipelineConfig()
    parts: Parts = Parts()

    @property
    def layer_overrides(self) -> tuple[Overrides, ...]:
        """Keys of each layer with values of their own, which replace the model's.

        They come from layer_kinds, attention_types, moe_layers and the like, dynamic_mlp_dim and
        dense_first_layer_norms. `mlp_dim` among them is a width after scaling, not a key.
        """
        num_layers = self.shape.dimensions.num_layers
        dense = self.dense_connections
        kinds = self.attention.kinds(num_layers) if self.attention.attention_types else ()
        experts = self.mixture_of_experts
        widths = self.feed_forward.mlp_dims(self.shape.dimensions)
        first_has_one_norm = dense.mixes_attention_inputs and dense.dense_first_layer_norms == "one"
        layer_kinds = self._layer_kinds()
        overrides = []
        for index in range(num_layers):
            layer_keys: dict[str, Any] = dict(layer_kinds[index]) if layer_kinds else {}
            if index < len(kinds):
                layer_keys["mixer"] = MIXERS[kinds[index]]
            if not experts.has_experts(index):
                layer_keys["num_experts"] = 1
            if self.feed_forward.dynamic_mlp_dim:
                layer_keys["mlp_dim"] = widths[index]
            if index == 0 and first_has_one_norm:
                layer_keys["dense_streams"] = ("r",)
            overrides.append(tuple(layer_keys.items()))
        return tuple(overrides)

    def _layer_kinds(self) -> list[Overrides]:
        """Returns the keys that layer_pattern gives each layer; empty without a valid pattern."""
        if not self.block.layer_pattern:
            return []
        try:
            chosen_letters = letters(self.block.layer_pattern, self.shape.dimensions.num_layers)
        except InvalidCombinationError:
            return []  # a rule reports it
        keys_by_letter = dict(self.block.layer_kinds)
        return [keys_by_letter.get(letter, ()) for letter in chosen_letters]

    @property
    def layers(self) -> tuple["LayerConfig", ...]:
        """Each layer's own keys and sizes; like layers share one object."""
        overrides = self.layer_overrides
        config_of = {layer_keys: self.layer(dict(layer_keys)) for layer_keys in set(overrides)}
        return tuple(config_of[layer_keys] for layer_keys in overrides)

    @property
    def distinct_layers(self) -> tuple["LayerConfig", ...]:
        """One of each set of like layers, in the order of the first of each."""
        return tuple(self.layer(dict(keys)) for keys in dict.fromkeys(self.layer_overrides))

    def layer(self, layer_keys: dict[str, Any]) -> "LayerConfig":
        """Returns the keys and sizes of a layer.

        Args:
          layer_keys: An element of layer_overrides, as a dict.
        """
        mlp_dim = layer_keys.get("mlp_dim")
        config = self.with_values(
            {name: value for name, value in layer_keys.items() if name != "mlp_dim"}
        )
        dimensions = config.shape.dimensions
        if mlp_dim is not None:
            dimensions = dimensions._replace(mlp_dim=mlp_dim)
        return LayerConfig(config, dimensions)

    @property
    def is_standard(self) -> bool:
        """Whether nothing is scaled with the sizes of the model (parametrization=standard)."""
        return self.parametrization.parametrization == "standard"

    @property
    def at_base_shape(self) -> "ModelConfig":
        """The model with the sizes of base_shape, but as many layers, in standard form."""
        num_layers = self.shape.dimensions.num_layers
        sizes = {"global_parameter_scale": 1} | dict(self.parametrization.base_shape)
        standard = {"parametrization": "standard", "base_shape": BaseShape()}
        return self.with_values(sizes | standard | {"base_num_decoder_layers": num_layers})

    @property
    def has_depth_rule(self) -> bool:
        """Whether its parametrization scales with depth, too."""
        return self.parametrization.parametrization in DEPTH_PARAMETRIZATIONS

    @property
    def depth_ratio(self) -> float:
        """Layers over those of base_shape, for a parametrization with a rule for depth; else 1."""
        if not self.has_depth_rule:
            return 1.0
        return self.shape.dimensions.num_layers / self.num_base_layers

    @property
    def num_base_layers(self) -> int:
        """Layers of the model of base_shape."""
        sizes = self.parametrization.base_shape.as_dict()
        return sizes.get("base_num_decoder_layers", self.shape.base_num_decoder_layers)

    @property
    def with_multipliers(self) -> "ModelConfig":
        """The standard form of the model: what its parametrization multiplies is in other keys.

        Scores are multiplied by sqrt(base head_dim) / head_dim instead of head_dim^-1/2, logits of
        a tied head by base width / width (Yang et al. 2022, appendix B.1 and table 8), branches by
        depth_ratio^-depth_exponent (Dey et al. 2025, table 1). Products with sqrt(emb_dim) of the
        embedding and of logits have that of base_shape.
        """
        if self.is_standard:
            return self
        base = self.at_base_shape
        width_ratio = self.shape.dimensions.emb_dim / base.shape.dimensions.emb_dim
        depth_factor = self.depth_ratio**-self.parametrization.depth_exponent
        head = self.head
        embedding = self.embedding
        logits_divisor = 1.0
        if head.logits_via_embedding:
            is_divided = head.normalize_embedding_logits  # by the root of the width already
            logits_divisor = math.sqrt(width_ratio) if is_divided else width_ratio
        embedding_factor = 1.0 / math.sqrt(width_ratio) if embedding.scale_embedding else 1.0
        scale = _score_scale(LayerConfig(self, self.shape.dimensions), base)
        base_kinds = base.block.layer_kinds.as_dict()
        kinds = {}
        for letter, letter_keys in self.block.layer_kinds:
            base_of_letter = base.layer(base_kinds.get(letter, {})).config
            own_keys = dict(letter_keys)
            own_scale = _score_scale(self.layer(own_keys), base_of_letter)
            if own_scale != scale:
                own_keys["attention_scale"] = own_scale
            if "residual_multiplier" in own_keys:
                own_keys["residual_multiplier"] *= depth_factor
            kinds[letter] = own_keys
        return self.with_values(
            {
                "parametrization": "standard",
                "base_shape": BaseShape(),
                "attention_scale": scale,
                "layer_kinds": LayerKinds.of(kinds),
                "logits_scaling": head.logits_scaling * logits_divisor,
                "embedding_multiplier": embedding.embedding_multiplier * embedding_factor,
                "residual_multiplier": self.block.residual_multiplier * depth_factor,
            }
        )

    @property
    def connection(self) -> str:
        """The registered connection that connection_type and dense_conn choose."""
        if self.block.connection_type != "auto":
            return self.block.connection_type
        return "dense" if self.dense_connections.dense_conn else "residual"

    @property
    def layer_plan(self) -> LayerPlan:
        """The repetition of layers; none if they read ever more outputs."""
        kinds = self.layer_overrides
        return plan_layers(kinds if self._keeps_shapes else range(len(kinds)))

    @property
    def _keeps_shapes(self) -> bool:
        return registration("connection", self.connection).keeps_shapes

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of each layer, by name."""
        return tuple(layer.config.block.mixer for layer in self.layers)

    @property
    def all_mixers(self) -> set[str]:
        """The names of all mixers, those beside others in a layer (parallel_mixer) included."""
        beside = {layer.config.block.parallel_mixer for layer in self.layers}
        return {*self.mixers, *(beside - {"none"})}

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers besides initial weights."""
        return self._draws or any(layer.config._draws for layer in self.layers)

    @property
    def _draws(self) -> bool:
        """Whether layers with these keys draw random numbers in training."""
        routing = self.mixture_of_experts
        draws_experts = routing.num_experts > 1 and routing.num_experts_per_tok == 2
        return (
            self.feed_forward.is_random
            or any(map(self.dropout.rate, DROPOUT_PLACES))
            or (draws_experts and routing.moe_second.policy == "random")
        )

    def pipeline_schedule(self, num_stages: int) -> PipelineSchedule:
        """Returns how layers are split into stages, with every -1 of the section filled in.

        Args:
          num_stages: Groups of devices, the size of the mesh axis `stage`.

        Raises:
          InvalidCombinationError: the layers cannot be split so.
        """
        pipeline = self.pipeline
        num_layers = self.shape.dimensions.num_layers
        if reason := self._unfit_for_stages():
            raise _stages_error(reason)
        period = self.layer_plan.cycle
        per_stage = pipeline.num_layers_per_pipeline_stage
        repeats = pipeline.num_pipeline_repeats
        if per_stage == -1:
            per_stage = period if repeats == -1 else max(num_layers // (num_stages * repeats), 1)
        if repeats == -1:
            repeats = max(num_layers // (num_stages * per_stage), 1)
        if num_stages * repeats * per_stage != num_layers:
            raise _stages_error(
                f"{num_layers} layers are not {num_stages} stages x {repeats} repeats "
                f"(num_pipeline_repeats) x {per_stage} layers (num_layers_per_pipeline_stage)",
                keys=("num_pipeline_repeats", "num_layers_per_pipeline_stage"),
            )
        if per_stage % period:
            raise _stages_error(
                f"a stage's {per_stage} layers (num_layers_per_pipeline_stage) are not a "
                f"multiple of the cycle of {period} layers: all stages run the same program",
                keys=("num_layers_per_pipeline_stage",),
            )
        microbatches = pipeline.microbatches(num_stages)
        if repeats > 1 and microbatches < num_stages:
            issue = ConfigIssue(
                message=f"num_pipeline_microbatches={microbatches} is less than the {num_stages} "
                "stages: a microbatch would return to the first stage too early "
                f"(num_pipeline_repeats={repeats})",
                remedies=(
                    f"num_pipeline_microbatches={num_stages}, or more",
                    "num_pipeline_repeats=1",
                ),
                keys=("num_pipeline_microbatches", "num_pipeline_repeats"),
            )
            raise InvalidCombinationError(issue)
        return PipelineSchedule(num_stages, repeats, per_stage, microbatches)

    def _unfit_for_stages(self) -> str:
        """Returns why layers cannot be split into stages at all, or ""."""
        if self.block.share_layer_params:
            return "share_layer_params=true: there is one layer, and nothing to split into stages"
        if self.scan_unsupported_reason is not None:
            return self.scan_unsupported_reason
        if not self.layer_plan.is_whole:
            return "layers are not repeats of one pattern, so stages cannot run the same program"
        return ""

    @property
    def scan_unsupported_reason(self) -> str | None:
        """Reason against scanning layers; None if they can be scanned."""
        if self._keeps_shapes:
            return None
        connection_type = self.block.connection_type
        chosen = "dense_conn=true" if connection_type == "auto" else f"{connection_type=!s}"
        return f"with {chosen} each layer reads another number of outputs"


def _score_scale(layer: "LayerConfig", base: ModelConfig) -> float | None:
    """Returns attention_scale of a layer so that scores of wider heads stay as large.

    Args:
      layer: The layer, whose head_dim may be larger than that of the base.
      base: The keys of the layer at base_shape.
    """
    scale = layer.config.attention.attention_scale
    head_dim = _score_width(layer)
    base_dim = _score_width(LayerConfig(base, base.shape.dimensions))
    if head_dim == base_dim:
        return scale
    return (base_dim**-0.5 if scale is None else scale) * base_dim / head_dim


def _score_width(layer: "LayerConfig") -> int:
    """Returns the width of the products of queries and keys of a layer."""
    if layer.config.block.mixer != "latent_attention":
        return layer.dimensions.head_dim
    latent = layer.config.attention.latent_attention
    return latent.qk_nope_head_dim + latent.qk_rope_head_dim


class LayerConfig(NamedTuple):
    """Keys and sizes of one layer.

    Attributes:
      config: The model's keys with the layer's own values in their place.
      dimensions: The sizes of this layer.
    """

    config: ModelConfig
    dimensions: Dimensions

    @property
    def parts(self) -> tuple[Any, ...]:
        """Mixers, feed-forward and projection, if derived from Part."""
        names = (
            ("mixer", self.config.block.mixer),
            ("mixer", self.config.block.parallel_mixer),
            ("feed_forward", self.config.feed_forward.feed_forward_type),
            ("projection", self.config.attention.attention_projections),
        )
        parts = [lookup(kind, name) for kind, name in names]
        return tuple(part for part in parts if hasattr(part, "slots_problem"))
