"""auto_layout and auto_layout_and_mesh_shape: plan.py's search, for the devices of a run.

The search needs no device and no compilation, and its result is a configuration with other mesh
keys. train.py, train_compile.py and plan.py make the same choice for the same hardware.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.serialization import diff_configs
from MaxText.cost.job_plan import (
    BATCH_KEYS,
    MESH_KEYS,
    JobPlan,
    candidate_layouts,
    candidate_meshes,
    find_fastest_mesh,
    find_fitting_plans,
)
from MaxText.errors import UserError
from MaxText.hardware.chips import CHIPS, CPU, PEAK_TFLOPS, Chip, Hardware

_LAYOUT = "auto_layout"
_LAYOUT_AND_SHAPE = "auto_layout_and_mesh_shape"
_MESSAGE_BYTES = 8192  # of the choice that process 0 tells the others


def hardware_of_devices(devices: Sequence[Any]) -> Hardware:
    """Returns the hardware that JAX devices are; UserError if plan.py does not know it."""
    slices = {getattr(device, "slice_index", None) or 0 for device in devices}
    first = devices[0]
    return hardware_of_kind(first.device_kind, first.platform, len(devices), len(slices))


def hardware_of_kind(kind: str, platform: str, num_devices: int, num_slices: int = 1) -> Hardware:
    """Returns the hardware of JAX devices described by their kind and platform.

    Raises:
      UserError: plan.py does not know the kind.
    """
    chip = CPU if platform == "cpu" else _chip_of(kind)
    return Hardware(
        name=kind, chip=chip, num_chips=num_devices // chip.devices, num_slices=num_slices
    )


def _chip_of(kind: str) -> Chip:
    pattern = _peak_pattern(kind)
    chips = [
        chip for chip in CHIPS.values() if pattern and _peak_pattern(chip.device_kind) == pattern
    ]
    if not chips:
        raise UserError(
            f"{_LAYOUT}: the memory and network of {kind} are unknown. Set the mesh with ici_* and "
            "dcn_* sizes (docs/how-to/shard_a_model.md)."
        )
    # The same chip with more or less memory: the exact name, else the smaller one.
    return min(chips, key=lambda chip: (chip.device_kind != kind, chip.memory))


def _peak_pattern(kind: str) -> str | None:
    return next((pattern for pattern, _ in PEAK_TFLOPS if re.search(pattern, kind)), None)


def choose_layout_for_devices(
    config: Config, devices: Sequence[Any], log: Callable[[str], None]
) -> Config:
    """As `choose_layout`, for JAX devices, present or to compile for."""
    if not is_requested(config):
        return config
    return choose_layout(config, hardware_of_devices(devices), log)


def is_requested(config: Config) -> bool:
    """Returns whether a configuration leaves its mesh to the search."""
    return config.mesh.auto_layout or config.mesh.auto_layout_and_mesh_shape


def choose_layout(config: Config, hardware: Hardware, log: Callable[[str], None]) -> Config:
    """Returns a configuration with the mesh that auto_layout chooses, and logs it.

    Args:
        config: of the run. Without auto_layout or auto_layout_and_mesh_shape it is returned as is.
        hardware: to train on.
        log: gets the mesh, its estimated step time and memory, and the keys that fix it.

    Raises:
        UserError: nothing fits.
    """
    if not is_requested(config):
        return config
    name = _LAYOUT
    candidates = candidate_layouts
    if config.mesh.auto_layout_and_mesh_shape:
        name = _LAYOUT_AND_SHAPE
        candidates = candidate_meshes
    meshes = list(candidates(config, hardware))
    plan = find_fastest_mesh(config, hardware, meshes)
    changed_keys = MESH_KEYS
    if plan is None:
        try:
            plan = find_fitting_plans(config, hardware, meshes)[0]
        except UserError as error:
            raise type(error)(f"{name}: {error}{_advice(name)}") from error
        changed_keys = (*MESH_KEYS, *BATCH_KEYS, "remat_policy")
    planned = flatten(plan.program.config)
    chosen = _choice_of_process_0({name: planned[name] for name in changed_keys})
    new_config = unflatten(flatten(config) | chosen)
    log(_description(name, plan))
    changes = diff_configs(flatten(config), flatten(new_config))
    if changes:
        # YAML needs these quotes, the command line does not.
        keys = " ".join(
            f"{key}={new_value.strip(chr(34))}" for key, (_, new_value) in changes.items()
        )
        log(f"To keep it, replace {name}=true with: {keys}")
    return new_config


def _advice(name: str) -> str:
    if name == _LAYOUT_AND_SHAPE:
        return ""
    return f" {_LAYOUT} keeps the sizes of the mesh; {_LAYOUT_AND_SHAPE}=true chooses them, too."


def _description(name: str, plan: JobPlan) -> str:
    program = plan.program
    accumulated = f" in {program.num_microbatches} microbatches"
    return (
        f"{name}: chose the mesh {program.sharding.mesh_sizes} for {program.hardware.describe()}: "
        f"{plan.time.estimate:.3g} s per step of {program.tokens_per_update:,} tokens"
        f"{accumulated if program.num_microbatches > 1 else ''} and "
        f"{plan.memory.total / 1e9:.3g} of {program.hardware.memory / 1e9:.3g} GB per device, "
        "as estimated by plan.py"
    )


def _choice_of_process_0(chosen: dict[str, Any]) -> dict[str, Any]:
    """Returns the choice of process 0 in every process.

    Estimates use the memory and speed of a process's own machine, which may differ on CPUs.
    """
    if jax.process_count() == 1:
        return chosen
    from jax.experimental import multihost_utils

    text = json.dumps(chosen).encode().ljust(_MESSAGE_BYTES)
    agreed = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    return json.loads(np.asarray(agreed, np.uint8).tobytes())
