"""Tasks of eval_tasks, read from files. Imports jax only to run them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from MaxText.config.schema import Config
from MaxText.evaluation import lambada, wikitext
from MaxText.evaluation.scorer_inputs import Progress
from MaxText.evaluation.scores import TaskResult, TaskScore, task_table
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.inference.trained_model import Log, TrainedModel

_SECONDS_PER_LINE = 30.0  # between progress lines


# Name -> reader of a path, and scorer of (items, scorer, tokenizer, progress).
TASKS: dict[str, tuple[Callable[[str], Sequence[Any]], Callable[..., TaskResult]]] = {
    "lambada": (lambada.read_passages, lambada.score),
    "wikitext": (wikitext.read_pages, wikitext.score),
}


def read_tasks(config: Config) -> dict[str, Sequence[Any]]:
    """Returns the items of each task; UserError for missing or bad files."""
    scoring = config.scoring
    return {name: TASKS[name][0](getattr(scoring.task_files, name)) for name in scoring.eval_tasks}


def run_tasks(
    items: Mapping[str, Sequence[Any]],
    trained: TrainedModel,
    tokenizer: ModelTokenizer,
    config: Config,
    log: Log = print,
) -> list[TaskScore]:
    """Scores the items of read_tasks and prints a table.

    Raises UserError for a text that exceeds the window.
    """
    from MaxText.evaluation.scorers import Scorer

    scorer = Scorer(trained)
    scores = []
    for name, task_items in items.items():
        path = getattr(config.scoring.task_files, name)
        began = time.perf_counter()
        result = TASKS[name][1](task_items, scorer, tokenizer, log_progress(name, log))
        scores.append(TaskScore(name, path, *result, time.perf_counter() - began))
    log(task_table(scores))
    return scores


def log_progress(name: str, log: Log) -> Progress:
    """Returns a callback for progress every half minute."""
    began = last = time.perf_counter()

    def progress(done: int, whole: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= _SECONDS_PER_LINE and done < whole:
            last = now
            log(f"{name}: {done:,} of {whole:,} scored in {now - began:.0f} s")

    return progress
