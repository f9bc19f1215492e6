"""Coverage of a ladder's intervals on simulated scaling laws, and its verdicts.

    python benchmarks/ladder_coverage.py              # all designs, 1,000 laws each: minutes
    python benchmarks/ladder_coverage.py --laws 200 "6 rungs x 2 seeds"

Each law is drawn from MaxText/experiments/ladder/simulated_ladder.py. The top rung is held out of
the fit that predicts it; the speed-up is measured on all rungs, at the top by the line, and as a
constant. Prints the table of docs/explanation/scaling_ladders.md.

    python benchmarks/ladder_coverage.py --bootstraps  # how often common bootstraps are right
"""

import argparse
import collections
import dataclasses
import math
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from MaxText.experiments.ladder.effective_speedup import measure_speedup
from MaxText.experiments.ladder.ladder_verdict import judge
from MaxText.experiments.ladder.measurements import Arm, Interval
from MaxText.experiments.ladder.scaling_law import fit_given_asymptotes, fit_law
from MaxText.experiments.ladder.simulated_ladder import (
    draw_law,
    draw_noise,
    simulate_ladder,
)


@dataclasses.dataclass(frozen=True)
class Design:
    """A ladder to simulate, and what its laws and noise are."""

    rungs: int = 6
    seeds: int = 2
    span: float = 1e3  # of compute
    speedup: float | None = None  # drawn if None
    asymptote: float | None = None  # drawn if None
    rung_to_seed: float = 1.0  # ratio of deviations
    drift_deviation: float = 0.0  # of ln S per e-fold
    bend: float = 0.0  # nats per token at the lowest rung
    bottom_noise: float = 1.0  # factor of the noise there
    laws: int = 1000


DESIGNS = {
    "5 rungs x 3 seeds": Design(rungs=5, seeds=3),
    "6 rungs x 2 seeds": Design(),
    "6 rungs x 3 seeds": Design(seeds=3),
    "8 rungs x 2 seeds": Design(rungs=8),
    "rungs without noise of their own": Design(rung_to_seed=0.0),
    "rungs three times as noisy as seeds": Design(rung_to_seed=3.0),
    "asymptote 0.5": Design(asymptote=0.5),
    "asymptote 3.5": Design(asymptote=3.5),
    "span 100": Design(span=1e2),
    "lowest rung bent by 0.03": Design(bend=0.03),
    "speed-up drifts, sd 0.03 per e-fold": Design(drift_deviation=0.03),
    "noise 3 times as large at the bottom": Design(bottom_noise=3.0),
    "A/A, 6 rungs x 2 seeds": Design(speedup=1.0, laws=2000),
    "S = 1.10, 6 rungs x 2 seeds": Design(speedup=1.1),
    "S = 1.05, 8 rungs x 3 seeds": Design(rungs=8, seeds=3, speedup=1.05),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage of a ladder's intervals.")
    parser.add_argument("designs", nargs="*", help="names; all by default")
    parser.add_argument("--laws", type=int, help="per design, instead of 1,000 (A/A: 2,000)")
    parser.add_argument("--bootstraps", action="store_true", help="of other procedures instead")
    arguments = parser.parse_args()
    if arguments.bootstraps:
        for name, share in cover_by_bootstraps(arguments.laws or 300).items():
            print(f"{name}: {100 * share:.1f} %")
        return
    print("| design | held-out top rung | S at top, line | S constant | worked | did not |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in arguments.designs or DESIGNS:
        design = DESIGNS[name]
        counts = cover(design, arguments.laws or design.laws)
        cells = [f"{100 * counts[key]:.1f} / {counts[key + ' width']:.3f}" for key in INTERVALS]
        cells += [f"{100 * counts[outcome]:.1f}" for outcome in ("worked", "did not work")]
        print(f"| {name} | {' | '.join(cells)} |")


INTERVALS = ("prediction", "line", "constant")
NUM_BOOTSTRAPS = 200


def cover(design: Design, num_laws: int) -> Mapping[str, float]:
    """Returns shares of laws.

    Keys are each of INTERVALS (that contain the truth), with " width" (their median width, of ln S
    for speed-ups), and the outcomes of verdicts.
    """
    generator = np.random.default_rng(0)
    computes = np.geomspace(1e13, 1e13 * design.span, design.rungs)
    hits: dict[str, list[float]] = collections.defaultdict(list)
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(num_laws):
        law = draw_law(
            generator,
            asymptote=design.asymptote,
            speedup=design.speedup,
            drift_deviation=design.drift_deviation,
            bend=design.bend,
        )
        noise = draw_noise(generator, design.rung_to_seed)
        baseline, variant = simulate_ladder(
            generator,
            computes,
            design.seeds,
            law=law,
            noise=noise,
            bottom_noise=design.bottom_noise,
        )
        below_top = Arm(baseline.label, baseline.rungs[:-1])
        prediction = fit_law(below_top, generator=generator).predict(computes[-1], beyond=True)
        fitted = fit_law(baseline, generator=generator)
        speedup = measure_speedup(baseline, variant, fitted, generator)
        true_speedup = math.exp(law.log_speedup)
        truths: list[tuple[str, Interval, float]] = [
            ("prediction", prediction, baseline.rungs[-1].loss),
            ("line", _log(speedup.at(speedup.top)), math.log(true_speedup)),
            ("constant", _log(speedup.constant()), math.log(true_speedup)),
        ]
        for key, interval, truth in truths:
            hits[key].append(interval.contains(truth))
            hits[f"{key} width"].append(interval.high - interval.low)
        outcomes[judge(baseline, variant, speedup).outcome] += 1
    shares = {key: float(np.mean(hits[key])) for key in INTERVALS}
    widths = {f"{key} width": float(np.median(hits[f"{key} width"])) for key in INTERVALS}
    verdicts = {key: outcomes[key] / num_laws for key in ("worked", "did not work")}
    return shares | widths | verdicts


def cover_by_bootstraps(num_laws: int) -> Mapping[str, float]:
    """Returns how often bootstraps' intervals of the held-out top rung contain it.

    Of 5 rungs with 3 seeds. Their error is what resampling moves: seeds, or seeds and rungs.
    """
    generator = np.random.default_rng(0)
    computes = np.geomspace(1e13, 1e16, 5)
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    for _ in range(num_laws):
        law = draw_law(generator)
        baseline, _ = simulate_ladder(generator, computes, 3, law=law, noise=draw_noise(generator))
        losses = np.array([[*rung.losses.values()] for rung in baseline.rungs])
        for resampled in ("seeds", "seeds and rungs"):
            for asymptote in (None, 1.6):
                predicted = _bootstrap(
                    generator, computes, losses[:-1], asymptote, rungs=resampled != "seeds"
                )
                pinned = "" if asymptote is None else f", asymptote pinned at {asymptote}"
                interval = Interval.of(predicted)
                hits[f"{resampled}{pinned}"].append(interval.contains(losses[-1].mean()))
    return {name: float(np.mean(values)) for name, values in hits.items()}


def _bootstrap(
    generator: np.random.Generator,
    computes: np.ndarray,
    losses: np.ndarray,
    asymptote: float | None,
    *,
    rungs: bool,
) -> np.ndarray:
    """Returns predictions at the last compute by least-squares laws of resampled runs.

    Args:
      generator: Of random numbers.
      computes: Of all rungs, the held-out one last: float [R + 1].
      losses: Of the runs, float [R, seeds].
      asymptote: Pins it; by default that of least squares, on a grid.
      rungs: Whether to resample rungs, besides the seeds of each.
    """
    x = np.log(computes / computes[0])
    count, num_seeds = losses.shape
    predictions = []
    while len(predictions) < NUM_BOOTSTRAPS:
        index = generator.integers(count, size=count) if rungs else np.arange(count)
        if len({*index}) < (2 if asymptote else 3):
            continue  # more parameters than rungs
        seeds = generator.integers(num_seeds, size=(count, num_seeds))
        means = np.take_along_axis(losses[index], seeds, axis=1).mean(1)
        grid = np.linspace(0.0, 0.97, 98) * means.min()
        if asymptote is not None:
            # A law can only be pinned below its losses.
            grid = np.array([min(asymptote, 0.97 * means.min())])
        with np.errstate(all="ignore"):  # an asymptote that fits badly may diverge
            fits = fit_given_asymptotes(x[:-1][index], means, grid)
        squares = np.where(fits.parameters[:, 1] > 0, fits.squared_residuals, np.inf)
        best = int(np.nan_to_num(squares, nan=np.inf).argmin())
        log_scale, exponent = fits.parameters[best]
        predictions.append(grid[best] + math.exp(log_scale - exponent * x[-1]))
    return np.array(predictions)


def _log(interval: Interval) -> Interval:
    return Interval(*map(math.log, interval))


if __name__ == "__main__":
    main()
