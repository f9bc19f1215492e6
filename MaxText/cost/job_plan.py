"""Plan of a configuration on hardware: memory, communication and time."""

import dataclasses

import jax

from MaxText.config.schema import Config
from MaxText.cost.abstract_step import Program, make_program
from MaxText.cost.communication import Exchange, exchanges
from MaxText.cost.hardware import Hardware
from MaxText.cost.peak_flops import PeakFlops, from_data_sheet, measured
from MaxText.cost.step_memory import Memory, memory_stats
from MaxText.cost.step_time import StepTime, step_time
from MaxText.errors import UserError
from MaxText.parallelism.mesh import check_sharding

FULL = 0.92  # usable share of device memory: leaves room for the plan's error and the runtime


@dataclasses.dataclass(frozen=True)
class Plan:
    """Requirements of a run, per step."""

    program: Program
    hardware: Hardware
    memory: Memory
    exchanged: tuple[Exchange, ...]
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether device memory suffices, with a margin."""
        return self.memory.total <= FULL * self.hardware.memory

    @property
    def tokens_per_device(self) -> float:
        return self.program.tokens_per_update / self.program.num_devices


def program_on(config: Config, hardware: Hardware) -> Program:
    """Returns the program of a configuration; UserError if it does not fit."""
    try:
        program = make_program(
            config,
            hardware.num_devices,
            hardware.chip.platform,
            hardware.chip.device_kind,
            hardware.num_slices,
        )
        check_sharding(program.model.parameters, program.layout, config.mesh.sharding_tolerance)
    except UserError as error:
        raise UserError(f"on {hardware.describe()}: {error}") from error
    return program


def make_plan(
    config: Config, hardware: Hardware, peak: PeakFlops, *, fused_attention: bool = False
) -> Plan:
    """Returns the plan of a configuration; UserError if mesh, batch or sharding do not fit.

    `fused_attention` assumes a kernel that never writes attention scores to memory.
    """
    return plan_of(program_on(config, hardware), hardware, peak, fused_attention=fused_attention)


def plan_of(
    program: Program, hardware: Hardware, peak: PeakFlops, *, fused_attention: bool = False
) -> Plan:
    memory = memory_stats(program)
    exchanged = exchanges(program, hardware)
    time = step_time(program, hardware, memory, exchanged, peak, fused_attention=fused_attention)
    return Plan(program, hardware, memory, tuple(exchanged), time)


def peak_of(hardware: Hardware) -> PeakFlops:
    """Returns a device's peak: by data sheet, or measured for this machine's CPU."""
    return from_data_sheet(hardware.chip.device_kind) or measured(jax.devices("cpu")[0])
