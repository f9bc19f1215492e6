"""What a model costs: parameters and operations by part, memory of training, cache of generation.

Legend: T tokens of a sequence, L layers, K key/value heads, H head_dim.
"""

import dataclasses
import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.layers.model import Model
from MaxText.monitoring.flops import (
    FlopCount,
    count_flops,
    keys_by_rule,
    keys_multiplied,
    query_block,
)
from MaxText.monitoring.tables import WIDTH, byte_count, derived_quantities, ruled_table, share

MFU_RULE = (
    "MFU is the model's own operations per second over the device's peak (PaLM, appendix B): "
    "products of matrices only, forward and backward, nothing that is computed again; causal "
    "attention counts half (MaxText's rule; PaLM counts all of it)."
)


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """The cost table of a model. Bytes are those of all devices together, each array once.

    Attributes:
      model: the model, with backend defaults resolved.
      count: operations on one token.
      optimizer_bytes: of the optimizer's state; None where there is no optimizer.
    """

    model: Model
    count: FlopCount
    optimizer_bytes: int | None

    @property
    def parameter_bytes(self) -> int:
        """Parameters in `weight_dtype`."""
        return sum(info.size * info.dtype.itemsize for info in self.model.parameters.values())

    @property
    def gradient_bytes(self) -> int:
        """Gradients: one for every parameter, in its format."""
        return self.parameter_bytes

    @property
    def kv_cache_bytes_per_token(self) -> int:
        """Keys and values of all layers in `dtype`; 0 for a model that sees later tokens.

        There, every new token changes the keys and values of all others.
        """
        if not self.model.section.attention.causal:
            return 0
        d = self.model.section.shape.dimensions
        return 2 * d.num_layers * d.num_kv_heads * d.head_dim * self._activation_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Keys and values of a whole sequence."""
        return self.kv_cache_bytes_per_token * self.count.sequence_length

    @property
    def attention_rule(self) -> str:
        """How many keys a query counts by the rule of MFU, in words."""
        length = self.count.sequence_length
        if not self.model.section.attention.causal:
            return f"not causal, a query counts all {length:,} keys"
        keys = keys_by_rule(length, causal=True)
        return f"causal, a query counts half of {length:,} keys: {keys:,.6g}"

    @property
    def attention_computed(self) -> str:
        """How many keys the backend multiplies a query with, in words."""
        section, length = self.model.section.attention, self.count.sequence_length
        multiplies = f"attention={section.attention} multiplies it with"
        rows = query_block(section, length)
        if rows == length:
            return f"{multiplies} all {length:,}"
        keys = keys_multiplied(section, length)
        return f"{multiplies} {keys:,.6g}, in blocks of {rows:,} query rows"

    def facts(self) -> dict[str, Any]:
        """The table as JSON values, for the events of a run.

        `flops_per_token` is for training, by the rule of MFU; `executed_flops_per_token` is null
        where what rematerialisation computes again is not known.
        """
        count = self.count
        return {
            "mfu_rule": MFU_RULE,
            "attention_rule": self.attention_rule,
            "attention_computed": self.attention_computed,
            "sequence_length": count.sequence_length,
            "parts": [
                {
                    "name": part.name,
                    "parameters": part.parameters,
                    "forward_flops_per_token": part.flops,
                    "flops_per_token": 3 * part.flops,
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
                "gradients": self.gradient_bytes,
            },
            "kv_cache_bytes_per_token": self.kv_cache_bytes_per_token,
            "kv_cache_bytes": self.kv_cache_bytes,
        }

    def describe(self) -> str:
        """The table as lines of at most 110 characters."""
        count, num_parameters = self.count, self.model.num_parameters
        rows = [
            [
                part.name,
                f"{part.parameters:,}",
                share(part.parameters, num_parameters),
                f"{part.flops:,.0f}",
                f"{3 * part.flops:,.0f}",
                share(part.flops, count.forward),
            ]
            for part in count.parts
        ]
        if self.model.section.head.logits_via_embedding:
            next(row for row in rows if row[0] == "head")[1:3] = ["tied", ""]
        table = ruled_table(
            ["part", "parameters", "share", "FLOPs/token forward", "training", "share"],
            rows,
            [
                "total",
                f"{num_parameters:,}",
                "100.0%",
                f"{count.forward:,.0f}",
                f"{count.per_token:,.0f}",
                "100.0%",
            ],
            right=range(1, 6),
        )
        notes = [f"attention: {self.attention_rule}; {self.attention_computed}.", MFU_RULE]
        return "\n".join(
            [
                table,
                *(textwrap.fill(note, WIDTH, subsequent_indent="    ") for note in notes),
                derived_quantities([*self._executed(), *self._memory()]),
            ]
        )

    def _executed(self) -> list[tuple[str, str, str, Any]]:
        """The row of executed operations, where they are known."""
        count = self.count
        if count.recomputed is None:
            return []
        section = self.model.section
        why = f"remat_policy={section.memory.remat_policy}"
        if section.objective.num_vocab_tiling > 1:
            why += f", num_vocab_tiling={section.objective.num_vocab_tiling}"
        return [
            (
                "executed FLOPs per token",
                f"3 x forward as computed + computed again ({why})",
                f"3 x {count.executed_forward:,.0f} + {count.recomputed:,.0f}",
                count.executed_per_token,
            )
        ]

    def _memory(self) -> list[tuple[str, str, str, Any]]:
        """Rows of the memory of training and of the cache of generation."""
        parts = {"parameters": self.parameter_bytes, "gradients": self.gradient_bytes}
        if self.optimizer_bytes is not None:
            parts["optimizer state"] = self.optimizer_bytes
        rows = [
            (
                "memory of training, each array once, without activations",
                " + ".join(parts),
                " + ".join(f"{size:,}" for size in parts.values()),
                byte_count(sum(parts.values())),
            )
        ]
        if not self.kv_cache_bytes_per_token:
            return [*rows, ("KV cache", "", "", "none, attention is not causal")]
        d, length = self.model.section.shape.dimensions, self.count.sequence_length
        per_token = self.kv_cache_bytes_per_token
        return [
            *rows,
            (
                "KV cache of a token",
                f"2 x layers x kv heads x head_dim x bytes of {self.model.section.numerics.dtype}",
                f"2 x {d.num_layers} x {d.num_kv_heads} x {d.head_dim} x {self._activation_bytes}",
                f"{per_token:,} bytes",
            ),
            (
                "KV cache of a sequence",
                "tokens x bytes of a token",
                f"{length:,} x {per_token:,}",
                byte_count(self.kv_cache_bytes),
            ),
        ]

    @property
    def _activation_bytes(self) -> int:
        return jnp.dtype(self.model.section.numerics.dtype).itemsize


def model_cost(
    model: Model, *, sequence_length: int, optimizer_state: Any | None = None
) -> ModelCost:
    """The cost of training and running a model.

    Args:
      model: with backend defaults resolved.
      sequence_length: tokens of a sequence; attention and the cache depend on it.
      optimizer_state: a tree of arrays or jax.ShapeDtypeStruct, such as TrainState.opt_state;
        None leaves it out of the table.
    """
    optimizer_bytes = None
    if optimizer_state is not None:
        optimizer_bytes = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(optimizer_state)
        )
    return ModelCost(model, count_flops(model, sequence_length), optimizer_bytes)
