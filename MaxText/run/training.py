"""Trains a language model, top to bottom.

`train` is the whole program after its configuration was read: devices, model, compiled steps, data,
starting point, records, loop, final outputs. It imports each section's modules where it begins,
because the first sections refuse mistakes within a second, and importing all takes several.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from MaxText import exit_codes
from MaxText.errors import storage_error_line
from MaxText.runtime import peers, processes, start_up
from MaxText.runtime.preemption import PreemptionHandler
from MaxText.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from MaxText.config.schema import Config
    from MaxText.run.hooks import Hook, StepInfo
    from MaxText.run.loop import Loop


def train(
    config: "Config",
    *,
    preemption: PreemptionHandler,
    hooks: "Sequence[Hook | Callable[[StepInfo], None]]" = (),
    callbacks: "Sequence[Callable[[Mapping[str, Any]], None]]" = (),
) -> int:
    """Runs a configuration to its end, from wherever its run folder stands.

    Args:
      config: The resolved configuration. `auto` values that depend on devices are resolved here.
      preemption: Says whether the machine is about to be preempted.
      hooks: Called after steps, besides those that `config.run.hooks` names.
      callbacks: Get each event of the run as a row of events.jsonl.

    Returns:
      An exit code of exit_codes.py: success, diverged, preempted, interrupted, or a user error if
      storage failed.

    Raises:
      UserError: The configuration, the data or a checkpoint cannot be used, or a hook failed.
    """
    # --- Run folder, before anything slow ---------------------------------------------------------
    details = start_up.choose_platform(config.run.hardware)  # for start.txt; before jax is imported
    from MaxText.checkpointing.manager import CheckpointManager
    from MaxText.config.schema import flatten
    from MaxText.evaluation.downstream import open_downstream_tasks, read_questions
    from MaxText.input_pipeline.data_sources import check_sources
    from MaxText.monitoring.sinks.tracker import check_packages
    from MaxText.run.hooks import user_hooks
    from MaxText.storage.run_folder import create_run_folder, lock_run_folder

    run = config.run
    guard = config.guard
    evaluation = config.evaluation
    if run.log_config:
        _print_lines(f"Config param {name}: {x}" for name, x in sorted(flatten(config).items()))
    check_packages(config.monitoring)
    questions = read_questions(evaluation.downstream_task_files)
    selected_hooks = user_hooks(run.hooks, hooks)
    run_folder = create_run_folder(f"{run.base_output_directory}/{run.run_name}")
    checkpoints = CheckpointManager(
        run_folder / "checkpoints", config.checkpoint, guard.healthy_after_steps
    )

    # --- Devices ----------------------------------------------------------------------------------
    _print_lines(start_up.initialize_distributed(run.hardware, guard.heartbeat_timeout))
    start_up.assert_same_config(flatten(config))  # before a process waits for another
    if not config.preparation.prepare_source:
        check_sources(config)

    import jax

    from MaxText.compilation import compilation_cache
    from MaxText.cost.auto_layout import choose_layout_for_devices
    from MaxText.hardware.peak_flops import peak_flops
    from MaxText.input_pipeline.sequences.plan_batches import plan_batches, resolve_global_batch
    from MaxText.parallelism import mesh

    devices = start_up.find_devices(run.hardware)
    process_index = jax.process_index()
    if process_index == 0:
        lock_run_folder(run_folder)
    watchdog = Watchdog(
        guard.heartbeat_timeout,
        process_index=process_index,
        process_count=jax.process_count(),
        store=peers.coordinator_client(),
    ).start()
    processes.set_watchdog(watchdog)
    checkpoints.preload()
    print(compilation_cache.enable(run, devices[0].platform))
    peak = peak_flops(cache_folder=compilation_cache.folder_in_use())  # before anything compiles
    layout_lines: list[str] = []
    config = choose_layout_for_devices(config, devices, layout_lines.append)
    sharding = mesh.make_sharding_plan(config.mesh, devices, config.model.pipeline)
    requested_batch = config.batch
    config = resolve_global_batch(config, sharding, layout_lines.append)
    print(f"System Information: Jax Version: {jax.__version__}, backend: {devices[0].platform}")
    print(f"Num_devices: {len(devices)} ({devices[0].device_kind}), mesh: {sharding.mesh_sizes}")
    _print_lines(layout_lines)
    details += layout_lines
    eval_batch_size = mesh.microbatch_size(
        config.batch, sharding, evaluation.eval_per_device_batch_size
    )

    # --- Model and optimizer ----------------------------------------------------------------------
    from MaxText.formatting import parameter_table
    from MaxText.growth.resolve import resolve_growth
    from MaxText.training.assembly import setup_train
    from MaxText.training.multipliers import multiplier_lines

    # Without growth in the run's history or its keys, the configuration stays as it is.
    steps_oldest_first = reversed(checkpoints.steps_to_resume())
    growth = resolve_growth(config, [checkpoints.stored(step) for step in steps_oldest_first])
    config = growth.config
    # What is saved keeps the batch as it was requested: the next start may have other devices.
    saved_config = config.model_copy(update={"batch": requested_batch})
    config_flat = flatten(saved_config)
    setup = setup_train(config, sharding, growth.existing_slots, growth.existing_slots_lr_scale)
    model = setup.model
    abstract_state = setup.abstract_state
    replicated = f"replicated on every device: {setup.replicated_fraction:.2%} of parameters"
    details.append(parameter_table(model.parameters, sharding.describe(model.parameters)))
    details += multiplier_lines(config.optimizer, model.parameters)
    details.append(replicated)
    if len(devices) > 1:
        print(replicated)
    _print_lines(setup.auto_choices)
    _print_lines(growth.lines)

    # --- Compiled steps ---------------------------------------------------------------------------
    from MaxText.compilation.compiled_steps import ShapeSpecializedStep
    from MaxText.compilation.saved_step import saved_steps
    from MaxText.cost.device_memory import check_memory_lower_bound
    from MaxText.evaluation.validation import make_eval_step, with_frozen
    from MaxText.layers.batch import batch_shapes
    from MaxText.training.model_objective import frozen_lines, read_frozen_params

    batch_schedule = plan_batches(config, sharding)
    accumulation_steps = config.batch.gradient_accumulation_steps
    check_memory_lower_bound(setup, batch_schedule, len(devices), accumulation_steps)
    frozen = read_frozen_params(model.config, sharding)
    details += frozen_lines(model.config, sharding)
    train_step = ShapeSpecializedStep(
        lambda shapes: sharding.compile_step(
            setup.step, abstract_state, shapes, setup.compiler_options, setup.abstract_frozen
        ),
        saved_steps(growth, model.config, sharding, abstract_state),
        frozen,
    )
    eval_step = sharding.jit(
        make_eval_step(model, count_correct=config.counts_correct),
        compiler_options=setup.compiler_options or None,
    )

    # --- Data, while the train step compiles ------------------------------------------------------
    from MaxText.input_pipeline.data_sources import prepare_sources, prepared_has_documents
    from MaxText.input_pipeline.loader import open_batches
    from MaxText.input_pipeline.sequences.batch_source import BatchShard

    compiler = ThreadPoolExecutor(1)
    newest_step = checkpoints.latest_step()
    stage = batch_schedule.at(0 if newest_step is None else newest_step + 1)

    def compile_first_step(has_documents: bool) -> "Future[dict[str, Any]]":
        """Compiles for the first batch on a thread, while data are opened and a state restored."""
        shapes = batch_shapes(batch_schedule.batch_size(stage), stage.length, has_documents)
        return compiler.submit(train_step.prepare, sharding.abstract_batch(shapes))

    compiling = None
    watchdog.enter("prepare")  # text is tokenized, records are imported: it may take hours
    if config.preparation.prepare_source:
        compiling = compile_first_step(prepared_has_documents(config))
        prepare_sources(config)
    train_batches, eval_batches = open_batches(
        config,
        batch_schedule,
        eval_batch_size,
        BatchShard(*sharding.batch_slice()),
        should_stop=preemption.is_pending,
    )
    watchdog.enter("startup")
    if compiling is None:
        compiling = compile_first_step(train_batches.has_documents)

    # --- Starting point ---------------------------------------------------------------------------
    from MaxText.checkpointing.compatibility import checkpoint_metadata
    from MaxText.run.records import write_run_files
    from MaxText.run.restore import (
        complete_message,
        end_of_record,
        restore_data_position,
        restore_or_initialize,
        scale_lines,
    )

    restored = restore_or_initialize(
        checkpoints,
        config.checkpoint,
        abstract_state,
        initialize=lambda: sharding.init_state(
            setup.initialize, abstract_state, model.config.initialization.init_weights_seed
        ),
        config_flat=config_flat,
        resolved=growth,
    )
    _print_lines(scale_lines(restored, batch_schedule, jax.process_count()))
    last_step = restore_data_position(restored, train_batches, run.steps)
    evaluation_is_due = bool(restored.progress.get("evaluation_is_due"))
    if restored.first_step > last_step and not evaluation_is_due:
        record = end_of_record(run_folder, restored)
        # Process 0 keeps the record. Without its end, this start makes up for what is missing.
        keeps_record = process_index == 0
        if processes.all_processes_agree(record.is_complete or not keeps_record):
            print(complete_message(restored, run.steps, last_step, config.data.num_epoch))
            return exit_codes.DIVERGED if record.has_diverged else exit_codes.SUCCESS
        evaluates = evaluation.eval_interval > 0 and eval_batches is not None
        evaluation_is_due = evaluates and not processes.all_processes_agree(
            record.has_evaluation or not keeps_record
        )
    write_run_files(run_folder, saved_config, train_batches.tokenizer_folder)
    downstream = open_downstream_tasks(
        questions,
        config=config,
        model=model,
        sharding=sharding,
        tokenizer_folder=train_batches.tokenizer_folder,
    )

    # --- Records ----------------------------------------------------------------------------------
    from MaxText.run.learning_checks import LearningChecks
    from MaxText.run.records import MetricLogger, open_run_logger
    from MaxText.run.rollback import RollbackController
    from MaxText.run.training_stats import TrainingStats

    stats = TrainingStats(
        model=model,
        batch=config.batch,
        batch_schedule=batch_schedule,
        num_devices=len(devices),
        num_steps=last_step + 1,
        peak=peak,
    )
    run_logger = open_run_logger(
        config,
        run_folder,
        restored=restored,
        setup=setup,
        stats=stats,
        batches=train_batches,
        details=details,
        callbacks=callbacks,
    )
    checkpoints.log = run_logger.terminal.line
    rollback = RollbackController(
        config=guard,
        checkpoints=checkpoints,
        emit=run_logger.events.emit,
        batches=train_batches,
        abstract_state=abstract_state,
        restored=restored,
    )
    learning_checks = LearningChecks(
        config,
        setup,
        sharding,
        run_logger.events.emit,
        first_step=restored.first_step,
        last_step=last_step,
    )

    # --- Loop -------------------------------------------------------------------------------------
    from MaxText.run import loop

    supervision = loop.Supervision(
        rollback=rollback,
        learning_checks=learning_checks,
        watchdog=watchdog,
        preemption=preemption,
    )
    training = loop.Loop(
        config=config,
        compiled=loop.CompiledModel(
            model=model,
            sharding=sharding,
            train_step=train_step,
            eval_step=with_frozen(eval_step, frozen),
        ),
        state=restored.state,
        schedule=loop.StepSchedule(
            step=restored.first_step, last_step=last_step, batch_schedule=batch_schedule
        ),
        data=loop.RunData(
            train=train_batches,
            evaluation=eval_batches,
            eval_batch_size=eval_batch_size,
            downstream=downstream,
        ),
        records=loop.Records(
            run_folder=run_folder,
            run_logger=run_logger,
            metric_logger=MetricLogger(run_logger, config, last_step, supervision.observe),
            checkpoints=checkpoints,
            metadata=checkpoint_metadata(config_flat, abstract_state.params),
        ),
        supervision=supervision,
        hooks=selected_hooks,
    )
    return _run_to_the_end(training, compiling, evaluation_is_due=evaluation_is_due)


def _print_lines(lines: "Iterable[str]") -> None:
    for line in lines:
        print(line)


def _run_to_the_end(
    training: "Loop", compiling: "Future[dict[str, Any]]", *, evaluation_is_due: bool
) -> int:
    """Runs a loop, writes its final outputs, and closes everything.

    Args:
      training: The assembled loop.
      compiling: The compilation of its first step; has the fields of the event "compile".
      evaluation_is_due: Whether to make up for an evaluation of an earlier start first.

    Returns:
      The exit code.
    """
    from MaxText.run import loop

    watchdog = training.supervision.watchdog
    preemption = training.supervision.preemption
    checkpoints = training.records.checkpoints
    run_logger = training.records.run_logger
    events = run_logger.events
    with ExitStack() as stack:
        # All are called, the last one first, even if one fails. A background save is atomic.
        stack.callback(watchdog.close)
        stack.callback(training.data.train.close)
        stack.callback(run_logger.close)
        stack.callback(processes.shutdown)
        stack.callback(watchdog.leave)
        stack.callback(checkpoints.wait)
        end = stack.enter_context(loop.recorded_end(run_logger, training.records.metric_logger))
        watchdog.enter("compile", training.schedule.step)
        with events.timed("compile", step=training.schedule.step) as fields:
            fields |= compiling.result()
        reason = training.run(evaluation_is_due)
        if reason == loop.STORAGE_FAILED:
            checkpoints.wait()
            end.reason = "error"
        elif reason == loop.PREEMPTED:
            checkpoints.wait()
            print(preemption.summary(checkpoints.latest_step(), training.config.run.run_name))
            end.reason = reason
            end.exit_code = preemption.exit_code
        else:
            watchdog.enter("shutdown")
            _finish(training)
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


def _finish(training: "Loop") -> None:
    """Judges the final state, and writes what a finished run leaves.

    Raises:
      TrainingDivergedError: If the training loss diverged or the final state is broken.
    """
    from MaxText.run import final_outputs
    from MaxText.training.objective import is_in_nats

    config = training.config
    model = training.compiled.model
    run_folder = training.records.run_folder
    run_logger = training.records.run_logger
    checkpoints = training.records.checkpoints
    train_batches = training.data.train
    final_outputs.write_sample(
        model,
        training.state.params,
        config=config,
        sharding=training.compiled.sharding,
        tokenizer=train_batches.tokenizer_folder,
        run_folder=run_folder,
        run_logger=run_logger,
    )
    problem = training.judge_final_state()  # uses up the state
    checkpoints.wait()
    in_nats = is_in_nats(model)
    final_outputs.log_validation_loss(
        training.eval_loss,
        train_batches.unigram_entropy_nats if in_nats else None,
        run_logger.terminal.line,
    )
    final_outputs.write_loss_curve(config, run_folder, run_logger)
    newest_step = checkpoints.latest_step()
    final_outputs.log_next_commands(
        model,
        config=config,
        run_folder=run_folder,
        checkpoint=None if newest_step is None else checkpoints.directory / str(newest_step),
        has_tokenizer=train_batches.tokenizer_folder is not None,
        log=run_logger.terminal.line,
    )
    final_outputs.raise_if_diverged(problem, run_logger.trend.diverged)
