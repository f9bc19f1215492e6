"""Error and power of arena sessions, simulated with the functions that judge real ones.

    python benchmarks/arena_sessions.py [sessions=2000]

A session has 20 candidates of at most 10 seeds, one after the other, and alpha=0.05. The loss of a
run is a sum of what its seed does to every model, and of noise of its own: `pairing` is the share
of the variance of a difference that pairing by seed removes. Standard deviations over seeds are 1.
docs/how-to/let_an_agent_search.md has the table that this prints.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText.experiments.arena.sequential_test import (
    FIRST_LOOK,
    FUTILITY,
    Noise,
    SequentialTest,
    estimate_noise,
    pool_session,
    take_look,
)
from MaxText.formatting import format_table

ALPHA = 0.05
NUM_CANDIDATES = 20
MAX_SEEDS = 10
CALIBRATION_SEEDS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedSessions:
    """Many sessions of one kind.

    Attributes:
      pairing: Share of the variance that pairing removes.
      effects: Improvement of each candidate, in standard deviations over seeds.
      noise_spread: Standard deviation of the logarithm of a candidate's own noise.
      quiet_share: Share of candidates whose own noise is a tenth of that of the others.
      degrees_of_freedom: Of Student's distribution of the noise; None for a normal one.
      gives_up: Whether futile candidates are discarded.
    """

    pairing: float
    effects: Sequence[float] = (0.0,) * NUM_CANDIDATES
    noise_spread: float = 0.0
    quiet_share: float = 0.0
    degrees_of_freedom: int | None = None
    gives_up: bool = True


@dataclasses.dataclass(frozen=True)
class SimulatedResults:
    """Results by candidate [K], and of whole sessions [S].

    Attributes:
      kept_SK: Whether each candidate was kept.
      seeds_SK: Seeds that it took.
      covered_SK: Whether all of its intervals contained its effect.
    """

    kept_SK: np.ndarray
    seeds_SK: np.ndarray
    covered_SK: np.ndarray


def simulate(kind: SimulatedSessions, num_sessions: int, seed: int = 0) -> SimulatedResults:
    """Returns the results of simulated sessions."""
    generator = np.random.default_rng(seed)
    num_candidates = len(kind.effects)
    test = SequentialTest(level=ALPHA / num_candidates, max_seeds=MAX_SEEDS)
    own_std = np.sqrt(1 - kind.pairing)

    def draw(num_seeds: int) -> np.ndarray:
        """Returns noise of runs that has nothing to do with their seed, [S, seeds]."""
        shape = (num_sessions, num_seeds)
        if kind.degrees_of_freedom is None:
            return own_std * generator.standard_normal(shape)
        df = kind.degrees_of_freedom
        return own_std * generator.standard_t(df, shape) / np.sqrt(df / (df - 2))

    # What a seed does to every model cancels in differences, so that it need not be drawn.
    baseline_SN = draw(MAX_SEEDS)
    calibration = baseline_SN[:, :CALIBRATION_SEEDS] - draw(CALIBRATION_SEEDS)
    calibration_noise = Noise(
        calibration.var(axis=1, ddof=1), np.full(num_sessions, CALIBRATION_SEEDS - 1.0)
    )
    other_noises: list[Noise] = []
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for effect in kind.effects:
        scale_S = np.exp(kind.noise_spread * generator.standard_normal(num_sessions))
        scale_S = np.where(generator.random(num_sessions) < kind.quiet_share, 0.1, scale_S)
        # A quiet candidate repeats the baseline's noise with the same seed.
        candidate_SN = draw(MAX_SEEDS) * scale_S[:, None]
        shared_S = np.where(scale_S == 0.1, 0.0, 1.0)
        improvements_SN = effect + baseline_SN * shared_S[:, None] - candidate_SN
        active_S = np.ones(num_sessions, bool)
        kept_S = np.zeros(num_sessions, bool)
        covered_S = np.ones(num_sessions, bool)
        seeds_S = np.zeros(num_sessions, int)
        final_variance_S = np.zeros(num_sessions)
        others = pool_session(calibration_noise, other_noises)
        for num_seeds in range(FIRST_LOOK, MAX_SEEDS + 1):
            first = improvements_SN[:, :num_seeds]
            own = Noise(first.var(axis=1, ddof=1), np.full(num_sessions, num_seeds - 1.0))
            noise = estimate_noise(own, others)
            look = take_look(test, num_seeds, first.mean(axis=1), noise)
            seeds_S[active_S] = num_seeds
            final_variance_S[active_S] = first.var(axis=1, ddof=1)[active_S]
            covered_S &= ~active_S | ((look.low <= effect) & (effect <= look.high))
            kept_S |= active_S & look.keeps
            futile_S = kind.gives_up & (look.predictive_power < FUTILITY)
            active_S &= ~(look.keeps | futile_S)
        other_noises.append(Noise(final_variance_S, seeds_S - 1.0))
        columns.append((kept_S, seeds_S, covered_S))
    kept, seeds, covered = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    return SimulatedResults(kept, seeds, covered)


NULL_KINDS = {
    "normal noise": SimulatedSessions(pairing=0.75),
    "normal noise, none given up": SimulatedSessions(pairing=0.75, gives_up=False),
    "Student's t, 4 degrees of freedom": SimulatedSessions(pairing=0.75, degrees_of_freedom=4),
    "noise of candidates spreads by 30 %": SimulatedSessions(pairing=0.75, noise_spread=0.3),
    "noise of candidates spreads by 50 %": SimulatedSessions(pairing=0.75, noise_spread=0.5),
    "half of the candidates have a tenth": SimulatedSessions(pairing=0.75, quiet_share=0.5),
}
# Five good candidates among 20.
_EFFECTS = tuple(float(index % 4 == 0) for index in range(NUM_CANDIDATES))


def main() -> None:
    """Prints both tables."""
    num_sessions = int(dict(word.split("=") for word in sys.argv[1:]).get("sessions", 2000))
    rows = []
    for name, kind in NULL_KINDS.items():
        results = simulate(kind, num_sessions)
        share = float(results.kept_SK.any(axis=1).mean())
        error = np.sqrt(share * (1 - share) / num_sessions)
        rows.append([name, f"{share:.1%} +- {error:.1%}", f"{results.seeds_SK.mean():.1f}"])
    header = ["20 candidates without effect", "sessions that keep any", "seeds"]
    print(format_table(header, rows))
    rows = []
    for pairing in (0.85, 0.8, 0.75, 0.7, 0.5):
        results = simulate(SimulatedSessions(pairing=pairing, effects=_EFFECTS), num_sessions)
        is_good = np.array(_EFFECTS) > 0
        rows.append(
            [
                f"{pairing:.0%}",
                f"{results.kept_SK[:, is_good].mean():.1%}",
                f"{results.seeds_SK[:, is_good].mean():.1f}",
                f"{results.seeds_SK[:, ~is_good].mean():.1f}",
                f"{results.covered_SK.mean():.2%}",
            ]
        )
    header = [
        "variance removed by pairing",
        "effect of one sd kept",
        "seeds",
        "seeds without effect",
        "intervals that cover",
    ]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
