"""What a command line asks eval.py to score. Imports no jax."""

from typing import NamedTuple

from MaxText.config.loading import Layer, Loaded
from MaxText.config.schema import Config

_NAMES_DATA = ("dataset_path", "grain_eval_files", "dataset_mix", "dataset_type", "eval_split")


class Request(NamedTuple):
    """What to score.

    Attributes:
      config: the configuration, without what the weights' own says only for their training.
      scores_data: whether a data set is scored: always without tasks; with tasks when one of the
        keys that name data was typed.
      names_tokenizer: whether tokenizer_path was typed.
    """

    config: Config
    scores_data: bool
    names_tokenizer: bool


def read(loaded: Loaded) -> Request:
    """Tells what was typed from what the weights' own configuration brought along."""
    config, origins = loaded.config, loaded.origins
    typed = any(map(loaded.typed, _NAMES_DATA))
    scores_data = typed or not (config.scoring.eval_tasks or config.scoring.harness_tasks)
    if origins["eval_steps"].layer is Layer.SAVED_CONFIG and config.data.dataset_type == "grain":
        # A run evaluates on a part while it trains, to save time.
        evaluation = config.evaluation.model_copy(update={"eval_steps": -1})
        config = config.model_copy(update={"evaluation": evaluation})
    return Request(config, scores_data, loaded.typed("tokenizer_path"))
