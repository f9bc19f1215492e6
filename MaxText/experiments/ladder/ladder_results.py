"""Analysis of a finished ladder: laws, speed-ups and verdicts, as text, JSON and CSV rows."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from MaxText import formatting
from MaxText.errors import UserError
from MaxText.experiments.ladder.effective_speedup import (
    FLOPS,
    TIME,
    Speedup,
    has_times,
    measure_speedup,
)
from MaxText.experiments.ladder.ladder_verdict import (
    LadderVerdict,
    describe_currency,
    format_interval,
    judge,
    warnings_of,
)
from MaxText.experiments.ladder.measurements import Arm, Interval, Rung
from MaxText.experiments.ladder.preregistration import PredictionOutcome
from MaxText.experiments.ladder.scaling_law import (
    MAX_PROJECTION,
    MIN_RUNGS_TO_PROJECT,
    LawPosterior,
    fit_law,
)
from MaxText.value_types import JsonObject


@dataclasses.dataclass(frozen=True)
class LadderResults:
    """What a ladder says; the first arm is the baseline."""

    arms: Sequence[Arm]
    laws: Mapping[str, LawPosterior]  # by label of the arm
    speedups: Mapping[str, Speedup]  # by label of the variant
    verdicts: Mapping[str, LadderVerdict]
    currencies: Sequence[str]  # of speed-ups; the last one decides
    outcomes: Sequence[PredictionOutcome] = ()
    warnings: Sequence[str] = ()  # what weakens or prevents a law or a verdict

    @property
    def baseline(self) -> Arm:
        return self.arms[0]


def analyze_ladder(
    arms: Sequence[Arm],
    *,
    asymptote: float | None = None,
    currencies: Sequence[str] | None = None,
    outcomes: Sequence[PredictionOutcome] = (),
) -> LadderResults:
    """Fits laws, measures speed-ups over the first arm, and judges.

    Rungs that are missing and losses that follow no law become warnings: a diverged arm is a
    result.

    Args:
      arms: One or more; with one there is only its law.
      asymptote: Pins that of the laws (linf=), in nats per token.
      currencies: Of speed-ups, the deciding one last; by default FLOPs, and measured time where all
        arms have it.
      outcomes: Of `check_preregistered`.
    """
    baseline, *variants = arms
    warnings = [line for arm in arms for line in warnings_of(arm)]
    laws: dict[str, LawPosterior] = {}
    for arm in arms:
        try:
            laws[arm.label] = fit_law(arm, asymptote)
        except UserError as error:
            warnings.append(str(error))
    if currencies is None:
        timed = variants and all(has_times(baseline, variant, TIME) for variant in variants)
        currencies = (FLOPS, TIME) if timed else (FLOPS,)
    speedups: dict[str, Speedup] = {}
    for variant in variants:
        if baseline.label in laws:
            try:
                speedups[variant.label] = measure_speedup(baseline, variant, laws[baseline.label])
            except UserError as error:
                warnings.append(str(error))
    verdicts: dict[str, LadderVerdict] = {}
    if len(baseline.rungs) >= MIN_RUNGS_TO_PROJECT:
        verdicts = {
            variant.label: judge(
                baseline,
                variant,
                speedups.get(variant.label),
                currencies=currencies,
                num_variants=len(variants),
            )
            for variant in variants
        }
    elif variants:
        warnings.append(
            f"{len(baseline.rungs)} rungs give no verdict. Add rungs: at least "
            f"{MIN_RUNGS_TO_PROJECT}."
        )
    return LadderResults(
        arms=arms,
        laws=laws,
        speedups=speedups,
        verdicts=verdicts,
        currencies=currencies,
        outcomes=outcomes,
        warnings=warnings,
    )


def summary_of(results: LadderResults) -> list[str]:
    """Returns the ladder's conclusions in sentences: verdicts, predictions, laws, then caveats."""
    lines = [line for verdict in results.verdicts.values() for line in verdict.sentences]
    lines += map(outcome_sentence, results.outcomes)
    lines += map(law_sentence, results.laws.values())
    return [*lines, *results.warnings]


def outcome_sentence(outcome: PredictionOutcome) -> str:
    """Returns a prediction and its outcome in words."""
    prediction = format_interval(outcome.prediction, digits=4)
    text = f"{outcome.label} at {outcome.compute:.3g} FLOPs: predicted {prediction}"
    if outcome.loss is None:
        return f"{text}; it has not run yet."
    place = "inside" if outcome.is_inside else "outside"
    return f"{text}; measured {outcome.loss:.4f}, {place} the interval."


def law_sentence(law: LawPosterior) -> str:
    """Returns a law in words. Its parameters trade off, so they are not tested."""
    exponent = format_interval(Interval.of(law.exponent))
    pinned = "pinned at " if law.is_pinned else ""
    asymptote = (
        f"{law.asymptote[0]:g}" if law.is_pinned else format_interval(Interval.of(law.asymptote))
    )
    line = f"{law.label}: exponent {exponent}, asymptote {pinned}{asymptote}"
    if len(law.computes) >= MIN_RUNGS_TO_PROJECT:
        compute = MAX_PROJECTION * law.top
        prediction = format_interval(law.predict(compute), digits=4)
        line += f"; loss at {compute:.3g} FLOPs, {MAX_PROJECTION:g} times the top: {prediction}"
    return f"{line}."


RUNG_HEADER = (
    "configuration",
    "FLOPs",
    "parameters",
    "width",
    "layers",
    "tokens",
    "tokens/parameter",
    "learning rate",
    "runs",
    "loss",
    "sd",
    "residual",
    "S",
    "seconds",
)


def rung_table(results: LadderResults) -> list[list[str]]:
    """Returns the cells of one row per arm and rung, under RUNG_HEADER."""
    return [_cells(row) for row in rung_rows(results)]


def _cells(row: JsonObject) -> list[str]:
    def optional(name: str, template: str) -> str:
        return formatting.ABSENT if row[name] is None else template.format(row[name])

    runs = str(row["completed"])
    if row["diverged"]:
        runs += f" ({row['diverged']} diverged)"
    speedup = formatting.ABSENT
    if row["speedup"] is not None:
        speedup = format_interval(Interval(row["speedup_low"], row["speedup"], row["speedup_high"]))
    return [
        row["configuration"],
        f"{row['flops']:.3g}",
        formatting.short_count(row["parameters"]),
        optional("width", "{}"),
        optional("layers", "{}"),
        formatting.short_count(row["tokens"]),
        f"{row['tokens_per_parameter']:.3g}",
        optional("learning_rate", "{:.3g}"),
        runs,
        optional("loss", "{:.4f}"),
        optional("loss_sd", "{:.4f}"),
        optional("residual", "{:+.4f}"),
        speedup,
        optional("seconds", "{:,.1f}"),
    ]


def rung_rows(results: LadderResults) -> list[JsonObject]:
    """Returns one row of ladder.csv per arm and rung.

    `speedup` is in the deciding currency, at the rung alone; `seconds` is a run's measured training
    time.
    """
    rows = []
    for arm in results.arms:
        residuals = _by_compute(results.laws.get(arm.label))
        speedups = _speedups_by_compute(results, arm.label)
        for rung in arm.rungs:
            speedup = speedups.get(rung.compute)
            rows.append(
                measured_row(arm.label, rung)
                | {
                    "residual": residuals.get(rung.compute),
                    "speedup": speedup and speedup.median,
                    "speedup_low": speedup and speedup.low,
                    "speedup_high": speedup and speedup.high,
                    "seconds": _seconds(rung),
                }
            )
    return rows


def measured_row(label: str, rung: Rung) -> JsonObject:
    """Returns what was measured at a rung, for a table."""
    return {
        "configuration": label,
        "flops": rung.compute,
        "parameters": rung.parameters,
        "width": rung.width,
        "layers": rung.depth,
        "tokens": rung.tokens,
        "tokens_per_parameter": rung.tokens_per_parameter,
        "learning_rate": rung.learning_rate,
        "completed": len(rung.losses),
        "diverged": len(rung.diverged),
        "loss": rung.loss if rung.losses else None,
        "loss_sd": _deviation(rung),
    }


def _deviation(rung: Rung) -> float | None:
    return statistics.stdev(rung.losses.values()) if len(rung.losses) > 1 else None


def _seconds(rung: Rung) -> float | None:
    return rung.tokens * statistics.median(rung.token_seconds) if rung.token_seconds else None


def _by_compute(law: LawPosterior | None) -> dict[float, float]:
    if law is None:
        return {}
    return dict(zip(law.computes.tolist(), law.residuals.tolist(), strict=True))


def _speedups_by_compute(results: LadderResults, label: str) -> dict[float, Interval]:
    speedup = results.speedups.get(label)
    if speedup is None:
        return {}
    intervals = speedup.at_rungs(results.currencies[-1])
    computes = [variant.compute for _, variant in speedup.pairs]
    return dict(zip(computes, intervals, strict=True))


def ladder_json(results: LadderResults) -> JsonObject:
    """Returns ladder.json: measurements, laws and verdicts, from which all else can be redone."""
    return {
        "arms": [arm.to_json() for arm in results.arms],
        "laws": {
            label: {
                "asymptote": [*Interval.of(law.asymptote)],
                "exponent": [*Interval.of(law.exponent)],
                "center_flops": law.center,
                "scale": [*map(math.exp, Interval.of(law.log_scale))],
            }
            for label, law in results.laws.items()
        },
        "verdicts": {
            label: {
                "outcome": verdict.outcome,
                "reason": verdict.reason,
                "baseline": verdict.baseline,
                "currency": verdict.currency,
                "level": verdict.level,
                "speedup": {
                    currency: {place: [*interval] for place, interval in places.items()}
                    for currency, places in verdict.intervals.items()
                },
                "seen": verdict.seen,
            }
            for label, verdict in results.verdicts.items()
        },
        "predictions": [
            outcome._asdict()
            | {"prediction": [*outcome.prediction], "is_inside": outcome.is_inside}
            for outcome in results.outcomes
        ],
        "warnings": [*results.warnings],
    }


def cost_sentence(results: LadderResults) -> str:
    """Returns what all finished runs of a ladder cost together."""
    rungs = [rung for arm in results.arms for rung in arm.rungs]
    counts = [len(rung.losses) + len(rung.diverged) for rung in rungs]
    flops = sum(count * rung.compute for count, rung in zip(counts, rungs, strict=True))
    text = f"{sum(counts)} runs: {formatting.format_operations(flops)} FLOPs"
    seconds = [_seconds(rung) for rung in rungs]
    known = [value for value in seconds if value is not None]
    if len(known) == len(rungs):
        total = sum(count * value for count, value in zip(counts, known, strict=True))
        text += f", {formatting.short_time(total)} of training steps"
    if any(arm.num_diverged for arm in results.arms):
        text += "; diverged runs are counted whole"
    return f"{text}."


PREDICTION_HEADER = ("configuration", "FLOPs", "predicted", "measured", "inside", "SHA-256")


def prediction_table(outcomes: Sequence[PredictionOutcome]) -> list[list[str]]:
    """Returns the cells of one row per preregistered prediction, under PREDICTION_HEADER."""
    return [
        [
            outcome.label,
            f"{outcome.compute:.3g}",
            format_interval(outcome.prediction, digits=4),
            formatting.format_loss(outcome.loss),
            {None: formatting.ABSENT, True: "yes", False: "no"}[outcome.is_inside],
            outcome.sha256,
        ]
        for outcome in outcomes
    ]


def speedup_title(results: LadderResults) -> str:
    return f"Effective speed-up in {describe_currency(results.currencies[-1])}"
