"""Results of a comparison: table, summary_lines and CSV files."""

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from MaxText.errors import UserError
from MaxText.experiments.chain_record import merge_stage_records
from MaxText.experiments.comparison_plan import Chain, Plan, Run, run_path
from MaxText.experiments.seed_statistics import (
    Difference,
    Summary,
    format_difference,
    paired_difference,
)
from MaxText.metrics.events import EVENTS_FILE
from MaxText.metrics.run_record import RunRecord, read_run
from MaxText.metrics.tables import format_table, short_count
from MaxText.reports.formatting import ABSENT, loss, operations

COMPLETED, DIVERGED = "completed", "diverged"
# A diverged run is a result; a run in any other state is resumed.
FINISHED = (COMPLETED, DIVERGED)
_SPEED_CHANGED = 0.1  # relative deviation from planned seconds that is reported


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Results of one run, or of a whole chain; a row of runs.csv."""

    config: str  # label
    seed: int
    state: str
    validation_loss: float | None  # final, in nats per token; None if the run did not complete
    validation_tokens: float | None
    training_loss: float | None  # see RunRecord.training_loss
    parameters: int | None  # of the final model
    steps: int
    tokens: float
    flops: float
    train_seconds: float  # in training steps, without compilation, evaluation and saving
    folder: str  # relative to the comparison's folder
    loss_kind: str = ""  # see RunRecord.loss_kind

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.train_seconds if self.train_seconds else None


@dataclasses.dataclass(frozen=True)
class ConfigResults:
    """Finished runs of one configuration."""

    label: str
    results: tuple[RunResult, ...]
    loss: Summary  # validation loss of completed runs
    difference: Difference | None  # to the first configuration; None for the first itself

    @property
    def loss_kind(self) -> str:
        return next((result.loss_kind for result in self.results), "")

    @property
    def diverged(self) -> int:
        """Number of diverged runs, which are excluded from means."""
        return sum(result.state == DIVERGED for result in self.results)

    def mean(self, name: str) -> float | None:
        """Mean of a field over completed runs that have it."""
        numbers = [
            getattr(result, name)
            for result in self.results
            if result.state == COMPLETED and getattr(result, name) is not None
        ]
        return Summary.of(numbers).mean

    @property
    def perplexity(self) -> float | None:
        """Exponential of the mean loss; None if it is no log-probability."""
        kind = self.loss_kind
        if self.loss.mean is None or (kind and not kind.startswith("cross-entropy")):
            return None
        return math.exp(min(self.loss.mean, 700.0))


def load_record(run: Run) -> RunRecord | None:
    """Returns the run's record; None if it has not started recording."""
    if not (run.folder / EVENTS_FILE).exists():
        return None
    try:
        return read_run(run.folder)
    except UserError:
        # Probably killed before its first row, and will restart. Other problems of the file
        # are reported once the run has ended.
        return None


def is_over(run: Run) -> bool:
    """Returns whether a run ended, or an earlier stage diverged."""
    record = load_record(run)
    if record is not None and record.state in FINISHED:
        return True
    return run.previous is not None and _has_diverged(run.previous)


def _has_diverged(run: Run) -> bool:
    """Returns whether a run or one of its previous stages diverged."""
    record = load_record(run)
    if record is not None and record.state == DIVERGED:
        return True
    return run.previous is not None and _has_diverged(run.previous)


def load_chain_record(chain: Chain) -> RunRecord | None:
    """Returns a chain's merge_stage_records record; None until it is over."""
    if not all(map(is_over, chain)):
        return None
    if len(chain) == 1:
        return load_record(chain[0])
    records = []
    for run in chain:
        record = load_record(run)
        if record is None:
            break
        records.append(record)
        if record.state == DIVERGED:
            break
    return merge_stage_records(records, records[0].folder.parent)


def summarize(chain: Chain, record: RunRecord) -> RunResult:
    """Summarizes a chain and its merge_stage_records record."""
    run = chain[-1]
    last = record.evaluations[-1] if record.evaluations else {}
    return RunResult(
        config=run.label,
        seed=run.seed,
        state=record.state,
        validation_loss=record.final_loss if record.state == COMPLETED else None,
        validation_tokens=last.get("eval/total_weights"),
        training_loss=record.training_loss[0] if record.training_loss else None,
        parameters=record.facts.get("num_parameters"),
        steps=0 if record.last_step is None else record.last_step + 1,
        tokens=record.tokens,
        flops=record.flops,
        train_seconds=sum(row.get("seconds") or 0.0 for row in record.steps),
        folder=str(Path(run.label) / run_path(run.seed)),
        loss_kind=record.loss_kind,
    )


def group_results(labels: Sequence[str], results: Sequence[RunResult]) -> list[ConfigResults]:
    """Groups results by label, with differences to the first configuration."""
    losses: dict[str, dict[int, float]] = {label: {} for label in labels}
    for result in results:
        if result.validation_loss is not None:
            losses[result.config][result.seed] = result.validation_loss
    first = labels[0]
    kinds = {result.config: result.loss_kind for result in results}
    return [
        ConfigResults(
            label,
            tuple(result for result in results if result.config == label),
            Summary.of(list(losses[label].values())),
            paired_difference(losses[first], losses[label])
            if label != first and kinds.get(label) == kinds.get(first)
            else None,
        )
        for label in labels
    ]


TABLE_NOTE = "Means over the seeds whose runs completed; loss in nats per token, sd over seeds."
HEADER = (
    "configuration", "validation loss", "sd", "runs", "perplexity", "parameters", "FLOPs",
    "tokens", "train seconds",
)  # fmt: skip


def table_rows(groups: Sequence[ConfigResults]) -> list[list[str]]:
    """Returns one row per configuration, under HEADER."""

    def counted(number: float | None) -> str:
        return ABSENT if number is None else short_count(number)

    differ = bool(_kinds(groups))

    return [
        [
            group.label,
            loss(group.loss.mean) + (f" ({group.loss_kind})" if differ else ""),
            loss(group.loss.std),
            str(group.loss.count) + (f" ({group.diverged} diverged)" if group.diverged else ""),
            _optional(group.perplexity, ".2f"),
            counted(group.mean("parameters")),
            operations(group.mean("flops")),
            counted(group.mean("tokens")),
            _optional(group.mean("train_seconds"), ",.1f"),
        ]
        for group in groups
    ]


def _kinds(groups: Sequence[ConfigResults]) -> dict[str, list[str]]:
    """Returns labels by kind of loss; empty if all are of the same kind."""
    kinds: dict[str, list[str]] = {}
    for group in groups:
        if group.results:
            kinds.setdefault(group.loss_kind, []).append(group.label)
    return kinds if len(kinds) > 1 else {}


def _optional(number: float | None, pattern: str) -> str:
    return ABSENT if number is None else format(number, pattern)


def summary_lines(groups: Sequence[ConfigResults], plan: Plan) -> list[str]:
    """Returns conclusions and caveats."""
    first, *others = groups
    lines = [
        format_difference(first.label, group.label, group.difference)
        for group in others
        if group.difference is not None
    ]
    intervals = [
        group for group in others if group.difference and group.difference.ci_low is not None
    ]
    if len(intervals) > 1:
        lines.append(
            f"These are {len(intervals)} intervals of 95 % each, not corrected for their number: "
            "the more configurations, the likelier that one of them excludes 0 by chance."
        )
    if kinds := _kinds(groups):
        each = "; ".join(f"{kind} ({', '.join(labels)})" for kind, labels in kinds.items())
        lines.append(f"Losses are of different kinds and cannot be compared: {each}.")
    lines += [line for group in others for line in _validation_mismatch(first, group)]
    return lines + [line for group in groups for line in _caveats(group, plan)]


def _validation_mismatch(first: ConfigResults, group: ConfigResults) -> Iterator[str]:
    """Warns about validation on more or fewer tokens than the first."""
    tokens = {result.seed: result.validation_tokens for result in first.results}
    for result in group.results:
        ours, theirs = tokens.get(result.seed), result.validation_tokens
        if ours and theirs and ours != theirs:
            yield (
                f"{group.label} was validated on {theirs:,.0f} tokens and {first.label} on "
                f"{ours:,.0f}, so part of the difference comes from the texts. Set eval_steps=-1 "
                "to use all of the text, and eval_per_device_batch_size for validation only."
            )
            return


def _caveats(group: ConfigResults, plan: Plan) -> Iterator[str]:
    """Yields deviations of a configuration's runs from the plan."""
    planned = plan.planned[group.label]
    if group.diverged:
        yield f"{group.label}: {group.diverged} diverged, excluded from means."
    for result in group.results:
        if result.state == COMPLETED and result.steps < planned.steps:
            yield (
                f"{result.config} seed {result.seed} ended after {result.steps} of {planned.steps} "
                "steps (num_epoch or target_eval_loss): it had a smaller budget than the others."
            )
    seconds = group.mean("train_seconds")
    if planned.seconds and seconds and abs(seconds / planned.seconds - 1) > _SPEED_CHANGED:
        yield (
            f"{group.label} trained for {seconds:,.1f} s where {planned.seconds:,.1f} s were "
            f"planned ({seconds / planned.seconds - 1:+.0%}): the machine changed its speed "
            "since steps were timed."
        )


def text_lines(groups: Sequence[ConfigResults], plan: Plan) -> list[str]:
    """Returns table and summary_lines for the terminal."""
    table = format_table(HEADER, table_rows(groups), max_width=None).splitlines()
    return [*table, TABLE_NOTE, "", *summary_lines(groups, plan)]


def write_runs_csv(path: Path, results: Iterable[RunResult]) -> None:
    """Writes one row per finished run."""
    names = [field.name for field in dataclasses.fields(RunResult)]
    rows = [
        {name: getattr(result, name) for name in names}
        | {"tokens_per_second": result.tokens_per_second}
        for result in results
    ]
    _write_csv(path, [*names, "tokens_per_second"], rows)


def write_summary_csv(path: Path, groups: Sequence[ConfigResults]) -> None:
    """Writes one row per configuration, with differences to the first."""
    rows = []
    for group in groups:
        difference = group.difference or Difference(0, None)
        rows.append(
            {
                "config": group.label,
                "runs": group.loss.count,
                "diverged": group.diverged,
                "validation_loss": group.loss.mean,
                "validation_loss_sd": group.loss.std,
                "perplexity": group.perplexity,
                "parameters": group.mean("parameters"),
                "flops": group.mean("flops"),
                "tokens": group.mean("tokens"),
                "train_seconds": group.mean("train_seconds"),
                "tokens_per_second": group.mean("tokens_per_second"),
                "difference": difference.mean,
                "difference_low_95": difference.ci_low,
                "difference_high_95": difference.ci_high,
                "difference_seeds": difference.count if group.difference else None,
            }
        )
    _write_csv(path, list(rows[0]), rows)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(rows)
