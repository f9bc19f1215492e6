"""Text of a plan."""

import shlex
import textwrap
from collections.abc import Sequence

from MaxText.config.axis_rules import MESH_AXES
from MaxText.config.schema import Config
from MaxText.cost.abstract_step import Program
from MaxText.cost.cost_table import MFU_RULE
from MaxText.cost.fitting import command
from MaxText.cost.job_plan import FULL, Plan
from MaxText.metrics.tables import WIDTH, ruled_table, short_count

_GB = 1e9


def describe(plan: Plan, tokens: float, price: float | None) -> str:
    """Describes memory, communication, time and, given a price per chip-hour, cost of a run."""
    program = plan.program
    section = program.config.model
    lines = [
        f"hardware: {plan.hardware.describe()}, {plan.hardware.memory / _GB:.1f} GB per device, "
        f"{plan.time.peak.tflops:.3g} TFLOP/s ({plan.time.peak.source})",
        f"model: {program.model.num_parameters:,} parameters; mesh: {program.layout.words}; "
        f"remat_policy={section.memory.remat_policy}, scan_layers={section.memory.scan_layers}",
        f"update: {program.num_microbatches} x {program.rows} sequences of {program.length} tokens "
        f"= {program.tokens_per_update:,} tokens",
        *_stages(program),
        *program.choices,
        "",
        _memory(plan),
        "",
        *_communication(plan),
        "",
        *_time(plan, tokens, price),
    ]
    return "\n".join(lines)


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


def _memory(plan: Plan) -> str:
    memory = plan.memory
    rows = [
        ("parameters", memory.parameters, "exact"),
        ("optimizer state", memory.optimizer, "exact"),
        *([("moments, fetched for the update", memory.fetched, "exact")] * (memory.fetched > 0)),
        ("batch", memory.batch, "exact"),
        ("gradients", memory.gradients, "exact; where activations peak they are not all there"),
        ("layers' weights, converted", memory.need.between, "for products"),
        ("kept and worked on, outside of layers", memory.need.outside, _largest(memory.need.alive)),
        ("of one layer's pass", memory.need.in_loops, _largest(memory.need.in_body)),
    ]
    if memory.update:
        rows.append(("of the optimizer's update", memory.update, ""))
    share = memory.total / plan.hardware.memory
    verdict = "fits" if plan.fits else "DOES NOT FIT: see --fit"
    table = ruled_table(
        ["memory per device", "GB", "largest"],
        [[name, f"{size / _GB:.3f}", note] for name, size, note in rows],
        [
            "needed at the peak",
            f"{memory.total / _GB:.3f}",
            f"{share:.0%} of the device: {verdict}",
        ],
        right=(1,),
    )
    accuracy = "docs/explanation/memory_model.md compares with the compiler"
    return f"{table}\n(a plan fits up to {FULL:.0%}; {accuracy})"


def _largest(alive: Sequence) -> str:
    return ", ".join(
        f"{'x'.join(map(str, array.shape))} {array.size / _GB:.2f}"
        for array in alive[:2]
        if array.size >= 1e6
    )


def _communication(plan: Plan) -> list[str]:
    if not plan.exchanged:
        return ["communication: none, one device"]
    rows = [
        (one.axis, str(one.size), one.num_bytes, f"{one.bandwidth / _GB:.0f}", one.seconds)
        for one in plan.exchanged
    ]
    received = sum(one.num_bytes for one in plan.exchanged)
    rows.append(("all, one after the other", "", received, "", plan.time.communicating))
    *cells, total = (
        [axis, size, f"{num_bytes / _GB:.2f}", speed, f"{seconds:.3f}"]
        for axis, size, num_bytes, speed, seconds in rows
    )
    header = ["communication per update", "devices", "GB received", "GB/s", "seconds"]
    return [ruled_table(header, cells, total, right=(1, 2, 3, 4))]


def _time(plan: Plan, tokens: float, price: float | None) -> list[str]:
    time, per_device = plan.time, plan.tokens_per_device
    updates = tokens / plan.program.tokens_per_update

    def row(name: str, seconds: float) -> list[str]:
        mfu, speed = time.mfu(seconds, per_device), per_device / seconds
        cells = [name, f"{seconds:.4g}", f"{mfu:.1%}", f"{speed:,.0f}"]
        return cells + _days_and_cost(plan, seconds, tokens, price)

    table = ruled_table(
        ["time", "s per update", "MFU", "tokens/s/device", "days", *["cost"] * (price is not None)],
        [row("at best", time.fast), row("at worst", time.slow)],
        row("in the middle", time.middle),
        right=range(1, 6),
    )
    low, high = time.computing
    source = plan.hardware.chip.efficiency_source
    money = [] if price is None else [f"cost at {price:g} per chip-hour."]
    notes = [
        f"run: {short_count(tokens)} tokens, {updates:,.0f} updates. Computing takes {low:.4g} to "
        f"{high:.4g} s; shares of the peak that products reach: {source}. At best communication "
        "costs nothing as long as it is shorter, at worst all of it. No evaluation, checkpoints or "
        "failures.",
        *money,
        MFU_RULE,
    ]
    return [table, *(textwrap.fill(note, WIDTH, subsequent_indent="    ") for note in notes)]


def _days_and_cost(plan: Plan, seconds: float, tokens: float, price: float | None) -> list[str]:
    days = tokens / plan.program.tokens_per_update * seconds / 86400
    money = [] if price is None else [f"{price * plan.hardware.num_chips * days * 24:,.0f}"]
    return [f"{days:.3g}", *money]


def _mesh_words(program: Program) -> str:
    words = program.layout.words
    sizes = zip(MESH_AXES, program.sizes.dcn, strict=True)
    if across := [f"{axis} {size}" for axis, size in sizes if size > 1]:
        words += f"; across slices {', '.join(across)}"
    if (schedule := program.schedule) is not None:
        words += f"; {schedule.num_microbatches} microbatches"
        words += f", {schedule.num_repeats} repeats" * (schedule.num_repeats > 1)
    return words


def proposals(
    plans: Sequence[Plan],
    config: Config,
    arguments: Sequence[str],
    tokens: float,
    price: float | None,
) -> str:
    """Describes plans that fit, fastest first."""
    rows = [
        [
            _mesh_words(plan.program),
            f"{plan.program.num_microbatches} x "
            f"{plan.program.config.batch.per_device_batch_size:g}",
            plan.program.config.model.memory.remat_policy,
            f"{plan.memory.total / _GB:.1f}",
            f"{plan.time.fast:.3g} - {plan.time.slow:.3g}",
            f"{plan.time.mfu(plan.time.middle, plan.tokens_per_device):.1%}",
            *_days_and_cost(plan, plan.time.middle, tokens, price),
        ]
        for plan in plans
    ]
    header = ["mesh", "batch", "remat_policy", "GB", "s per update", "MFU", "days"]
    table = ruled_table(
        header + ["cost"] * (price is not None),
        rows,
        ["(other meshes are slower, or too large)"],
        right=range(3, 8),
    )
    line = shlex.join(["python", "MaxText/train.py", *command(arguments, plans[0], config)])
    return f"what fits, fastest first:\n{table}\nthe first:\n  {line}"
