"""Impossible combinations of the keys about growth (docs/growth.md)."""

from MaxText.configuration.rule import Rule
from MaxText.configuration.schema import Config
from MaxText.configuration.training_sections import Checkpoint

# Of the moment of growth. growth_old_slots_learning_rate lasts: whether it has slots to act on is
# known from the run's checkpoints (checkpointing/growth/settling.py).
_KEYS = (
    "growth_mode",
    "growth_moments",
    "growth_data",
    "growth_allow_shrinking",
    "load_parameters_path_slot_number",
    "load_parameters_zero_init",
)


def _has_source(config: Config) -> str | None:
    section, defaults = config.checkpoint, Checkpoint()
    if section.load_parameters_path:
        return None
    for name in _KEYS:
        if getattr(section, name) != getattr(defaults, name):
            return (
                f"{name}: has no effect without load_parameters_path, the smaller model; a run "
                "that has grown goes on without either\nload_parameters_path=RUN"
            )
    return None


def _one_mode(config: Config) -> str | None:
    section = config.checkpoint
    if section.load_parameters_zero_init and section.growth_mode == "random":
        return "load_parameters_zero_init=true is growth_mode=zero, but growth_mode=random is set"
    return None


def _slot_number(config: Config) -> str | None:
    if config.checkpoint.load_parameters_path_slot_number == 0:
        return (
            "load_parameters_path_slot_number: 0 is not possible; use 1 or more, or -1 for what "
            "the checkpoint holds"
        )
    return None


def _moments(config: Config) -> str | None:
    opt_type = config.optimizer.opt_type
    if config.checkpoint.growth_moments == "warmed" and opt_type not in ("adamw", "muon"):
        return (
            "growth_moments=warmed is about Adam's second moments, which opt_type="
            f"{opt_type} has not\ngrowth_moments=reused\ngrowth_moments=zeroed"
        )
    return None


GROWTH_RULES: tuple[Rule, ...] = (
    Rule((*_KEYS, "load_parameters_path"), _has_source, is_idle=True),
    Rule(("growth_mode", "load_parameters_zero_init"), _one_mode),
    Rule(("load_parameters_path_slot_number",), _slot_number),
    Rule(("growth_moments", "opt_type"), _moments),
)
