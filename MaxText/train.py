"""Trains a language model: python MaxText/train.py CONFIG.yml key=value ...

The whole program, top to bottom: configuration, text, devices, model, data, compiled steps,
starting point, loop, what is left in the run folder.
"""

import dataclasses
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from MaxText.configuration import command_line
from MaxText.errors import UserError
from MaxText.parallelism import start_up

USAGE = """Trains a language model.

  python MaxText/train.py configs/quickstart.yml
  python MaxText/train.py configs/gpt2.yml run_name=first dataset_path=DIR steps=1000

The same command again resumes from the newest checkpoint of the run."""


def main() -> int:
    """Exit codes: 0 done, 1 the loss diverged, 2 a mistake of the user, 130 Ctrl-C."""
    launched = start_up.restart_with_allocator_setting()
    loaded = command_line.parse("train.py", sys.argv[1:], USAGE)
    for line in start_up.choose_platform(loaded.config.run.hardware):
        print(line)
    try:
        return train(loaded.config, launched)
    except UserError as error:
        command_line.fail(error)
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it stood", file=sys.stderr)
        return 130


def train(config, launched: float) -> int:
    """Runs a configuration to its end, from wherever its run folder stands.

    Args:
      launched: Unix seconds at which the program was started.
    """
    # --- Output folder and text: what may be refused, before anything slow ----------------------
    from MaxText.checkpointing.manager import Checkpoints, prepare_run_folder
    from MaxText.configuration.saved import flat

    run, evaluation, monitoring = config.run, config.evaluation, config.monitoring
    if run.log_config:
        for name, value in sorted(flat(config).items()):
            print(f"Config param {name}: {value}")
    run_folder = prepare_run_folder(f"{run.base_output_directory}/{run.run_name}")
    checkpoints = Checkpoints(run_folder / "checkpoints", config.checkpoint)
    if config.data.dataset_type == "grain" and config.preparation.prepare_source:
        from MaxText.input_pipeline.preparation.preparing import prepare

        prepare(config.preparation, config.data.dataset_path)

    # --- Devices --------------------------------------------------------------------------------
    import jax

    from MaxText.parallelism import mesh

    start_up.use_compilation_cache(run.jax_cache_dir)
    checkpoints.preload()
    devices = start_up.find_devices(run.hardware)
    layout = mesh.make_layout(config.mesh, devices)
    print(f"System Information: Jax Version: {jax.__version__}, backend: {devices[0].platform}")
    print(f"Num_devices: {len(devices)} ({devices[0].device_kind}), mesh {dict(layout.mesh.shape)}")
    eval_rows = mesh.rows_of_batch(config.batch, layout, evaluation.eval_per_device_batch_size)

    # --- Model and optimizer ----------------------------------------------------------------------
    from MaxText.checkpointing.growth.old_slots import slow_old_slots
    from MaxText.checkpointing.growth.settling import settle
    from MaxText.layers.model import Model
    from MaxText.monitoring.tables import parameter_table
    from MaxText.training import backend_defaults
    from MaxText.training import step as steps
    from MaxText.training.optimizer import make_optimizer
    from MaxText.training.schedule import learning_rate_schedule

    settled = settle(config, [checkpoints.stored(step) for step in checkpoints.steps()])
    config, config_flat = settled.config, flat(settled.config)
    model_section, choices = backend_defaults.resolve(config.model, devices[0].platform)
    model = Model(model_section)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = slow_old_slots(
        make_optimizer(config.optimizer, schedule, model.parameters),
        model.parameters,
        settled.old_slots,
        settled.old_slots_learning_rate,
    )
    initialize = steps.make_initialize(model, optimizer)
    abstract_state = layout.abstract_state(initialize, model.parameters)
    whole = mesh.check_sharding(model.parameters, layout, config.mesh.sharding_tolerance)
    print(parameter_table(model.parameters, layout.describe(model.parameters)))
    print(f"parameters that lie whole on every device: {whole:.2%}")
    print("\n".join([*choices, *settled.lines]))

    # --- Data -------------------------------------------------------------------------------------
    from MaxText.input_pipeline.batch import batch_shapes
    from MaxText.input_pipeline.loader import eval_loader, train_loader
    from MaxText.input_pipeline.rows.batch_plan import plan_batches

    length = model_section.shape.max_target_length
    plan = plan_batches(
        config.batch, length, lambda size: mesh.rows_of_update(config.batch, layout, size)
    )
    reading = {
        "masking": config.masking,
        "preparation": config.preparation,
        "vocab_size": model_section.shape.vocab_size,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    train_batches = train_loader(config.data, plan=plan, num_steps=run.steps, **reading)
    eval_batches = None
    if evaluation.eval_interval > 0:
        eval_batches = eval_loader(
            config.data,
            eval_steps=evaluation.eval_steps,
            max_target_length=length,
            global_batch_size=eval_rows,
            **reading,
        )
    if train_batches.description:
        print(train_batches.description)

    # --- Compiled steps, while the state is restored or drawn -------------------------------------
    from MaxText.parallelism.compiled_steps import CompiledSteps

    step_function = steps.make_train_step(
        model,
        optimizer,
        schedule,
        num_microbatches=config.batch.gradient_accumulation_steps,
        dropout_seed=model_section.initialization.init_weights_seed,
    )
    train_step = CompiledSteps(
        lambda shapes: layout.compile_step(step_function, abstract_state, shapes)
    )
    newest = checkpoints.latest_step()
    stage = plan.at(0 if newest is None else newest + 1)
    first_shapes = batch_shapes(plan.rows(stage), stage.length, train_batches.has_documents)
    compiling = start_up.in_background(
        lambda: train_step.prepare(layout.abstract_batch(first_shapes))
    )
    eval_step = layout.jit(steps.make_eval_step(model, count_correct=config.masking.mlm_training))

    # --- Starting point ---------------------------------------------------------------------------
    from MaxText.checkpointing.matching import checkpoint_metadata
    from MaxText.checkpointing.run_files import write_run_files
    from MaxText.checkpointing.starting_data import begin_data, complete
    from MaxText.checkpointing.starting_point import restore_or_initialize

    start = restore_or_initialize(
        checkpoints,
        config.checkpoint,
        abstract_state,
        lambda: layout.draw_state(
            initialize, abstract_state, model_section.initialization.init_weights_seed
        ),
        config_flat,
        settled=settled,
    )
    state = start.state
    last_step = begin_data(start, train_batches, run.steps)
    if start.first_step > last_step:
        print(complete(start, run.steps, last_step, config.data.num_epoch))
        return 0
    write_run_files(run_folder, config, train_batches.tokenizer_folder)
    metadata = checkpoint_metadata(config_flat, abstract_state.params)

    # --- Records ----------------------------------------------------------------------------------
    from MaxText.monitoring.cost import model_cost
    from MaxText.monitoring.event_stream import open_stream
    from MaxText.monitoring.lineage import Lineage
    from MaxText.monitoring.peak_flops import peak_flops
    from MaxText.monitoring.profiler import StepProfiler
    from MaxText.monitoring.quantities import Quantities
    from MaxText.monitoring.run_facts import emit_start, start_facts
    from MaxText.monitoring.sinks.tensorboard import TENSORBOARD_FOLDER
    from MaxText.monitoring.sinks.terminal import Terminal
    from MaxText.monitoring.step_log import Diverged, StepLog
    from MaxText.training.evaluation import evaluate

    peak = peak_flops(devices[0])
    quantities = Quantities(model, config.batch, plan, len(devices), last_step + 1, peak)
    lineage = Lineage.of(start, quantities)
    opt_state = abstract_state.opt_state
    cost = model_cost(model, sequence_length=length, optimizer_state=opt_state)
    entropy = train_batches.unigram_entropy if model_section.objective.is_in_nats else None
    print(f"{quantities.describe()}\n{cost.describe()}")
    if monitoring.enable_tensorboard:
        print(f"To see full metrics 'tensorboard --logdir={run_folder / TENSORBOARD_FOLDER}'")
    terminal = Terminal(last_step + 1)
    first_step = start.first_step
    events = open_stream(
        run_folder, monitoring, run.run_name, config_flat, first_step=first_step, terminal=terminal
    )
    facts = start_facts(run.run_name, quantities, cost, lineage, train_batches)
    emit_start(events, start, facts, launched)
    profiler = StepProfiler(monitoring, run_folder / TENSORBOARD_FOLDER, first_step)
    log = StepLog(
        events,
        config.guard,
        period=monitoring.step_log_period,
        last_step=last_step,
        quantities=quantities,
        lineage=lineage,
    )

    def save(step: int) -> None:
        # No row of a step may be missing beside its checkpoint.
        log.complete()
        with log.paused():
            events.flush()
            kept = metadata | lineage.metadata(step)
            with events.timed("checkpoint", step=step):
                checkpoints.save(step, state, train_batches.position, kept)

    def run_evaluation(batches, step: int) -> float:
        with log.paused(), events.timed("evaluation", step=step) as facts:
            placed = (layout.place(batch, eval_rows) for batch in batches)
            report = evaluate(eval_step, state.params, placed, step=step)
            facts.update(report=report, **report.row(), **lineage.progress(step))
        return report.loss

    # --- Loop -------------------------------------------------------------------------------------
    eval_loss, reason = None, "error"
    try:
        with events.timed("compile", step=first_step) as facts:
            facts |= dataclasses.asdict(compiling.result())
        log.start(first_step)
        for step in range(first_step, last_step + 1):
            with log.waiting_for_data():
                batch = layout.place(next(train_batches), plan.rows(plan.at(step)))
            for message in train_batches.bad_records.drain():
                events.emit("skip", step=step, what="record", reason=message, count=1)
            if not train_step.fits(batch):
                with log.paused(), events.timed("compile", step=step) as facts:
                    facts |= dataclasses.asdict(train_step.prepare(batch))
            with profiler.step(step):
                state, metrics = train_step(state, batch)
            log.add(step, metrics)
            profiler.finished(step, metrics)
            if checkpoints.should_save(step, last_step):
                save(step)

            if eval_batches is not None and (
                (step + 1) % evaluation.eval_interval == 0 or step == last_step
            ):
                eval_loss = run_evaluation(eval_batches, step)
                if eval_loss < evaluation.target_eval_loss:
                    terminal.line(f"target_eval_loss={evaluation.target_eval_loss:g} is reached")
                    if config.checkpoint.enable_checkpointing:
                        save(step)
                    break
        log.complete()
        checkpoints.close()

        # --- What the run leaves ------------------------------------------------------------------
        if eval_loss is not None and entropy is not None:
            terminal.line(f"Validation loss {eval_loss:.3f}, unigram entropy {entropy:.3f} nats")
        tokenizer = train_batches.tokenizer_folder
        if config.decoding.sample_tokens and tokenizer is not None:
            from MaxText.generation.sampling import write_sample

            text = write_sample(model, state.params, layout, config, tokenizer, run_folder)
            # Its time is part of the finish, which the last row tells.
            events.emit("sample", step=step, text=text)
            terminal.line(f"Sample, also in {run_folder / 'sample.txt'}:\n{text}")
        if monitoring.loss_curve:
            from MaxText.monitoring.loss_curve import draw_loss_curve

            events.flush()
            terminal.line(f"Loss curve: {draw_loss_curve(run_folder)}")
        reason = "completed"
    except Diverged as error:
        reason = "diverged"
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        reason = "interrupted"
        raise
    finally:
        finish = log.idle_seconds if reason == "completed" else 0.0
        events.emit("stop", step=log.newest_step, seconds=finish, reason=reason)
        events.close()
        profiler.close()
        train_batches.close()
        # Whatever ended the run: a save in the background is whole or nothing.
        checkpoints.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
