"""Compiles a train step ahead of time and reports its cost."""

from collections.abc import Callable

import jax

from MaxText.config.schema import Config
from MaxText.cost import device_memory, saved_step, targets
from MaxText.cost.flops import count_flops
from MaxText.cost.hlo import HloModule
from MaxText.cost.peak_flops import datasheet_peak
from MaxText.cost.saved_step import LoweredStep, compile_lowered, lower_train_step

_MIB = 2**20


def train_compile(
    config: Config, target: targets.CompileTarget, log: Callable[[str], None]
) -> None:
    """Compiles a train step for a machine, prints its cost, and saves it.

    Call targets.prepare_environment first. Raises UserError if the step does not fit the machine or
    cannot be compiled for it here.
    """
    devices = targets.devices(target)
    kind = devices[0].device_kind
    slices = f" in {target.num_slices} slices" if target.num_slices > 1 else ""
    log(f"target: {target.name}{slices}, {len(devices)} x {kind}; jax {jax.__version__}")
    planned = lower_train_step(config, devices)
    log("\n".join([f"mesh: {planned.sharding.mesh_sizes}", *planned.lines]))
    stages, stage = planned.plan.stages, planned.plan.stages[-1]
    last = f", the last of {len(stages)} stages" if len(stages) > 1 else ""
    log(f"batch: {planned.plan.batch_size(stage)} x {stage.length} tokens{last}")
    try:
        compiled, seconds = compile_lowered(planned)
    except jax.errors.JaxRuntimeError as error:
        _, is_exhausted, what = str(error).partition("RESOURCE_EXHAUSTED: ")
        if not is_exhausted:
            raise
        raise device_memory.out_of_memory(target, what) from error
    log(f"compiled in {seconds:.1f} s")
    program = _program(compiled, log)
    needed = device_memory.memory_breakdown(planned, compiled)
    device_memory.check_fits(target, needed, program)
    log("\n".join(["", *device_memory.describe_memory(target, needed, program)]))
    log("\n".join(cost_lines(planned, compiled, program)))
    if path := config.run.compiled_trainstep_file:
        signature = saved_step.save_compiled(path, planned, compiled)
        log(f"\nsaved: {path}, signature {signature[:16]}...")
        log(f"To use it: train.py with the same configuration and compiled_trainstep_file={path}")


def _program(compiled: jax.stages.Compiled, log: Callable[[str], None]) -> HloModule:
    """Returns the compiled program, empty if the compiler cannot print it."""
    try:
        return HloModule(compiled.as_text() or "")
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        log(f"the compiler cannot print this program, so its buffers are not listed: {reason}")
        return HloModule("")


def cost_lines(
    planned: LoweredStep, compiled: jax.stages.Compiled, program: HloModule
) -> list[str]:
    sharding, stage = planned.sharding, planned.plan.stages[-1]
    num_devices = sharding.mesh.size
    tokens = stage.samples * planned.plan.window
    count = count_flops(planned.model, stage.length)
    tflops = count.tflops(tokens / num_devices)
    lines = [
        "",
        f"FLOPs of a step per device, by formula: {tflops:,.4g} TFLOP "
        f"({count.per_token / 1e6:,.3f} MFLOP x {tokens:,} tokens / {num_devices} devices)",
    ]
    peak = datasheet_peak(sharding.mesh.devices.flat[0].device_kind)
    if peak is not None:
        lines.append(
            f"at {peak.tflops:g} TFLOP/s ({peak.source}) a step takes at least "
            f"{tflops / peak.tflops:.4g} s"
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
    lines += ["", "communication in a step (results per device; loops counted in full):"]
    lines += [
        f"{row.num_bytes / _MIB:12,.2f} MiB  {row.kind} x {row.count:,}"
        for row in program.collectives()
    ] or ["        nothing"]
    if program.has_unknown_loops:
        lines.append("             loops of unknown length were counted once")
    return lines
