"""Combinations of keys that cannot work where sequences are split over devices."""

from MaxText.configuration.axis_rules import NETWORKS, size_key
from MaxText.configuration.rule import Rule
from MaxText.configuration.schema import Config

_SIZES = tuple(size_key("context", network) for network in NETWORKS)


def _lengths(config: Config) -> str | None:
    # What -1 fills is known where the devices are.
    parts = 1
    for name in _SIZES:
        parts *= max(getattr(config.mesh, name), 1)
    lengths = {"max_target_length": config.model.shape.max_target_length}
    for _, length in config.batch.sequence_length_stages:
        lengths[f"a stage of {length} in sequence_length_stages"] = length
    for name, length in lengths.items():
        if length % parts:
            sizes = " ".join(f"{name}={getattr(config.mesh, name)}" for name in _SIZES)
            whose = name if name.startswith("a stage") else f"{name}={length}"
            return f"{_SIZES[0]}: {whose} is no multiple of {parts} ({sizes})"
    return None


def _ring(config: Config) -> str | None:
    splits = any(getattr(config.mesh, name) not in (0, 1) for name in _SIZES)
    ring = config.model.attention.context_parallel_strategy == "ring"
    if splits and ring and config.model.dropout.rate("attention"):
        return (
            "context_parallel_strategy=ring computes probabilities again in the backward pass and "
            "drops none of them\ncontext_parallel_strategy=all_gather\nattention_dropout_rate=0"
        )
    return None


CONTEXT_RULES: tuple[Rule, ...] = (
    Rule((*_SIZES, "max_target_length", "sequence_length_stages"), _lengths),
    Rule((*_SIZES, "context_parallel_strategy", "attention_dropout_rate", "dropout_rate"), _ring),
)
