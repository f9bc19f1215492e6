"""Events of a run, as rows of events.jsonl, the source of all records.

docs/reference/run_folder_and_events.md lists the fields of each kind.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
SECONDS_TO_CLOSE = 60.0  # limit on the time that closing waits for sinks

# Kind of event -> phase that the preceding time was spent in.
PHASES: dict[str, str] = {
    "start": "startup",
    "resume": "startup",
    "config_change": "startup",
    "compile": "compile",
    "step": "train",
    "step_skipped": "train",
    "record_skipped": "train",
    "rollback": "train",
    "data_retry": "train",
    "warning": "train",
    "growth": "startup",
    "peak_measured": "startup",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "sample": "shutdown",
    "stop": "shutdown",
}

# Kinds repeated by an attempt that resumes before the last step of the previous one.
REPEATED = (
    "step",
    "step_skipped",
    "record_skipped",
    "rollback",
    "data_retry",
    "warning",
    "evaluation",
    "checkpoint",
    "sample",
)


# Keys that readers ask for first: shown also with their defaults, and compared between runs.
MAIN_KEYS = (
    "model_name",
    "decoder_block",
    "base_emb_dim",
    "base_num_decoder_layers",
    "max_target_length",
    "dataset_path",
    "global_batch_size",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "steps",
    "dtype",
    "weight_dtype",
    "opt_type",
    "learning_rate",
    "lr_schedule_type",
    "warmup_steps_fraction",
    "adam_weight_decay",
    "gradient_clipping_threshold",
    "init_weights_seed",
    "data_shuffle_seed",
)

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclasses.dataclass(frozen=True)
class Event:
    """A row of events.jsonl.

    Attributes:
      kind: One of PHASES.
      time: Unix seconds at its end.
      restart: Starts of the program in this run folder before this one.
      step: From 0; None if it belongs to no step.
      seconds: Wall time, to be summed by phase.
      fields: What this kind of event has besides; metrics have a slash in their names.
    """

    kind: str
    time: float
    restart: int = 0
    step: int | None = None
    seconds: float = 0.0
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Returns the row of events.jsonl, as JSON values and array scalars."""
        return {
            "time": round(self.time, 3),
            "event": self.kind,
            "phase": PHASES[self.kind],
            "restart": self.restart,
            "step": self.step,
            "seconds": round(self.seconds, 6),
            **self.fields,
        }


class Sink:
    """A destination of events, called from one thread."""

    def write(self, event: Event) -> None:
        """Handles an event without blocking the training loop."""
        raise NotImplementedError

    def flush(self) -> None:
        """Makes events durable, as far as possible without waiting."""

    def wait_durable(self, until: float) -> None:
        """Waits until flushed rows needed for a resume are durable or failed.

        Args:
          until: Time of `time.monotonic` to give up at.
        """

    def request_close(self) -> None:
        """Requests closing without waiting for it."""

    def close(self, until: float | None = None) -> None:
        """Flushes and releases everything. Idempotent.

        Args:
          until: Time of `time.monotonic` to give up at, by default in a minute.
        """

    def discard(self) -> None:
        """Releases everything after an error, without another write. Raises nothing."""


def provenance() -> dict[str, Any]:
    """Returns the provenance of this process as JSON values."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": shlex.join(sys.orig_argv),
        "commit": _commit(),
        "packages": versions,
        "host": f"{platform.node()}, {platform.system()} {platform.machine()}",
    }


@functools.cache
def _commit() -> str:
    """Returns the git commit, with "-dirty" if changed, or "" without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed package may be inside another repository
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        described = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, encoding="utf-8", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()
