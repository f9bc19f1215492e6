"""Values that follow from other keys: every -1, and every empty name, that another key decides."""

import datetime
import os
import secrets
from pathlib import Path

from MaxText.config import sources
from MaxText.config.merging import MergedSettings
from MaxText.config.sources import Source


def derive(merged: MergedSettings, config_path: Path | None) -> None:
    """Fills in the keys that follow from others.

    Args:
      merged: Values and origins, which are changed.
      config_path: The config file that was named, or None.
    """
    _derive_steps(merged)
    if merged.typed["mlm_training"] and merged.origins["causal"].source == Source.DEFAULT:
        merged.set_derived("causal", False, "from mlm_training")
    _derive_eval_interval(merged)
    _derive_data(merged)
    _derive_expert_capacity(merged)
    _derive_run_name(merged, config_path)
    _derive_run_folder(merged)


def _derive_steps(merged: MergedSettings) -> None:
    """Replaces -1 of the run's length or the schedule's by the other."""
    steps = merged.typed["steps"]
    schedule_steps = merged.typed["learning_rate_schedule_steps"]
    if schedule_steps == -1:
        merged.set_derived("learning_rate_schedule_steps", steps, "from steps")
    elif steps == -1:
        merged.set_derived("steps", schedule_steps, "from learning_rate_schedule_steps")


def _derive_eval_interval(merged: MergedSettings) -> None:
    """Switches evaluation off where there is nothing to evaluate on."""
    typed = merged.typed
    if typed["eval_interval"] == 0:
        merged.set_derived("eval_interval", -1, "0 is never, too")
    source = merged.origins["eval_interval"].source
    is_asked_for = source in (Source.COMMAND_LINE, Source.ARGUMENT)
    reads_records = typed["dataset_type"] == "grain" and typed["grain_train_files"]
    has_eval_data = typed["grain_eval_files"] or typed["dataset_path"]
    if typed["eval_interval"] == -1 or is_asked_for or has_eval_data or not reads_records:
        return
    sources.print_notices(["note: no evaluation: grain_eval_files names no records for it"])
    merged.set_derived("eval_interval", -1, "without records to evaluate on")


def _derive_data(merged: MergedSettings) -> None:
    """Empties a weaker choice of training data.

    What to train on is one choice of several keys: the key that was set last beats the others.
    """
    typed = merged.typed
    for name in ("dataset_path", "grain_train_files"):
        if not typed[name] or not typed["data_mixture_weights"]:
            continue
        rank = merged.origins[name].source.rank
        mixture_rank = merged.origins["data_mixture_weights"].source.rank
        if rank < mixture_rank:
            merged.set_derived(name, "", "because of data_mixture_weights")
        elif rank > mixture_rank:
            merged.set_derived("data_mixture_weights", (), f"because of {name}")


def _derive_expert_capacity(merged: MergedSettings) -> None:
    """Limits the capacity of experts on several devices, which cannot be dropless."""
    typed = merged.typed
    sizes = (typed["ici_expert_parallelism"], typed["dcn_expert_parallelism"])
    if typed["num_experts"] == 1 or all(size in (0, 1) for size in sizes):
        return
    for name, factor in (("capacity_factor", 1.25), ("eval_capacity_factor", 2.0)):
        is_chosen = merged.origins[name].source not in (Source.DEFAULT, Source.DECODER_BLOCK)
        if typed[name] == -1 and not is_chosen:
            sources.print_notices([f"note: {name}={factor:g}: experts are on several devices"])
            merged.set_derived(name, factor, "for experts on several devices")


def _derive_run_name(merged: MergedSettings, config_path: Path | None) -> None:
    """Names a run that has no name, by its job, else by what it trains and the time."""
    typed = merged.typed
    if typed["run_name"]:
        return
    if job := os.environ.get("JOBSET_NAME"):
        merged.set_derived("run_name", job, "from $JOBSET_NAME")
        return
    if typed["model_name"] not in ("default", ""):
        source = "model_name"
        stem = typed["model_name"]
        if sources.YAML_PATH.fullmatch(stem):
            stem = Path(stem).stem
    elif config_path:
        source = "the config file's name"
        stem = config_path.stem
    else:
        source = stem = "run"
    time = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
    # A sweep may start several runs in one second.
    name = f"{stem}_{time}-{secrets.token_hex(2)}"
    merged.set_derived("run_name", name, f"from {source} and time of start")


def _derive_run_folder(merged: MergedSettings) -> None:
    """Splits a run_name that is a whole path, and fills in an empty base_output_directory."""
    typed = merged.typed
    name = typed["run_name"]
    root = typed["base_output_directory"]
    is_whole_path = name.startswith(("/", "~")) or "://" in name
    if not is_whole_path:
        if not root:
            merged.set_derived("base_output_directory", "./maxtext_output", "because it is empty")
        return
    parent, _, last_part = name.rstrip("/").rpartition("/")
    if root and root.rstrip("/") != parent:
        sources.print_notices([f"note: base_output_directory={root}: run_name is a whole path"])
    merged.set_derived("base_output_directory", parent or "/", "from run_name, a whole path")
    note = "from the last part of the path given as run_name"
    merged.set_derived("run_name", last_part, note)
