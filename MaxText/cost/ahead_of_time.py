"""Implementation of train_compile.py."""

from collections.abc import Callable

import jax

from MaxText.config.schema import Config
from MaxText.cost import compiled_memory, compiled_report, saved_step, targets
from MaxText.cost.compiling import compile_planned, plan_step
from MaxText.cost.hlo import Program


def compile_ahead(config: Config, target: targets.Target, show: Callable[[str], None]) -> None:
    """Compiles a train step for a machine, prints its cost, and saves it.

    Call targets.prepare_environment first. Raises UserError if the step does not fit the machine or
    cannot be compiled for it here.
    """
    num_slices = max(config.run.compile_topology_num_slices, 1)
    devices = targets.devices(target, num_slices)
    kind = devices[0].device_kind
    slices = f" in {num_slices} slices" if num_slices > 1 else ""
    show(f"target: {target.name}{slices}, {len(devices)} x {kind}; jax {jax.__version__}")
    planned = plan_step(config, devices)
    show("\n".join([f"mesh: {planned.layout.words}", *planned.lines]))
    stages, stage = planned.plan.stages, planned.plan.stages[-1]
    last = f", the last of {len(stages)} stages" if len(stages) > 1 else ""
    show(f"batch: {planned.plan.rows(stage)} x {stage.length} tokens{last}")
    try:
        compiled, seconds = compile_planned(planned)
    except jax.errors.JaxRuntimeError as error:
        if compiled_memory.is_out_of_memory(error):
            raise compiled_memory.out_of_memory(target, planned, error) from error
        raise
    show(f"compiled in {seconds:.1f} s")
    program = _program(compiled, show)
    needed = compiled_memory.memory_by_cause(planned, compiled)
    compiled_memory.check_fits(target, planned, needed, program)
    for line in compiled_report.memory_lines(target, needed, program):
        show(line)
    for line in compiled_report.cost_lines(planned, compiled, program):
        show(line)
    if path := config.run.compiled_trainstep_file:
        signature = saved_step.save(path, planned, compiled)
        show(f"\nsaved: {path}, signature {signature[:16]}...")
        show("train.py takes it with the same configuration and compiled_trainstep_file")


def _program(compiled: jax.stages.Compiled, show: Callable[[str], None]) -> Program:
    """Returns the compiled program, empty if the compiler cannot print it."""
    try:
        return Program(compiled.as_text() or "")
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        show(f"the compiler cannot show this program, so what follows lacks its parts: {reason}")
        return Program("")
