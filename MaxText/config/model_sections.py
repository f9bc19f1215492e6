"""Keys that choose and size the model, a class for each part."""

from typing import Annotated, Any, Literal, NamedTuple

from MaxText.config import layer_kinds
from MaxText.config.dense_connections_section import DenseConnections
from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Section,
    key,
)
from MaxText.config.layer_plan import LayerPlan, PipelineSchedule, plan_layers
from MaxText.config.layer_sections import (
    MIXERS,
    Attention,
    Block,
    Dimensions,
    FeedForward,
    MixtureOfExperts,
    Pattention,
    Position,
)
from MaxText.config.registry import Name, ObjectiveParts, Parts

RematPolicy = Literal[
    "auto", "none", "full", "minimal", "minimal_with_context", "minimal_offloaded",
    "save_dot_except_mlp", "save_dot_except_mlpwi", "save_qkv_proj", "save_out_proj",
    "qkv_proj_offloaded",
]  # fmt: skip

# ((section, key), value) of keys that a layer has other values of than the model.
Overrides = tuple[tuple[tuple[str, str], Any], ...]

# What to set where layers cannot be cut into stages, as a line of a message.
NO_STAGES = "ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1"


class Shape(Section):
    """Sizes of the model."""

    decoder_block: str = key(
        "llama2", "Family whose part choices are the defaults: a file of configs/decoder_blocks/."
    )
    # Upper bounds are far beyond any model. They tell a slip of the keyboard before shapes that
    # nothing can hold, and lists of layers that fill the memory.
    global_parameter_scale: int = key(
        1, "Power of two by which the base_* sizes are scaled up to multiply the parameters.",
        ge=1, le=2**20,
    )  # fmt: skip
    base_emb_dim: int = key(
        2048, "Width of the residual stream before scaling.", ge=1, le=1_000_000
    )
    base_num_query_heads: int = key(16, "Query heads before scaling.", ge=1, le=100_000)
    base_num_kv_heads: int = key(
        16, "Key/value heads before scaling; fewer than query heads is grouped-query.",
        ge=1, le=100_000,
    )  # fmt: skip
    base_mlp_dim: int = key(
        7168, "Hidden width of the feed-forward before scaling.", ge=1, le=10_000_000,
        only_if={"feed_forward_type": ["mlp"]},
    )  # fmt: skip
    base_num_decoder_layers: int = key(16, "Layers before scaling.", ge=1, le=10_000)
    head_dim: CountOrAuto = key(
        128, "Width of one head; -1 is emb_dim / query heads.", le=1_000_000
    )
    vocab_size: int = key(
        32_000, "Rows of the token table, padding rows included.", ge=1, le=2**31 - 1
    )
    max_target_length: int = key(
        2048, "Sequence length of a training window.", unit="tokens", ge=1, le=2**31 - 1
    )

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


class Head(Section):
    """From the last hidden state to logits."""

    head_type: Annotated[str, Name("head", "auto")] = key(
        "auto",
        "linear: a matrix or the token table. auto: linear, or head_qk where head_qk=true.",
    )
    logits_via_embedding: bool = key(False, "Tie the output head to the token table.")
    logits_bias: bool = key(
        False,
        "A bias of an output head that is not tied.",
        only_if={"logits_via_embedding": [False]},
    )
    final_norm: bool = key(True, "A norm after the last layer.")
    final_normalization_type: Annotated[str, Name("norm", "auto")] = key(
        "auto",
        "The norm after the last layer; auto: that of the blocks, normalization_type.",
        only_if={"final_norm": [True]},
    )
    head_qk: bool = key(
        False,
        "Add to the logit of each id how well earlier tokens with that id match the current one "
        "(Head-QK, fattorib/transformer).",
        only_if={"head_type": ["auto", "head_qk"]},
    )
    head_qk_dim: Count = key(
        256,
        "Width of the queries and keys of Head-QK.",
        only_if_any={"head_qk": [True], "head_type": ["head_qk"]},
    )
    normalize_embedding_logits: bool = key(
        True, "Divide tied logits by sqrt(emb_dim).", only_if={"logits_via_embedding": [True]}
    )
    logits_embedding_dtype: Literal["auto", "bfloat16"] = key(
        "auto",
        "What a tied token table is rounded to for the logits; auto: not. bfloat16 is what "
        "TokenFormer's JAX program does, whatever dtype is.",
        only_if={"logits_via_embedding": [True]},
    )
    logits_dot_in_fp32: bool = key(False, "Multiply by the head in float32 whatever dtype is.")
    final_logits_soft_cap: NonNegative = key(0.0, "Caps logits at c * tanh(logit / c); 0 is off.")

    @property
    def name(self) -> str:
        """The registered head."""
        return (
            ("head_qk" if self.head_qk else "linear")
            if self.head_type == "auto"
            else self.head_type
        )


class Objective(Section):
    """What is minimised."""

    loss_type: Annotated[str, Name("objective")] = key(
        "cross_entropy",
        "entmax: the loss of alpha-entmax, which gives most ids probability 0 (Peters et al. "
        "2019; GPT-Neo: entmax_loss). It has no perplexity; decode with decode_entmax_alpha.",
    )
    entmax_alpha: float = key(
        1.3, "From 1, which is softmax, to 2, sparsemax.", ge=1, le=2,
        only_if={"loss_type": ["entmax"]},
    )  # fmt: skip
    z_loss_multiplier: NonNegative = key(
        0.0,
        "Weight of log(Z)^2, which keeps the logits' normaliser near 1 (PaLM, section 5). Entmax "
        "has no such normaliser.",
        only_if={"loss_type": ["cross_entropy"]},
    )
    num_vocab_tiling: Count = key(
        1,
        "Chunks of the sequence in which logits and loss are computed, so that [B,T,V] never "
        "exists.",
    )
    parts: ObjectiveParts = ObjectiveParts()


DROPOUT_PLACES = ("embedding", "attention", "residual", "path")


class Dropout(Section):
    """Dropout rates. The three specific ones take dropout_rate where they are null."""

    enable_dropout: bool = key(True, "Master switch of all rates; false sets them to 0.")
    dropout_rate: Fraction = key(0.0, "Rate for every place that has none of its own.")
    embedding_dropout_rate: float | None = key(None, "On the embedding output.", ge=0, lt=1)
    attention_dropout_rate: float | None = key(None, "On attention probabilities.", ge=0, lt=1)
    residual_dropout_rate: float | None = key(
        None, "On what attention and feed-forward add to the residual stream.", ge=0, lt=1
    )
    drop_path: Fraction = key(
        0.0,
        "Probability that a sequence leaves out what a part of a layer adds to the residual "
        "stream, each on its own (stochastic depth).",
    )
    drop_path_schedule: Literal["constant", "linear"] = key(
        "constant", "linear: from 0 in the first layer to drop_path in the last."
    )

    def rate(self, place: str) -> float:
        """Returns the rate at one of DROPOUT_PLACES; 0 if dropout is disabled."""
        if not self.enable_dropout:
            return 0.0
        if place == "path":
            return self.drop_path
        own: float | None = getattr(self, f"{place}_dropout_rate")
        return self.dropout_rate if own is None else own


class Initialization(Section):
    """Starting values of the weights."""

    weight_init: Literal[
        "fan_in",
        "gpt2",
        "neox",
        "xavier",
        "xavier_uniform",
        "normal",
        "tokenformer",
        "wang",
        "gpt_neo",
    ] = key(
        "fan_in",
        "fan_in: N(0, 1/fan_in) truncated. gpt2: N(0, init_std), outputs / sqrt(2 layers). "
        "neox: small init sqrt(2/5d), outputs 2/(layers sqrt(d)). xavier: 2/(fan_in+fan_out). "
        "tokenformer: fan_in, not truncated in attention. wang: N(0, init_std), outputs and value "
        "slots 2/(layers sqrt(d)). gpt_neo: N(0, init_std), attention 1/sqrt(d), its queries "
        "1/sqrt(d head_dim).",
    )
    init_std: Positive = key(
        0.02, "Standard deviation.", only_if={"weight_init": ["gpt2", "normal", "wang", "gpt_neo"]}
    )
    init_scale_by_depth: bool = key(
        False,
        "Divide outputs by sqrt(layers) (GPT-Neo: scale_by_depth, of the feed-forward alone).",
        only_if={"weight_init": ["normal", "gpt_neo"]},
    )
    init_scale_by_in: bool = key(
        False,
        "Divide by sqrt of the number of inputs as well (GPT-Neo: scale_by_in, of the feed-forward "
        "alone).",
        only_if={"weight_init": ["normal", "gpt_neo"]},
    )
    embedding_init_std: float | None = key(
        None,
        "Standard deviation of token and position tables; null: 1 with fan_in, tokenformer and "
        "xavier, else that of weight_init.",
        gt=0,
    )
    init_weights_seed: Natural = key(0, "Seed of the initial weights and of dropout.")


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
        "One compiled layer walked by a scan (true) or all layers unrolled (false). "
        "auto: unrolled for few small layers on CPU, where layers differ, and with dense_conn; "
        "else scanned.",
    )
    remat_policy: RematPolicy = key(
        "auto",
        "What the backward pass computes again. full: all of a layer; minimal: all but matrix "
        "products; none: nothing. auto: none for unrolled layers on CPU, else full.",
    )


class Pipeline(Section):
    """How layers and rows are cut where a mesh has several stages. No effect on the result."""

    num_pipeline_microbatches: CountOrAuto = key(
        -1,
        "Parts into which the rows of a microbatch are cut once more, to flow through the stages; "
        "-1: as many as stages. More leave stages idle for less of the time.",
    )
    num_pipeline_repeats: CountOrAuto = key(
        -1,
        "How often a row passes through all stages (circular schedule); -1: what "
        "num_layers_per_pipeline_stage leaves. More leave stages idle for less of the time.",
    )
    num_layers_per_pipeline_stage: CountOrAuto = key(
        -1,
        "Layers that a stage computes before the next one goes on; -1: what num_pipeline_repeats "
        "leaves, and if that is -1, too, one pattern of kinds.",
    )

    def microbatches(self, num_stages: int) -> int:
        """Returns the microbatches for a number of stages."""
        if self.num_pipeline_microbatches == -1:
            return num_stages
        return self.num_pipeline_microbatches


class Model(Section):
    shape: Shape = Shape()
    embedding: Embedding = Embedding()
    block: Block = Block()
    position: Position = Position()
    attention: Attention = Attention()
    feed_forward: FeedForward = FeedForward()
    mixture_of_experts: MixtureOfExperts = MixtureOfExperts()
    pattention: Pattention = Pattention()
    dense_connections: DenseConnections = DenseConnections()
    head: Head = Head()
    objective: Objective = Objective()
    dropout: Dropout = Dropout()
    initialization: Initialization = Initialization()
    numerics: Numerics = Numerics()
    memory: Memory = Memory()
    pipeline: Pipeline = Pipeline()
    parts: Parts = Parts()

    @property
    def layer_overrides(self) -> tuple[Overrides, ...]:
        """Keys of each layer that replace the model's own."""
        num_layers, dense = self.shape.dimensions.num_layers, self.dense_connections
        kinds = self.attention.kinds(num_layers) if self.attention.attention_types else ()
        experts, widths = self.mixture_of_experts, self.feed_forward.mlp_dims(self.shape.dimensions)
        letters = self._layer_kinds
        try:
            pattern = self.block.layer_pattern
            chosen = layer_kinds.letters(pattern, num_layers) if pattern else ""
        except ValueError:
            chosen = ""  # said by a rule
        found = []
        for index in range(num_layers):
            own: dict[tuple[str, str], Any] = dict(letters.get(chosen[index], ())) if chosen else {}
            if index < len(kinds):
                own["block", "mixer"] = MIXERS[kinds[index]]
            if experts.moe_layers is not None and index not in experts.moe_layers:
                own["mixture_of_experts", "num_experts"] = 1
            if self.feed_forward.dynamic_mlp_dim:
                own["", "mlp_dim"] = widths[index]
            if index == 0 and dense.mixes_attention_inputs and dense.dense_first_norms == "one":
                own["dense_connections", "dense_ways"] = ("r",)
            found.append(tuple(own.items()))
        return tuple(found)

    @property
    def _layer_kinds(self) -> dict[str, Overrides]:
        """Overrides of each letter of layer_pattern."""
        owners = {}
        for section, field in type(self).model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                owners |= dict.fromkeys(field.annotation.model_fields, section)
        for own in self.parts.sections:
            owners |= dict.fromkeys(type(own).model_fields, "parts")
        return {
            letter: tuple(((owners[name], name), value) for name, value in keys)
            for letter, keys in self.block.layer_kinds
        }

    @property
    def layers(self) -> tuple["Layer", ...]:
        """Each layer's own keys and sizes; like layers share one object."""
        overrides = self.layer_overrides
        made = {own: self._layer(dict(own)) for own in set(overrides)}
        return tuple(made[own] for own in overrides)

    def _layer(self, own: dict[tuple[str, str], Any]) -> "Layer":
        width = own.pop(("", "mlp_dim"), None)
        changed: dict[str, dict[str, Any]] = {}
        for (section, name), value in own.items():
            changed.setdefault(section, {})[name] = value
        sections = {
            name: self.parts.with_values(values)
            if name == "parts"
            else getattr(self, name).model_copy(update=values)
            for name, values in changed.items()
        }
        section = self.model_copy(update=sections)
        dimensions = section.shape.dimensions
        return Layer(section, dimensions if width is None else dimensions._replace(mlp_dim=width))

    @property
    def connection(self) -> str:
        """The registered connection between layers."""
        name = self.block.connection_type
        if name == "auto":
            return "dense" if self.dense_connections.dense_conn else "residual"
        return name

    @property
    def layer_plan(self) -> LayerPlan:
        """The repetition of layers; none with dense connections, which are never scanned."""
        kinds = self.layer_overrides
        return plan_layers(range(len(kinds)) if self.dense_connections.dense_conn else kinds)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The name of each layer's mixer."""
        return tuple(layer.section.block.mixer for layer in self.layers)

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers besides initial weights."""
        routing = self.mixture_of_experts
        if self.feed_forward.is_random:
            return True
        return any(self.dropout.rate(place) for place in DROPOUT_PLACES) or (
            routing.num_experts > 1
            and routing.num_experts_per_tok == 2
            and routing.moe_second_policy == "random"
        )

    def pipeline_schedule(self, num_stages: int) -> PipelineSchedule:
        """Returns the pipeline schedule of the layers."""
        asked, num_layers = self.pipeline, self.shape.dimensions.num_layers
        unlike = self._unfit_for_stages()
        if unlike:
            raise ValueError(f"{unlike}\n{NO_STAGES}")
        period, per_stage = self.layer_plan.cycle, asked.num_layers_per_pipeline_stage
        repeats = asked.num_pipeline_repeats
        if per_stage == -1:
            per_stage = period if repeats == -1 else max(num_layers // (num_stages * repeats), 1)
        if repeats == -1:
            repeats = max(num_layers // (num_stages * per_stage), 1)
        if num_stages * repeats * per_stage != num_layers:
            raise ValueError(
                f"{num_layers} layers are not {num_stages} stages x {repeats} repeats "
                f"(num_pipeline_repeats) x {per_stage} layers (num_layers_per_pipeline_stage)\n"
                + self._fitting_stages(num_stages)
            )
        if per_stage % period:
            raise ValueError(
                f"a stage's {per_stage} layers (num_layers_per_pipeline_stage) are no multiple of "
                f"the {period} after which kinds of attention repeat: all stages run the same "
                f"program\n" + self._fitting_stages(num_stages)
            )
        microbatches = asked.microbatches(num_stages)
        if repeats > 1 and microbatches < num_stages:
            raise ValueError(
                f"num_pipeline_microbatches={microbatches} is below the {num_stages} stages, so "
                f"that a row would be back at the first stage before its turn comes again "
                f"(num_pipeline_repeats={repeats})\n"
                f"num_pipeline_microbatches={num_stages}, or more\nnum_pipeline_repeats=1"
            )
        return PipelineSchedule(num_stages, repeats, per_stage, microbatches)

    def _unfit_for_stages(self) -> str:
        """Returns why layers cannot be split into stages at all; empty if they can."""
        if self.block.share_parameters:
            return "share_parameters=true: there is one layer, and nothing to cut into stages"
        if self.dense_connections.dense_conn:
            return "dense_conn=true: each layer reads the outputs of all stages before its own"
        if not self.layer_plan.is_whole:
            return "layers are no repeats of one pattern, so that stages cannot run one program"
        return ""

    def _fitting_stages(self, num_stages: int) -> str:
        """Returns what to set instead, as a further line of a message."""
        per_repeat, rest = divmod(self.shape.dimensions.num_layers, num_stages)
        if rest == 0 and per_repeat % self.layer_plan.cycle == 0:
            return f"num_pipeline_repeats=1 num_layers_per_pipeline_stage={per_repeat}"
        return NO_STAGES

    @property
    def scan_refused(self) -> str | None:
        """Why layers cannot be scanned; None if they can."""
        if self.dense_connections.dense_conn:
            return "with dense_conn=true each layer reads another number of outputs"
        return None


class Layer(NamedTuple):
    section: Model  # the model's keys with the layer's own values in their place
    dimensions: Dimensions  # the sizes of this layer
