"""Report of a comparison: that of its runs, plus plan and results."""

from collections.abc import Sequence
from pathlib import Path

from MaxText.experiments import comparison_results
from MaxText.experiments.comparison_plan import Plan, run_path
from MaxText.experiments.comparison_results import ConfigResults
from MaxText.experiments.solved_plan import format_budget, format_changes, plan_rows
from MaxText.experiments.solving import UNITS
from MaxText.experiments.variants import Variant
from MaxText.metrics.run_record import RunRecord
from MaxText.reports.page import Section, Table
from MaxText.reports.writing import write_report

_LABELS_OF_TITLE = 3  # more would not fit on a line


def sections(
    plan: Plan,
    variants: Sequence[Variant],
    groups: Sequence[ConfigResults],
    unasked: Sequence[str],
) -> list[Section]:
    """Returns the report's sections on the comparison."""
    found = Section(
        "Result",
        [comparison_results.TABLE_NOTE, *comparison_results.summary_lines(groups, plan)],
        Table(comparison_results.HEADER, comparison_results.table_rows(groups)),
    )
    header, rows = plan_rows(plan)
    warnings = [f"The configurations differ in {line}." for line in unasked]
    made_equal = Section(
        "What was made equal",
        [
            f"match={plan.question.match}: {format_budget(plan, variants)}.",
            *format_changes(plan, variants),
            "A seed gives every configuration the same order of the data and the same seed of the "
            f"initial weights. Seeds: {', '.join(map(str, plan.seeds))}.",
            *warnings,
        ],
        Table(header, rows),
    )
    return [found, made_equal]


def write(
    plan: Plan,
    variants: Sequence[Variant],
    records: Sequence[RunRecord],
    groups: Sequence[ConfigResults],
    unasked: Sequence[str],
) -> Path:
    """Writes the report into the comparison's folder and returns its path.

    `records` has one record of `comparison_results.load_chain_record` per finished chain.
    """
    present = {str(record.folder) for record in records}
    by_label = {
        label: [
            path
            for seed in plan.seeds
            if (path := str(plan.folder / label / run_path(seed))) in present
        ]
        for label in plan.identities
    }
    return write_report(
        records,
        plan.folder,
        title=_title(plan),
        groups={label: folders for label, folders in by_label.items() if folders},
        sections=sections(plan, variants, groups, unasked),
    )


def _title(plan: Plan) -> str:
    labels = list(plan.identities)
    few = len(labels) <= _LABELS_OF_TITLE
    what = " and ".join(labels) if few else f"{len(labels)} configurations"
    return f"{what}, equal {UNITS[plan.question.match]}"
