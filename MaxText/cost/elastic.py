"""Process counts that a run can go on with after it has lost some: those with the same batch."""

from collections.abc import Callable

from MaxText.config.schema import Config
from MaxText.cost.abstract_step import make_program
from MaxText.errors import UserError, first_line
from MaxText.hardware.chips import CPU, Hardware


def usable_process_counts(
    config: Config,
    num_processes: int,
    min_processes: int,
    devices_per_process: int,
    log: Callable[[str], None],
) -> list[int]:
    """Returns the numbers of processes below `num_processes` that a run can go on with.

    Args:
      config: Of the run.
      num_processes: Processes that the run starts with.
      min_processes: The smallest number to return.
      devices_per_process: Devices of each.
      log: Gets a line for each number that does not fit, with the reason.

    Returns:
      The numbers whose devices form the configured mesh and divide the model and
      global_batch_size, the largest first.

    Raises:
      UserError: There is none, or the global batch would change with the number of devices.
    """
    if min_processes >= num_processes:
        raise UserError(
            f"--min-processes={min_processes} has to be less than the {num_processes} processes of "
            "the run. Without it, all are started again."
        )
    batch = config.batch
    if not batch.global_batch_size:
        sequences = batch.per_device_batch_size * batch.gradient_accumulation_steps
        sequences *= num_processes * devices_per_process
        raise UserError(
            f"--min-processes={min_processes} needs global_batch_size: otherwise the batch would "
            "shrink with the number of processes. Set global_batch_size="
            f"{max(1, round(sequences))}, the batch of {num_processes} processes."
        )
    counts = []
    for count in range(num_processes - 1, min_processes - 1, -1):
        reason = _misfit(config, count * devices_per_process)
        if reason:
            log(f"{count} of {num_processes} processes could not go on: {reason}")
        else:
            counts.append(count)
    if not counts:
        raise UserError(
            f"no number of processes from {min_processes} to {num_processes - 1} "
            f"({devices_per_process} devices each) fits the model, its mesh, and "
            f"global_batch_size={batch.global_batch_size}; the reasons are above. Change them or "
            "--min-processes, or leave that out: a run that loses a process then waits for it."
        )
    return counts


def _misfit(config: Config, num_devices: int) -> str:
    """Returns why a run cannot be divided over devices; "" if it can."""
    hardware = Hardware(name="cpu", chip=CPU, num_chips=num_devices // CPU.devices)
    try:
        make_program(config, hardware)
    except UserError as error:
        return first_line(error)
    return ""
