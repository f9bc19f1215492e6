"""Mesh, microbatch and remat policy that fit, the fastest first.

An update keeps its number of sequences: smaller microbatches are accumulated. What GPT-Neo's
--auto_layout and --auto_layout_and_mesh_shape did for its own model is done here for any.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from MaxText.configuration.catalogue import build
from MaxText.configuration.saved import flat
from MaxText.configuration.schema import Config
from MaxText.errors import UserError
from MaxText.monitoring.peak_flops import PeakFlops
from MaxText.planning.hardware import Hardware
from MaxText.planning.planning import Plan, make_plan

# From what keeps most to what keeps least.
POLICIES = ("none", "minimal", "save_dot_except_mlp", "save_qkv_proj", "full")
LARGEST_TENSOR = 8
CHANGED = (
    "ici_data_parallelism", "ici_fsdp_parallelism", "ici_expert_parallelism",
    "ici_tensor_parallelism", "dcn_data_parallelism", "dcn_fsdp_parallelism",
    "per_device_batch_size", "gradient_accumulation_steps", "remat_policy",
)  # fmt: skip


def fitting(config: Config, hardware: Hardware, peak: PeakFlops) -> list[Plan]:
    """Plans that fit, the one with the shortest update first; of each mesh and policy the one with
    the largest microbatch.

    Raises:
      UserError: nothing fits; says what comes closest.
    """
    found: list[Plan] = []
    smallest: Plan | None = None
    for mesh, policy in itertools.product(_meshes(config, hardware), POLICIES):
        for batch in _microbatches(config, hardware.num_devices):
            plan = _tried(config, mesh | batch | {"remat_policy": policy}, hardware, peak)
            if plan is None:
                continue
            if smallest is None or plan.memory.total < smallest.memory.total:
                smallest = plan
            if plan.fits:
                found.append(plan)
                break
    if found:
        return sorted(found, key=lambda plan: plan.time.middle)
    if smallest is None:
        raise UserError(
            f"no mesh of {hardware.num_devices} devices divides this model and batch. Set another "
            "per_device_batch_size, or a higher sharding_tolerance."
        )
    raise UserError(
        f"nothing fits {hardware.describe()}: the least that is needed is "
        f"{smallest.memory.total / 1e9:.1f} GB per device, with {words(smallest)}; there are "
        f"{hardware.memory / 1e9:.1f} GB. Take more devices, a smaller model, or an optimizer with "
        "less state (opt_type=adafactor, mu_dtype=bfloat16)."
    )


def words(plan: Plan) -> str:
    """The keys that make a plan what it is, to be typed."""
    keys = flat(plan.program.config)
    slices = plan.hardware.num_slices > 1
    names = [name for name in CHANGED if slices or not name.startswith("dcn_")]
    return " ".join(f"{name}={_value(keys[name])}" for name in names)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tried(
    config: Config, changes: dict[str, Any], hardware: Hardware, peak: PeakFlops
) -> Plan | None:
    """The plan with other keys; None where they do not go together."""
    try:
        return make_plan(build(flat(config) | changes), hardware, peak)
    except UserError:
        return None


def _meshes(config: Config, hardware: Hardware) -> Iterator[dict[str, int]]:
    """Sizes of mesh axes.

    Weights are split over all devices of a slice, over a half of them, or copied; and across slices
    split or copied.
    """
    num_devices = hardware.num_devices // hardware.num_slices
    experts = config.model.mixture_of_experts
    parts = [1]
    if experts.num_experts > 1 and experts.capacity_factor > 0:
        parts = [n for n in (1, 2, 4, 8) if experts.num_experts % n == 0]
    for expert, tensor in itertools.product(parts, (1, 2, 4, LARGEST_TENSOR)):
        if num_devices % (expert * tensor):
            continue
        rest = num_devices // (expert * tensor)
        for fsdp in dict.fromkeys((rest, max(rest // 2, 1), 1)):
            if rest % fsdp:
                continue
            for across in dict.fromkeys((1, hardware.num_slices)):
                copies = hardware.num_slices // across
                sizes = (rest // fsdp, fsdp, expert, tensor, copies, across)
                yield dict(zip(CHANGED[:6], sizes, strict=True))


def _microbatches(config: Config, num_devices: int) -> Iterator[dict[str, float]]:
    """The update's sequences in more and more microbatches."""
    batch = config.batch
    sequences = round(batch.per_device_batch_size * num_devices * batch.gradient_accumulation_steps)
    steps = 1
    while sequences % steps == 0 and sequences // steps:
        yield {
            "per_device_batch_size": sequences / steps / num_devices,
            "gradient_accumulation_steps": steps,
        }
        steps *= 2
