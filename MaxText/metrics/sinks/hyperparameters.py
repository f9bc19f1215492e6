"""The configuration for TensorBoard's HParams page, one table row per run.

The page needs two summaries in a run's event file: the experiment, which names the columns, and a
session start with this run's values (tensorboard/plugins/hparams/plugin_data.proto).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config.values import to_yaml


def hyperparameter_summaries(config_flat: Mapping[str, Any], metrics: Sequence[str]) -> list[Any]:
    """Returns tensorboardX Summary messages; `metrics` are scalar tags to compare runs by."""
    # Imported late: tensorboardX is not needed before the first metrics.
    from tensorboardX.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else to_yaml(value)
        for name, value in config_flat.items()
    }
    experiment, session_start, _ = hparams(values, dict.fromkeys(metrics))
    return [experiment, session_start]
