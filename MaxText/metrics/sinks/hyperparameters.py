"""The configuration for TensorBoard's HParams page: one row of its table per run.

The page wants two summaries in the event file of a run: the experiment, which names the columns
(hyperparameters and metrics), and the start of a session with this run's values. The format is
tensorboard/plugins/hparams/plugin_data.proto, as tensorboardX has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config.values import to_yaml


def hyperparameter_summaries(config_flat: Mapping[str, Any], metrics: Sequence[str]) -> list[Any]:
    """Returns tensorboardX Summary messages for the start of a run, in order.

    Args:
      config_flat: Lists and null become the text that a config file would have.
      metrics: Tags of the scalars to compare runs by; the page shows their last values.
    """
    # Not at the top: tensorboardX is not imported before the first numbers are there.
    from tensorboardX.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else to_yaml(value)
        for name, value in config_flat.items()
    }
    experiment, session_start, _ = hparams(values, dict.fromkeys(metrics))
    return [experiment, session_start]
