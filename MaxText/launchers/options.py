"""Options of launch.py, by place."""

import os
from typing import Annotated, ClassVar

from MaxText.config.keys import Count, Natural, Parser, key
from MaxText.config.program_options import ProgramOptions


def _repeated(text: str) -> tuple[str, ...]:
    return (text,)


Repeated = Annotated[tuple[str, ...], Parser(_repeated, "text; may be given several times", True)]


class LaunchOptions(ProgramOptions):
    """Options of all places."""

    RENAMED: ClassVar = {
        "devices": "devices_per_process", "grace": "grace_period", "job": "job_id",
        "lines": "tail", "logs": "log_dir", "tries": "max_attempts", "type": "accelerator_type",
    }  # fmt: skip

    dry_run: bool = key(False, "Print the commands.")
    max_restarts: Natural = key(10, "Maximum restarts without a new checkpoint (SLURM: in total).")


class LocalOptions(LaunchOptions):
    """local N: processes of this machine."""

    devices_per_process: int | None = key(None, "Devices (CPU or GPU) per process.", ge=1)
    supervise: bool = key(False, "Restart after a failure.")
    backoff: float = key(1.0, "Delay before a restart.", unit="seconds")
    grace_period: float = key(60.0, "Grace period for processes to exit.", unit="seconds")
    log_dir: str = key("", "Log folder.")


class GcloudOptions(LaunchOptions):
    """gcloud ACTION ...: Cloud TPU VMs."""

    REQUIRED = ("name", "zone")

    name: str = key("", "TPU VM name.")
    zone: str = key("", "Zone of the TPU VM.")
    project: str = key(os.environ.get("CLOUDSDK_CORE_PROJECT", ""), "Project of the TPU VM.")
    accelerator_type: str = key("", "Accelerator type, e.g. v5p-32.")
    version: str = key("", "Runtime version.")
    spot: bool = key(False, "Preemptible, cheaper.")
    gcloud: Repeated = key(())
    """Extra flag of create and queue, e.g. --gcloud=--service-account=NAME."""
    max_attempts: Count = key(100, "Attempts while no capacity is available.")
    retry_seconds: float = key(60.0, "Delay between attempts.", unit="seconds")
    tail: Count = key(50, "Number of log lines.")
    follow: bool = key(False, "Stream new log lines.")
    worker: str = key("all", "Worker to read logs from.")


class SlurmOptions(LaunchOptions):
    """slurm submit, status or stop: a SLURM job."""

    name: str = key("", "Job name, by default run_name.")
    nodes: Count = key(1, "Nodes of the job.")
    processes_per_node: Count = key(1, "Processes per node.")
    gpus_per_node: Natural = key(0, "GPUs per node.")
    sbatch: Repeated = key((), "Extra #SBATCH line, e.g. --sbatch=--partition=long.")
    job_id: str = key("", "Job id, for status and stop.")
    log_dir: str = key("", "Log folder.")


PLACES = {"local": LocalOptions, "gcloud": GcloudOptions, "slurm": SlurmOptions}
