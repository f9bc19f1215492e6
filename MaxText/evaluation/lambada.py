"""LAMBADA (Paperno et al. 2016): prediction of the last word of a passage.

Scored like task lambada_openai of lm-evaluation-harness.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from MaxText.errors import UserError
from MaxText.evaluation.scorer_inputs import Continuation, Progress
from MaxText.evaluation.scores import TaskResult
from MaxText.inference.model_tokenizer import ModelTokenizer, encode_pair
from MaxText.inference.text_files import read_lines
from MaxText.metrics.step_line import perplexity

if TYPE_CHECKING:
    from MaxText.evaluation.scorers import Scorer

KEY = "task_files.lambada"


class Passage(NamedTuple):
    """Text before the last space, and the last word including it."""

    context: str
    word: str


def read_passages(path: str) -> list[Passage]:
    """Reads passages: .jsonl with the field "text", else one passage per line.

    Raises UserError if the file is missing, or names the line with fewer than two words.
    """
    passages = []
    for number, passage, _ in read_lines(path, KEY, "text"):
        context, space, word = passage.rstrip().rpartition(" ")
        if not context.strip():
            raise UserError(
                f"{KEY}={path}:{number} has fewer than two words ({passage.strip()[:40]!r}). A "
                "passage is some text and the last word, which is predicted."
            )
        passages.append(Passage(context, space + word))
    return passages


def score(
    passages: Sequence[Passage],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> TaskResult:
    """Returns accuracy on whole last words, and perplexity per word."""
    prefix = tokenizer.prefix_token_id()
    pairs = [encode_pair(tokenizer.encode, *passage, prefix) for passage in passages]
    scores = scorer.score_continuations([Continuation(*pair) for pair in pairs], progress)
    loss = -math.fsum(one.log_probability for one in scores) / len(scores)
    count = len(scores)
    accuracy = sum(one.is_greedy for one in scores) / count
    metrics = {"accuracy": accuracy, "perplexity": perplexity(loss)}
    if count > 1:
        # Standard error of a Bernoulli mean, with n - 1 as in the harness.
        error = math.sqrt(accuracy * (1 - accuracy) / (count - 1))
        metrics = {"accuracy": accuracy, "accuracy_standard_error": error} | metrics
    return TaskResult(metrics, {"passages": count, "tokens": sum(len(ids) for _, ids in pairs)})
