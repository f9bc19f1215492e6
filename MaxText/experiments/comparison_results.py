"""Results of a comparison: table, findings and CSV files.

Configurations are compared by their validation loss, or, if the data have labels (probes), by the
share of labels that they predict.

An arm is a configuration file with one value of each swept key that is not a number. Its variants
differ in swept numbers, such as the learning rate.
"""

import csv
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from MaxText import formatting
from MaxText.config.schema import flatten
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.experiments.compare_args import UNITS
from MaxText.experiments.comparison_plan import (
    Plan,
    StageSequence,
    Trial,
    format_budget,
    format_changes,
    plan_rows,
    run_path,
    warmup_problems,
)
from MaxText.experiments.seed_statistics import (
    Estimate,
    format_difference,
    holm_corrected,
    paired_difference,
)
from MaxText.experiments.variants import Variant
from MaxText.monitoring.run_record import RunHistory, read_run
from MaxText.monitoring.step_line import perplexity
from MaxText.reports.page import PageSection, PageTable

COMPLETED = "completed"
DIVERGED = "diverged"
# A diverged run is a result; a run in any other state is resumed.
FINISHED = (COMPLETED, DIVERGED)
_LABELS_OF_TITLE = 3  # more would not fit on a line
_EQUAL = 0.02  # largest relative deviation that counts as equal, as the default tolerance
# Accuracies, in every seed, from which a probe counts as solved, and up to which as failed.
SOLVED = 0.99
FAILED = 0.5


class RunResult(NamedTuple):
    """Results of one run, or of a whole chain; a row of runs.csv."""

    config: str  # label
    seed: int
    state: str
    validation_loss: float | None  # final, of the objective; None if the run did not complete
    validation_tokens: float | None
    training_loss: float | None  # see RunHistory.training_loss
    parameters: int | None  # of the final model
    steps: int
    tokens: float
    flops: float
    train_seconds: float  # in training steps, without compilation, evaluation and saving
    folder: str  # relative to the comparison's folder
    loss_kind: str = ""  # of validation_loss; see RunHistory.loss_kind
    validation_lm_loss: float | None = None  # cross entropy in nats per token, beside any objective
    lm_loss_kind: str = ""  # see RunHistory.lm_loss_kind
    validation_accuracy: float | None = None  # of labels; None if the data have none

    @property
    def has_lm_loss(self) -> bool:
        """Whether its cross entropy is known, or not needed."""
        return self.state != COMPLETED or self.validation_lm_loss is not None

    @property
    def tokens_per_second(self) -> float | None:
        """Training tokens per second of training steps; None without steps."""
        return self.tokens / self.train_seconds if self.train_seconds else None


class ConfigResults(NamedTuple):
    """Finished runs of one configuration."""

    label: str
    results: tuple[RunResult, ...]
    by_lm_loss: bool = False  # whether losses are cross entropies beside different objectives
    by_accuracy: bool = False  # whether configurations are compared by the accuracy of labels

    @property
    def losses(self) -> dict[int, float]:
        """Validation losses of completed runs by seed."""
        return self._by_seed("validation_loss")

    @property
    def loss(self) -> Estimate:
        """Validation loss over the seeds."""
        return Estimate.of(list(self.losses.values()))

    @property
    def accuracies(self) -> dict[int, float]:
        """Accuracies of the labels of completed runs by seed; empty without labels."""
        return self._by_seed("validation_accuracy")

    @property
    def accuracy(self) -> Estimate:
        """Accuracy of the labels over the seeds."""
        return Estimate.of(list(self.accuracies.values()))

    @property
    def scores(self) -> dict[int, float]:
        """What configurations are compared by, by seed."""
        return self.accuracies if self.by_accuracy else self.losses

    @property
    def outcome(self) -> str:
        """Whether all seeds solved or failed a probe."""
        accuracies = self.accuracies.values()
        if not accuracies:
            return formatting.ABSENT
        if min(accuracies) >= SOLVED and not self.diverged:
            return "solved"
        return "failed" if max(accuracies) <= FAILED else "between"

    def _by_seed(self, name: str) -> dict[int, float]:
        """Returns a field of the completed runs by seed."""
        value_by_seed = {result.seed: getattr(result, name) for result in self.results}
        return {seed: value for seed, value in value_by_seed.items() if value is not None}

    @property
    def loss_kind(self) -> str:
        """What the losses are; see RunHistory.loss_kind."""
        return next((result.loss_kind for result in self.results), "")

    @property
    def diverged(self) -> int:
        """Number of diverged runs, excluded from means."""
        return sum(result.state == DIVERGED for result in self.results)

    def mean(self, name: str) -> float | None:
        """Mean of a field over completed runs."""
        completed = [result for result in self.results if result.state == COMPLETED]
        numbers = [getattr(result, name) for result in completed]
        numbers = [number for number in numbers if number is not None]
        return statistics.fmean(numbers) if numbers else None

    @property
    def perplexity(self) -> float | None:
        """Exponential of the mean loss; None unless it is a cross-entropy."""
        if self.loss.mean is None or not self.loss_kind.startswith("cross-entropy"):
            return None
        return perplexity(self.loss.mean)


def load_record(run: Trial) -> RunHistory | None:
    """Returns the run's record; None if it has not started recording."""
    try:
        return read_run(run.folder)
    except UserError:
        # No file, or killed before its first row. Other problems of the file are reported once
        # the run has ended.
        return None


def is_over(run: Trial, states: Sequence[str] = FINISHED) -> bool:
    """Returns whether a run is in `states`, or an earlier stage diverged."""
    record = load_record(run)
    if record is not None and record.state in states:
        return True
    return run.previous is not None and is_over(run.previous, (DIVERGED,))


def load_chain(chain: StageSequence) -> list[RunHistory]:
    """Returns the records of a chain's runs; none until it is over."""
    if not all(map(is_over, chain)):
        return []
    # Stages after one that diverged have no record.
    return [record for record in map(load_record, chain) if record is not None]


def summarize(chain: StageSequence, records: Sequence[RunHistory]) -> RunResult:
    """Returns the results of a chain from the records of its runs.

    Costs are sums over the stages; the loss is that of the last one that ran.
    """
    run = chain[-1]
    final = records[-1]
    last = final.evaluations[-1] if final.evaluations else {}
    rows = [row for record in records for row in record.steps]
    return RunResult(
        config=run.label,
        seed=run.seed,
        state=final.state,
        validation_loss=final.final_loss if final.state == COMPLETED else None,
        validation_tokens=last.get("eval/total_weights"),
        training_loss=final.training_loss[0] if final.training_loss else None,
        parameters=final.facts.get("num_parameters"),
        steps=sum(record.last_step + 1 for record in records if record.last_step is not None),
        tokens=sum(record.tokens for record in records),
        flops=sum(record.flops for record in records),
        train_seconds=sum(row.get("seconds") or 0.0 for row in rows),
        folder=str(Path(run.label) / run_path(run.seed)),
        loss_kind=final.loss_kind,
        validation_lm_loss=final.final_lm_loss if final.state == COMPLETED else None,
        lm_loss_kind=final.lm_loss_kind,
        validation_accuracy=final.final_accuracy if final.state == COMPLETED else None,
    )


def group_results(labels: Sequence[str], results: Sequence[RunResult]) -> list[ConfigResults]:
    """Returns the results by configuration.

    Objectives of different kinds are compared by the cross entropy beside them, if all have one.
    Runs on data with labels are compared by their accuracy.
    """
    completed = [result for result in results if result.state == COMPLETED]
    by_accuracy = bool(completed) and all(r.validation_accuracy is not None for r in completed)
    objectives = {result.loss_kind for result in results}
    by_lm_loss = len(objectives) > 1 and all(result.has_lm_loss for result in results)
    if by_lm_loss:
        results = [
            result._replace(
                validation_loss=result.validation_lm_loss, loss_kind=result.lm_loss_kind
            )
            for result in results
        ]
    groups = []
    for label in labels:
        results_of_label = tuple(result for result in results if result.config == label)
        groups.append(ConfigResults(label, results_of_label, by_lm_loss, by_accuracy))
    return groups


def differences(groups: Sequence[ConfigResults]) -> dict[str, Estimate]:
    """Returns Holm-corrected differences to the first group by label."""
    first, *other_groups = groups
    return holm_corrected(
        {
            group.label: paired_difference(first.scores, group.scores)
            for group in other_groups
            if group.by_accuracy or group.loss_kind == first.loss_kind
        }
    )


TABLE_NOTE = "Means over the seeds whose runs completed; loss in nats per token, sd over seeds."
_CROSS_ENTROPIES = (
    "The objectives differ, so the losses are the cross entropies beside them (eval/lm_loss)."
)
_LABELS_NOTE = (
    f"Accuracy is the share of labels that are the most likely token. A probe is solved if it is "
    f"{SOLVED:g} or more in every run, and failed if it is {FAILED:g} or less in every run."
)
_OF_ACCURACY = ("accuracy", "sd of accuracy", "probe")


def table_header(groups: Sequence[ConfigResults]) -> tuple[str, ...]:
    """Returns the columns of `table_rows`."""
    return (
        "configuration",
        *(_OF_ACCURACY if groups[0].by_accuracy else ()),
        "validation loss",
        "sd",
        "runs",
        "perplexity",
        "parameters",
        "FLOPs",
        "tokens",
        "train seconds",
    )


def _table_notes(groups: Sequence[ConfigResults]) -> list[str]:
    notes = [TABLE_NOTE]
    if groups[0].by_accuracy:
        notes.append(_LABELS_NOTE)
    if any(group.by_lm_loss for group in groups):
        notes.append(_CROSS_ENTROPIES)
    return notes


def table_rows(groups: Sequence[ConfigResults]) -> list[list[str]]:
    """Returns one row per configuration, under `table_header`; the best first."""
    differ = bool(_kinds(groups))
    if not differ:
        groups = sorted(groups, key=_rank)
    rows = []
    for group in groups:
        loss = formatting.format_loss(group.loss.mean)
        if differ:
            loss += f" ({group.loss_kind})"
        runs = str(group.loss.count)
        if group.diverged:
            runs += f" ({group.diverged} diverged)"
        of_accuracy = []
        if group.by_accuracy:
            of_accuracy = [
                _optional(group.accuracy.mean, "{:.4f}".format),
                _optional(group.accuracy.std, "{:.4f}".format),
                group.outcome,
            ]
        cells = [
            group.label,
            *of_accuracy,
            loss,
            formatting.format_loss(group.loss.std),
            runs,
            _optional(group.perplexity, "{:.2f}".format),
            _optional(group.mean("parameters"), formatting.short_count),
            formatting.format_operations(group.mean("flops")),
            _optional(group.mean("tokens"), formatting.short_count),
            _optional(group.mean("train_seconds"), "{:,.1f}".format),
        ]
        rows.append(cells)
    return rows


def _rank(group: ConfigResults) -> float:
    """Returns a number that is lower for a better configuration; those without a score are last."""
    mean = _mean_score(group)
    if mean is None:
        return math.inf
    return -mean if group.by_accuracy else mean


def _mean_score(group: ConfigResults) -> float | None:
    """Returns the mean of what configurations are compared by."""
    return (group.accuracy if group.by_accuracy else group.loss).mean


def _kinds(groups: Sequence[ConfigResults]) -> dict[str, list[str]]:
    """Returns labels by kind of loss; empty if all are of the same kind, or have an accuracy."""
    if groups[0].by_accuracy:
        return {}
    kinds: dict[str, list[str]] = {}
    for group in groups:
        if group.results:
            kinds.setdefault(group.loss_kind, []).append(group.label)
    return kinds if len(kinds) > 1 else {}


def _optional(number: float | None, formatted: Callable[[float], str]) -> str:
    return formatting.ABSENT if number is None else formatted(number)


def summary_lines(
    groups: Sequence[ConfigResults], plan: Plan, variants: Sequence[Variant]
) -> list[str]:
    """Returns conclusions, after what limits them."""
    return budget_deviations(groups, plan) + _conclusions(groups, plan, variants)


def no_verdict_lines(problems: Sequence[str]) -> list[str]:
    """Returns the sentences in place of a verdict about runs with `warmup_problems`."""
    return [
        *(f"{problem}." for problem in problems),
        "No verdict: such losses say nothing about longer runs. Increase the budget, or shorten "
        "the warm-up (warmup_steps, warmup_steps_fraction).",
    ]


def _conclusions(
    groups: Sequence[ConfigResults], plan: Plan, variants: Sequence[Variant]
) -> list[str]:
    """Returns what the results say, in sentences: exclusions, caveats, then findings.

    Args:
      groups: Results of each configuration; the first is the baseline.
      plan: Of the experiment.
      variants: Its configurations.
    """
    lines = [
        f"{group.label}: {group.diverged} diverged, excluded from means."
        for group in groups
        if group.diverged
    ]
    tokens = groups[0].mean("validation_tokens")
    for group in groups[1:]:
        tokens_of_group = group.mean("validation_tokens")
        if tokens and tokens_of_group and tokens_of_group != tokens:
            lines.append(
                f"{group.label} was validated on {tokens_of_group:,.0f} tokens per run and "
                f"{groups[0].label} on {tokens:,.0f}, so part of the difference comes from the "
                "texts. Set eval_steps=-1 to use all of the text, and eval_per_device_batch_size "
                "for validation only."
            )
    if problems := warmup_problems(plan, variants):
        return [*lines, *no_verdict_lines(problems)]
    if kinds := _kinds(groups):
        labels_by_kind = "; ".join(
            f"{kind} ({', '.join(labels)})" for kind, labels in kinds.items()
        )
        lines.append(f"Losses are of different kinds and cannot be compared: {labels_by_kind}.")
    else:
        lines += best_value_lines(variants, _ranks(groups))
    return lines + _findings(groups, variants)


def _ranks(groups: Sequence[ConfigResults]) -> dict[str, float]:
    """Returns `_rank` of the configurations with a completed run, by label."""
    return {group.label: _rank(group) for group in groups if group.scores}


def best_value_lines(variants: Sequence[Variant], ranks: Mapping[str, float]) -> list[str]:
    """Names the best numbers of each arm, and warns of those at an edge.

    Args:
      variants: The configurations.
      ranks: Label -> a number that is lower for a better configuration, such as its loss.
    """
    lines = []
    for best, arm in _bests(variants, ranks):
        for name, value in _numbers(best).items():
            tried = sorted({_numbers(variant)[name] for variant in arm})
            if len(tried) == 1:
                continue
            line = f"{best.label} has the best {name} of {', '.join(map(to_yaml, tried))}"
            if value == tried[0]:
                line += ", the smallest: try smaller values before you conclude"
            elif value == tried[-1]:
                line += ", the largest: try larger values before you conclude"
            lines.append(f"{line}.")
    return lines


def _arms(variants: Sequence[Variant]) -> list[list[Variant]]:
    arms: dict[Any, list[Variant]] = {}
    for variant in variants:
        keys = flatten(variant.config)
        numbers = _numbers(variant)
        other_values = tuple(to_yaml(keys[name]) for name in variant.swept if name not in numbers)
        arms.setdefault((variant.source, variant.swept, other_values), []).append(variant)
    return list(arms.values())


def _bests(
    variants: Sequence[Variant], ranks: Mapping[str, float]
) -> list[tuple[Variant, list[Variant]]]:
    """Returns the best variant, that of the lowest rank, and all variants of each arm."""
    bests = []
    for arm in _arms(variants):
        finished = [variant for variant in arm if variant.label in ranks]
        if finished:
            bests.append((min(finished, key=lambda variant: ranks[variant.label]), arm))
    return bests


def _numbers(variant: Variant) -> dict[str, float]:
    keys = flatten(variant.config)
    return {name: keys[name] for name in variant.swept if type(keys[name]) in (int, float)}


def _findings(groups: Sequence[ConfigResults], variants: Sequence[Variant]) -> list[str]:
    """Describes the differences; of several arms, those of their best."""
    bests = _bests(variants, _ranks(groups))
    compared = groups
    if len(bests) > 1 and len(_arms(variants)) < len(variants):
        labels = [best.label for best, _ in bests]
        compared = [group for group in groups if group.label in labels]
    differences_by_label = differences(compared)
    count = sum(difference.p_value is not None for difference in differences_by_label.values())
    if len(differences_by_label) > 1 and count == 0:
        return ["One seed cannot distinguish a difference from chance: add seeds=3."]
    lines = [
        format_difference(
            compared[0].label,
            label,
            difference,
            count,
            unit="in accuracy" if groups[0].by_accuracy else "nats/token",
        )
        for label, difference in differences_by_label.items()
    ]
    if compared is not groups:
        lines.append(
            f"These are the best of several each, chosen by the same "
            f"{'accuracies' if groups[0].by_accuracy else 'losses'}, which favors those that tried "
            "more values."
        )
    return lines


def budget_deviations(groups: Sequence[ConfigResults], plan: Plan) -> list[str]:
    """Returns how runs missed the budget; empty if it was equal."""
    lines = []
    unit = UNITS[plan.question.match]
    for group in groups:
        planned = plan.planned[group.label]
        steps = planned.total("steps")
        seconds = planned.total("seconds")
        if abs(planned.deviation) > _EQUAL:
            lines.append(
                f"{group.label} has {abs(planned.deviation):.1%} "
                f"{'more' if planned.deviation > 0 else 'fewer'} {unit} than the budget "
                f"(tolerance={plan.question.tolerance:g} allowed it)."
            )
        completed = (result for result in group.results if result.state == COMPLETED)
        for result in completed:
            time_deviation = result.train_seconds / seconds - 1 if seconds else 0.0
            if result.steps < steps:
                lines.append(
                    f"{group.label} seed {result.seed} ended after {result.steps} of "
                    f"{steps} steps (num_epoch or target_eval_loss): it had a smaller "
                    "budget than the others."
                )
            elif abs(time_deviation) > _EQUAL:
                lines.append(
                    f"{group.label} seed {result.seed} trained for {result.train_seconds:,.1f} s "
                    f"instead of {seconds:,.1f} s ({time_deviation:+.1%}): the machine changed its "
                    "speed since steps were timed."
                )
    return lines


def text_lines(
    groups: Sequence[ConfigResults], plan: Plan, variants: Sequence[Variant]
) -> list[str]:
    """Returns what limits the verdict, the table, and the conclusions."""
    lines = budget_deviations(groups, plan)
    if lines:
        lines.append("")
    header = table_header(groups)
    lines += formatting.format_table(header, table_rows(groups), max_width=None).splitlines()
    lines += [*_table_notes(groups), ""]
    return lines + _conclusions(groups, plan, variants)


def result_section(
    plan: Plan, variants: Sequence[Variant], groups: Sequence[ConfigResults]
) -> PageSection:
    """Returns the report's first section: what limits the verdict, the verdict, and the table."""
    notes = [*summary_lines(groups, plan, variants), *_table_notes(groups)]
    return PageSection("Result", notes, PageTable(table_header(groups), table_rows(groups)))


def budget_section(
    plan: Plan, variants: Sequence[Variant], unasked: Sequence[str], command: Sequence[str]
) -> PageSection:
    """Returns the report's section on how the configurations were made comparable."""
    notes = [
        f"Command: {shlex.join(['python', *command])}",
        f"match={plan.question.match}: {format_budget(plan, variants)}.",
        *format_changes(plan, variants),
        "A seed gives every configuration the same order of the data and the same seed of the "
        f"initial weights. Seeds: {', '.join(map(str, plan.seeds))}.",
        *(f"The configurations differ in {line}." for line in unasked),
    ]
    return PageSection("How the budgets were matched", notes, PageTable(*plan_rows(plan)))


def title_of(plan: Plan, groups: Sequence[ConfigResults]) -> str:
    """Returns the report's title; it says "equal" only if budgets were."""
    labels = list(plan.configurations)
    fits = len(labels) <= _LABELS_OF_TITLE
    compared = " and ".join(labels) if fits else f"{len(labels)} configurations"
    budget_kind = "unequal" if budget_deviations(groups, plan) else "equal"
    return f"{compared}, {budget_kind} {UNITS[plan.question.match]}"


def write_runs_csv(path: Path, results: Iterable[RunResult]) -> None:
    """Writes one row per configuration and seed."""
    write_csv(path, [r._asdict() | {"tokens_per_second": r.tokens_per_second} for r in results])


def write_summary_csv(
    path: Path, groups: Sequence[ConfigResults], *, has_verdict: bool = True
) -> None:
    """Writes one row per configuration, with differences to the first if there is a verdict.

    Differences are of the loss, or of the accuracy if that is what configurations are compared by.
    """
    means = ("parameters", "flops", "tokens", "train_seconds", "tokens_per_second")
    differences_by_label = differences(groups) if has_verdict else {}
    rows = []
    for group in groups:
        difference = differences_by_label.get(group.label, Estimate(0))
        of_accuracy = {}
        if group.by_accuracy:
            of_accuracy = {
                "accuracy": group.accuracy.mean,
                "accuracy_sd": group.accuracy.std,
                "probe": group.outcome,
            }
        rows.append(
            {
                "config": group.label,
                "runs": group.loss.count,
                "diverged": group.diverged,
                "validation_loss": group.loss.mean,
                "validation_loss_sd": group.loss.std,
                **of_accuracy,
                "perplexity": group.perplexity,
                **{name: group.mean(name) for name in means},
                "difference": difference.mean,
                "difference_low_95": difference.ci_low,
                "difference_high_95": difference.ci_high,
                "difference_seeds": difference.count
                if group.label in differences_by_label
                else None,
                "difference_p_holm": difference.p_value,
            }
        )
    write_csv(path, rows)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows under a header of the keys of the first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
