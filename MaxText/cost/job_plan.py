"""Plan of a configuration on hardware, and the search for a fitting one.

The search finds a mesh, microbatch and remat policy, fastest first. A step keeps its number of
sequences: smaller microbatches are accumulated. Meshes are visited by their lower bound of time,
known without tracing, until no remaining mesh can be among the proposals. cost/auto_layout.py
makes the choice for train.py, as GPT-Neo's --auto_layout did for its own model.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from MaxText.config.axis_rules import MESH_AXES, NETWORKS, size_key
from MaxText.config.model_sections import PipelineConfig
from MaxText.config.rules import RULES, broken_letters
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.serialization import diff_configs
from MaxText.cost.abstract_step import (
    Program,
    cached_model,
    configured_mesh_sizes,
    make_program,
)
from MaxText.cost.step_memory import MemoryEstimate, estimate_memory, min_memory
from MaxText.cost.step_time import CommCost, StepTime, communication_costs, min_step_time, step_time
from MaxText.errors import UserError
from MaxText.hardware.chips import Hardware
from MaxText.training import backend_defaults

USABLE_SHARE = 0.92  # of device memory: leaves room for the plan's error and the runtime
POLICIES = ("none", "minimal", "save_dot_except_mlp", "save_qkv_proj", "full")
MAX_PROPOSALS = 6
_RAMP_KEYS = ("per_device_batch_size_start", "per_device_batch_size_increment")
_MICROBATCH_KEYS = ("per_device_batch_size", "gradient_accumulation_steps")
BATCH_KEYS = (*_MICROBATCH_KEYS, *_RAMP_KEYS)
MAX_TENSOR = 8
MAX_STAGES = 16
# Minimum length from which sequences are split despite a large enough batch, and maximum parts.
LONG_SEQUENCE = 8192
MAX_CONTEXT = 8
_BYTES_OF_A_WEIGHT = 16  # a float32 weight, two moments, and its gradient
_PIPELINE = tuple(PipelineConfig.model_fields)
MESH_KEYS = (*(size_key(axis, network) for network in NETWORKS for axis in MESH_AXES), *_PIPELINE)
Keys = dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What a train step needs on hardware: memory, communication and time."""

    program: Program
    memory: MemoryEstimate
    communication: list[CommCost]
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the reserve of a device free."""
        return self.memory.total <= USABLE_SHARE * self.program.hardware.memory


def make_plan(config: Config, hardware: Hardware) -> JobPlan:
    """Returns a configuration's plan; UserError if the program does not fit."""
    try:
        program = make_program(config, hardware)
    except UserError as error:
        raise UserError(f"on {hardware.describe()}: {error}") from error
    return _plan_of(program)


def _plan_of(program: Program) -> JobPlan:
    memory = estimate_memory(program)
    communication = communication_costs(program)
    time = step_time(program, memory, communication)
    return JobPlan(program=program, memory=memory, communication=communication, time=time)


class _Mesh(NamedTuple):
    seconds: float  # lower bound of a step
    keys: dict[str, Any]  # configuration of the mesh
    batches: list[dict[str, Any]]  # of the batch, from the largest microbatch that divides


def find_fitting_plans(
    config: Config, hardware: Hardware, meshes: Iterable[Keys] | None = None
) -> list[JobPlan]:
    """Returns at most MAX_PROPOSALS fitting plans, the shortest step first.

    Args:
        config: of the run, with any mesh.
        hardware: to train on.
        meshes: mesh keys to choose from; by default `candidate_meshes`.
    """
    if meshes is None:
        meshes = candidate_meshes(config, hardware)
    search = _PlanSearch(flatten(config), hardware)
    plans: list[JobPlan] = []
    smallest: JobPlan | None = None
    for mesh in sorted(search.meshes(config, meshes), key=lambda mesh: mesh.seconds):
        if len(plans) == MAX_PROPOSALS and mesh.seconds >= plans[-1].time.estimate:
            break
        fitting_plans, closest = search.plans(mesh)
        plans = sorted([*plans, *fitting_plans], key=lambda plan: plan.time.estimate)[
            :MAX_PROPOSALS
        ]
        if closest and (smallest is None or closest.memory.total < smallest.memory.total):
            smallest = closest
    if plans:
        return plans
    if smallest is None:
        raise UserError(
            f"no mesh of {hardware.num_devices} devices in {hardware.num_slices} equal slices "
            "divides this model and batch. Set another number of devices, another "
            "per_device_batch_size, or a higher sharding_tolerance."
        )
    keys = " ".join(command_with_plan((), smallest, config)) or "the configuration as it is"
    raise NothingFits(
        f"nothing fits {hardware.describe()}: the smallest plan needs "
        f"{smallest.memory.total / 1e9:.1f} GB per device, with {keys}, and a device has "
        f"{hardware.memory / 1e9:.1f} GB. Use more devices, a smaller model, or an optimizer with "
        "less state (opt_type=adafactor, mu_dtype=bfloat16)."
    )


def find_fastest_mesh(config: Config, hardware: Hardware, meshes: Iterable[Keys]) -> JobPlan | None:
    """Returns the fitting plan of the shortest step that changes the mesh and nothing else.

    Microbatches and the remat policy stay as they are. Returns None if no mesh fits with them.
    """
    search = _PlanSearch(flatten(config), hardware)
    bounds: list[tuple[float, Program]] = []
    for keys in meshes:
        if (program := search.program(keys)) is not None:
            bounds.append((min_step_time(program), program))
    fastest: JobPlan | None = None
    for lower_bound, program in sorted(bounds, key=lambda bound: bound[0]):
        if fastest is not None and lower_bound >= fastest.time.estimate:
            break
        plan = _plan_of(program)
        if plan.fits and (fastest is None or plan.time.estimate < fastest.time.estimate):
            fastest = plan
    return fastest


class NothingFits(UserError):
    """Raised if no mesh, microbatch and remat policy fits."""

    exit_code = 1


def command_with_plan(arguments: Sequence[str], plan: JobPlan, config: Config) -> list[str]:
    """Returns the arguments of a command line with the keys that a plan changes.

    Args:
        arguments: of the command, `key=value` among them; other values of the plan replace theirs.
        plan: found by a search.
        config: that the search began with.
    """
    changed = diff_configs(flatten(config), flatten(plan.program.config))
    searched = (*MESH_KEYS, *BATCH_KEYS, "remat_policy")
    # YAML needs these quotes, the command line does not.
    new_values = {name: changed[name][1].strip('"') for name in searched if name in changed}
    unchanged_arguments = [
        argument for argument in arguments if argument.partition("=")[0] not in new_values
    ]
    return [*unchanged_arguments, *(f"{name}={value}" for name, value in new_values.items())]


@dataclasses.dataclass(frozen=True)
class _PlanSearch:
    """The search for settings that fit a machine, from cheap bounds to complete plans.

    Attributes:
      base_keys: Keys of the configuration that the search starts from.
      hardware: The machine.
    """

    base_keys: dict[str, Any]
    hardware: Hardware

    def meshes(self, config: Config, candidates: Iterable[Keys]) -> Iterator[_Mesh]:
        """Yields the candidates that divide model and batch, with a lower bound of their step."""
        all_batches = microbatches(config, self.hardware)
        for keys in candidates:
            for index, batch in enumerate(all_batches):
                program = self.program(keys | batch | {"remat_policy": POLICIES[0]})
                if program is not None:
                    yield _Mesh(min_step_time(program), keys, all_batches[index:])
                    break

    def plans(self, mesh: _Mesh) -> tuple[list[JobPlan], JobPlan | None]:
        """Returns fitting plans, and the one with the least memory.

        Each policy has its largest microbatch, unless a faster one (that saves more) fits with an
        equal one.
        """
        batches = self._small_enough(mesh)

        @functools.cache
        def plan_with(policy: str, batch_index: int) -> JobPlan | None:
            program = self.program(mesh.keys | batches[batch_index] | {"remat_policy": policy})
            return None if program is None else _plan_of(program)

        def fits(policy: str, batch_index: int) -> bool:
            plan = plan_with(policy, batch_index)
            return plan is not None and plan.fits

        closest = plan_with(POLICIES[-1], len(batches) - 1) if batches else None
        # Index of the largest microbatch that fits with the policies so far, from large to small.
        fitting_plans = []
        first_fitting = len(batches)
        for policy in POLICIES if closest is not None and closest.fits else ():
            if first_fitting and fits(policy, first_fitting - 1):
                is_fit = functools.partial(fits, policy)
                first_fitting = bisect.bisect_left(range(first_fitting - 1), True, key=is_fit)
                fitting_plans.append(plan_with(policy, first_fitting))
        return fitting_plans, closest

    def _small_enough(self, mesh: _Mesh) -> list[dict[str, Any]]:
        """Drops microbatches with a too large lower bound, except the last."""
        small_enough = []
        last_valid = []
        for batch in mesh.batches:
            program = self.program(mesh.keys | batch | {"remat_policy": POLICIES[-1]})
            if program is not None:
                last_valid = [batch]
                if min_memory(program) <= USABLE_SHARE * self.hardware.memory:
                    small_enough.append(batch)
        return small_enough or last_valid

    def program(self, changes: dict[str, Any]) -> Program | None:
        """Returns the program of changed keys, or None if it breaks a rule or does not divide."""
        config = unflatten(self.base_keys | changes)
        for rule in RULES:
            is_affected = rule.applies_to("train") and bool(set(rule.keys) & set(changes))
            if is_affected and rule.check(config):
                return None
        if any(broken_letters(config)):
            return None
        try:
            return make_program(config, self.hardware)
        except UserError:
            return None


def microbatches(config: Config, hardware: Hardware) -> list[dict[str, Any]]:
    """Returns the step's sequences in increasingly many microbatches."""
    batch_config = config.batch
    sequences = sequences_of(config, hardware)
    microbatch_keys = []
    steps = 1
    while True:
        per_device = sequences / steps / hardware.num_devices
        sizes = dict(zip(_MICROBATCH_KEYS, (per_device, steps), strict=True))
        if batch_config.enable_rampup_batch_size:
            smaller = batch_config.gradient_accumulation_steps / steps
            sizes |= {name: getattr(batch_config, name) * smaller for name in _RAMP_KEYS}
        microbatch_keys.append(sizes)
        sequences_per_microbatch = sequences // steps
        if sequences_per_microbatch <= 1:
            return microbatch_keys
        # Usually halves; finally each sequence is its own microbatch.
        steps *= next(
            factor
            for factor in range(2, sequences_per_microbatch + 1)
            if sequences_per_microbatch % factor == 0
        )


def candidate_meshes(config: Config, hardware: Hardware) -> Iterator[Keys]:
    """Yields mesh keys, and pipeline keys if there are stages.

    Within a slice, weights are sharded over all or half of the devices, or replicated; across
    slices replicated, sharded, or split by layers. Model, batch or rules may reject some.
    """
    num_devices = hardware.num_devices // hardware.num_slices
    for within, across in itertools.product(
        _within(config, hardware, num_devices), _across(hardware.num_slices)
    ):
        yield from _mesh_keys(config, hardware, within, across)


def candidate_layouts(config: Config, hardware: Hardware) -> Iterator[Keys]:
    """Yields mesh keys that give the sizes of a configuration's mesh to other axes.

    A mesh of fsdp 4 and tensor 2 may become, for example, one of data 2 and tensor 4, with other
    dimensions of the arrays split over as many devices. Model, batch or rules may reject some.
    """
    sizes = configured_mesh_sizes(config, hardware)
    experts = config.model.mixture_of_experts.num_experts
    axes_within = ["data", "fsdp", "tensor", "context", "stage"]
    if experts > 1:
        axes_within.append("expert")
    for within, across in itertools.product(
        _assignments(sizes.ici, axes_within), _assignments(sizes.dcn, ["data", "fsdp", "stage"])
    ):
        yield from _mesh_keys(config, hardware, within, across)


def _assignments(sizes: Sequence[int], axes: Sequence[str]) -> Iterator[Keys]:
    """Yields sizes by axis, for each way to give the sizes above 1 to different axes."""
    by_axis = dict(zip(MESH_AXES, sizes, strict=True))
    # One way to shard weights: _mesh_keys splits it again.
    by_axis["fsdp"] *= by_axis.pop("fsdp_transpose")
    shape = [size for size in by_axis.values() if size > 1]
    assignments = (
        dict(zip(chosen, shape, strict=True)) for chosen in itertools.permutations(axes, len(shape))
    )
    yield from {tuple(sorted(sizes.items())): sizes for sizes in assignments}.values()


def _mesh_keys(config: Config, hardware: Hardware, within: Keys, across: Keys) -> Iterator[Keys]:
    """Yields the keys of a mesh by its sizes, absent ones 1, once per pipeline schedule."""
    width = config.model.shape.dimensions.emb_dim
    # A factor of fsdp moves to fsdp_transpose, for divisible widths.
    fsdp = within.get("fsdp", 1)
    other_parts = across.get("fsdp", 1) * within.get("context", 1)
    fsdp_parts = math.gcd(fsdp, width // other_parts if width % other_parts == 0 else 1)
    sizes = within | {"fsdp": fsdp_parts, "fsdp_transpose": fsdp // fsdp_parts}
    mesh = {
        size_key(axis, network): axis_sizes.get(axis, 1)
        for network, axis_sizes in zip(NETWORKS, (sizes, across), strict=True)
        for axis in MESH_AXES
    }
    if hardware.num_slices > 1 or across.get("data", 1) == 1:
        mesh["dcn_data_parallelism"] = -1  # the default: fills the remaining devices
    for pipeline in _pipelines(within.get("stage", 1) * across.get("stage", 1)):
        yield mesh | pipeline


def sequences_of(config: Config, hardware: Hardware) -> int:
    """Returns the sequences of an optimizer step on hardware."""
    batch = config.batch
    if batch.global_batch_size:
        return batch.global_batch_size
    per_device = batch.per_device_batch_size * batch.gradient_accumulation_steps
    return round(per_device * hardware.num_devices)


def _within(config: Config, hardware: Hardware, num_devices: int) -> Iterator[Keys]:
    """Yields mesh sizes within a slice that are worth a try, by axis."""
    experts = config.model.mixture_of_experts
    splits_experts = experts.num_experts > 1 and experts.capacity_factor > 0
    model_config, _ = backend_defaults.resolve_auto(config.model, hardware.chip.platform)
    needed = _BYTES_OF_A_WEIGHT * cached_model(model_config).num_parameters / num_devices
    sizes = _powers(8 if splits_experts else 1)
    for expert, tensor, context, stage in itertools.product(
        [size for size in sizes if experts.num_experts % size == 0],
        _powers(MAX_TENSOR),
        _contexts(config, hardware),
        _powers(MAX_STAGES if needed > hardware.memory else 1),
    ):
        remaining, remainder = divmod(num_devices, expert * tensor * context * stage)
        if remainder:
            continue
        for fsdp in dict.fromkeys((remaining, max(remaining // 2, 1), 1)):
            if remaining % fsdp == 0:
                yield {
                    "data": remaining // fsdp,
                    "stage": stage,
                    "fsdp": fsdp,
                    "context": context,
                    "expert": expert,
                    "tensor": tensor,
                }


def _across(num_slices: int) -> Iterator[Keys]:
    """Yields mesh sizes across slices, by axis."""
    for stage in (n for n in range(1, MAX_STAGES + 1) if num_slices % n == 0):
        remaining = num_slices // stage
        for fsdp in dict.fromkeys((1, remaining)):
            yield {"data": remaining // fsdp, "stage": stage, "fsdp": fsdp}


def _contexts(config: Config, hardware: Hardware) -> list[int]:
    """Returns sizes of the context axis: above 1 for long sequences or fewer than devices."""
    length = config.model.shape.max_target_length
    max_context = MAX_CONTEXT if length >= LONG_SEQUENCE else 1
    devices_per_sequence = -(-hardware.num_devices // max(sequences_of(config, hardware), 1))
    if devices_per_sequence > 1:
        max_context = max(max_context, 2 ** (devices_per_sequence - 1).bit_length())
    return [n for n in _powers(max_context) if length % n == 0]


def _pipelines(num_stages: int) -> Iterator[Keys]:
    """Yields the pipeline keys to try with a number of stages."""
    choices = [(-1, -1)]  # the defaults
    if num_stages > 1:
        choices = itertools.product((1, -1), [n * num_stages for n in (1, 2, 4)])
    for num_repeats, num_microbatches in choices:
        yield dict(zip(_PIPELINE, (num_microbatches, num_repeats, -1), strict=True))


def _powers(maximum: int) -> list[int]:
    """Returns the powers of two up to `maximum`."""
    return [2**i for i in range(maximum.bit_length())]
