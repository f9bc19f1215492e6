"""WikiText (Merity et al. 2016): perplexity per word and byte, by page.

Follows task wikitext of lm-evaluation-harness: the model reads detokenized text, but words and
bytes are counted in the original file.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from MaxText.errors import UserError
from MaxText.evaluation.scorer_inputs import Progress, rolling_windows
from MaxText.evaluation.scores import TaskResult
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.inference.text_files import is_json_lines, read_lines, read_text_file
from MaxText.metrics.step_line import perplexity

if TYPE_CHECKING:
    from MaxText.evaluation.scorers import Scorer

KEY = "task_files.wikitext"

# A line such as " = Robert Boulter = "; sections below have two or more marks: " = = Career = = ".
_TITLE = re.compile(r"\s*= (?!=).*(?<!=) =\s*")
_WHITE_SPACE = re.compile(r"\s+")

# Detokenization rules, applied in order.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("s '"), "s'"),  # plural possessives
    # Marks inside numbers and compounds: 1 @,@ 000, 1 @.@ 5, well @-@ known.
    *((re.compile(f" @{re.escape(mark)}@ "), mark) for mark in "-,."),
    *((re.compile(f" {re.escape(mark)} "), f"{mark} ") for mark in ":;.!?,"),
    # White space inside brackets and quotation marks.
    *(
        (re.compile(rf"{re.escape(a)}\s*([^{re.escape(b)}]*?)\s*{re.escape(b)}"), rf"{a}\1{b}")
        for a, b in ("()", "[]", "{}", '""', "''")
    ),
    *((re.compile(" ".join("=" * n)), "=" * n) for n in (4, 3, 2)),  # marks of headings
    (re.compile(" \N{DEGREE SIGN} "), "\N{DEGREE SIGN}"),
    (re.compile(" \n"), "\n"),
    (re.compile("\n "), "\n"),
    (re.compile(" N "), " 1 "),
    (re.compile(" 's"), "'s"),
)


def read_pages(path: str) -> list[str]:
    """Reads pages of a .jsonl file, wiki.test.raw or wiki.test.tokens.

    JSON lines have the field "page". Raises UserError for a missing file, an empty page (with its
    line), or no pages.
    """
    if is_json_lines(path):
        rows = read_lines(path, KEY, "page")
        for number, page, _ in rows:
            if not page.strip():
                raise UserError(f'{KEY}={path}:{number} has an empty "page".')
        return [page for _, page, _ in rows]
    pages = split_pages(read_text_file(path, KEY))
    if not pages:
        raise UserError(f"{KEY}={path} is empty.")
    return pages


def split_pages(text: str) -> list[str]:
    """Splits a file at page titles; drops blank pages.

    Pages keep all of their white space, which counts among their bytes.
    """
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _TITLE.fullmatch(line):
            pages.append([])
        pages[-1].append(line)
    joined = ("\n".join(lines) for lines in pages)
    return [page for page in joined if page.strip()]


def detokenized(page: str) -> str:
    """Undoes WikiText's tokenization, such as spaces before commas."""
    for pattern, replacement in _RULES:
        page = pattern.sub(replacement, page)
    return page


def count_words(page: str) -> int:
    """Counts white space runs plus one, including leading and trailing ones."""
    return len(_WHITE_SPACE.findall(page)) + 1


def score(
    pages: Sequence[str],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> TaskResult:
    """Returns perplexity per word and byte, and bits per byte.

    Each page is read alone, in disjoint windows.
    """
    prefix = tokenizer.prefix_token_id()
    ids = [tokenizer.encode(detokenized(page)) for page in pages]
    windows = [window for page in ids for window in rolling_windows(page, prefix, scorer.window)]
    scores = scorer.score_continuations(windows, progress)
    loss = -math.fsum(one.log_probability for one in scores)
    num_words = sum(map(count_words, pages))
    num_bytes = sum(len(page.encode()) for page in pages)
    metrics = {
        "word_perplexity": perplexity(loss / num_words),
        "byte_perplexity": perplexity(loss / num_bytes),
        "bits_per_byte": loss / num_bytes / math.log(2),
    }
    counts = {
        "pages": len(pages),
        "words": num_words,
        "bytes": num_bytes,
        "tokens": sum(map(len, ids)),
    }
    return TaskResult(metrics, counts)
