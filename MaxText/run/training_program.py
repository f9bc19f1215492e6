"""The program train.py, from its command line to its exit code."""

import sys

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.config.loading import LoadedConfig
from MaxText.config.schema import all_keys
from MaxText.errors import UserError, storage_error_line, storage_failure
from MaxText.inference import checkpoint_config
from MaxText.run.training import train
from MaxText.runtime import processes
from MaxText.runtime.preemption import PreemptionHandler


def train_from_command_line(usage: str) -> int:
    """Trains the run of sys.argv; returns its exit code, or exits with one.

    Args:
      usage: For --help.
    """
    preemption = PreemptionHandler.install()
    loaded = command_line.parse(
        "train.py",
        sys.argv[1:],
        usage,
        checkpoint_config.for_training,
        consequences=_multipliers_of_weights,
    )
    try:
        return train(loaded.config, preemption=preemption)
    except BaseException as error:
        processes.fail(error)  # one process of several ends here
        if isinstance(error, UserError):
            sys.stderr.write(f"error: {error}\n")
            processes.exit_now(error.exit_code)  # a compilation is not waited for
        if isinstance(error, KeyboardInterrupt):
            processes.exit_now(exit_codes.INTERRUPTED)
        if isinstance(error, BrokenPipeError):
            processes.exit_now(exit_codes.BROKEN_PIPE)
        failure = storage_failure(error) if isinstance(error, Exception) else None
        if failure:
            sys.stderr.write(f"{storage_error_line(failure)}\n")
            processes.exit_now(exit_codes.USER_ERROR)
        raise


def _multipliers_of_weights(loaded: LoadedConfig, key: str) -> str:
    """Returns what a parametrization makes of each weight, for --why of one of its keys."""
    if all_keys()[key].section != ("model", "parametrization"):
        return ""
    from MaxText.training.multipliers import describe_parametrization

    return describe_parametrization(loaded.config)
