"""The configuration as TensorBoard's HParams page reads it: one row of its table per run.

The page wants two summaries in the event file of a run: the experiment, which names the columns
(hyperparameters and metrics), and the start of a session, which holds this run's values. A session
without an end is shown as it is; whether a run is over stands in events.jsonl.

Source of the format: tensorboard/plugins/hparams/plugin_data.proto, as tensorboardX has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.configuration.values import to_yaml


def hyperparameter_summaries(config_flat: Mapping[str, Any], metrics: Sequence[str]) -> list[Any]:
    """What a run writes once at its start, and again when its configuration changes.

    Args:
      config_flat: the configuration by key. Truth values, numbers and texts stay what they are,
        lists and null become the text that a config file would have.
      metrics: tags of the scalars that runs are compared by; the page shows the last value of each.

    Returns:
      tensorboardX Summary messages, in the order in which they are written.
    """
    # Not at the top: tensorboardX is not imported before the first numbers are there.
    from tensorboardX.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else to_yaml(value)
        for name, value in config_flat.items()
    }
    experiment, session_start, _ = hparams(values, dict.fromkeys(metrics))
    return [experiment, session_start]
