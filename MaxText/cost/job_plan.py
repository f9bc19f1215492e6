"""Plan of a configuration on hardware: memory, communication and time."""

import dataclasses

import jax

from MaxText.config.schema import Config
from MaxText.cost.abstract_step import Program, make_program
from MaxText.cost.communication import CommCost, communication_costs
from MaxText.cost.hardware import Hardware
from MaxText.cost.peak_flops import PeakFlops, datasheet_peak, measure_peak
from MaxText.cost.step_memory import MemoryEstimate, estimate_memory
from MaxText.cost.step_time import StepTime, step_time
from MaxText.errors import UserError
from MaxText.parallelism.mesh import assert_params_sufficiently_sharded

USABLE_SHARE = 0.92  # of device memory: leaves room for the plan's error and the runtime


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """Requirements of a run, per step."""

    program: Program
    hardware: Hardware
    memory: MemoryEstimate
    communication: tuple[CommCost, ...]
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE_SHARE * self.hardware.memory

    @property
    def tokens_per_device(self) -> float:
        return self.program.tokens_per_update / self.program.num_devices


def make_program_for(config: Config, hardware: Hardware) -> Program:
    """Returns the program of a configuration; UserError if it does not fit."""
    try:
        kind = hardware.chip.platform, hardware.chip.device_kind
        program = make_program(config, hardware.num_devices, *kind, hardware.num_slices)
        assert_params_sufficiently_sharded(
            program.model.parameters, program.sharding, config.mesh.sharding_tolerance
        )
    except UserError as error:
        raise UserError(f"on {hardware.describe()}: {error}") from error
    return program


def make_plan(config: Config, hardware: Hardware, peak: PeakFlops) -> JobPlan:
    return plan_of(make_program_for(config, hardware), hardware, peak)


def plan_of(program: Program, hardware: Hardware, peak: PeakFlops) -> JobPlan:
    memory = estimate_memory(program)
    communication = communication_costs(program, hardware)
    time = step_time(program, hardware, memory, communication, peak)
    return JobPlan(program, hardware, memory, tuple(communication), time)


def peak_of(hardware: Hardware) -> PeakFlops:
    """Returns a device's peak: by data sheet, or measured on this CPU."""
    if known := datasheet_peak(hardware.chip.device_kind):
        return known
    measured = measure_peak(jax.devices("cpu")[0])
    return measured._replace(tflops=measured.tflops / hardware.num_chips)
