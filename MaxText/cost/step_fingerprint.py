"""Identity of a compiled step, to load it for matching runs only."""

import hashlib
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax

import MaxText
from MaxText.config.catalog import flatten, keys_by_section
from MaxText.config.model_sections import ModelConfig
from MaxText.config.schema import Config
from MaxText.config.values import to_yaml
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.runtime.compilation_cache import cpu_fingerprint

# Sections and single keys that determine a step.
_SECTIONS = ("model", "batch", "optimizer", "schedule", "mesh")
_KEYS = (
    "skip_step_on_spikes", "skip_step_interval", "skip_step_scaling_factor", "log_layer_norms",
)  # fmt: skip
_IRRELEVANT_KEYS = ("sharding_tolerance",)

# Sources that a step is traced from.
_SOURCES = ("layers", "training", "parallelism/logical_sharding.py", "parallelism/mesh.py")

# Flags that change output paths or autotuning, but not the program.
_OTHER_FLAGS = r"--xla_(dump_\S*|gpu_autotune_level=\S*|force_host_platform_device_count=\S*)"


def fingerprint(
    config: Config, model_config: ModelConfig, sharding: ShardingPlan, state: Any
) -> dict[str, Any]:
    """Returns JSON values, equal for runs with the same step.

    `config` has the score zoom fixed; `model_config` has `auto` resolved, which may differ without
    cuDNN.
    """
    device = sharding.mesh.devices.flat[0]
    values = flatten(config.model_copy(update={"model": model_config}))
    names = [
        key.name for section, keys in keys_by_section().items() for key in keys
        if (section and section[0] in _SECTIONS) or key.name in _KEYS
    ]  # fmt: skip
    flags = {
        name: " ".join(sorted(re.sub(_OTHER_FLAGS, "", os.environ.get(name, "")).split()))
        for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    return {
        "configuration": {
            name: to_yaml(values[name]) for name in names if name not in _IRRELEVANT_KEYS
        },
        "environment": flags,
        "versions": {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")},
        "sources of the step": {"hash": _hash_of_sources()},
        "devices": {
            "kind": device.device_kind,
            "number": sharding.mesh.size,
            "mesh": str(dict(sharding.mesh.shape)),
            # CPU programs use the instructions of this processor.
            "processor": cpu_fingerprint() if device.platform == "cpu" else "",
        },
        "state": describe(state),
    }


def describe(tree: Any) -> dict[str, str]:
    """Maps the path of each array to its dtype, shape and sharding."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns a line "group, name: old in the file, new here" per difference."""
    lines = []
    for group, values in current.items():
        others = stored.get(group, {})
        for name in sorted({*values, *others}):
            old, new = others.get(name, "nothing"), values.get(name, "nothing")
            if old != new:
                lines.append(f"{group}, {name}: {old} in the file, {new} in this run")
    return lines


def _hash_of_sources() -> str:
    package = pathlib.Path(MaxText.__file__).parent
    digest = hashlib.sha256()
    for source in _SOURCES:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
