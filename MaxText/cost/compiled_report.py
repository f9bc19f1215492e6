"""Log lines about the cost of a compiled step."""

import jax

from MaxText.cost.compiled_memory import Memory, usable
from MaxText.cost.compiling import Planned
from MaxText.cost.flops import count_flops
from MaxText.cost.hlo import Program
from MaxText.cost.peak_flops import from_data_sheet
from MaxText.cost.targets import Target
from MaxText.metrics.tables import ruled_table, share

_GIB = 2**30
_MIB = 2**20
_LARGE_ARRAYS = 8


def memory_lines(target: Target, memory: Memory, program: Program) -> list[str]:
    """Returns memory of one device by cause, and the largest arrays."""
    limit = usable(target)
    rows = [
        [cause, f"{size / _MIB:,.2f}", share(size, memory.total)]
        for cause, size in memory.rows()
        if size
    ]
    total = ["at most at once", f"{memory.total / _MIB:,.2f}", ""]
    lines = [
        "",
        ruled_table(["memory of one device", "MiB", "share"], rows, total, right={1, 2}),
        f"all gradients at once, a part of the temporaries: {memory.gradients / _MIB:,.2f} MiB",
    ]
    if limit:
        left = (limit - memory.total) / _GIB
        lines.append(f"a program can have {limit / _GIB:,.1f} GiB: {left:,.1f} GiB are left")
    lines += ["", "largest arrays of one device (MiB), not all there at once:"]
    lines += [
        f"{row.num_bytes / _MIB:12,.2f}  {row.shape}  {row.made_by}"
        + (f"  x {row.count}" if row.count > 1 else "")
        for row in program.largest_arrays(_LARGE_ARRAYS)
    ]
    return lines


def cost_lines(planned: Planned, compiled: jax.stages.Compiled, program: Program) -> list[str]:
    """Returns FLOPs, bytes, collectives and time of a step."""
    layout, stage = planned.layout, planned.plan.stages[-1]
    num_devices = layout.mesh.size
    tokens = stage.samples * planned.plan.window
    count = count_flops(planned.model, stage.length)
    tflops = count.tflops(tokens / num_devices)
    lines = [
        "",
        f"operations of a step on one device, by formula: {tflops:,.4g} TFLOP "
        f"({count.per_token / 1e6:,.3f} MFLOP x {tokens:,} tokens / {num_devices} devices)",
    ]
    peak = from_data_sheet(layout.mesh.devices.flat[0].device_kind)
    if peak is not None:
        lines.append(
            f"at {peak.tflops:g} TFLOP/s ({peak.source}) a step takes {tflops / peak.tflops:.4g} s "
            "or more"
        )
    once = ""
    if program.num_loops:
        once = f", with the bodies of {program.num_loops} loops counted once"
    costs = compiled.cost_analysis() or {}  # some backends return nothing, or -1 for unknown
    if (flops := costs.get("flops", 0.0)) > 0:
        lines.append(f"the compiler's count{once}: {flops / 1e12:,.4g} TFLOP")
    if (accessed := costs.get("bytes accessed", 0.0)) > 0:
        lines.append(f"bytes accessed, by the compiler{once}: {accessed / 1e9:,.3f} GB")
    if (seconds := costs.get("optimal_seconds", 0.0)) > 0:
        lines.append(f"time of a step, by the compiler{once}: {seconds:.4g} s")
    else:
        lines.append("time of a step: this compiler gives no estimate")
    lines += ["", "sent between devices in a step (results on one device; loops counted in full):"]
    lines += [
        f"{row.num_bytes / _MIB:12,.2f} MiB  {row.kind} x {row.count:,}"
        for row in program.collectives()
    ] or ["        nothing"]
    if program.has_unknown_loops:
        lines.append("             loops of unknown length were counted once")
    return lines
