"""Reads the record of a run from its folder, while it runs or afterwards."""

import dataclasses
import functools
import os
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import yaml
from etils import epath

from MaxText.config import values
from MaxText.errors import UserError
from MaxText.monitoring.events import EVENTS_FILE
from MaxText.monitoring.goodput import Goodput, measure_goodput
from MaxText.monitoring.json_lines import last_change, read_rows
from MaxText.storage.paths import parse_path

CONFIG_FILE = "config.yml"

State = Literal["running", "killed", "completed", "diverged", "interrupted", "preempted", "error"]
_END_STATES: tuple[State, ...] = ("completed", "diverged", "interrupted", "preempted", "error")

# Numeric or null fields, besides tags, which contain a slash.
_NUMBERS = ("seconds", "data_seconds", "updates", "count")

# A run without a stop row counts as running until its file has been silent for this long, or for
# this multiple of its last row. Five minutes cover a compilation and most evaluations.
_SILENT_SECONDS = 300.0
_SILENT_ROWS = 5.0

_MIN_REPORTS = 9  # minimum number of reports in the mean training loss


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """Recorded data of a run.

    Rows are those of events.jsonl, without those that a rollback has replaced.

    Attributes:
      folder: The run folder.
      name: The run's name.
      config: Keys of config.yml; empty without that file.
      facts: The newest start or resume row.
      steps: Rows of reported steps.
      evaluations: Rows of evaluations.
      events: All other rows.
      state: What became of the run.
      goodput: Its time, by part.
      tokens: Training tokens, without those of ancestors.
      flops: Training FLOPs, without those of ancestors.
      inherited_tokens: Training tokens of ancestors; 0 if unknown.
      inherited_flops: Training FLOPs of ancestors; 0 if unknown.
      last_step: The last step with a row; None without one.
      final_loss: Loss of the last evaluation, as the objective defines it; None without one.
    """

    folder: epath.Path
    name: str
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    state: State
    goodput: Goodput
    tokens: float
    flops: float
    inherited_tokens: float
    inherited_flops: float
    last_step: int | None
    final_loss: float | None

    @property
    def objective_in_nats(self) -> bool:
        """Whether the objective is a cross entropy."""
        return self.facts.get("objective_in_nats", True)

    @property
    def loss_tag(self) -> str:
        """Tag of the training loss that belongs to `final_loss`."""
        return trained_loss_tag(self.objective_in_nats)

    @property
    def final_lm_loss(self) -> float | None:
        """Cross entropy of the last evaluation, in nats per token; None if unknown."""
        if not self.evaluations:
            return None
        loss = self.evaluations[-1].get("eval/lm_loss")
        return self.final_loss if loss is None and self.objective_in_nats else loss

    @property
    def final_accuracy(self) -> float | None:
        """Share of labels that the last evaluation predicted; None if the data have no labels.

        Masked language modeling counts its masked tokens, too, but is judged by its loss.
        """
        if not self.evaluations or self.config.get("mlm_training"):
            return None
        return self.evaluations[-1].get("eval/masked_accuracy")

    @property
    def training_loss(self) -> tuple[float, int] | None:
        """Mean loss of the last 1/25 of the reports (9 at least), and its number of steps."""
        last = self.steps[-max(len(self.steps) // 25, _MIN_REPORTS) :]
        counted = [
            (row[self.loss_tag], row.get("updates") or 1)
            for row in last
            if row.get(self.loss_tag) is not None and not row.get("learning/skipped")
        ]
        if not counted:
            return None
        updates = sum(count for _, count in counted)
        return sum(loss * count for loss, count in counted) / updates, updates

    @property
    def loss_kind(self) -> str:
        """Description of the loss; losses of different kinds are not comparable."""
        objective = str(self.config.get("loss_type", "cross_entropy"))
        alpha = self.config.get("entmax_alpha")
        names = {
            "cross_entropy": "cross-entropy",
            "multi_token_prediction": "cross-entropy",  # that of the next token
            "entmax": f"entmax, alpha {alpha}",
        }
        return self._kind(names.get(objective, objective))

    @property
    def lm_loss_kind(self) -> str:
        """Description of `final_lm_loss`, as `loss_kind` of `final_loss`."""
        return self._kind("cross-entropy")

    def _kind(self, kind: str) -> str:
        if self.config.get("mlm_training"):
            kind += " of masked tokens"
        tokenizer = (self.facts.get("data") or {}).get("tokenizer")
        return f"{kind}, tokenizer {str(tokenizer)[:8]}" if tokenizer else kind


def trained_loss_tag(objective_in_nats: bool) -> str:
    """Returns the tag of the training loss that is compared with the validation loss.

    Args:
      objective_in_nats: Whether the objective is a cross entropy.

    The cross entropy leaves out auxiliary losses. Other objectives are reported as a whole.
    """
    return "learning/lm_loss" if objective_in_nats else "learning/loss"


def read_run(folder: str | PathLike[str]) -> RunHistory:
    """Reads a run, ignoring a partial last line.

    Raises:
      UserError: The folder is not that of a run, or its record is damaged.
    """
    path = parse_path(str(folder), "RUN")
    file = path / EVENTS_FILE
    if not file.exists():
        if not path.exists():
            raise UserError(f"{path}: no such folder. Give the folder of a run.")
        raise UserError(
            f"{path} contains no {EVENTS_FILE}, so it is not the folder of a run. Give "
            "base_output_directory/run_name."
        )
    changed = last_change(file)
    rows = read_rows(file)
    _check_rows(rows, file)
    replaced = _replaced(rows)
    standing_rows = [row for index, row in enumerate(rows) if index not in replaced]
    facts = [row for row in standing_rows if row["event"] in ("start", "resume")][-1]
    evaluations = [row for row in standing_rows if row["event"] == "evaluation"]
    peak_corrections = [row for row in standing_rows if row["event"] == "peak_measured"]
    if peak_corrections:
        peak = {name: peak_corrections[-1][name] for name in ("peak_tflops", "peak_source")}
        if (facts.get("peak_tflops") or 0.0) < peak["peak_tflops"]:
            facts = {**facts, **peak}
    steps = [
        _with_possible_mfu(row, facts.get("peak_tflops"))
        for row in standing_rows
        if row["event"] == "step"
    ]
    last_rows = (*steps[-1:], *evaluations[-1:])
    inherited = (facts.get("lineage") or [{}])[-1]
    return RunHistory(
        folder=path,
        name=str(facts.get("run_name") or path.name),
        config=_read_config(path / CONFIG_FILE),
        facts=facts,
        steps=steps,
        evaluations=evaluations,
        events=[row for row in standing_rows if row["event"] not in ("step", "evaluation")],
        state=_state(rows, silent_for=time.time() - changed),
        goodput=measure_goodput(rows, replaced),
        tokens=max((row.get("progress/tokens") or 0.0 for row in last_rows), default=0.0),
        flops=max((row.get("progress/flops") or 0.0 for row in last_rows), default=0.0),
        inherited_tokens=inherited.get("tokens") or 0.0,
        inherited_flops=inherited.get("flops") or 0.0,
        # A run whose end was made up for after a kill may have an evaluation only.
        last_step=max((row["step"] for row in last_rows), default=None),
        final_loss=evaluations[-1].get("eval/avg_loss") if evaluations else None,
    )


def resolve_run_dir(folder: str | PathLike[str]) -> str:
    """Returns the canonical path of a folder, with symlinks resolved."""
    path = str(folder)
    # Buckets have no links; epath.Path.resolve follows none.
    return path.rstrip("/") if "://" in path else os.path.realpath(os.path.expanduser(path))


def _check_rows(rows: Sequence[Mapping[str, Any]], file: epath.Path) -> None:
    """Rejects another program's file, before a field is missing."""
    for number, row in enumerate(rows, 1):
        numbers = (*_NUMBERS, *(name for name in row if "/" in name))
        kinds: dict[str, Any] = dict.fromkeys(numbers, int | float | None)
        kinds |= {"time": int | float, "event": str, "phase": str, "restart": int}
        if row.get("event") in ("step", "evaluation"):
            kinds["step"] = int
        wrong = [
            f"{name}={row.get(name)!r}"
            for name, kind in kinds.items()
            if not isinstance(row.get(name), kind)
        ]
        if wrong:
            raise UserError(
                f"{file}: row {number} has {', '.join(wrong)}. Another program or an older version "
                "wrote it; only files of this version are readable."
            )
    if not any(row["event"] in ("start", "resume") for row in rows):
        raise UserError(
            f"{file} has {len(rows)} complete rows and no start row: the run has not started yet, "
            "or the beginning of the file was removed. Retry after its first step."
        )


def _replaced(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns the indices of rolled back steps and evaluations."""
    replaced: set[int] = set()
    standing: dict[str, list[tuple[int, int]]] = {"step": [], "evaluation": []}

    def roll_back(kinds: Sequence[str], step: int) -> None:
        for kind in kinds:
            while standing[kind] and standing[kind][-1][0] >= step:
                replaced.add(standing[kind].pop()[1])

    for index, row in enumerate(rows):
        kind = row["event"]
        if kind == "rollback" and isinstance(row.get("restored_step"), int):
            roll_back(("step", "evaluation"), row["restored_step"])
        elif kind in standing:
            roll_back((kind,), row["step"])
            standing[kind].append((row["step"], index))
    return replaced


def _with_possible_mfu(row: dict[str, Any], peak_tflops: float | None) -> dict[str, Any]:
    """Returns a step's row with its MFU of the newest peak; without one if it is above 1.

    A peak measured while the machine was busy is too low, for all rows before a step that beat it.
    """
    if row.get("perf/mfu") is None:
        return row
    speed = row.get("perf/per_device_tflops_per_sec")
    mfu = speed / peak_tflops if speed and peak_tflops else row["perf/mfu"]
    if mfu > 1:
        return {name: value for name, value in row.items() if name != "perf/mfu"}
    return {**row, "perf/mfu": mfu}


def _state(rows: Sequence[Mapping[str, Any]], silent_for: float) -> State:
    attempt = rows[-1]["restart"]
    stops = [row for row in rows if row["event"] == "stop" and row["restart"] == attempt]
    if stops:
        reason = stops[-1].get("reason")
        return reason if reason in _END_STATES else "error"
    patience = max(_SILENT_SECONDS, _SILENT_ROWS * (rows[-1].get("seconds") or 0.0))
    return "running" if silent_for < patience else "killed"


def _read_config(file: epath.Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        return _parse_config(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:  # dates that do not exist are ValueErrors
        raise UserError(
            f"{file} is not valid: {error}. Restore it, or remove it to read the run without its "
            "configuration."
        ) from error


@functools.lru_cache(maxsize=256)  # comparisons read the records of their runs again and again
def _parse_config(text: str) -> Mapping[str, Any]:
    root = values.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise values.InvalidValueError("not a mapping of keys to values")
    for _, node in root.value:
        values.from_node(node)  # bounded, with all aliases expanded
    config = yaml.safe_load(text)
    return {str(name): value for name, value in config.items()}
