"""Runs lm-evaluation-harness for eval.py; imports it and jax lazily."""

import difflib
import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.inference.trained_model import Log, TrainedModel

# For standard errors of metrics without a formula. The harness's default takes minutes.
_BOOTSTRAP_SAMPLES = 1000


def run_harness(
    trained: TrainedModel, tokenizer: ModelTokenizer, config: Config, log: Log = print
) -> dict[str, Any]:
    """Runs harness.tasks and prints their table.

    Returns results, configurations, versions and sample counts by task, as JSON values. Raises
    UserError as find_tasks does, or if a task cannot be read.
    """
    scoring = config.scoring
    names, manager = find_tasks(scoring.harness.tasks, scoring.harness.task_path)
    # Bootstrapping would fork, which is unsafe with jax's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        handle_non_serializable,
        make_table,
    )

    from MaxText.evaluation.harness import MaxTextLM

    lm = MaxTextLM(trained, tokenizer, log)
    fewshot = scoring.harness.num_fewshot
    try:
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=names,
            num_fewshot=None if fewshot == -1 else fewshot,
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
        reason = str(error).strip().splitlines() or [""]
        raise UserError(
            f"harness.tasks={','.join(names)} cannot be read: {type(error).__name__}: "
            f"{reason[0][:300]}\n  What to do: fix the task file, or download its data first if "
            "this machine has no network (datasets keeps it in HF_DATASETS_CACHE)."
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
    """Resolves task names and patterns; returns the TaskManager as well.

    Raises UserError for a missing harness or task folder, or an unknown task.
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
    found: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            near = f" Nearest: {', '.join(close)}." if close else ""
            raise UserError(
                f"harness.tasks={name}: no such task, group or tag among the harness's own"
                f"{f' and in {folder}' if folder else ''}.{near} Set harness.task_path=FOLDER to "
                "use your own task files."
            )
        found += [task for task in matching if task not in found]
    return found, manager
