"""Optimal sizes, from runs of every size at every compute: parabolas at equal FLOPs, and L(N, D).

What cannot be fitted, because the grid is too small or its optimum lies at its edge, is refused in
words beside the fits that can.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from MaxText.errors import UserError
from MaxText.experiments.comparison_results import write_csv
from MaxText.experiments.ladder.iso_flop import IsoFlopOptimum, fit_iso_flop
from MaxText.experiments.ladder.ladder_results import measured_row
from MaxText.experiments.ladder.ladder_verdict import format_interval
from MaxText.experiments.ladder.measurements import Interval, Rung
from MaxText.experiments.ladder.size_law import SizeCell, SizeLaw, fit_size_law
from MaxText.formatting import format_loss, short_count
from MaxText.reports.chart import Axis, Chart, Series, draw_chart
from MaxText.reports.page import PageSection, PageTable
from MaxText.reports.plots import plot_over
from MaxText.storage.atomic import atomic_write_bytes, atomic_write_text
from MaxText.value_types import JsonObject

SIZES_JSON_FILE = "sizes.json"
SIZES_CSV_FILE = "sizes.csv"

_AXIS = Axis("parameters", "parameters, embeddings included", "Parameters")
_HEADER = ("configuration", "FLOPs", "width", "layers", "parameters", "tokens", "tokens/parameter")
_HEADER += ("learning rate", "runs", "diverged", "loss")
_NOTE = (
    "Loss in nats per token, mean over seeds. A parabola in ln(parameters) is fitted to at least "
    "five sizes within a factor of four around the best; E + A/N^alpha + B/D^beta to all runs, "
    "with intervals from resampled pairs of N and D. Intervals are 95 %."
)


@dataclasses.dataclass(frozen=True)
class SizeStudy:
    """What a grid of sizes and computes says of one configuration."""

    label: str
    cells: Mapping[float, Sequence[Rung]]  # FLOPs asked for -> runs at all sizes, ascending
    optima: Mapping[float, IsoFlopOptimum]  # FLOPs asked for -> best size, where there is one
    law: SizeLaw | None
    refusals: Sequence[str]  # why an optimum or the law is missing


def study_sizes(label: str, cells: Mapping[float, Sequence[Rung]]) -> SizeStudy:
    """Fits a parabola per compute, and L(N, D) to all cells.

    Args:
      label: Of the configuration.
      cells: FLOPs of a run -> what was measured at each size.
    """
    optima = {}
    refusals = []
    for compute, rungs in cells.items():
        try:
            optima[compute] = fit_iso_flop(rungs)
        except UserError as error:
            refusals.append(f"{label}, no best size at {compute:.3g} FLOPs: {error}")
    measured = [rung for rungs in cells.values() for rung in rungs]
    completed = [SizeCell(r.parameters, r.tokens, r.loss) for r in measured if r.losses]
    law = None
    if completed:
        try:
            law = fit_size_law(completed)
        except UserError as error:
            refusals.append(f"{label}, no law of parameters and tokens: {error}")
    for rung in measured:
        if rung.diverged:
            refusals.append(
                f"{label}: {len(rung.diverged)} runs of {short_count(rung.parameters)} parameters "
                f"at {rung.compute:.3g} FLOPs diverged"
            )
    return SizeStudy(label, cells, optima, law, refusals)


def study_lines(study: SizeStudy) -> list[str]:
    """Returns what a study found, and what it refuses to say."""
    lines = []
    for compute, optimum in study.optima.items():
        ratio = optimum.tokens.median / optimum.parameters.median
        lines.append(
            f"{study.label} at {compute:.3g} FLOPs: best size {_counts(optimum.parameters)} "
            f"parameters, {ratio:.3g} tokens per parameter, loss "
            f"{format_interval(optimum.loss, digits=4)}; {optimum.num_sizes} sizes"
        )
    if study.law is not None:
        law = study.law
        exponent = Interval.of(law.beta / (law.alpha + law.beta))
        top = max(study.cells)
        lines.append(
            f"{study.label}: E + A/N^alpha + B/D^beta with E {format_interval(_e_of(law))}, alpha "
            f"{format_interval(Interval.of(law.alpha))}, beta "
            f"{format_interval(Interval.of(law.beta))}; at 6 N D = {top:.3g} FLOPs least for N "
            f"{_counts(law.optimal_parameters(top))}, which grows as FLOPs to the power "
            f"{format_interval(exponent)}"
        )
    return [*lines, *study.refusals]


def _e_of(law: SizeLaw) -> Interval:
    return Interval.of(np.exp(law.log_e))


def _counts(interval: Interval) -> str:
    low, median, high = map(short_count, interval)
    return f"{median} ({low} to {high})"


def study_rows(studies: Sequence[SizeStudy]) -> list[JsonObject]:
    """Returns one row of sizes.csv per configuration, compute and size."""
    return [
        measured_row(study.label, rung)
        for study in studies
        for rungs in study.cells.values()
        for rung in rungs
    ]


def study_json(studies: Sequence[SizeStudy]) -> JsonObject:
    """Returns sizes.json: fits and measurements."""
    return {
        "configurations": {
            study.label: {
                "optima": {
                    f"{compute:.6g}": dataclasses.asdict(optimum)
                    for compute, optimum in study.optima.items()
                },
                "law": _law_json(study.law),
                "refusals": [*study.refusals],
            }
            for study in studies
        },
        "cells": study_rows(studies),
    }


def _law_json(law: SizeLaw | None) -> JsonObject | None:
    if law is None:
        return None
    return {
        "e": [*_e_of(law)],
        "a": [*Interval.of(np.exp(law.log_a))],
        "b": [*Interval.of(np.exp(law.log_b))],
        "alpha": [*Interval.of(law.alpha)],
        "beta": [*Interval.of(law.beta)],
    }


def write_study_files(folder: Path, studies: Sequence[SizeStudy]) -> list[Path]:
    """Writes sizes.json, sizes.csv and the figures as PNG; returns their paths."""
    written = [folder / SIZES_JSON_FILE, folder / SIZES_CSV_FILE]
    atomic_write_text(written[0], json.dumps(study_json(studies), indent=1))
    write_csv(written[1], study_rows(studies))
    for chart in map(_chart, studies):
        figure = draw_chart(chart, _AXIS)
        if figure is not None:
            written.append(folder / f"{chart.name}.png")
            atomic_write_bytes(written[-1], figure)
    return written


def study_sections(studies: Sequence[SizeStudy]) -> list[PageSection]:
    """Returns the first sections of the report: best sizes, curves, and what was measured."""
    rows = [
        [
            row["configuration"],
            f"{row['flops']:.3g}",
            str(row["width"]),
            str(row["layers"]),
            short_count(row["parameters"]),
            short_count(row["tokens"]),
            f"{row['tokens_per_parameter']:.3g}",
            f"{row['learning_rate']:.3g}",
            str(row["completed"]),
            str(row["diverged"]),
            format_loss(row["loss"]),
        ]
        for row in study_rows(studies)
    ]
    return [
        PageSection("Best sizes", [line for study in studies for line in study_lines(study)]),
        PageSection(
            "Loss over size", [_NOTE], plots=[plot_over(_chart(s), _AXIS) for s in studies]
        ),
        PageSection("Runs by size and compute", table=PageTable(_HEADER, rows)),
    ]


def _chart(study: SizeStudy) -> Chart:
    """Returns the chart of loss over parameters, a curve per compute."""
    series = []
    for color, (compute, rungs) in enumerate(study.cells.items()):
        completed = [rung for rung in rungs if rung.losses]
        name = f"{compute:.3g} FLOPs"
        series.append(
            Series(
                label=name,
                owner=name,
                color=color,
                kind="dots",
                x={"parameters": np.array([rung.parameters for rung in completed], dtype=float)},
                y=np.array([rung.loss for rung in completed]),
            )
        )
        if compute in study.optima:
            optimum = study.optima[compute]
            series.append(
                Series(
                    label="",
                    owner=name,
                    color=color,
                    kind="points",
                    x={"parameters": np.array([optimum.parameters.median])},
                    y=np.array([optimum.loss.median]),
                    low=np.array([optimum.loss.low]),
                    high=np.array([optimum.loss.high]),
                )
            )
    return Chart(
        name=f"sizes_{study.label}",
        title=f"Validation loss of {study.label} over parameters at equal FLOPs",
        y_title="nats per token",
        series=series,
        log_x=True,
        note="points with error bars are the vertices of parabolas",
    )
