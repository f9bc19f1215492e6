"""LAMBADA (Paperno et al. 2016): prediction of the last word of a passage.

Causal models are scored like task lambada_openai of lm-evaluation-harness.
"""

import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from MaxText.errors import UserError
from MaxText.evaluation.masked_text import hide_word, without_cls
from MaxText.evaluation.task_score import TaskScore
from MaxText.evaluation.text_files import holds_json, json_fields, read_text_file
from MaxText.evaluation.text_pairs import encode_pair, first_id
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.metrics.step_line import perplexity

if TYPE_CHECKING:
    from MaxText.evaluation.continuations import ContinuationScorer
    from MaxText.evaluation.masked_scorer import MaskedScorer
    from MaxText.evaluation.place_reader import Progress

KEY = "lambada_path"


class Passage(NamedTuple):
    """Text before the last space, and the last word including that space."""

    context: str
    word: str


def read(path: str) -> list[Passage]:
    """Reads passages: .jsonl with the field "text", else one passage per line.

    Raises UserError if the file is missing, or names the line with fewer than two words.
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
    """Returns accuracy on whole last words, and perplexity per word."""
    from MaxText.evaluation.continuations import Continuation

    began = time.perf_counter()
    first = first_id(tokenizer)
    pairs = [encode_pair(tokenizer.encode, *passage, first) for passage in passages]
    scores = scorer.score([Continuation(*pair) for pair in pairs], progress)
    loss = -math.fsum(one.log_probability for one in scores) / len(scores)
    return TaskScore(
        "lambada",
        path,
        _accuracy([one.is_greedy for one in scores]) | {"perplexity": perplexity(loss)},
        {"passages": len(passages), "tokens": sum(len(ids) for _, ids in pairs)},
        time.perf_counter() - began,
    )


def score_masked(
    passages: Sequence[Passage],
    path: str,
    scorer: "MaskedScorer",
    tokenizer: ModelTokenizer,
    progress: "Progress | None" = None,
) -> TaskScore:
    """Returns accuracy and pseudo-perplexity of a masked language model.

    A word is correct if each token is the argmax while all of its tokens are hidden. Its
    log-probability is that of hide_word. Passages are truncated on the left to the window. Raises
    UserError for a last word without tokens or longer than the window.
    """
    began = time.perf_counter()
    tokenizer = without_cls(tokenizer, scorer.ids.cls)
    texts, lengths = [], []
    for number, passage in enumerate(passages, 1):
        context, ids = encode_pair(tokenizer.encode, *passage, None)
        if not 0 < len(ids) <= scorer.window:
            raise UserError(
                f"{KEY}={path}: the last word of passage {number}, {passage.word[:40]!r}, has "
                f"{len(ids)} tokens, and between 1 and {scorer.window} can be hidden at once "
                "(max_target_length, less one where CLS begins a row)."
            )
        whole = [*context, *ids][-scorer.window :]
        texts += hide_word(whole, len(whole) - len(ids))
        lengths.append(len(ids))
    scores = scorer.score(texts, progress)
    loss = -math.fsum(float(one.log_probabilities_C[0]) for one in scores) / len(passages)
    # The first text of each word hides all of its tokens.
    firsts = itertools.accumulate(lengths[:-1], initial=0)
    right = [bool(scores[first].likeliest_C.all()) for first in firsts]
    return TaskScore(
        "lambada",
        path,
        _accuracy(right) | {"pseudo_perplexity": perplexity(loss)},
        {"passages": len(passages), "tokens": len(texts)},
        time.perf_counter() - began,
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
