"""Downstream tasks during training: multiple-choice questions of local files.

A file is JSON Lines with the fields query (text), choices (texts), and gold (index of the right
choice, from 0), as the cloze form of OLMES (Gu et al. 2024, arXiv 2406.08446): a choice is scored
as the continuation of the query. Nothing is downloaded. Imports jax only to score.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.evaluation.scores import Continuation
from MaxText.inference.model_tokenizer import ModelTokenizer, encode_pair, load_model_tokenizer
from MaxText.inference.text_files import read_lines
from MaxText.inference.trained_model import TrainedModel

if TYPE_CHECKING:
    from MaxText.evaluation.scorers import Scorer
    from MaxText.layers.assembly.model import Model
    from MaxText.layers.params import Params
    from MaxText.parallelism.mesh import ShardingPlan

_KEY = "downstream_task_files"
_EXAMPLE = json.dumps({"query": "The sky is", "choices": ["blue", "made of tin"], "gold": 0})


class Question(NamedTuple):
    """A multiple-choice question."""

    query: str
    choices: tuple[str, ...]
    gold: int  # index of the right choice


class DownstreamScore(NamedTuple):
    """Metrics of a task, means over its questions.

    Attributes:
      accuracy: Share of questions whose right choice has the highest log-probability.
      accuracy_per_byte: The same with log-probabilities divided by the bytes of the choices.
      bits_per_byte: -log2 of the probability of the right choice per byte of its UTF-8 text, which
        falls smoothly long before the accuracy rises.
      num_questions: Number of questions.
    """

    accuracy: float
    accuracy_per_byte: float
    bits_per_byte: float
    num_questions: int


def read_questions(paths: Sequence[str]) -> dict[str, list[Question]]:
    """Returns the questions of each file, by the name of the file without its ending.

    Raises:
      UserError: A file is unreadable, two have one name, or a line is no question.
    """
    tasks: dict[str, list[Question]] = {}
    for path in paths:
        name = re.sub(r"[^\w.-]", "_", Path(path).stem)
        if name in tasks:
            raise UserError(
                f"{_KEY} has two files of the name {name}, which is that of their metrics "
                f"(eval/tasks/{name}/accuracy). Rename {path}."
            )
        if not path.lower().endswith((".jsonl", ".json")):
            raise UserError(f"{_KEY}={path} is not JSON Lines (.jsonl). A line: {_EXAMPLE}")
        tasks[name] = [
            _question(line.text, line.fields, f"{_KEY}={path}:{line.number}")
            for line in read_lines(path, _KEY, "query")
        ]
    return tasks


def _question(query: str, fields: Mapping[str, object], location: str) -> Question:
    """Returns the question of a JSON object; `location` is for messages."""
    choices = fields.get("choices")
    gold = fields.get("gold")
    is_valid = (
        isinstance(choices, list)
        and len(choices) > 1
        and all(isinstance(choice, str) and choice.strip() for choice in choices)
        and isinstance(gold, int)
        and not isinstance(gold, bool)
        and 0 <= gold < len(choices)
    )
    if not is_valid or not isinstance(choices, list) or not isinstance(gold, int):
        raise UserError(
            f'{location} needs two or more texts in "choices" and the index of the right one, from '
            f'0, in "gold". A line: {_EXAMPLE}'
        )
    return Question(query, tuple(choices), gold)


def score_questions(
    questions: Sequence[Question],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    params: "Params | None" = None,
    on_batch: Callable[[], None] = lambda: None,
) -> DownstreamScore:
    """Returns the metrics of a task.

    A space separates query and choice unless there is white space already. It belongs to what is
    scored, but not to the bytes.

    Args:
      questions: Of the task.
      scorer: Of the model.
      tokenizer: Of the model.
      params: Weights in place of those of the scorer's model.
      on_batch: Called after each batch.

    Raises:
      UserError: A choice has more tokens than the model can read.
    """
    prefix_id = tokenizer.prefix_token_id()
    continuations = []
    for question in questions:
        for choice in question.choices:
            has_space = not question.query or question.query[-1].isspace() or choice[0].isspace()
            text = choice if has_space else f" {choice}"
            pair = encode_pair(tokenizer.encode, question.query, text, prefix_id)
            continuations.append(Continuation(*pair))
    scores = iter(
        scorer.score_continuations(continuations, lambda done, total: on_batch(), params=params)
    )
    num_right = 0
    num_right_per_byte = 0
    bits_per_byte = []
    for question in questions:
        log_p = [next(scores).log_probability for _ in question.choices]
        num_bytes = [len(choice.strip().encode()) for choice in question.choices]
        per_byte = [x / size for x, size in zip(log_p, num_bytes, strict=True)]
        num_right += log_p.index(max(log_p)) == question.gold
        num_right_per_byte += per_byte.index(max(per_byte)) == question.gold
        bits_per_byte.append(-per_byte[question.gold] / math.log(2))
    count = len(questions)
    return DownstreamScore(
        accuracy=num_right / count,
        accuracy_per_byte=num_right_per_byte / count,
        bits_per_byte=math.fsum(bits_per_byte) / count,
        num_questions=count,
    )


class DownstreamTasks:
    """The downstream tasks of a run, scored at its evaluations.

    Every process scores all questions together with the others.
    """

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Question]],
        scorer: "Scorer",
        tokenizer: ModelTokenizer,
    ):
        self._tasks = tasks
        self._scorer = scorer
        self._tokenizer = tokenizer

    def score(
        self, params: "Params", log: Callable[[str], None], on_batch: Callable[[], None]
    ) -> dict[str, float]:
        """Scores all tasks, and logs a line for each.

        Args:
          params: The weights to evaluate.
          log: Gets the lines.
          on_batch: Called after each batch.

        Returns:
          Metrics by tag: eval/tasks/<task>/accuracy, .../accuracy_per_byte, .../bits_per_byte.
        """
        row = {}
        for name, questions in self._tasks.items():
            score = score_questions(questions, self._scorer, self._tokenizer, params, on_batch)
            log(
                f"  {name}: accuracy={score.accuracy:.4f}, per byte {score.accuracy_per_byte:.4f}, "
                f"bits_per_byte={score.bits_per_byte:.4f}, questions={score.num_questions}"
            )
            metrics = score._asdict()
            del metrics["num_questions"]
            row |= {f"eval/tasks/{name}/{metric}": value for metric, value in metrics.items()}
        return row


def open_downstream_tasks(
    tasks: Mapping[str, Sequence[Question]],
    *,
    config: Config,
    model: "Model",
    sharding: "ShardingPlan",
    tokenizer_folder: Path | None,
) -> DownstreamTasks | None:
    """Returns the downstream tasks of a run; None without any.

    Args:
      tasks: From `read_questions`.
      config: Of the run.
      model: With `auto` values resolved.
      sharding: Of the run.
      tokenizer_folder: Folder or file of the tokenizer of the data; None if they have none.

    Raises:
      UserError: There is no tokenizer, or it does not fit the model.
    """
    if not tasks:
        return None
    if tokenizer_folder is None:
        raise UserError(
            f"{_KEY} needs a tokenizer, and the data set has none. Train on data with a tokenizer "
            f"(prepare_data.py keeps it with them), or set {_KEY}=[]."
        )
    from MaxText.evaluation.scorers import Scorer

    trained = TrainedModel(
        config=config, model=model, sharding=sharding, params={}, source="", folder="", metadata={}
    )
    tokenizer = load_model_tokenizer(str(tokenizer_folder), config)
    return DownstreamTasks(tasks, Scorer(trained), tokenizer)
