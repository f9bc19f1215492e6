"""`stages:` of a file: one configuration as a chain of runs, each beginning from the one before.

    stages:
      - {steps: 150, slot_num: 64}
      - {steps: 100, slot_num: 128, growth_data: continue}

Each stage lays its keys over the file. From the second on a stage begins with the parameters of the
one before (load_parameters_path), which grow if the model has become larger. Imports no jax.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config import values
from MaxText.config.saved import flat
from MaxText.config.schema import Config

# Stands for the folder of the stage before, which each run of a chain has another one of.
PREVIOUS = "the_stage_before"
_SOURCE = "load_parameters_path"
# The keys that no stage may set, and what does.
SET_PER_STAGE = {
    _SOURCE: "the stage before is where a stage begins",
    "load_full_state_path": "the stage before is where a stage begins",
}


def read_stages(value: Any) -> list[dict[str, Any]]:
    """The keys of each stage, in order.

    Raises:
      values.WrongValue: it is no list of two mappings or more.
    """
    if not isinstance(value, list) or not all(isinstance(stage, dict) for stage in value):
        raise values.WrongValue(
            f"{values.show(value)} is no list of mappings; write one mapping of keys for each stage"
        )
    if len(value) < 2:
        raise values.WrongValue("a chain has two stages or more")
    return [dict(stage) for stage in value]


def source_words(stage: int) -> list[str]:
    """What a stage is loaded with besides its keys.

    Args:
      stage: from 0.
    """
    return [f"{_SOURCE}={PREVIOUS}"] if stage else []


def source_keys(previous: str) -> dict[str, Any]:
    """Keys of a run that begins where another one ended.

    Args:
      previous: the other one's folder.
    """
    return {_SOURCE: previous}


# What a run has that another one begins from, whatever its configuration says.
KEPT_AT_THE_END = {"enable_checkpointing": True, "save_checkpoint_on_completion": True}


def differing(stages: Sequence[Config]) -> set[str]:
    """Names of the keys that are not the same in all stages."""
    first, *others = map(flat, stages)
    return {name for name in first for other in others if other[name] != first[name]}


def named_by_stage(stages: Sequence[Config], left_out: Sequence[str]) -> Mapping[str, Any]:
    """The keys that differ between stages, with the stage in their name; empty for a single run."""
    flats = [flat(stage) for stage in stages]
    return {
        f"{name} of stage {number}": keys[name]
        for name in sorted(differing(stages) - set(left_out))
        for number, keys in enumerate(flats, 1)
    }
