"""Text of a plan."""

import shlex
import textwrap
from collections.abc import Sequence

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.schema import Config
from MaxText.cost.abstract_step import Program
from MaxText.cost.device_memory import GPU_FRACTION
from MaxText.cost.flops import MFU_RULE
from MaxText.cost.job_plan import USABLE_SHARE, JobPlan, command_with_plan
from MaxText.cost.step_time import StepTime
from MaxText.formatting import ABSENT, format_table, short_count, short_time

_GB = 1e9
_WIDTH = 100  # columns of a usual terminal's screen


def describe(plan: JobPlan, tokens: float, price: float | None, with_notes: bool = True) -> str:
    """Describes memory, communication, time and cost on one screen.

    Args:
        plan: to describe.
        tokens: of the run.
        price: of a chip-hour, in any currency; None leaves the cost out.
        with_notes: whether notes on the times follow. Without them, the screen has room for
            proposals.
    """
    program = plan.program
    hardware = plan.program.hardware
    memory = program.config.model.memory
    lines = [
        f"hardware: {hardware.describe()}, {hardware.memory / _GB:.1f} GB per device, "
        f"{plan.time.peak.tflops:.3g} TFLOP/s ({plan.time.peak.source})",
        f"model: {program.model.num_parameters:,} parameters; mesh: {program.sharding.mesh_sizes}; "
        f"remat_policy={memory.remat_policy}, scan_layers={memory.scan_layers}",
        f"step: {program.num_microbatches} x {program.rows} sequences of {program.length} tokens "
        f"= {program.tokens_per_update:,} tokens",
        *_stages(program),
        *program.auto_choices,
    ]
    tables = [_memory(plan), _communication(plan), _time(plan, tokens, price, with_notes)]
    return "\n\n".join([_filled(lines), *tables])


def _filled(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in lines)


def _stages(program: Program) -> list[str]:
    schedule = program.schedule
    if schedule is None:
        return []
    return [
        f"pipeline: {schedule.num_stages} stages x {schedule.num_repeats} repeats x "
        f"{schedule.layers_per_stage} layers, {schedule.num_microbatches} microbatches; stages are "
        f"idle for {schedule.bubble:.1%} of the time "
        f"({schedule.num_stages - 1} of {schedule.num_turns} turns)"
    ]


def _memory(plan: JobPlan) -> str:
    """Returns the table of memory per device at the peak, in GB, and notes about it."""
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters, "exact"),
        ("optimizer state", memory.optimizer, "exact"),
    ]
    if memory.fetched:
        rows.append(("offloaded moments", memory.fetched, "exact"))
    rows += [
        *([("frozen models", memory.frozen, "exact")] if memory.frozen else []),
        ("batch", memory.batch, "exact"),
        ("gradients", memory.gradients, "exact; not all live at the peak of activations"),
        ("layer weights in compute dtype", memory.peak.between, ""),
        ("activations outside of layers", memory.peak.outside, _largest(memory.peak.live)),
        ("activations inside a layer", memory.peak.in_loops, _largest(memory.peak.in_body)),
    ]
    if memory.update:
        rows.append(("temporaries of the optimizer", memory.update, ""))
    share = memory.total / plan.program.hardware.memory
    result = "fits" if plan.fits else "does not fit, try --fit"
    table = format_table(
        ["memory per device", "GB", "largest"],
        [[name, f"{size / _GB:.3f}", note] for name, size, note in rows],
        ["peak", f"{memory.total / _GB:.3f}", f"{share:.0%} of the device: {result}"],
        right=(1,),
        max_width=_WIDTH,
    )
    notes = f"Fits up to {USABLE_SHARE:.0%}. Accuracy: docs/explanation/memory_model.md."
    if plan.fits and plan.program.hardware.chip.platform == "gpu" and share > GPU_FRACTION:
        notes += (
            f" JAX takes {GPU_FRACTION:.0%} of a GPU by default: set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE_SHARE}."
        )
    return f"{table}\n{_filled([notes])}"


def _largest(live: Sequence) -> str:
    return ", ".join(
        f"{'x'.join(map(str, array.shape))} {array.size / _GB:.2f}"
        for array in live[:2]
        if array.size >= 1e6
    )


def _communication(plan: JobPlan) -> str:
    if not plan.communication:
        return "communication: none, one device"
    rows = []
    for cost in plan.communication:
        received = f"{cost.num_bytes / _GB:.2f}"
        speed = f"{cost.bandwidth / _GB:.0f}"
        rows.append([cost.axis, str(cost.size), received, speed, short_time(cost.seconds)])
    received = sum(cost.num_bytes for cost in plan.communication) / _GB
    total = ["all, not overlapped", "", f"{received:.2f}", "", short_time(plan.time.comm_seconds)]
    header = ["communication per step", "devices", "GB received", "GB/s", "time"]
    return format_table(header, rows, total)


def _mfu(time: StepTime, seconds: float) -> str:
    """Formats the MFU. With 8-bit matmuls it may exceed the bfloat16 peak and says nothing."""
    share = time.mfu(seconds)
    return f"{share:.1%}" if share <= 1 else ABSENT


def _time(plan: JobPlan, tokens: float, price: float | None, with_notes: bool) -> str:
    """Returns the table of times per step: best and worst case, and the estimate between them.

    Args:
      plan: The plan.
      tokens: Of the whole run, for its duration.
      price: Per chip-hour, for a column of costs; None for no column.
      with_notes: Whether sentences about the assumptions follow.
    """
    time = plan.time
    steps = tokens / plan.program.tokens_per_update

    def row(name: str, seconds: float) -> list[str]:
        """Returns the cells of one case, from the seconds of a step."""
        speed = plan.program.tokens_per_device / seconds
        cells = [name, short_time(seconds), _mfu(time, seconds), f"{speed:,.0f}"]
        return cells + _time_and_cost(plan, seconds, tokens, price)

    header = ["time", "step", "MFU", "tokens/s/device", "run"]
    if price is not None:
        header.append("cost")
    table = format_table(
        header,
        [row("best case", time.lower), row("worst case", time.upper)],
        row("estimate", time.estimate),
        right=range(1, 6),
    )
    if not with_notes:
        return table
    low, high = time.compute_seconds
    source = plan.program.hardware.chip.efficiency_source
    notes = [
        f"run: {short_count(tokens)} tokens, {steps:,.0f} steps. Compute takes {short_time(low)} "
        f"to {short_time(high)}; share of the peak that matmuls reach: {source}. Best case: "
        "communication fully overlaps compute. Worst case: none does. Without evaluation, "
        "checkpoints and failures."
    ]
    if price is not None:
        notes.append(f"cost at {price:g} per chip-hour.")
    notes.append(MFU_RULE)
    return f"{table}\n{_filled(notes)}"


def _time_and_cost(plan: JobPlan, seconds: float, tokens: float, price: float | None) -> list[str]:
    run_seconds = tokens / plan.program.tokens_per_update * seconds
    cells = [short_time(run_seconds)]
    if price is not None:
        chip_hours = plan.program.hardware.num_chips * run_seconds / 3600
        cells.append(f"{price * chip_hours:,.0f}")
    return cells


def _interval(low: float, high: float) -> str:
    first, unit = short_time(low).split()
    last = short_time(high)
    return f"{first} - {last}" if last.endswith(unit) else f"{first} {unit} - {last}"


def _mesh_description(program: Program) -> str:
    description = program.sharding.mesh_sizes
    sizes = zip(MESH_AXES, program.sizes.dcn, strict=True)
    across = [f"{axis} {size}" for axis, size in sizes if size > 1]
    if across:
        description += f"; across slices {', '.join(across)}"
    schedule = program.schedule
    if schedule is not None:
        description += f"; {schedule.num_microbatches} microbatches"
        if schedule.num_repeats > 1:
            description += f", {schedule.num_repeats} repeats"
    return description


def format_proposals(
    plans: Sequence[JobPlan],
    config: Config,
    arguments: Sequence[str],
    tokens: float,
    price: float | None,
) -> str:
    """Describes fitting plans, fastest first, and the command that trains with the first.

    Args:
        plans: that fit, fastest first.
        config: that the search began with.
        arguments: of the command line that asked.
        tokens: of the run.
        price: of a chip-hour; None leaves the cost out.
    """
    cells_by_plan = [
        [
            f"{plan.program.num_microbatches} x "
            f"{plan.program.config.batch.per_device_batch_size:g}",
            plan.program.config.model.memory.remat_policy,
            f"{plan.memory.total / _GB:.1f}",
            _interval(plan.time.lower, plan.time.upper),
            _mfu(plan.time, plan.time.estimate),
            *_time_and_cost(plan, plan.time.estimate, tokens, price),
        ]
        for plan in plans
    ]
    header = ["batch", "remat_policy", "GB", "step", "MFU", "run"]
    if price is not None:
        header.append("cost")
    _, rule, *_ = format_table(header, cells_by_plan).splitlines()
    rows = []
    for plan, cells in zip(plans, cells_by_plan, strict=True):
        first, *continuation_lines = textwrap.wrap(
            _mesh_description(plan.program), _WIDTH - len(rule) - 2
        )
        rows += [[first, *cells], *([line] for line in continuation_lines)]
    table = format_table(["mesh", *header], rows, right=range(3, 8))
    command = ["python", "MaxText/train.py", *command_with_plan(arguments, plans[0], config)]
    return (
        f"plans that fit, fastest first (other meshes are slower or do not fit):\n{table}\n"
        f"To train with the first, add your data:\n{_shell_lines(command)}"
    )


def _shell_lines(command: Sequence[str]) -> str:
    lines = [" "]
    for argument in map(shlex.quote, command):
        if len(f"{lines[-1]} {argument} \\") > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {argument}"
    return " \\\n".join(lines)
