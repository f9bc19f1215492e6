"""Determines what eval.py scores from its command line."""

from typing import NamedTuple

from MaxText.config.loading import LoadedConfig, Source
from MaxText.config.schema import Config

_NAMES_DATA = ("dataset_path", "grain_eval_files", "dataset_mix", "dataset_type", "eval_split")


class Request(NamedTuple):
    """Scoring request."""

    config: Config  # without the weights' settings that concern only their training
    scores_data: bool  # always without tasks; with tasks if the user set a data key
    names_tokenizer: bool  # whether the user set tokenizer_path


def read(loaded: LoadedConfig) -> Request:
    """Separates user-set keys from those that the weights supplied."""
    config, origins = loaded.config, loaded.origins
    typed = any(map(loaded.typed, _NAMES_DATA))
    scores_data = typed or not (config.scoring.eval_tasks or config.scoring.harness_tasks)
    if origins["eval_steps"].source is Source.SAVED_CONFIG and config.data.dataset_type == "grain":
        # Training limits eval_steps to save time; eval.py reads the whole split.
        evaluation = config.evaluation.model_copy(update={"eval_steps": -1})
        config = config.model_copy(update={"evaluation": evaluation})
    return Request(config, scores_data, loaded.typed("tokenizer_path"))
