"""Files and page sections of a ladder: curves with bands, residuals, speed-up, tables."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from MaxText.experiments.comparison_results import write_csv
from MaxText.experiments.ladder.effective_speedup import Speedup
from MaxText.experiments.ladder.ladder_results import (
    PREDICTION_HEADER,
    RUNG_HEADER,
    LadderResults,
    cost_sentence,
    ladder_json,
    prediction_table,
    rung_rows,
    rung_table,
    speedup_title,
    summary_of,
)
from MaxText.experiments.ladder.measurements import Arm, Interval
from MaxText.experiments.ladder.scaling_law import MAX_PROJECTION, LawPosterior
from MaxText.reports.chart import Axis, Chart, Series, draw_chart
from MaxText.reports.page import PageSection, PageTable
from MaxText.reports.plots import plot_over
from MaxText.storage.atomic import atomic_write_bytes, atomic_write_text

LADDER_JSON_FILE = "ladder.json"
LADDER_CSV_FILE = "ladder.csv"

_AXIS = Axis("flops", "training FLOPs of a run", "FLOPs")
_NUM_POINTS = 60  # of a curve
_RUNG_NOTE = (
    "Loss in nats per token, mean and sd over seeds. The residual is the loss minus the law's "
    "median. S is that of the rung alone, given the scatter of all rungs. Seconds are those of the "
    "training steps of one run."
)
_BAND_NOTE = (
    "Bands are 95 % intervals of the curve, up to ten times the top rung. The scatter of the rungs "
    "about the curve is the error; seeds only average and pair. "
    "docs/explanation/scaling_ladders.md says what not to conclude."
)


def write_ladder_files(folder: Path, results: LadderResults) -> list[Path]:
    """Writes ladder.json, ladder.csv and the figures as PNG; returns their paths."""
    charts = ladder_charts(results)
    written = [folder / LADDER_JSON_FILE, folder / LADDER_CSV_FILE]
    atomic_write_text(written[0], json.dumps(ladder_json(results), indent=1))
    write_csv(written[1], rung_rows(results))
    for chart in charts:
        figure = draw_chart(chart, _AXIS)
        if figure is not None:
            path = folder / f"{chart.name}.png"
            atomic_write_bytes(path, figure)
            written.append(path)
    return written


def ladder_sections(results: LadderResults) -> list[PageSection]:
    """Returns the first sections of the report: verdict, curves, predictions, and rungs."""
    sections = [
        PageSection("Verdict" if results.verdicts else "Scaling law", summary_of(results)),
        PageSection(
            "Ladder", [_BAND_NOTE], plots=[plot_over(c, _AXIS) for c in ladder_charts(results)]
        ),
    ]
    if results.outcomes:
        sections.append(
            PageSection(
                "Prediction against outcome",
                [
                    "Predictions of the top rung, from the rungs below, written before it ran. "
                    "The hash is that of preregistration.json."
                ],
                PageTable(PREDICTION_HEADER, prediction_table(results.outcomes)),
            )
        )
    rungs = PageSection(
        "Rungs",
        [_RUNG_NOTE, cost_sentence(results)],
        PageTable(RUNG_HEADER, rung_table(results)),
    )
    return [*sections, rungs]


def ladder_charts(results: LadderResults) -> list[Chart]:
    """Returns the charts of loss, residuals and speed-up over compute."""
    charts = [
        Chart(
            name="ladder_loss",
            title="Validation loss over compute",
            y_title="nats per token",
            series=_loss_series(results),
            log_x=True,
        )
    ]
    if results.laws:
        charts.append(
            Chart(
                name="ladder_residuals",
                title="Residuals of the laws",
                y_title="loss minus the law's median, nats per token",
                series=_residual_series(results),
                references=[("the law", 0.0)],
                log_x=True,
            )
        )
    if results.speedups:
        charts.append(
            Chart(
                name="ladder_speedup",
                title=speedup_title(results),
                y_title="S over the baseline",
                series=[
                    series
                    for index, arm in enumerate(results.arms)
                    if arm.label in results.speedups
                    for series in _speedup_series(
                        results.speedups[arm.label], index, results.currencies[-1]
                    )
                ],
                references=[("no difference", 1.0)],
                log_x=True,
            )
        )
    return charts


def _loss_series(results: LadderResults) -> list[Series]:
    series = []
    for index, arm in enumerate(results.arms):
        law = results.laws.get(arm.label)
        if law is not None:
            series.append(_law_series(law, index))
        if not arm.completed:
            continue
        computes, losses = _seed_losses(arm)
        series.append(
            Series(
                label=f"{arm.label}, runs" if law else arm.label,
                owner=arm.label,
                color=index,
                kind="points",
                x={"flops": computes},
                y=losses,
            )
        )
    for outcome in results.outcomes:
        index = [arm.label for arm in results.arms].index(outcome.label)
        series.append(
            _interval_series(
                f"{outcome.label}, prediction",
                index,
                np.array([outcome.compute]),
                [outcome.prediction],
                "points",
            )
        )
    return series


def _law_series(law: LawPosterior, color: int) -> Series:
    computes = np.geomspace(law.computes[0], MAX_PROJECTION * law.top, _NUM_POINTS)
    intervals = [law.curve(compute) for compute in computes]
    return _interval_series(law.label, color, computes, intervals, "line")


def _interval_series(
    label: str, color: int, computes: np.ndarray, intervals: Sequence[Interval], kind: str
) -> Series:
    low, median, high = np.array(intervals).T
    return Series(
        label=label,
        owner=label,
        color=color,
        kind="points" if kind == "points" else "line",
        x={"flops": computes},
        y=median,
        low=low,
        high=high,
    )


def _seed_losses(arm: Arm) -> tuple[np.ndarray, np.ndarray]:
    """Returns compute and loss of each completed run."""
    runs = [(rung.compute, loss) for rung in arm.rungs for loss in rung.losses.values()]
    computes, losses = np.array(runs).T
    return computes, losses


def _residual_series(results: LadderResults) -> list[Series]:
    return [
        Series(
            label=arm.label,
            owner=arm.label,
            color=index,
            kind="dots",
            x={"flops": results.laws[arm.label].computes},
            y=results.laws[arm.label].residuals,
        )
        for index, arm in enumerate(results.arms)
        if arm.label in results.laws
    ]


def _speedup_series(speedup: Speedup, color: int, currency: str) -> list[Series]:
    # In time the line jumps where the nearest rung, and with it the throughput, changes; so it is
    # drawn through the rungs and continued with the top's.
    computes = np.append(speedup.computes, MAX_PROJECTION * speedup.top)
    line = [speedup.at(compute, currency, beyond=True) for compute in computes]
    return [
        _interval_series(f"{speedup.label}, line", color, computes, line, "line"),
        _interval_series(
            f"{speedup.label}, rungs",
            color,
            speedup.computes,
            speedup.at_rungs(currency),
            "points",
        ),
    ]
