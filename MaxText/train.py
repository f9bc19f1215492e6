"""Trains a language model: MaxText/train.py CONFIG.yml key=value ...

The whole program, top to bottom: configuration, devices, model, compiled steps, data, starting
point, loop, final outputs.
"""

import functools
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NoReturn

if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from MaxText import program_start

program_start.install(__name__, tune_malloc=True)  # before the slow imports

from MaxText import CallableModule, exit_codes
from MaxText.config import command_line
from MaxText.errors import UserError, storage_error_line, storage_failure
from MaxText.inference import checkpoint_config
from MaxText.runtime import processes, start_up
from MaxText.runtime.preemption import PreemptionHandler
from MaxText.runtime.watchdog import Watchdog

USAGE = """Trains a language model.

  python MaxText/train.py configs/quickstart.yml
  python MaxText/train.py configs/gpt2.yml run_name=first dataset_path=DIR steps=1000

The same command again resumes from the newest checkpoint of the run."""


def main() -> NoReturn:
    """Trains; exits with a code of exit_codes.py."""
    processes.run(_train_from_command_line)


def _train_from_command_line() -> int:
    preemption = PreemptionHandler.install()
    loaded = command_line.parse("train.py", sys.argv[1:], USAGE, checkpoint_config.for_training)
    try:
        return train(loaded.config, preemption)
    except BaseException as error:
        processes.fail(error)  # one process of several ends here
        if isinstance(error, UserError):
            sys.stderr.write(f"error: {error}\n")
            processes.exit_now(error.exit_code)  # a compilation is not waited for
        if isinstance(error, KeyboardInterrupt):
            processes.exit_now(exit_codes.INTERRUPTED)
        if isinstance(error, BrokenPipeError):
            processes.exit_now(exit_codes.BROKEN_PIPE)
        failure = storage_failure(error) if isinstance(error, Exception) else None
        if failure:
            sys.stderr.write(f"{storage_error_line(failure)}\n")
            processes.exit_now(exit_codes.USER_ERROR)
        raise


def train(config, preemption: PreemptionHandler, callbacks=()) -> int:
    """Runs a configuration to its end, from wherever its run folder stands.

    Args:
      preemption: Says whether the machine is about to be preempted.
      callbacks: Get each event of the run as a row of events.jsonl.
    """
    # --- Run folder, before anything slow ---------------------------------------------------------
    details = start_up.choose_platform(config.run.hardware)  # for start.txt; before jax is imported
    from MaxText.checkpointing.manager import CheckpointManager
    from MaxText.config.schema import flatten
    from MaxText.input_pipeline.data_sources import check_sources
    from MaxText.storage.run_folder import create_run_folder, lock_run_folder

    run = config.run
    evaluation = config.evaluation
    guard = config.guard
    if run.log_config:
        print(
            *(f"Config param {name}: {x}" for name, x in sorted(flatten(config).items())), sep="\n"
        )
    run_folder = create_run_folder(f"{run.base_output_directory}/{run.run_name}")
    checkpoints = CheckpointManager(
        run_folder / "checkpoints", config.checkpoint, guard.healthy_after_steps
    )
    if not config.preparation.prepare_source:
        check_sources(config)

    # --- Devices --------------------------------------------------------------------------------
    for line in start_up.initialize_distributed(run.hardware, guard.heartbeat_timeout):
        print(line)

    import jax

    from MaxText.compilation import compilation_cache
    from MaxText.cost.auto_layout import choose_layout_for_devices
    from MaxText.hardware.peak_flops import peak_flops
    from MaxText.parallelism import mesh

    devices = start_up.find_devices(run.hardware)
    if jax.process_index() == 0:
        lock_run_folder(run_folder)
    index = jax.process_index()
    count = jax.process_count()
    watchdog = Watchdog(run_folder, guard.heartbeat_timeout, index, count).start()
    checkpoints.preload()
    print(compilation_cache.enable(run, devices[0].platform))
    peak = peak_flops(cache_folder=compilation_cache.folder_in_use())  # before anything compiles
    layout_lines: list[str] = []
    config = choose_layout_for_devices(config, devices, layout_lines.append)
    start_up.assert_same_config(flatten(config))
    sharding = mesh.make_sharding_plan(config.mesh, devices, config.model.pipeline)
    print(f"System Information: Jax Version: {jax.__version__}, backend: {devices[0].platform}")
    print(f"Num_devices: {len(devices)} ({devices[0].device_kind}), mesh: {sharding.mesh_sizes}")
    print(*layout_lines, sep="\n", end="\n" if layout_lines else "")
    details += layout_lines
    eval_batch_size = mesh.microbatch_size(
        config.batch, sharding, evaluation.eval_per_device_batch_size
    )

    # --- Model and optimizer ----------------------------------------------------------------------
    from MaxText.cost.device_memory import check_memory_lower_bound
    from MaxText.growth.resolve import resolve_growth
    from MaxText.metrics.tables import parameter_table
    from MaxText.training.assembly import setup_train

    # Without growth in the run's history or its keys, the configuration stays as it is.
    growth = resolve_growth(
        config, [*map(checkpoints.stored, reversed(checkpoints.steps_to_resume()))]
    )
    config = growth.config
    config_flat = flatten(growth.config)
    setup = setup_train(config, sharding, growth.existing_slots, growth.existing_slots_lr_scale)
    model = setup.model
    abstract_state = setup.abstract_state
    replicated = f"replicated on every device: {setup.replicated_fraction:.2%} of parameters"
    details += [parameter_table(model.parameters, sharding.describe(model.parameters)), replicated]
    lines = [replicated] if len(devices) > 1 else []
    print(*lines, *setup.auto_choices, *growth.lines, sep="\n")

    # --- Compiled steps, while text is prepared and the state is restored or initialized ----------
    from MaxText.compilation.compiled_steps import ShapeSpecializedStep
    from MaxText.compilation.saved_step import saved_steps
    from MaxText.evaluation.validation import make_eval_step
    from MaxText.input_pipeline.sequences.plan_batches import plan_batches
    from MaxText.layers.batch import batch_shapes

    batch_schedule = plan_batches(config, sharding)
    accumulation_steps = config.batch.gradient_accumulation_steps
    check_memory_lower_bound(setup, batch_schedule, len(devices), accumulation_steps)
    train_step = ShapeSpecializedStep(
        lambda shapes: sharding.compile_step(
            setup.step, abstract_state, shapes, setup.compiler_options
        ),
        saved_steps(growth, model.config, sharding, abstract_state),
    )
    newest = checkpoints.latest_step()
    stage = batch_schedule.at(0 if newest is None else newest + 1)
    first_batch = functools.partial(batch_shapes, batch_schedule.batch_size(stage), stage.length)
    eval_step = sharding.jit(
        make_eval_step(model, count_correct=config.masking.mlm_training),
        compiler_options=setup.compiler_options or None,
    )

    # --- Data -------------------------------------------------------------------------------------
    from MaxText.input_pipeline.data_sources import prepare_sources, prepared_has_documents
    from MaxText.input_pipeline.loader import open_batches
    from MaxText.input_pipeline.sequences.batch_source import BatchShard

    compiler = ThreadPoolExecutor(1)
    compiling = None
    if config.preparation.prepare_source:
        shapes = first_batch(prepared_has_documents(config))
        compiling = compiler.submit(train_step.prepare, sharding.abstract_batch(shapes))
        watchdog.enter("prepare")
        prepare_sources(config)
        watchdog.enter("startup")
    train_batches, eval_batches = open_batches(
        config,
        batch_schedule,
        eval_batch_size,
        BatchShard(*sharding.batch_slice()),
        should_stop=preemption.is_pending,
    )
    if compiling is None:
        shapes = first_batch(train_batches.has_documents)
        compiling = compiler.submit(train_step.prepare, sharding.abstract_batch(shapes))

    # --- Starting point ---------------------------------------------------------------------------
    from MaxText.checkpointing.compatibility import checkpoint_metadata
    from MaxText.run.records import write_run_files
    from MaxText.run.restore import (
        complete_message,
        end_of_record,
        restore_data_position,
        restore_or_initialize,
    )

    restored = restore_or_initialize(
        checkpoints,
        config.checkpoint,
        abstract_state,
        lambda: sharding.init_state(
            setup.initialize, abstract_state, model.config.initialization.init_weights_seed
        ),
        config_flat,
        resolved=growth,
    )
    last_step = restore_data_position(restored, train_batches, run.steps)
    evaluation_is_due = bool(restored.metadata.get("evaluation_is_due"))
    if restored.first_step > last_step and not evaluation_is_due:
        record = end_of_record(run_folder, restored)
        # Process 0 keeps the record. Without its end, this start makes up for what is missing.
        if processes.all_processes_agree(index != 0 or record.is_complete):
            print(complete_message(restored, run.steps, last_step, config.data.num_epoch))
            return exit_codes.DIVERGED if record.has_diverged else exit_codes.SUCCESS
        evaluates = evaluation.eval_interval > 0 and eval_batches is not None
        evaluation_is_due = evaluates and not processes.all_processes_agree(
            index != 0 or record.has_evaluation
        )
    write_run_files(run_folder, config, train_batches.tokenizer_folder)
    metadata = checkpoint_metadata(config_flat, abstract_state.params)

    # --- Records ----------------------------------------------------------------------------------
    from MaxText.run import loop
    from MaxText.run.learning_checks import LearningChecks
    from MaxText.run.records import MetricLogger, open_run_logger
    from MaxText.run.rollback import RollbackController

    run_logger = open_run_logger(
        config,
        run_folder,
        restored,
        setup,
        batch_schedule,
        train_batches,
        devices,
        last_step,
        peak,
        details,
        callbacks,
    )
    checkpoints.log = run_logger.terminal.line
    events = run_logger.events
    rollback = RollbackController(
        guard, checkpoints, events.emit, train_batches, abstract_state, restored
    )
    learning_checks = LearningChecks(
        config, setup, sharding, events.emit, first_step=restored.first_step, last_step=last_step
    )

    def observe(step, metrics):
        learning_checks.observe(step, metrics)
        rollback.observe(step, metrics)

    metric_logger = MetricLogger(run_logger, config, last_step, observe)

    # --- Loop -------------------------------------------------------------------------------------
    training = loop.Loop(
        config,
        sharding,
        batch_schedule,
        eval_batch_size,
        train_batches,
        eval_batches,
        train_step,
        eval_step,
        checkpoints,
        metadata,
        run_logger,
        rollback,
        watchdog,
        preemption,
        metric_logger,
        learning_checks,
        restored.state,
        restored.first_step,
        last_step,
    )
    with ExitStack() as stack:
        # All are called, the last one first, even if one fails. A background save is atomic.
        for resource in (watchdog, train_batches, run_logger):
            stack.callback(resource.close)
        stack.callback(processes.shutdown)
        stack.callback(checkpoints.close)
        end = stack.enter_context(loop.recorded_end(run_logger, metric_logger, watchdog))
        watchdog.enter("compile", training.step)
        with events.timed("compile", step=training.step) as fields:
            fields |= compiling.result()
        reason = training.run(evaluation_is_due)
        if reason == loop.STORAGE_FAILED:
            checkpoints.close()
            end.reason = "error"
        elif reason == loop.PREEMPTED:
            checkpoints.close()
            print(preemption.summary(checkpoints.latest_step(), run.run_name))
            end.reason = reason
            end.exit_code = preemption.exit_code
        else:
            watchdog.enter("shutdown")
            training.write_sample(run_folder, model)
            problem = training.confirm_final_state()
            checkpoints.close()
            training.finish(run_folder, setup, problem)
            end.reason = loop.COMPLETED
    if events.failure and end.exit_code == exit_codes.SUCCESS:
        end.exit_code = exit_codes.USER_ERROR
        end.message = storage_error_line(events.failure)
        saved_step = checkpoints.latest_step()
        if saved_step is not None:
            end.message += f" Saved: step {saved_step}."
    if end.message:
        print(end.message, file=sys.stderr)
    return end.exit_code


# `MaxText.train(config)` is a call: the package's attribute of that name is this module.
sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    main()
