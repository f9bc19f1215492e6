"""Stages: a chain of runs, each starting from the previous one.

    stages:
      - {steps: 150, slot_num: 64}
      - {steps: 100, slot_num: 128, growth.data: continue}

Each stage overrides keys of the file. From the second on, it starts from the previous parameters
(load_parameters_path), which grow if the model is larger.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config import values
from MaxText.config.schema import Config
from MaxText.config.serialization import flatten

SOURCE = "load_parameters_path"  # key of the previous stage's folder, which differs for each run
PREVIOUS = "the_stage_before"  # placeholder of that folder
# Keys that no stage may set -> reason.
SET_PER_STAGE = {
    SOURCE: "each stage starts from the previous one",
    "load_full_state_path": "each stage starts from the previous one",
}


def read_stages(value: Any) -> list[dict[str, Any]]:
    """Returns each stage's keys; InvalidValueError below two mappings."""
    if not isinstance(value, list) or not all(isinstance(stage, dict) for stage in value):
        raise values.InvalidValueError(
            f"{values.format_value(value)} is not a list of mappings; write one mapping of "
            "keys per stage"
        )
    if len(value) < 2:
        raise values.InvalidValueError("a chain needs two or more stages")
    return [dict(stage) for stage in value]


# Keys of a run that another stage starts from, whatever its configuration says.
KEPT_AT_THE_END = {"enable_checkpointing": True, "save_checkpoint_on_completion": True}


def keys_that_differ(stages: Sequence[Config]) -> set[str]:
    """Returns the keys with different values in the stages."""
    first, *others = map(flatten, stages)
    return {name for name in first for other in others if other[name] != first[name]}


def prefix_with_stage(stages: Sequence[Config], excluded: Sequence[str]) -> Mapping[str, Any]:
    """Returns keys named "<key> of stage <n>"; empty for a single run."""
    flats = [flatten(stage) for stage in stages]
    return {
        f"{name} of stage {number}": keys[name]
        for name in sorted(keys_that_differ(stages) - set(excluded))
        for number, keys in enumerate(flats, 1)
    }
