"""LAMBADA: the last word of a passage, predicted from all before it.

Paperno et al., 2016. As task lambada_openai of lm-evaluation-harness scores it. Imports no jax.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.monitoring.step_line import perplexity
from MaxText.scoring.task_score import TaskScore
from MaxText.scoring.text_files import holds_json, json_fields, read_text_file
from MaxText.scoring.text_pairs import encode_pair, first_id

if TYPE_CHECKING:
    from MaxText.scoring.continuations import ContinuationScorer, Progress

KEY = "lambada_path"


class Passage(NamedTuple):
    """A passage: all before its last space, and the last word with that space."""

    context: str
    word: str


def read(path: str) -> list[Passage]:
    """Passages of a file: .jsonl with the field "text", else plain text, one passage a line.

    Raises:
      UserError: no such file, or a passage that has no two words; names the line.
    """
    text = read_text_file(path, KEY)
    place = f"{KEY}={path}"
    if holds_json(path):
        lines = json_fields(text, "text", place)
    else:
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    passages = []
    for number, passage in lines:
        context, space, word = passage.rstrip().rpartition(" ")
        if not context.strip():
            raise UserError(
                f"{place}:{number} has fewer than two words ({passage.strip()[:40]!r}): a passage "
                "is some text and the last word, which is predicted."
            )
        passages.append(Passage(context, space + word))
    if not passages:
        raise UserError(f"{place} holds no passage.")
    return passages


def score(
    passages: Sequence[Passage],
    path: str,
    scorer: "ContinuationScorer",
    tokenizer: ModelTokenizer,
    progress: "Progress | None" = None,
) -> TaskScore:
    """Share of last words predicted whole, and exp of their mean negative log-probability."""
    from MaxText.scoring.continuations import Continuation

    began = time.perf_counter()
    first = first_id(tokenizer)
    pairs = [encode_pair(tokenizer.encode, *passage, first) for passage in passages]
    scores = scorer.score([Continuation(*pair) for pair in pairs], progress)
    count = len(scores)
    accuracy = sum(one.is_greedy for one in scores) / count
    loss = -math.fsum(one.log_probability for one in scores) / count
    metrics = {"accuracy": accuracy}
    if count > 1:
        # Of a mean of zeros and ones, with n - 1 as the harness has it.
        metrics["accuracy_standard_error"] = math.sqrt(accuracy * (1 - accuracy) / (count - 1))
    metrics["perplexity"] = perplexity(loss)
    counts = {"passages": count, "tokens": sum(len(ids) for _, ids in pairs)}
    return TaskScore("lambada", path, metrics, counts, time.perf_counter() - began)
