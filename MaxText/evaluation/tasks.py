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


class TaskNumbers(NamedTuple):
    """Metrics and counts of a TaskScore."""

    metrics: dict[str, float]
    counts: dict[str, int]


class Passage(NamedTuple):
    """Text before the last space, and the last word including it."""

    context: str
    word: str


def read_passages(path: str) -> list[Passage]:
    """Reads passages: .jsonl with the field "text", else one passage per line.

    Raises UserError for an unreadable file, or a passage of fewer than two words.
    """
    passages = []
    for line in read_lines(path, "task_files.lambada", "text"):
        context, space, word = line.text.rstrip().rpartition(" ")
        if not context.strip():
            raise UserError(
                f"task_files.lambada={path}:{line.number} has fewer than two words "
                f"({line.text.strip()[:40]!r}). A passage is some text and the last word, which is "
                "predicted."
            )
        passages.append(Passage(context, space + word))
    return passages


def score_lambada(
    passages: Sequence[Passage],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> TaskNumbers:
    """Returns accuracy on whole last words, and perplexity per word.

    A word is right if every one of its tokens is the argmax.
    """
    prefix_id = tokenizer.prefix_token_id()
    continuations = []
    for passage in passages:
        context_ids, word_ids = encode_pair(
            tokenizer.encode, passage.context, passage.word, prefix_id
        )
        continuations.append(Continuation(context_ids, word_ids))
    scores = scorer.score_continuations(continuations, progress)
    count = len(scores)
    loss = -math.fsum(score.log_probability for score in scores) / count
    accuracy = sum(score.is_greedy for score in scores) / count
    metrics = {"accuracy": accuracy, "perplexity": perplexity(loss)}
    if count > 1:
        # Standard error of a Bernoulli mean, with n - 1 as in the harness.
        error = math.sqrt(accuracy * (1 - accuracy) / (count - 1))
        metrics = {"accuracy": accuracy, "accuracy_standard_error": error} | metrics
    num_tokens = sum(len(continuation.ids) for continuation in continuations)
    return TaskNumbers(metrics, {"passages": count, "tokens": num_tokens})


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
    """Reads pages of .jsonl (field "page"), or of wiki.test.raw or .tokens.

    Raises UserError for an unreadable file, an empty one, or an empty page of .jsonl.
    """
    key = "task_files.wikitext"
    if is_json_lines(path):
        lines = read_lines(path, key, "page")
        for line in lines:
            if not line.text.strip():
                raise UserError(f'{key}={path}:{line.number} has an empty "page".')
        return [line.text for line in lines]
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
    """Counts runs of white space plus one, as the harness: leading and trailing runs count, too."""
    return len(re.split(r"\s+", page))


def score_wikitext(
    pages: Sequence[str],
    scorer: "Scorer",
    tokenizer: ModelTokenizer,
    progress: Progress | None = None,
) -> TaskNumbers:
    """Returns perplexity per word and byte, and bits per byte, by page.

    The loss is that of the detokenized text; words and bytes are those of the file.
    """
    prefix_id = tokenizer.prefix_token_id()
    windows = []
    num_tokens = 0
    for page in pages:
        ids = tokenizer.encode(detokenized(page))
        windows += rolling_windows(ids, prefix_id, scorer.window)
        num_tokens += len(ids)
    scores = scorer.score_continuations(windows, progress)
    loss = -math.fsum(score.log_probability for score in scores)
    num_words = sum(map(count_words, pages))
    num_bytes = sum(len(page.encode()) for page in pages)
    metrics = {
        "word_perplexity": perplexity(loss / num_words),
        "byte_perplexity": perplexity(loss / num_bytes),
        "bits_per_byte": loss / num_bytes / math.log(2),
    }
    counts = {"pages": len(pages), "words": num_words, "bytes": num_bytes, "tokens": num_tokens}
    return TaskNumbers(metrics, counts)


class Task(NamedTuple):
    """Functions of a built-in task, of which items are its passages or pages."""

    read: Callable[[str], Sequence[Any]]  # of the path of its file
    score: Callable[..., TaskNumbers]  # of the items, as score_lambada


TASKS = {
    "lambada": Task(read_passages, score_lambada),
    "wikitext": Task(read_pages, score_wikitext),
}


def read_tasks(config: Config) -> dict[str, Sequence[Any]]:
    """Returns the items of each task; UserError for missing or bad files."""
    scoring = config.scoring
    return {
        name: TASKS[name].read(getattr(scoring.task_files, name)) for name in scoring.eval_tasks
    }


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
        start_time = time.perf_counter()
        numbers = TASKS[name].score(task_items, scorer, tokenizer, log_progress(name, log))
        scores.append(
            TaskScore(
                task=name,
                path=getattr(config.scoring.task_files, name),
                metrics=numbers.metrics,
                counts=numbers.counts,
                seconds=time.perf_counter() - start_time,
            )
        )
    log(task_table(scores))
    return scores


def run_harness(
    trained: TrainedModel, tokenizer: ModelTokenizer, config: Config, log: Log = print
) -> dict[str, Any]:
    """Runs harness.tasks with lm-evaluation-harness and prints its tables.

    Args:
      trained: The model and its weights.
      tokenizer: Of the weights.
      config: Names the tasks, and the number of examples in a prompt (num_fewshot).
      log: Takes lines for the terminal.

    Returns:
      Results, configurations, versions and sample counts by task, as JSON values.

    Raises:
      UserError: A task does not exist or cannot be read, or the harness is not installed.
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
        results = lm_eval.simple_evaluate(
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
    log(make_table(results))
    if results.get("groups"):
        log(make_table(results, "groups"))
    fields = ("results", "groups", "configs", "versions", "n-shot", "n-samples")
    record = {name: results[name] for name in fields if name in results}
    record["harness_version"] = lm_eval.__version__
    return json.loads(json.dumps(record, default=handle_non_serializable))


# Cached because listing the harness's tasks takes seconds and is needed twice.
@functools.lru_cache(maxsize=1)
def find_tasks(names: tuple[str, ...], path: str) -> tuple[list[str], Any]:
    """Resolves task names and patterns of the harness.

    Args:
      names: Tasks, groups, tags or patterns.
      path: Folder of the user's own task files; empty for none.

    Returns:
      The names of the tasks, and the harness's TaskManager.

    Raises:
      UserError: A name matches nothing, the folder does not exist, or there is no harness.
    """
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
            nearest = difflib.get_close_matches(name, manager.all_tasks, n=3)
            searched = "among the harness's own"
            if folder:
                searched += f" and in {folder}"
            raise UserError(
                f"harness.tasks={name}: no such task, group or tag {searched}. Nearest: "
                f"{', '.join(nearest) or 'none'}. Set harness.task_path=FOLDER to use your own "
                "task files."
            )
    return manager.match_tasks(list(names)), manager
