"""Cost table of a model: parameters, FLOPs, training memory, KV cache.

Legend: T tokens of a sequence, L layers, K key/value heads, H head_dim.
"""

import dataclasses
import functools
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.config.registry import registrations
from MaxText.cost.flops import FlopCount, count_flops
from MaxText.layers.attention_flops import average_keys_computed, average_keys_visible, query_block
from MaxText.layers.block_variants import mixer_class
from MaxText.layers.head import head_and_layer
from MaxText.layers.model import Model
from MaxText.metrics.tables import WIDTH, byte_count, derived_quantities, format_table, share

MFU_RULE = (
    "MFU is the model's FLOP/s divided by the device's peak (PaLM, appendix B). It counts matmuls "
    "only, forward and backward, without recomputation; causal attention counts half (MaxText's "
    "rule; PaLM counts all of it)."
)


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """The cost table of a model, in bytes of all devices together."""

    model: Model
    count: FlopCount
    optimizer_bytes: int | None

    @property
    def parameter_bytes(self) -> int:
        return sum(spec.size * spec.dtype.itemsize for spec in self.model.parameters.values())

    @property
    def training_bytes(self) -> int:
        """Parameters, gradients in the same dtypes, and optimizer state."""
        return 2 * self.parameter_bytes + (self.optimizer_bytes or 0)

    @functools.cached_property
    def _states(self) -> list[tuple[int, int]]:
        """Decode state bytes per token and per sequence, by layer, then the head.

        Zero for a bidirectional model: every new token changes all keys and values.
        """
        config, length = self.model.config, self.count.sequence_length
        if not config.attention.causal:
            return [(0, 0)]
        itemsize = jnp.dtype(config.numerics.dtype).itemsize
        parts = [(mixer_class(layer), layer) for layer in config.layers]
        return [
            part.state_bytes(part.config_of(layer), layer.dimensions, length, itemsize)
            if part is not None
            else (0, 0)
            for part, layer in [*parts, head_and_layer(config)]
        ]

    @property
    def kv_cache_bytes_per_token(self) -> int:
        return sum(of_token for of_token, _ in self._states)

    @property
    def kv_cache_bytes(self) -> int:
        fixed = sum(fixed for _, fixed in self._states)
        return self.kv_cache_bytes_per_token * self.count.sequence_length + fixed

    @property
    def attention(self) -> tuple[str, str]:
        """Description of the keys per query, by the MFU rule and as executed."""
        model, length = self.model.config, self.count.sequence_length
        config = model.attention
        rule = f"not causal, a query counts all {length:,} keys"
        if config.causal:
            keys = average_keys_visible(length, causal=True)
            rule = f"causal, a query counts half of {length:,} keys: {keys:,.6g}"
        if config.num_mem_kv:
            rule += f", and {config.num_mem_kv} learned ones"
        computed = f"attention={config.attention} multiplies it with"
        rows, keys = query_block(config, length), average_keys_computed(config, length)
        whole = f" all {length:,}"
        computed += whole if rows == length else f" {keys:,.6g}, in blocks of {rows:,} query rows"
        # In registration order.
        layers = {layer.config.block.mixer: layer for layer in model.layers}
        mixers = (one for one in registrations() if one.kind == "mixer" and one.name in layers)
        loaded = [(one.load(), layers[one.name]) for one in mixers]
        notes = [mixer.notes(mixer.config_of(layer), length) for mixer, layer in loaded]
        of_rule, of_computed = zip((rule, computed), *notes, strict=True)
        return "; ".join(filter(None, of_rule)), "; ".join(filter(None, of_computed))

    def fields(self) -> dict[str, Any]:
        """Returns JSON values for the events of a run; FLOPs by the MFU rule."""
        count, (rule, computed) = self.count, self.attention
        return {
            "mfu_rule": MFU_RULE,
            "attention_rule": rule,
            "attention_computed": computed,
            "sequence_length": count.sequence_length,
            "parts": [
                {
                    "name": part.name,
                    "parameters": part.parameters,
                    "forward_flops_per_token": part.flops,
                    "flops_per_token": part.training,
                }
                for part in count.parts
            ],
            "parameters": self.model.num_parameters,
            "forward_flops_per_token": count.forward,
            "flops_per_token": count.per_token,
            "executed_flops_per_token": count.executed_per_token,
            "bytes": {
                "parameters": self.parameter_bytes,
                "optimizer": self.optimizer_bytes,
                "gradients": self.parameter_bytes,
            },
            "kv_cache_bytes_per_token": self.kv_cache_bytes_per_token,
            "kv_cache_bytes": self.kv_cache_bytes,
        }

    def describe(self) -> str:
        count, num_parameters = self.count, self.model.num_parameters

        def row(name: str, parameters: int, flops: float, training: float) -> list[str]:
            held, forward = share(parameters, num_parameters), share(flops, count.forward)
            return [name, f"{parameters:,}", held, f"{flops:,.0f}", f"{training:,.0f}", forward]

        rows = [row(one.name, one.parameters, one.flops, one.training) for one in count.parts]
        if self.model.config.head.logits_via_embedding:
            next(row for row in rows if row[0] == "head")[1:3] = ["tied", ""]
        table = format_table(
            ["part", "parameters", "share", "FLOPs/token forward", "training", "share"],
            rows,
            row("total", num_parameters, count.forward, count.per_token),
            right=range(1, 6),
        )
        notes = [f"attention: {'; '.join(self.attention)}.", MFU_RULE]
        filled = (textwrap.fill(note, WIDTH, subsequent_indent="    ") for note in notes)
        return "\n".join([table, *filled, derived_quantities(self._totals())])

    def _totals(self) -> Iterator[tuple[str, str, str, Any]]:
        count, config = self.count, self.model.config
        if count.executed_per_token is not None:
            why = f"remat_policy={config.memory.remat_policy}"
            if config.objective.num_vocab_tiling > 1:
                why += f", num_vocab_tiling={config.objective.num_vocab_tiling}"
            yield f"executed FLOPs/token in training ({why})", "", "", count.executed_per_token
        state = "" if self.optimizer_bytes is None else ", optimizer state"
        name = f"memory of parameters, gradients{state} (no activations)"
        yield name, "", "", byte_count(self.training_bytes)
        if not config.attention.causal:
            yield "KV cache", "", "", "none, attention is not causal"
            return
        yield "KV cache of a token", "", "", byte_count(self.kv_cache_bytes_per_token)
        name = f"KV cache of {count.sequence_length:,} tokens"
        yield name, "", "", byte_count(self.kv_cache_bytes)


def model_cost(
    model: Model, *, sequence_length: int, optimizer_state: Any | None = None
) -> ModelCost:
    leaves = jax.tree.leaves(optimizer_state)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    held = None if optimizer_state is None else num_bytes
    return ModelCost(model, count_flops(model, sequence_length), held)
