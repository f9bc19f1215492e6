"""Compiles a train step ahead of time and reports its cost."""

import os
from collections.abc import Callable, Mapping

import jax

from MaxText.compilation import targets
from MaxText.compilation.compiled_steps import memory_stats
from MaxText.compilation.hlo import HloModule
from MaxText.compilation.lowering import LoweredStep, compile_lowered, lower_train_step
from MaxText.compilation.saved_step import save_compiled
from MaxText.config.schema import Config
from MaxText.cost.auto_layout import choose_layout_for_devices
from MaxText.cost.device_memory import GPU_FRACTION, bytes_on_device
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.formatting import format_table, share
from MaxText.hardware.peak_flops import datasheet_peak

_GIB = 2**30
_MIB = 2**20
_LARGE_ARRAYS = 8  # number shown


def train_compile(
    config: Config, target: targets.CompileTarget, log: Callable[[str], None]
) -> None:
    """Compiles a train step for a machine, reports its cost, and saves it.

    Call targets.prepare_environment first.

    Args:
        config: of the run; compiled_trainstep_file names the file to save, "" saves none.
        target: machine to compile for.
        log: gets the report.

    Raises:
        UserError: the step does not fit the machine or cannot be compiled for it here.
    """
    devices = targets.devices(target)
    kind = devices[0].device_kind
    slices = f" in {target.num_slices} slices" if target.num_slices > 1 else ""
    log(f"target: {target.name}{slices}, {len(devices)} x {kind}; jax {jax.__version__}")
    config = choose_layout_for_devices(config, devices, log)
    planned = lower_train_step(config, devices)
    log("\n".join([f"mesh: {planned.sharding.mesh_sizes}", *planned.lines]))
    stages = planned.plan.stages
    stage = planned.plan.stages[-1]
    last = f", the last of {len(stages)} stages" if len(stages) > 1 else ""
    log(f"batch: {planned.plan.batch_size(stage)} x {stage.length} tokens{last}")
    try:
        compiled, seconds = compile_lowered(planned)
    except jax.errors.JaxRuntimeError as error:
        _, is_exhausted, reason = str(error).partition("RESOURCE_EXHAUSTED: ")
        if not is_exhausted:
            raise
        raise out_of_memory(target, reason) from error
    log(f"compiled in {seconds:.1f} s")
    program = _program(compiled, log)
    needed = memory_breakdown(planned, compiled)
    check_fits(target, needed, program)
    log("\n".join(["", *describe_memory(target, needed, program)]))
    log("\n".join(cost_lines(planned, compiled, program)))
    if path := config.run.compiled_trainstep_file:
        signature = save_compiled(path, planned, compiled)
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


def memory_breakdown(planned: LoweredStep, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns bytes on one device by cause, as the compiler placed them."""
    parameters = bytes_on_device(planned.state.params)
    num_bytes = {
        "parameters": parameters,
        "optimizer state and counters": bytes_on_device(planned.state) - parameters,
        "batch": bytes_on_device(planned.batch),
    }
    if stats := memory_stats(compiled):
        analysis = compiled.memory_analysis()
        num_bytes |= {
            "padding of these": max(stats["arguments"] - sum(num_bytes.values()), 0),
            "outputs besides the state": max(stats["outputs"] - stats["aliased"], 0),
            "temporaries: gradients, activations": stats["temporaries"],
            "program": 0 if analysis is None else analysis.generated_code_size_in_bytes,
        }
    return num_bytes


def usable_bytes(target: targets.CompileTarget) -> int:
    """Returns the usable bytes of a device; 0 if unknown."""
    if target.platform != "gpu":
        return target.memory
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or GPU_FRACTION
    return int(target.memory * float(fraction))


def check_fits(
    target: targets.CompileTarget, memory: Mapping[str, int], program: HloModule
) -> None:
    """Raises UserError if a compiled step exceeds the target's memory."""
    limit = usable_bytes(target)
    if limit and sum(memory.values()) > limit and target.platform != "tpu":  # their compiler checks
        needed = f"{sum(memory.values()) / _GIB:.2f} GiB of {limit / _GIB:.2f} GiB "
        needed += f"({limit / target.memory:.0%} of the device)"
        raise out_of_memory(target, "\n".join([needed, *describe_memory(target, memory, program)]))


def out_of_memory(target: targets.CompileTarget, reason: str) -> UserError:
    """Returns an error with advice; `reason` may end in the largest arrays."""
    name = target.name if target.num_slices == 1 else f"{target.num_slices}x{target.name}"
    return UserError(
        f"{name} has too little memory: {reason}\n"
        "What to do, cheapest first:\n"
        "    remat_policy=full scan_layers=true num_vocab_tiling=8: fewer activations at once\n"
        "    half of per_device_batch_size, twice of gradient_accumulation_steps: the same batch\n"
        "    ici_fsdp_parallelism=-1 shard_optimizer_over_data=true mu_dtype=bfloat16: less state\n"
        f"    python MaxText/plan.py ... hardware={name} --fit: keys that fit"
    )


def describe_memory(
    target: targets.CompileTarget, memory: Mapping[str, int], program: HloModule
) -> list[str]:
    """Returns lines with the memory of a device by cause, and its largest arrays."""
    total = sum(memory.values())
    rows = [
        [cause, f"{size / _MIB:,.2f}", share(size, total)] for cause, size in memory.items() if size
    ]
    header = ["memory per device", "MiB", "share"]
    lines = [
        format_table(header, rows, ["peak", f"{total / _MIB:,.2f}", ""]),
        # Of the same shapes and dtypes as the parameters.
        f"all gradients, part of the temporaries: {memory['parameters'] / _MIB:,.2f} MiB",
        "",
        "largest arrays (per device, not all live at once), MiB:",
    ]
    for row in program.largest_arrays(_LARGE_ARRAYS):
        times = f"  x {row.count}" if row.count > 1 else ""
        lines.append(f"{row.num_bytes / _MIB:12,.2f}  {row.shape}  {row.made_by}{times}")
    if limit := usable_bytes(target):
        free = (limit - total) / _GIB
        lines.append(f"\nusable memory: {limit / _GIB:,.1f} GiB, free: {free:,.1f} GiB")
    return lines


def cost_lines(
    planned: LoweredStep, compiled: jax.stages.Compiled, program: HloModule
) -> list[str]:
    """Returns lines with the FLOPs and communication of a step, by formula and by the compiler."""
    sharding = planned.sharding
    stage = planned.plan.stages[-1]
    num_devices = sharding.mesh.size
    tokens = stage.num_sequences * planned.plan.sequence_length
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
