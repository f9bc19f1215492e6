"""Tasks of eval_tasks, scored as by lm-evaluation-harness, and its own.

LAMBADA (Paperno et al. 2016, lambada_openai) predicts the last word of a passage. WikiText (Merity
et al. 2016, wikitext) is perplexity per word and byte, by page: the model reads detokenized text,
but words and bytes are counted in the original file. Imports jax and lm_eval only to run them.
"""

import difflib
import functools
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from MaxText.config.schema import Config
from MaxText.errors import UserError, first_line
from MaxText.evaluation.scores import (
    Continuation,
    Progress,
    TaskScore,
    log_progress,
    rolling_windows,
    task_table,
)
from MaxText.inference.model_tokenizer import ModelTokenizer, encode_pair
from MaxText.inference.text_files import is_json_lines, read_lines, read_text_file
from MaxText.inference.trained_model import Log, TrainedModel
from MaxText.metrics.step_line import perplexity

if TYPE_CHECKING:
    from MaxText.evaluation.scorers import Scorer

# For standard errors of metrics without a formula. The harness's default takes minutes.
_BOOTSTRAP_SAMPLES = 1000

Numbers = tuple[dict[str, float], dict[str, int]]  # metrics and counts of a TaskScore


class Passage(NamedTuple):
    """Text before the last space, and the last word including it."""

    context: str
    word: str


def read_passages(path: str) -> list[Passage]:
    """Reads passages: .jsonl with the field "text", else one passage per line."""
    passages = []
    for number, passage, _ in read_lines(path, "task_files.lambada", "text"):
        context, space, word = passage.rstrip().rpartition(" ")
        if not context.strip():
            raise UserError(
                f"task_files.lambada={path}:{number} has fewer than two words "
                f"({passage.strip()[:40]!r}). A passage is some text and the last word, which is "
                "predicted."
            )
        passages.append(Passage(context, space + word))
    return passages


def score_lambada(
    passages: Sequence[Passage],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> Numbers:
    """Returns accuracy on whole last words, and perplexity per word."""
    prefix = tokenizer.prefix_token_id()
    pairs = [encode_pair(tokenizer.encode, *passage, prefix) for passage in passages]
    scores = scorer.score_continuations([Continuation(*pair) for pair in pairs], progress)
    count = len(scores)
    loss = -math.fsum(one.log_probability for one in scores) / count
    accuracy = sum(one.is_greedy for one in scores) / count
    metrics = {"accuracy": accuracy, "perplexity": perplexity(loss)}
    if count > 1:
        # Standard error of a Bernoulli mean, with n - 1 as in the harness.
        error = math.sqrt(accuracy * (1 - accuracy) / (count - 1))
        metrics = {"accuracy": accuracy, "accuracy_standard_error": error} | metrics
    return metrics, {"passages": count, "tokens": sum(len(ids) for _, ids in pairs)}


# A line such as " = Robert Boulter = "; sections below have two or more marks: " = = Career = = ".
_TITLE = re.compile(r"\s*= (?!=).*(?<!=) =\s*")

# Detokenization rules of WikiText, applied in order.
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
    """Reads pages of .jsonl (field "page"), or of wiki.test.raw or .tokens."""
    key = "task_files.wikitext"
    if is_json_lines(path):
        rows = read_lines(path, key, "page")
        for number, page, _ in rows:
            if not page.strip():
                raise UserError(f'{key}={path}:{number} has an empty "page".')
        return [page for _, page, _ in rows]
    pages = split_pages(read_text_file(path, key))
    if not pages:
        raise UserError(f"{key}={path} is empty.")
    return pages


def split_pages(text: str) -> list[str]:
    """Splits a file at page titles; drops only blank pages."""
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
    return len(re.split(r"\s+", page))


def score_wikitext(
    pages: Sequence[str],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> Numbers:
    """Returns perplexity per word and byte, and bits per byte, by page."""
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
    counts = {"pages": len(pages), "words": num_words, "bytes": num_bytes}
    return metrics, counts | {"tokens": sum(map(len, ids))}


# Name -> reader of a path, and scorer of its items.
TASKS: dict[str, tuple[Callable[[str], Sequence[Any]], Callable[..., Numbers]]] = {
    "lambada": (read_passages, score_lambada),
    "wikitext": (read_pages, score_wikitext),
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
        numbers = TASKS[name][1](task_items, scorer, tokenizer, log_progress(name, log))
        scores.append(TaskScore(name, path, *numbers, time.perf_counter() - began))
    log(task_table(scores))
    return scores


def run_harness(
    trained: TrainedModel, tokenizer: ModelTokenizer, config: Config, log: Log = print
) -> dict[str, Any]:
    """Runs harness.tasks and prints their table.

    Returns results, configurations, versions and sample counts by task, as JSON values. Raises
    UserError as find_tasks does, or if a task cannot be read.
    """
    harness = config.scoring.harness
    names, manager = find_tasks(harness.tasks, harness.task_path)
    # Bootstrapping would fork, which is unsafe with jax's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        handle_non_serializable,
        make_table,
    )

    from MaxText.evaluation.harness import MaxTextLM

    lm = MaxTextLM(trained, tokenizer, log)
    try:
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=names,
            num_fewshot=None if harness.num_fewshot == -1 else harness.num_fewshot,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=_BOOTSTRAP_SAMPLES,
        )
    except UserError:
        raise
    except Exception as error:
        # Before its first request, a task runs its own code, which may raise anything.
        if lm.was_asked:
            raise
        raise UserError(
            f"harness.tasks={','.join(names)} cannot be read: {type(error).__name__}: "
            f"{first_line(error)[:300]}\n  What to do: fix the task file, or download its data "
            "first if this machine has no network (datasets keeps it in HF_DATASETS_CACHE)."
        ) from error
    log(make_table(found))
    if found.get("groups"):
        log(make_table(found, "groups"))
    kept = ("results", "groups", "configs", "versions", "n-shot", "n-samples")
    plain = {name: found[name] for name in kept if name in found}
    plain["harness_version"] = lm_eval.__version__
    return json.loads(json.dumps(plain, default=handle_non_serializable))


# Cached because listing the harness's tasks takes seconds and is needed twice.
@functools.lru_cache(maxsize=1)
def find_tasks(names: tuple[str, ...], path: str) -> tuple[list[str], Any]:
    """Resolves task names and patterns; returns the TaskManager as well."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "harness.tasks needs lm-evaluation-harness, which is not installed: "
            "pip install '.[lm-eval]'."
        )
    folder = str(Path(path).expanduser()) if path else ""
    if folder and not Path(folder).is_dir():
        raise UserError(
            f"harness.task_path={path} is not a folder (seen from {Path.cwd()}). Set it to the "
            "folder of the task's YAML file."
        )
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=folder or None)
    for name in names:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise UserError(
                f"harness.tasks={name}: no such task, group or tag among the harness's own"
                f"{f' and in {folder}' if folder else ''}. Nearest: {', '.join(close) or 'none'}. "
                "Set harness.task_path=FOLDER to use your own task files."
            )
    return manager.match_tasks(list(names)), manager
