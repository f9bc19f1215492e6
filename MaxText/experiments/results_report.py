"""Report of a comparison: its runs, plan and results."""

from collections.abc import Sequence
from pathlib import Path

from MaxText.experiments.comparison_plan import Plan, run_path
from MaxText.experiments.comparison_results import (
    HEADER,
    RANKING_HEADER,
    RANKING_NOTE,
    TABLE_NOTE,
    ConfigResults,
    budget_deviations,
    ranking_rows,
    summary_lines,
    table_rows,
)
from MaxText.experiments.solved_plan import format_budget, format_changes, plan_rows
from MaxText.experiments.solver import UNITS
from MaxText.experiments.variants import Variant
from MaxText.metrics.run_record import RunHistory
from MaxText.reports.page import PageSection, PageTable
from MaxText.reports.report_writer import write_report

_LABELS_OF_TITLE = 3  # more would not fit on a line


def sections(
    plan: Plan,
    variants: Sequence[Variant],
    groups: Sequence[ConfigResults],
    unasked: Sequence[str],
) -> list[PageSection]:
    """Returns the report's sections on the comparison."""
    found = PageSection(
        "Result",
        [TABLE_NOTE, *summary_lines(groups, plan, variants)],
        PageTable(HEADER, table_rows(groups)),
    )
    ranked = ranking_rows(groups)
    ranking = (
        [PageSection("Ranking", [RANKING_NOTE], PageTable(RANKING_HEADER, ranked))]
        if ranked
        else []
    )
    header, rows = plan_rows(plan)
    warnings = [f"The configurations differ in {line}." for line in unasked]
    made_equal = PageSection(
        "How the budgets were matched",
        [
            f"match={plan.question.match}: {format_budget(plan, variants)}.",
            *format_changes(plan, variants),
            "A seed gives every configuration the same order of the data and the same seed of the "
            f"initial weights. Seeds: {', '.join(map(str, plan.seeds))}.",
            *warnings,
        ],
        PageTable(header, rows),
    )
    return [found, *ranking, made_equal]


def write(
    plan: Plan,
    variants: Sequence[Variant],
    records: Sequence[RunHistory],
    groups: Sequence[ConfigResults],
    unasked: Sequence[str],
) -> Path:
    """Writes the report into the comparison's folder and returns its path.

    `records` has one record of `load_chain_record` per finished chain.
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
        title=title_of(plan, groups),
        groups={label: folders for label, folders in by_label.items() if folders},
        sections=sections(plan, variants, groups, unasked),
    )


def title_of(plan: Plan, groups: Sequence[ConfigResults]) -> str:
    """Returns the report's title.

    It calls a budget equal only if it was.
    """
    labels = list(plan.identities)
    few = len(labels) <= _LABELS_OF_TITLE
    what = " and ".join(labels) if few else f"{len(labels)} configurations"
    how = "unequal" if budget_deviations(groups, plan) else "equal"
    return f"{what}, {how} {UNITS[plan.question.match]}"
