"""The batches of a run, as its configuration asks for them."""

from collections.abc import Callable

from MaxText.configuration.schema import Config
from MaxText.input_pipeline.iterator import BatchIterator, EvalBatches
from MaxText.input_pipeline.loader import eval_loader, train_loader
from MaxText.input_pipeline.prefetch import never
from MaxText.input_pipeline.sequences.batch_schedule import BatchPlan


def open_batches(
    config: Config,
    plan: BatchPlan,
    eval_rows: int,
    part: int,
    parts: int,
    stopping: Callable[[], bool] = never,
    show: Callable[[str], None] = print,
) -> tuple[BatchIterator, EvalBatches | None]:
    """This process's batches for training, and for evaluation if the run has any.

    Args:
      plan: of the training batches.
      eval_rows: sequences of an evaluation's batch, over all processes.
      part, parts: which part of each batch this process reads.
      stopping: whether nobody shall wait for data any more; see BatchIterator.stop_waiting.
      show: takes lines about the data.

    Raises:
      UserError: as train_loader and eval_loader.
    """
    reading = {
        "masking": config.masking,
        "preparation": config.preparation,
        "vocab_size": config.model.shape.vocab_size,
        "process_index": part,
        "process_count": parts,
        "show": show,
    }
    evaluation = config.evaluation
    training = train_loader(config.data, plan=plan, num_steps=config.run.steps, **reading)
    training.stop_waiting(stopping)
    if training.description:
        show(training.description)
    if evaluation.eval_interval <= 0:
        return training, None
    evaluating = eval_loader(
        config.data,
        eval_steps=evaluation.eval_steps,
        max_target_length=config.model.shape.max_target_length,
        global_batch_size=eval_rows,
        **reading,
    )
    evaluating.stop_waiting(stopping)
    return training, evaluating
