"""The decoder: embedding, a stack of blocks, final norm, head.

`hidden_states` is the forward pass of training, up to the final norm, and `logits` is the head.
Between both the loss may divide the sequence into chunks (training/objective.py). `read_layers`
also returns the outputs of some layers, for objectives that read them.

Legend: B sequences, T tokens, D emb_dim, V vocab_size.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.model_sections import LayerConfig, ModelConfig, RematPolicy
from MaxText.config.registry import lookup
from MaxText.errors import UserError
from MaxText.layers import part_outputs
from MaxText.layers.assembly.block import Block
from MaxText.layers.assembly.block_variants import block_class
from MaxText.layers.assembly.layer_loops import apply_scanned, apply_unrolled
from MaxText.layers.assembly.pipeline import pipeline_apply
from MaxText.layers.assembly.remat import apply_remat
from MaxText.layers.assembly.stack import Blueprint, stack
from MaxText.layers.batch import Batch
from MaxText.layers.capture import record, scope
from MaxText.layers.context import ForwardContext
from MaxText.layers.dense import Embedding, scaled
from MaxText.layers.dropout import dropout
from MaxText.layers.head import head_and_layer
from MaxText.layers.normalization import Norm, make_norm
from MaxText.layers.params import Init, initializers, stream
from MaxText.layers.part import (
    Carry,
    DecodeState,
    LayerIndex,
    LayerInputs,
    Position,
    PreNormalized,
    Scalars,
)
from MaxText.layers.part_scalars import by_layer
from MaxText.layers.per_layer_inputs import PerLayerInputs
from MaxText.layers.quantization import Quantizer
from MaxText.parallelism.logical_sharding import HIDDEN, current_num_stages, with_logical_constraint

States = tuple[DecodeState, ...]  # decode states: one per layer, then the head's

_HEAD_AXES = ("activation_embed_and_logits_batch", "activation_length")


class HiddenStates(NamedTuple):
    """Results of the forward pass up to the head."""

    h_BTD: jax.Array  # after the final norm: what the head reads
    scalars: Scalars  # auxiliary losses of layers, summed over tokens
    # Output [B, T, D] of each layer that was asked for, by its index: the residual stream after it.
    of_layers: dict[int, jax.Array]


class _LayerCarry(NamedTuple):
    """What layers pass on."""

    state: Carry  # of the connection
    # Outputs of the layers that are read, by index; zeros before that layer. They are carried
    # because a value inside of a scan, or on another stage of a pipeline, cannot be reached from
    # outside. Without any, a tree without leaves.
    outputs: dict[int, jax.Array]


class _UnrolledResult(NamedTuple):
    """Results of layers that are applied one by one."""

    y_BTD: jax.Array  # what the final norm reads
    scalars: Scalars  # summed over layers
    states: States  # decode states
    outputs: dict[int, jax.Array]  # of the layers that are read


class Decoder(nnx.Module):
    """A causal language model composed of the configured parts.

    Attributes:
      objective: The objective, if it is a class, which may have weights of its own; None if it is a
        function of logits.
    """

    rows: ClassVar = {"token_embedder": "token embedding"}

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Builds all parts.

        Args:
          config: With `auto` values resolved.
          rngs: RNG streams that weights are drawn from. With AbstractRngs they have only shapes.
        """
        assert config.numerics.dtype != "auto", "resolve backend defaults first"
        assert "auto" not in (config.memory.scan_layers, config.memory.remat_policy)
        whole_model = LayerConfig(config, config.shape.dimensions)  # for parts outside of layers
        layers = config.layers
        init = _make_init(config, whole_model)
        self.config = config
        self.token_embedder = _make_embedding(config, init, stream(rngs, "token_embedder"))
        self.embedding_norm = _make_embedding_norm(config, init, stream(rngs, "embedding_norm"))
        has_inputs = config.embedding.hidden_size_per_layer_input > 0
        input_rngs = stream(rngs, "per_layer_inputs")
        self.per_layer_inputs = PerLayerInputs(config, init, input_rngs) if has_inputs else None
        layer_of_positions = _layer_of_positions([whole_model, *layers])
        position_rngs = stream(rngs, "positions")
        self.position_embedder, *other_positions = [
            _make_position(config, layer, position_rngs) for layer in layer_of_positions.values()
        ]
        self.other_positions = nnx.List(other_positions)
        self.layers, self.blueprint = _make_layers(
            config, layers, list(layer_of_positions), stream(rngs, "layers")
        )
        connection = lookup("connection", config.connection)
        self.connections = connection.build(whole_model, init, stream(rngs, "connections"))
        self.decoder_norm = make_final_norm(config, init, stream(rngs, "decoder_norm"))
        head, head_config = head_and_layer(config)
        self.head = head.build(head_config, init, stream(rngs, "head"))
        objective = lookup("objective", config.objective.name)
        is_class = isinstance(objective, type)
        objective_rngs = stream(rngs, "objective")
        self.objective = objective.build(whole_model, init, objective_rngs) if is_class else None

    def __call__(self, batch: Batch) -> jax.Array:
        """Returns float32 logits [B, T, V] of whole sequences."""
        h_BTD, _ = self.hidden_states(batch)
        return self.logits(h_BTD, self.head_state(h_BTD, batch))

    def hidden_states(
        self,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        training: bool = False,
        drops_tokens: bool = True,
    ) -> tuple[jax.Array, Scalars]:
        """Returns final hidden states h_BTD, and auxiliary losses as sums over tokens.

        Args:
          batch: Arrays [B, T].
          dropout_key: RNG key of dropout and routing in all layers; None disables them.
          training: As in ForwardContext.
          drops_tokens: As in ForwardContext.
        """
        states = self.read_layers(
            (), batch, dropout_key, training=training, drops_tokens=drops_tokens
        )
        return states.h_BTD, states.scalars

    def read_layers(
        self,
        layers: Sequence[int],
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        training: bool = False,
        drops_tokens: bool = True,
        log_layer_metrics: bool = False,
    ) -> HiddenStates:
        """Returns final hidden states, and the outputs of some layers.

        Layers are unrolled (scan_layers=false), scanned, or on the stages of a pipeline. All three
        apply `_layer`, and compute the same except for rounding and a pipeline's dropout.

        Args:
          layers: Indices of the layers whose outputs are returned. Each needs memory for one hidden
            state, however deep the model is.
          batch: Arrays [B, T].
          dropout_key: RNG key of dropout and routing in all layers; None disables them.
          training: As in ForwardContext.
          drops_tokens: As in ForwardContext.
          log_layer_metrics: As in ForwardContext. Each metric of layers then has another one beside
            it, of arrays [L] by layer (`part_scalars.by_layer`).

        Raises:
          UserError: The model has no such layer.
        """
        num_layers = self.config.shape.dimensions.num_layers
        for layer in layers:
            if not 0 <= layer < num_layers:
                raise UserError(f"layer {layer} cannot be read: there are 0 to {num_layers - 1}")
        memory = self.config.memory
        positions_BT = _positions_in_documents(batch)
        context = self.forward_context(
            batch, dropout_key, training=training, drops_tokens=drops_tokens
        )
        context = dataclasses.replace(context, log_layer_metrics=log_layer_metrics)
        x_BTD = self._embed(batch.tokens_BT, positions_BT, context)
        context = self._with_per_layer_inputs(context, batch.tokens_BT, x_BTD)
        num_stages = current_num_stages()

        if num_stages == 1 and memory.scan_layers is not True:
            result = self._unrolled(x_BTD, context, None, memory.remat_policy, layers)
            return HiddenStates(self._normalized(result.y_BTD), result.scalars, result.outputs)

        # A pipeline passes the context of each microbatch.
        def apply(layer: Block, carry: _LayerCarry, index: LayerIndex, context=context):
            return self._layer(layer, carry, context, index, None)[:2]

        arguments = self.layers, self.blueprint, self._begin(x_BTD, layers)
        if num_stages > 1:
            schedule = self.config.pipeline_schedule(num_stages)
            carry, scalars = pipeline_apply(
                *arguments, context, apply, schedule, memory.remat_policy
            )
        else:
            carry, scalars = apply_scanned(*arguments, apply, memory.remat_policy)
        end = self.connections.end(carry.state)
        x_BTD = part_outputs.check_like(self.connections, "end", end, x_BTD)
        if num_stages > 1:  # norm and head run on all stages
            x_BTD = with_logical_constraint(x_BTD, *_HEAD_AXES, "activation_embed")
        return HiddenStates(self._normalized(x_BTD), scalars, carry.outputs)

    def forward_context(
        self,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        training: bool = False,
        drops_tokens: bool = True,
    ) -> ForwardContext:
        """Returns what blocks read of a batch besides hidden states.

        Args:
          batch: Arrays [B, T].
          dropout_key: RNG key of dropout and routing in all layers; None disables them.
          training: As in ForwardContext.
          drops_tokens: As in ForwardContext.
        """
        return ForwardContext(
            segments_BT=batch.segments_BT,
            dropout_key=dropout_key,
            training=training,
            drops_tokens=drops_tokens,
            **self._for_mixers(_positions_in_documents(batch)),
        )

    def prefill(
        self, tokens_BT: jax.Array, lengths_B: jax.Array, capacity: int
    ) -> tuple[jax.Array, States]:
        """Prefills states of `capacity` >= T from right-padded prompts.

        Args:
          tokens_BT: Prompts, each followed by any tokens up to T.
          lengths_B: Length of each prompt, int32.
          capacity: Number of tokens of prompt and continuation that the states have room for.

        Returns:
          Final hidden states h_BTD, and the decode state of each layer, then of the head.
        """
        positions_BT = _positions(tokens_BT)
        for_mixers = self._for_mixers(positions_BT)
        context = ForwardContext(capacity=capacity, lengths_B=lengths_B, **for_mixers)
        return self._with_states(tokens_BT, positions_BT, context, None)

    def decode_step(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, states: States
    ) -> tuple[jax.Array, States]:
        """Decodes T new tokens at `positions_BT`, right after the earlier ones.

        Args:
          tokens_BT: The new tokens; usually T is 1.
          positions_BT: Their positions in the sequences, int32.
          states: From `prefill` or the step before.

        Returns:
          Final hidden states h_BTD of the new tokens, and the new states.
        """
        context = ForwardContext(positions_BT=positions_BT, **self._for_mixers(positions_BT))
        return self._with_states(tokens_BT, positions_BT, context, states)

    def _with_states(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        context: ForwardContext,
        states: States | None,
    ) -> tuple[jax.Array, States]:
        """Applies the model for generation, layers unrolled: returns h_BTD and the new states."""
        x_BTD = self._embed(tokens_BT, positions_BT, context)
        context = self._with_per_layer_inputs(context, tokens_BT, x_BTD)
        layer_states = None if states is None else states[:-1]
        result = self._unrolled(x_BTD, context, layer_states, "none")
        h_BTD = self._normalized(result.y_BTD)
        earlier = None if states is None else states[-1]
        return h_BTD, (*result.states, self.head.state(h_BTD, tokens_BT, context, earlier))

    def _begin(self, x_BTD: jax.Array, layers: Sequence[int]) -> _LayerCarry:
        """Returns what the first layer reads.

        Args:
          x_BTD: The embedding.
          layers: Indices of the layers whose outputs are returned.
        """
        outputs = {
            layer: with_logical_constraint(jnp.zeros_like(x_BTD), *HIDDEN) for layer in layers
        }
        return _LayerCarry(self.connections.begin(x_BTD), outputs)

    def _unrolled(
        self,
        x_BTD: jax.Array,
        context: ForwardContext,
        states: States | None,
        policy: RematPolicy,
        layers: Sequence[int] = (),
    ) -> _UnrolledResult:
        """Applies the layers one by one, between the connections' beginning and end.

        Args:
          x_BTD: The embedding.
          context: Facts about the batch.
          states: Decode state of each layer; None for whole sequences.
          policy: Of rematerialization.
          layers: Indices of the layers whose outputs are returned.
        """

        def apply(layer: Block, carry: _LayerCarry, index: int, state: DecodeState):
            with scope(f"layers/{index}"):
                return self._layer(layer, carry, context, index, state)

        carry, scalars, states = apply_unrolled(
            self.layers,
            self.blueprint,
            self._begin(x_BTD, layers),
            apply,
            policy=policy,
            states=states,
            sequential=not self.connections.keeps_shapes,
        )
        end = apply_remat(self.connections.end, policy, in_scan=False)
        with scope("connections"):
            y_BTD = part_outputs.check_like(self.connections, "end", end(carry.state), x_BTD)
            record(y_BTD, "output")
        return _UnrolledResult(y_BTD, scalars, states, carry.outputs)

    def _layer(
        self,
        layer: Block,
        carry: _LayerCarry,
        context: ForwardContext,
        index: LayerIndex,
        state: DecodeState,
    ) -> tuple[_LayerCarry, Scalars, DecodeState]:
        """Applies one layer: the connection reads its inputs, the block computes, it writes.

        With a residual stream, all inputs are `carry`, and the output is carried on.

        Args:
          layer: The block with its weights.
          carry: What the layers before passed on, trees of arrays [B, T, ...].
          context: Facts about the batch.
          index: Index of the layer, from 0; an array inside a scan.
          state: Decode state of the mixer; None for whole sequences.

        Returns:
          What the layer passes on, scalars to sum over layers, and its decode state.
        """
        # Read inside the rematerialized layer, so that inputs are recomputed, not saved.
        with scope("connections"):
            read = self.connections.read(index, carry.state, layer.stream_norms)
            emb_dim = self.config.shape.dimensions.emb_dim
            inputs, carry_on = part_outputs.check_read(self.connections, read, carry.state, emb_dim)
            _record_inputs(inputs)
        shared = self.connections.shared(carry_on)
        context = context.for_layer(index, shared, layer.position_index)
        y_BTD, scalars, state = layer(inputs, context, state)
        record(y_BTD, "output")
        if context.log_layer_metrics:
            scalars = by_layer(scalars, index, self.config.shape.dimensions.num_layers)
        new_state = self.connections.write(index, carry_on, y_BTD, context.shared)
        part_outputs.check_write(self.connections, carry.state, new_state)
        outputs = {
            number: jnp.where(index == number, y_BTD, output_BTD)
            for number, output_BTD in carry.outputs.items()
        }
        return _LayerCarry(new_state, outputs), scalars, state

    def _for_mixers(self, positions_BT: jax.Array) -> dict[str, Any]:
        """Returns the fields of ForwardContext that the position encodings set."""
        first, *others = [
            part_outputs.check_for_mixers(part, part.for_mixers(positions_BT), positions_BT)
            for part in (self.position_embedder, *self.other_positions)
        ]
        return {**first, "other_positions": tuple(others)}

    def _embed(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, context: ForwardContext
    ) -> jax.Array:
        """Returns the embedding [B, T, D] of tokens, with their positions, norm and dropout."""
        with scope("token_embedder"):
            x_BTD = self.embed_tokens(tokens_BT)
            record(x_BTD, "output")
        part = self.position_embedder
        with scope("position_embedder"):
            added_BTD = part_outputs.check_embedding(part, part.embed(positions_BT), x_BTD)
            if added_BTD is not None:
                record(added_BTD, "output")
        if added_BTD is not None:
            x_BTD = x_BTD + added_BTD.astype(x_BTD.dtype)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        x_BTD = with_logical_constraint(x_BTD, *HIDDEN)
        embedding_key = context.for_layer(2**31 - 1).dropout_key  # an index that no layer has
        return dropout(x_BTD, self.config.dropout.rate("embedding"), embedding_key)

    def embed_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the embedding [B, T, D] of tokens alone, without positions and norm."""
        x_BTD = self.token_embedder(tokens_BT)
        return scaled(x_BTD, self.config.embedding.embedding_multiplier)

    def _with_per_layer_inputs(
        self, context: ForwardContext, tokens_BT: jax.Array, x_BTD: jax.Array
    ) -> ForwardContext:
        """Returns the context with the per-layer embeddings of tokens, if the model has them."""
        if self.per_layer_inputs is None:
            return context
        with scope("per_layer_inputs"):
            inputs_BTLP = self.per_layer_inputs(tokens_BT, x_BTD)
            record(inputs_BTLP, "output")
        return dataclasses.replace(context, per_layer_inputs_BTLP=inputs_BTLP)

    def head_state(self, h_BTD: jax.Array, batch: Batch) -> DecodeState:
        """Returns the head's state of the whole sequence, an argument of `logits`."""
        context = ForwardContext(segments_BT=batch.segments_BT)
        return self.head.state(h_BTD, batch.tokens_BT, context)

    def logits(
        self,
        h_BTD: jax.Array,
        head_state: DecodeState = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 logits [B, T, V]; T may be any part of the sequence.

        Args:
          h_BTD: Final hidden states of some of the tokens.
          head_state: From `head_state` of the whole sequence, or the latest decode state.
          positions_BT: Their positions in the sequence, not the document; None is 0..T-1.
        """
        if positions_BT is None:
            positions_BT = _positions(h_BTD)
        with scope("head"):
            logits_BTV = self.head(h_BTD, self.token_embedder, head_state, positions_BT)
            record(logits_BTV, "output")
        shape = (*h_BTD.shape[:2], self.config.shape.vocab_size)
        expected = jax.ShapeDtypeStruct(shape, jnp.float32)
        part_outputs.check_like(self.head, "__call__", logits_BTV, expected, any_dtype=False)
        return with_logical_constraint(logits_BTV, *_HEAD_AXES, "activation_vocab")

    def _normalized(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after the final norm, if the model has one."""
        if self.decoder_norm is None:
            return x_BTD
        with scope("decoder_norm"):
            h_BTD = self.decoder_norm(x_BTD)
            record(h_BTD, "output")
        return h_BTD


def make_layer(config: ModelConfig, layer: LayerConfig, rngs: nnx.Rngs) -> Block:
    """Builds a layer beside those of the model, such as one of an objective.

    Args:
      config: Of the model.
      layer: Keys and sizes of one of its layers.
      rngs: Draws the weights.
    """
    whole_model = LayerConfig(config, config.shape.dimensions)
    positions_keys = list(_layer_of_positions([whole_model, *config.layers]))
    return _make_block(config, layer, positions_keys, Quantizer(config.numerics), rngs)


def _make_init(config: ModelConfig, layer: LayerConfig) -> Init:
    """Returns sizes of a layer's parts, with the initializers and dtypes of the model."""
    numerics = config.numerics
    precision = numerics.matmul_precision
    return Init(
        dimensions=layer.dimensions,
        initializers=initializers(config.initialization, layer.dimensions),
        dtype=jnp.dtype(numerics.dtype),
        weight_dtype=jnp.dtype(numerics.weight_dtype),
        precision=None if precision == "default" else precision,
        zero_centered_norms=config.block.normalization_zero_centered,
    )


def _make_embedding(config: ModelConfig, init: Init, rngs: nnx.Rngs) -> Embedding:
    """Builds the table of tokens."""
    D = init.dimensions.emb_dim
    V = init.dimensions.vocab_size
    scale = math.sqrt(D) if config.embedding.scale_embedding else None
    used_in = jnp.dtype(jnp.float32) if config.head.logits_dot_in_fp32 else None
    return Embedding(V, "vocab", init, rngs, scale, used_in)


def _layer_of_positions(layers: Sequence[LayerConfig]) -> dict[Any, LayerConfig]:
    """Returns the first layer of each position encoding, by the encoding's `_positions_key`.

    Args:
      layers: The whole model, then its layers, which may differ from it.
    """
    first_layers: dict[Any, LayerConfig] = {}
    for layer in layers:
        first_layers.setdefault(_positions_key(layer), layer)
    return first_layers


def _make_position(config: ModelConfig, layer: LayerConfig, rngs: nnx.Rngs) -> Position:
    """Builds the position encoding that a layer reads."""
    part = lookup("position", layer.config.position.position_embedding)
    return part.build(layer, _make_init(config, layer), rngs)


def _make_layers(
    config: ModelConfig,
    layers: Sequence[LayerConfig],
    positions_keys: Sequence[Any],
    rngs: nnx.Rngs,
) -> tuple[Any, Blueprint]:
    """Builds all blocks as one module, and its blueprint.

    Args:
      config: Of the model.
      layers: Keys and sizes of each layer.
      positions_keys: Those of the model's position encodings, in their order.
      rngs: Draws the weights.
    """
    quantizer = Quantizer(config.numerics)

    def make_block(index: int, rngs: nnx.Rngs) -> Block:
        return _make_block(config, layers[index], positions_keys, quantizer, rngs)

    shared = config.block.share_layer_params
    module_and_blueprint = stack(make_block, config.layer_plan, rngs, shared=shared)
    quantizer.check()
    return module_and_blueprint


def _make_block(
    config: ModelConfig,
    layer: LayerConfig,
    positions_keys: Sequence[Any],
    quantizer: Quantizer,
    rngs: nnx.Rngs,
) -> Block:
    """Builds a block.

    Args:
      config: Of the model.
      layer: Keys and sizes of the layer.
      positions_keys: Those of the model's position encodings, in their order.
      quantizer: Of the model's matmuls.
      rngs: Draws the weights.
    """
    block = block_class(layer)(layer, _make_init(config, layer), rngs)
    block.position_index = positions_keys.index(_positions_key(layer))
    return quantizer.quantize(block)


def _make_embedding_norm(config: ModelConfig, init: Init, rngs: nnx.Rngs) -> Norm | None:
    """Builds the norm between the embedding and the first layer; None if the model has none."""
    embedding = config.embedding
    if not embedding.embedding_norm:
        return None
    return make_norm(config.block, init, rngs, parametric=embedding.embedding_norm_parametric)


def make_final_norm(config: ModelConfig, init: Init, rngs: nnx.Rngs) -> Norm | None:
    """Builds the norm between the last layer and the head; None if the model has none."""
    if not config.head.final_norm:
        return None
    kind = config.head.final_normalization_type
    return make_norm(
        config.block,
        init,
        rngs,
        parametric=config.head.final_norm_parametric,
        kind=None if kind == "auto" else kind,
    )


def _record_inputs(inputs: LayerInputs) -> None:
    """Records what a layer reads: r, and q, k and v if they are other arrays."""
    record(inputs.r, "r")
    for name in ("q", "k", "v"):
        x = getattr(inputs, name)
        if x is not inputs.r:
            record(x.x_BTD if isinstance(x, PreNormalized) else x, name)


def _positions_key(layer: LayerConfig) -> tuple[object, ...] | None:
    """Returns a key of a layer's positions; None if mixers read none."""
    config = layer.config.position
    d = layer.dimensions
    part = lookup("position", config.position_embedding)
    reads = part.for_mixers is not Position.for_mixers
    if not reads:
        return None
    mixer = lookup("mixer", layer.config.block.mixer)
    return config, d.head_dim, d.num_query_heads, mixer.rotary_width(layer)


def _positions_in_documents(batch: Batch) -> jax.Array:
    """Returns the positions of tokens within their documents, int32 [B or 1, T]."""
    if batch.positions_BT is None:
        return _positions(batch.tokens_BT)
    return batch.positions_BT


def _positions(x_BT: jax.Array) -> jax.Array:
    """Returns positions 0 to T - 1 of an array [B, T, ...], int32 [1, T]."""
    return jnp.arange(x_BT.shape[1], dtype=jnp.int32)[None]
