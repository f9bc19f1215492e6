"""Provenance of a run: command, code, packages, host, and main keys."""

import contextlib
import functools
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

# Keys that readers ask for first: shown also with their defaults, and compared between runs.
MAIN_KEYS = (
    "model_name", "decoder_block", "base_emb_dim", "base_num_decoder_layers", "max_target_length",
    "dataset_path", "per_device_batch_size", "gradient_accumulation_steps", "steps", "dtype",
    "weight_dtype", "opt_type", "learning_rate", "lr_schedule_type", "warmup_steps_fraction",
    "adam_weight_decay", "gradient_clipping_threshold", "init_weights_seed", "data_shuffle_seed",
)  # fmt: skip

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


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
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
