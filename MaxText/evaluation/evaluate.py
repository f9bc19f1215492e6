"""Main sequence of eval.py: request, data, weights, scores, output file.

User errors are detected before weights are loaded, and all but data errors before jax is imported.
"""

import datetime
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from MaxText.checkpointing.checkpoint_files import CHECKPOINTS
from MaxText.config.loading import LoadedConfig, Source
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.errors import UserError
from MaxText.evaluation.scores import source_table, total_score
from MaxText.evaluation.tasks import find_tasks, read_tasks, run_harness, run_tasks
from MaxText.evaluation.text_bytes import TextBytes
from MaxText.inference.model_tokenizer import ModelTokenizer, open_tokenizer
from MaxText.inference.text_files import check_not_input
from MaxText.inference.trained_model import Log, TrainedModel, load_model, resolve_weights
from MaxText.monitoring.json_lines import to_json_value
from MaxText.storage.atomic import atomic_write_text
from MaxText.storage.file_access import is_url
from MaxText.storage.paths import parse_path

_FOLDER = "eval"  # in the run folder
_DATA_KEYS = (
    "dataset_path",
    "grain_eval_files",
    "data_mixture_weights",
    "dataset_type",
    "eval_split",
)


def parse_request(loaded: LoadedConfig) -> tuple[Config, bool]:
    """Returns the configuration, and whether it asks to score a data set.

    A data set is scored if the user names no task, or a task and a data key.
    """
    config = loaded.config
    origins = loaded.origins
    names_data = any(map(loaded.typed, _DATA_KEYS))
    scores_data = names_data or not (config.scoring.eval_tasks or config.scoring.harness.tasks)
    if origins["eval_steps"].source is Source.SAVED_CONFIG and config.data.dataset_type == "grain":
        # Training limits eval_steps to save time; eval.py reads the whole split.
        config = unflatten(flatten(config) | {"eval_steps": -1})
    return config, scores_data


def evaluate(loaded: LoadedConfig, log: Log = print) -> dict[str, Any]:
    """Scores the requested data; prints and writes the scores: the program eval.py.

    Args:
      loaded: The configuration, of the weights and the command line.
      log: Takes lines for the terminal.

    Returns:
      The scores, as written to the JSON file.

    Raises:
      UserError: Missing weights or data, or input that cannot be scored.
    """
    config, scores_data = parse_request(loaded)
    scoring = config.scoring
    typed = loaded.typed("tokenizer_path")
    asks_tasks = bool(scoring.eval_tasks or scoring.harness.tasks)
    weights = resolve_weights(config)
    _check_output_and_tasks(config, weights.folder)
    tasks = read_tasks(config)
    try:
        tokenizer = open_tokenizer(config, weights.folder, weights.metadata, typed=typed)
    except UserError as error:
        if typed or asks_tasks:
            raise
        tokenizer = error  # prepared data do without
    score_data = _open_data_set(config, tokenizer, log) if scores_data else None
    trained = load_model(config, log, weights)
    result = _describe(trained)
    if score_data is not None:
        result["data"] = score_data(trained)
    if isinstance(tokenizer, ModelTokenizer):
        result["tokenizer_sha256"] = tokenizer.tokenizer.entry.sha256
        if scoring.eval_tasks:
            scores = run_tasks(tasks, trained, tokenizer, config, log)
            result["tasks"] = [score._asdict() for score in scores]
        if scoring.harness.tasks:
            result["harness"] = run_harness(trained, tokenizer, config, log)
    result["finished"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    import jax  # already imported

    output = output_path(scoring.eval_output, weights.folder)
    if output is not None and jax.process_index() == 0:
        write_scores(output, result, log)
    return result


def _check_output_and_tasks(config: Config, weights_folder: str) -> None:
    """Raises UserError if scores cannot be written, or a harness task does not exist."""
    scoring = config.scoring
    output_path(scoring.eval_output, weights_folder)
    for name, path in scoring.task_files:
        check_not_input("eval_output", scoring.eval_output, f"task_files.{name}", path)
    if scoring.harness.tasks:
        find_tasks(scoring.harness.tasks, scoring.harness.task_path)


def _describe(trained: TrainedModel) -> dict[str, Any]:
    """Returns the first fields of the JSON file: the weights and the devices."""
    devices = trained.sharding.mesh.devices.flat
    return {
        "weights": trained.source,
        "folder": trained.folder,
        "num_parameters": trained.model.num_parameters,
        "dtype": trained.model.config.numerics.dtype,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "finished": "",  # set at the end
        "tokenizer_sha256": "",  # set if there is a tokenizer
    }


def _open_data_set(
    config: Config, tokenizer: ModelTokenizer | UserError, log: Log
) -> Callable[[TrainedModel], dict[str, Any]]:
    """Opens the data to score, before the weights are loaded.

    Text is encoded with the tokenizer of the weights, unless tokenizer_path is set.

    Args:
      config: The data and how they are read.
      tokenizer: Of the weights, or the error of opening it, raised only if it is needed.
      log: Takes lines for the terminal.

    Returns:
      A function that scores the data and returns fields for the JSON file.
    """
    from MaxText.input_pipeline.loader import open_eval_sources

    model_tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ModelTokenizer) else tokenizer
    preparation = config.preparation
    if isinstance(tokenizer, ModelTokenizer) and not preparation.tokenizer_path:
        adds_bos = preparation.add_bos or bool(tokenizer.prefix)
        keys = {"tokenizer_path": str(tokenizer.folder), "add_bos": adds_bos}
        config = unflatten(flatten(config) | keys)
    text_bytes = TextBytes(config.masking.mlm_training, model_tokenizer)
    opened = open_eval_sources(config, log)  # none for random tokens
    for source in opened:
        warning = text_bytes.mismatch(source)
        if warning:
            log(warning)

    def score(trained: TrainedModel) -> dict[str, Any]:
        from MaxText.evaluation.data_set import score_data_set

        data = config.data
        scores = score_data_set(trained, opened, text_bytes, config, log)
        length = config.model.shape.max_target_length
        stride = config.scoring.eval_stride
        limit = config.evaluation.eval_steps
        windows = "no overlap" if stride == -1 else f"every {stride} targets"
        if data.cross_document_attention:
            windows += ", across documents"
        log(source_table(scores))
        log(f"windows of {length} tokens, {windows}")
        if limit != -1:
            log(f"a part only: {limit} batches of each source at most (eval_steps)")
        return {
            "split": data.eval_split,
            "max_target_length": length,
            "eval_stride": stride,
            "cross_document_attention": data.cross_document_attention,
            "eval_steps": limit,
            "sources": [source_score.to_json() for source_score in scores],
            "total": total_score(scores).to_json(),
        }

    return score


def output_path(eval_output: str, weights_folder: str) -> epath.Path | None:
    """Returns the requested file, or eval/<step>.json in the weights' run.

    Existing scores are kept: the next file is eval/<step>-2.json.

    Args:
      eval_output: The configuration key; empty for the default.
      weights_folder: Checkpoint step folder, or Hugging Face checkpoint.

    Returns:
      The path; None if the weights belong to no run, or to a read-only one.

    Raises:
      UserError: The requested file is not writable.
    """
    if eval_output:
        path = parse_path(eval_output, "eval_output")
        if not _is_writable(path):
            raise UserError(
                f"eval_output={eval_output} cannot be written: it is a folder, or its folder is a "
                "file or not writable. Name a file in a folder of yours."
            )
        return path
    step = parse_path(weights_folder, "load_parameters_path")
    if step.parent.name != CHECKPOINTS:
        return None
    folder = step.parent.parent / _FOLDER
    path = folder / f"{step.name}.json"
    for number in itertools.count(2):
        if not path.exists():
            break
        path = folder / f"{step.name}-{number}.json"
    return path if _is_writable(path) else None


def _is_writable(path: epath.Path) -> bool:
    """Returns whether a file can be written; creates nothing."""
    if is_url(str(path)):
        return True
    local = Path(os.fspath(path)).absolute()
    folder = next(folder for folder in local.parents if folder.exists())
    return not local.is_dir() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def write_scores(path: epath.Path, scores: Mapping[str, Any], log: Log) -> None:
    """Writes scores as JSON, atomically; non-finite numbers become null.

    Raises UserError if the file cannot be written.
    """
    text = json.dumps(to_json_value(scores), indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
    except OSError as error:
        raise UserError(
            f"eval_output={path} cannot be written ({error.strerror or error}). The scores above "
            "are complete; name another file to keep them."
        ) from error
    log(f"written to {path}")
