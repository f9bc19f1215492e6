"""The tasks that eval_tasks names, over files of their own. Imports no jax until they run."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from MaxText.config.schema import Config
from MaxText.evaluation import lambada, wikitext
from MaxText.evaluation.masked_text import mask_ids
from MaxText.evaluation.task_score import TaskScore, table
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.inference.trained_model import Show, TrainedModel

if TYPE_CHECKING:
    from MaxText.evaluation.place_reader import Progress

# Between lines about a task that takes long.
_SECONDS_PER_LINE = 30.0


class Task(NamedTuple):
    """How a task is read from its file and scored.

    Attributes:
      key: the configuration key with the path of its file.
      read: path -> items.
      score: of a causal model: (items, path, scorer, tokenizer, progress) -> outcome.
      score_masked: the same of a masked language model, with a MaskedScorer.
    """

    key: str
    read: Callable[[str], Sequence[Any]]
    score: Callable[..., TaskScore]
    score_masked: Callable[..., TaskScore]


TASKS = {
    "lambada": Task(lambada.KEY, lambada.read, lambada.score, lambada.score_masked),
    "wikitext": Task(wikitext.KEY, wikitext.read, wikitext.score, wikitext.score_masked),
}


def read_tasks(config: Config) -> dict[str, Sequence[Any]]:
    """Task -> its passages or pages. Before the model is opened, this finds what is wrong.

    Raises:
      UserError: a file that is not named, not there, or not what the task needs.
    """
    section = config.scoring
    return {
        name: TASKS[name].read(getattr(section, TASKS[name].key)) for name in section.eval_tasks
    }


def run_tasks(
    items: Mapping[str, Sequence[Any]],
    trained: TrainedModel,
    tokenizer: ModelTokenizer,
    config: Config,
    show: Show = print,
) -> list[TaskScore]:
    """Scores all tasks of eval_tasks and shows their table.

    Args:
      items: what read_tasks gave.

    Raises:
      UserError: a text that the model has no room for, or a masked model without a mask.
    """
    from MaxText.evaluation.continuations import ContinuationScorer
    from MaxText.evaluation.masked_scorer import MaskedScorer

    masked = config.masking.mlm_training
    if masked:
        scorer = MaskedScorer(trained, mask_ids(config, tokenizer))
    else:
        scorer = ContinuationScorer(trained)
    scores = []
    for name, of_task in items.items():
        task = TASKS[name]
        path = getattr(config.scoring, task.key)
        score = task.score_masked if masked else task.score
        scores.append(score(of_task, path, scorer, tokenizer, progress_lines(name, show)))
    show(table(scores))
    return scores


def progress_lines(name: str, show: Show) -> "Progress":
    """Shows how far a task is, every half minute."""
    began = last = time.perf_counter()

    def progress(done: int, whole: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= _SECONDS_PER_LINE and done < whole:
            last = now
            show(f"{name}: {done:,} of {whole:,} scored in {now - began:.0f} s")

    return progress
