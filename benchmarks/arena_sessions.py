"""Error and power of arena sessions, simulated with the functions that judge real ones.

    python benchmarks/arena_sessions.py [sessions=2000]

A session has 20 candidates of at most 10 seeds, and alpha=0.05. The loss of a run is a sum of what
its seed does to every model, and of noise of its own: `pairing` is the share of the variance of a
difference that pairing by seed removes. Standard deviations over seeds are 1.
docs/how-to/let_an_agent_search.md has the table that this prints.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText.experiments.arena.sequential_test import (
    FIRST_LOOK,
    SequentialTest,
    standard_deviation,
    take_look,
)
from MaxText.formatting import format_table

ALPHA = 0.05
NUM_CANDIDATES = 20
MAX_SEEDS = 10
# The rule was chosen with seeds of one and two digits.
_SEED = 20_261_130

Distribution = Literal["normal", "student", "exponential"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedSessions:
    """Many sessions of one kind.

    Attributes:
      pairing: Share of the variance that pairing removes.
      effects: Improvement of each candidate, in standard deviations over seeds.
      noise_spread: Standard deviation of the logarithm of a candidate's own noise.
      quiet_share: Share of candidates whose own noise is a tenth of that of the others.
      distribution: Of the noise: normal, Student's with 4 degrees of freedom, or exponential above
        its mean, as that of candidates that are sometimes unstable. The baseline's is normal then.
      gives_up: Whether futile candidates are discarded.
    """

    pairing: float
    effects: Sequence[float] = (0.0,) * NUM_CANDIDATES
    noise_spread: float = 0.0
    quiet_share: float = 0.0
    distribution: Distribution = "normal"
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


def draw_noise(
    generator: np.random.Generator, distribution: Distribution, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns noise with a mean of 0 and a standard deviation of 1."""
    if distribution == "student":
        return generator.standard_t(4, shape) / np.sqrt(2)
    if distribution == "exponential":
        return generator.standard_exponential(shape) - 1
    return generator.standard_normal(shape)


def simulate(kind: SimulatedSessions, num_sessions: int, seed: int = _SEED) -> SimulatedResults:
    """Returns the results of simulated sessions."""
    generator = np.random.default_rng(seed)
    S, K, N = num_sessions, len(kind.effects), MAX_SEEDS
    test = SequentialTest(level=ALPHA / K, max_seeds=N)
    own_std = np.sqrt(1 - kind.pairing)
    # What a seed does to every model cancels in differences, so that it need not be drawn.
    of_baseline: Distribution = "student" if kind.distribution == "student" else "normal"
    baseline_S1N = draw_noise(generator, of_baseline, (S, 1, N))
    candidate_SKN = draw_noise(generator, kind.distribution, (S, K, N))
    scale_SK1 = np.exp(kind.noise_spread * generator.standard_normal((S, K, 1)))
    is_quiet_SK1 = generator.random((S, K, 1)) < kind.quiet_share
    # A quiet candidate repeats the baseline's noise with the same seed, but for a tenth.
    noise_SKN = np.where(
        is_quiet_SK1, 0.1 * candidate_SKN, baseline_S1N - scale_SK1 * candidate_SKN
    )
    effects_K = np.array(kind.effects)
    improvements_SKN = effects_K[:, None] + own_std * noise_SKN

    is_active_SK = np.ones((S, K), bool)
    results = SimulatedResults(
        kept_SK=np.zeros((S, K), bool),
        seeds_SK=np.zeros((S, K), int),
        covered_SK=np.ones((S, K), bool),
    )
    for num_seeds in range(FIRST_LOOK, N + 1):
        first_SKN = improvements_SKN[..., :num_seeds]
        look = take_look(test, num_seeds, first_SKN.mean(axis=-1), standard_deviation(first_SKN))
        results.seeds_SK[is_active_SK] = num_seeds
        results.kept_SK[is_active_SK & look.keeps] = True
        is_missed_SK = (effects_K < look.low) | (effects_K > look.high)
        results.covered_SK[is_active_SK & is_missed_SK] = False
        is_active_SK &= ~look.keeps
        if kind.gives_up:
            is_active_SK &= ~look.is_futile
    return results


NULL_KINDS = {
    "normal noise": SimulatedSessions(pairing=0.75),
    "normal noise, none given up": SimulatedSessions(pairing=0.75, gives_up=False),
    "Student's t, 4 degrees of freedom": SimulatedSessions(pairing=0.75, distribution="student"),
    "noise of candidates spreads by 30 %": SimulatedSessions(pairing=0.75, noise_spread=0.3),
    "noise of candidates spreads by 50 %": SimulatedSessions(pairing=0.75, noise_spread=0.5),
    "half of the candidates have a tenth": SimulatedSessions(pairing=0.75, quiet_share=0.5),
    "exponential noise of candidates": SimulatedSessions(pairing=0.75, distribution="exponential"),
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
    for pairing in (0.99, 0.98, 0.96, 0.94, 0.9, 0.85, 0.75):
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
