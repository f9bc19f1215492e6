"""Equal shares of this machine for runs that train at the same time."""

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from MaxText.errors import UserError


class MachineShare(NamedTuple):
    """Cores or GPUs of one run."""

    cores: tuple[int, ...] = ()  # of the machine; none pins nothing
    environment: Mapping[str, str] = {}

    def pin(self, process_id: int) -> None:
        """Keeps a process that just started, and the threads that it will start, on its cores."""
        if self.cores:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process_id, self.cores)


def split_machine(num_jobs: int, platform: str, num_devices: int) -> list[MachineShare]:
    """Returns the share of each of several runs.

    Args:
      num_jobs: Runs at a time.
      platform: Of the devices: "cpu", "gpu" or "tpu".
      num_devices: GPUs of this machine.

    Raises:
      UserError: The machine cannot be divided so.
    """
    if platform == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        if num_jobs > len(cores):
            raise UserError(
                f"jobs={num_jobs}, but this process may use {len(cores)} cores. Set "
                f"jobs={len(cores)} or fewer."
            )
        size = len(cores) // num_jobs
        return [
            MachineShare(cores=tuple(cores[job * size : (job + 1) * size]))
            for job in range(num_jobs)
        ]
    if platform != "gpu":
        raise UserError(
            f"jobs={num_jobs}: runs on one machine cannot share its TPUs. Set jobs=1, or print the "
            "runs for several machines with launch=print."
        )
    if num_devices % num_jobs:
        raise UserError(
            f"jobs={num_jobs} does not divide the {num_devices} GPUs of this machine. Set jobs= to "
            "a divisor."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(num_devices)]
    size = num_devices // num_jobs
    return [
        MachineShare(
            environment={"CUDA_VISIBLE_DEVICES": ",".join(names[job * size : (job + 1) * size])}
        )
        for job in range(num_jobs)
    ]
