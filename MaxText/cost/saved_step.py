"""Saves a compiled step to a file, and loads it for a matching run."""

import hashlib
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

import MaxText
from MaxText.config.model_sections import ModelConfig
from MaxText.config.schema import Config, flatten, keys_by_section
from MaxText.config.values import to_yaml
from MaxText.cost import serialized_executable
from MaxText.cost.lowering import LoweredStep
from MaxText.errors import UserError
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.runtime.compilation_cache import cpu_fingerprint

_SHOWN = 8  # differences listed
# Sections and single keys that determine a step.
_SECTIONS = ("model", "batch", "optimizer", "schedule", "mesh")
_KEYS = (
    "skip_step_on_spikes", "skip_step_interval", "skip_step_scaling_factor", "rollback",
    "log_layer_norms",
)  # fmt: skip

# Sources that a step is traced from.
_SOURCES = ("layers", "training", "parallelism/logical_sharding.py", "parallelism/mesh.py")

# Flags that change output paths or autotuning, but not the program.
_OTHER_FLAGS = r"--xla_(dump_\S*|gpu_autotune_level=\S*|force_host_platform_device_count=\S*)"


def save_compiled(path: str, planned: LoweredStep, compiled: jax.stages.Compiled) -> str:
    try:
        executable, _, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"compiled_trainstep_file={path}: jax cannot serialize this program ({error}). Remove "
            "the key; restarts use the compilation cache (jax_cache_dir)."
        ) from error
    _, metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    kept = {
        "run": _fingerprint(planned.config, planned.model.config, planned.sharding, planned.state),
        "batch": _describe(planned.batch),
        "metrics": sorted(metrics),
    }
    return serialized_executable.write(path, kept, executable)


def load_compiled(
    config: Config, model_config: ModelConfig, sharding: ShardingPlan, state: Any
) -> Callable[[Any], Callable | None] | None:
    """Returns a function from batch shapes to the saved step, if any.

    `config` is of `resolve_growth`, `model_config` has `auto` resolved. Raises UserError if the
    file is missing, unsigned, or for another configuration, program or machine, before executing
    any of it.
    """
    path = config.run.compiled_trainstep_file
    if not path:
        return None
    kept, executable = serialized_executable.read(path)
    different = _differences(kept["run"], _fingerprint(config, model_config, sharding, state))
    if different:
        more = len(different) - _SHOWN
        lines = different[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise UserError(
            f"compiled_trainstep_file={path} was compiled for another run:\n"
            + "\n".join(f"    {line}" for line in lines)
            + "\n  What to do: compile again by train_compile.py with this configuration, or "
            "remove the key."
        )

    def step_for(batch: Any) -> Callable | None:
        if _describe(batch) != kept["batch"]:
            return None
        out_tree = jax.tree.structure((state, dict.fromkeys(kept["metrics"], 0)))
        devices = list(sharding.mesh.devices.flat)
        try:
            return serialize_executable.deserialize_and_load(
                executable,
                jax.tree.structure(((state, batch), {})),
                out_tree,
                backend=devices[0].client,
                execution_devices=devices,
            )
        except Exception as error:  # runtimes raise anything
            raise UserError(
                f"compiled_trainstep_file={path}: the runtime of these devices "
                f"({devices[0].device_kind}) rejects it: {str(error).splitlines()[0]}\n"
                "  What to do: compile it with the versions installed here, or remove the key."
            ) from error

    return step_for


def _fingerprint(
    config: Config, model_config: ModelConfig, sharding: ShardingPlan, state: Any
) -> dict[str, Any]:
    """Returns JSON values, equal for runs with the same step.

    `config` is of `resolve_growth`; `model_config` has `auto` resolved, which may differ
    without cuDNN.
    """
    device = sharding.mesh.devices.flat[0]
    values = flatten(config.model_copy(update={"model": model_config}))
    names = [
        key.name for section, keys in keys_by_section().items() for key in keys
        if (section and section[0] in _SECTIONS) or key.name in _KEYS
        if key.name != "sharding_tolerance"  # changes no program
    ]  # fmt: skip
    flags = {
        name: " ".join(sorted(re.sub(_OTHER_FLAGS, "", os.environ.get(name, "")).split()))
        for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    return {
        "configuration": {name: to_yaml(values[name]) for name in names},
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
        "state": _describe(state),
    }


def _describe(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
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
