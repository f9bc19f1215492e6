"""LAMBADA (Paperno et al. 2016): prediction of the last word of a passage.

Causal models are scored like task lambada_openai of lm-evaluation-harness.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from MaxText.errors import UserError
from MaxText.evaluation.scorer_inputs import (
    Continuation,
    Progress,
    mask_word_left_to_right,
    strip_cls_prefix,
)
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
    path: str,
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> TaskResult:
    """Returns accuracy on whole last words, and perplexity per word."""
    prefix = tokenizer.prefix_token_id()
    pairs = [encode_pair(tokenizer.encode, *passage, prefix) for passage in passages]
    scores = scorer.score_continuations([Continuation(*pair) for pair in pairs], progress)
    loss = -math.fsum(one.log_probability for one in scores) / len(scores)
    return TaskResult(
        _accuracy([one.is_greedy for one in scores]) | {"perplexity": perplexity(loss)},
        {"passages": len(passages), "tokens": sum(len(ids) for _, ids in pairs)},
    )


def score_masked(
    passages: Sequence[Passage],
    path: str,
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> TaskResult:
    """Returns accuracy and pseudo-perplexity of a masked language model.

    A word is correct if each token is the argmax while all of its tokens are hidden. Its
    log-probability is that of mask_word_left_to_right. Passages are truncated on the left to the
    window. Raises UserError for a last word without tokens or longer than the window.
    """
    tokenizer = strip_cls_prefix(tokenizer, scorer.cls_id)
    texts, lengths = [], []
    for number, passage in enumerate(passages, 1):
        context, ids = encode_pair(tokenizer.encode, *passage, None)
        if not 0 < len(ids) <= scorer.window:
            raise UserError(
                f"{KEY}={path}: the last word of passage {number}, {passage.word[:40]!r}, has "
                f"{len(ids)} tokens; it must have between 1 and {scorer.window} "
                "(max_target_length, less one if CLS begins each sequence)."
            )
        whole = [*context, *ids][-scorer.window :]
        texts += mask_word_left_to_right(whole, len(whole) - len(ids))
        lengths.append(len(ids))
    scores = scorer.score(texts, progress)
    loss = -math.fsum(float(one.log_probabilities_C[0]) for one in scores) / len(passages)
    # The first text of each word hides all of its tokens.
    firsts = itertools.accumulate(lengths[:-1], initial=0)
    right = [bool(scores[first].is_argmax_C.all()) for first in firsts]
    return TaskResult(
        _accuracy(right) | {"pseudo_perplexity": perplexity(loss)},
        {"passages": len(passages), "tokens": len(texts)},
    )


def _accuracy(right: Sequence[bool]) -> dict[str, float]:
    """Returns the accuracy, and its standard error if there are several words."""
    count = len(right)
    accuracy = sum(right) / count
    if count == 1:
        return {"accuracy": accuracy}
    # Standard error of a Bernoulli mean, with n - 1 as in the harness.
    error = math.sqrt(accuracy * (1 - accuracy) / (count - 1))
    return {"accuracy": accuracy, "accuracy_standard_error": error}
