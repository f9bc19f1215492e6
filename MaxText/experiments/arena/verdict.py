"""Verdicts: what follows from the runs and looks of a candidate, and how it is reported."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from MaxText import exit_codes
from MaxText.experiments.arena.ledger import (
    BASELINE,
    CandidateRow,
    FinalRow,
    Ledger,
    LookRow,
    Outcome,
    TrialRow,
)
from MaxText.experiments.arena.sequential_test import (
    FUTILITY,
    SequentialTest,
    standard_deviation,
    take_look,
)
from MaxText.experiments.arena.session import Session
from MaxText.experiments.seed_statistics import Estimate, format_difference, paired_difference
from MaxText.formatting import pluralize

# Of a clear loser: how many standard deviations over seeds its loss is above the baseline's, from
# the second of the evaluations during a run on. Losses of early steps cross.
_CLEAR_LOSS = 10.0
_FIRST_CLEAR_EVALUATION = 1
_EXIT_CODES: dict[Outcome, int] = {
    "keep": exit_codes.SUCCESS,
    "undecided": exit_codes.UNDECIDED,
    "discard": exit_codes.DISCARDED,
    "refused": exit_codes.REFUSED,
}


def baseline_std(ledger: Ledger) -> float | None:
    """Returns the standard deviation of the baseline's loss over seeds; None before two runs."""
    losses = ledger.losses(BASELINE).values()
    return statistics.stdev(losses) if len(losses) > 1 else None


def describe_noise(ledger: Ledger) -> str:
    """Returns a sentence about the scatter of the baseline's loss."""
    std = baseline_std(ledger)
    seeds = pluralize(len(ledger.losses(BASELINE)), "seed")
    if std is None:
        return f"the baseline has run {seeds}"
    return f"the baseline's loss scatters by {std:.4f} nats/token (sd over {seeds})"


def paired_losses(baseline: dict[int, float], other: dict[int, float]) -> list[float]:
    """Returns the improvements of `other` over the baseline by seed, in order of the seeds."""
    return [baseline[seed] - other[seed] for seed in sorted(baseline.keys() & other.keys())]


def look_at(ledger: Ledger, test: SequentialTest, owner: str, num_seeds: int) -> LookRow:
    """Returns the look of a candidate after its first seeds.

    Args:
      ledger: With both runs of each of these seeds completed.
      test: Of the session.
      owner: Name of the candidate.
      num_seeds: How many seeds count.
    """
    baseline = ledger.losses(BASELINE)
    improvements = paired_losses(baseline, ledger.losses(owner))[:num_seeds]
    std = standard_deviation(np.array(improvements), mean_loss=statistics.fmean(baseline.values()))
    look = take_look(test, num_seeds, statistics.fmean(improvements), std)
    return LookRow(
        owner=owner,
        num_seeds=num_seeds,
        improvement=float(look.improvement),
        low=float(look.low),
        high=float(look.high),
        predictive_power=float(look.predictive_power),
        std=float(std),
    )


def decide(test: SequentialTest, look: LookRow) -> tuple[Outcome, str] | None:
    """Returns the verdict that a look allows, with its reason; None to add a seed.

    Args:
      test: Of the session.
      look: The newest one.
    """
    effect = f"{look.improvement:+.4f} nats/token"
    least = f"{test.min_effect:g}" if test.min_effect else "0"
    if look.low > test.min_effect:
        return "keep", f"the improvement of {effect} exceeds {least} at this look's boundary"
    is_last = look.num_seeds == test.max_seeds
    if is_last and look.improvement > test.min_effect:
        return "undecided", f"the improvement of {effect} is not distinguished from {least}"
    if is_last or look.predictive_power < FUTILITY:
        return "discard", (
            f"with an improvement of {effect} so far, the chance that more seeds keep it is "
            f"{look.predictive_power:.1%}"
        )
    return None


def clear_loss(
    evaluations: Sequence[float], baseline: Sequence[Sequence[float]], same_seed: Sequence[float]
) -> str:
    """Returns why a run at work is a clear loser; "" if it is not.

    Its loss at an evaluation is above that of the baseline's run with the same seed by more than 10
    standard deviations of the baseline's over seeds. Only whole runs enter a difference, so the
    rule can discard a candidate but not bias the interval of one that is kept.

    Args:
      evaluations: Validation losses of the run so far.
      baseline: Those of the baseline's runs, by seed.
      same_seed: Those of the baseline's run with its seed.
    """
    for index in range(_FIRST_CLEAR_EVALUATION, min(len(evaluations), len(same_seed))):
        losses = [run[index] for run in baseline if len(run) > index]
        if len(losses) < 2:
            continue
        std = statistics.stdev(losses)
        excess = evaluations[index] - same_seed[index]
        if std and excess > _CLEAR_LOSS * std:
            return (
                f"after {(index + 1) / len(same_seed):.0%} of a run its loss was "
                f"{excess:.4f} nats/token above the baseline's, {excess / std:,.0f} times the sd "
                "over seeds"
            )
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What arena.py prints about a candidate.

    Attributes:
      effect_nats: Mean difference of the losses, candidate minus baseline, in nats per token:
        negative is better. None without a look, and for a clear loser.
      interval_nats: Its repeated confidence interval at `confidence`.
      std_nats: Standard deviation of the paired differences.
      seeds: Of its runs.
      cost: Counted by the session, of the candidate; `baseline_cost` of the baseline.
      is_repeated: Whether it was answered from the ledger.
      candidates_left: That the session may still run.
    """

    candidate: str
    verdict: Outcome
    effect_nats: float | None
    effect_bits_per_byte: float | None
    interval_nats: tuple[float, float] | None
    std_nats: float | None
    confidence: float
    seeds: tuple[int, ...]
    reasons: tuple[str, ...]
    cost: dict[str, Any]
    baseline_cost: dict[str, Any]
    source_hash: str
    command: str
    is_repeated: bool
    candidates_left: int

    @property
    def exit_code(self) -> int:
        """Exit code of arena.py for this candidate alone."""
        return _EXIT_CODES[self.verdict]

    def to_json(self) -> str:
        """Returns the verdict as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        line = f"{self.candidate}: {self.verdict}"
        if self.effect_nats is not None and self.interval_nats is not None:
            low, high = self.interval_nats
            line += (
                f", {self.effect_nats:+.4f} nats/token ({self.confidence:.1%} interval {low:+.4f} "
                f"to {high:+.4f}, {pluralize(len(self.seeds), 'seed')})"
            )
        return "\n  ".join([f"{line}{' (from the ledger)' * self.is_repeated}", *self.reasons])


def verdict_of(session: Session, ledger: Ledger, name: str, *, is_repeated: bool) -> Verdict:
    """Returns the verdict on a candidate that has one.

    Args:
      session: Of the candidate.
      ledger: Of the session.
      name: Of the candidate.
      is_repeated: Whether it was decided before this call.
    """
    row = ledger.candidate(name)
    decision = ledger.verdict(name)
    assert row is not None
    assert decision is not None
    trials = ledger.of(TrialRow, name)
    look = last_look(ledger, name)
    bits = None if look is None else bits_per_byte(-look.improvement, trials)
    return Verdict(
        candidate=name,
        verdict=decision.verdict,
        effect_nats=None if look is None else -look.improvement,
        effect_bits_per_byte=bits,
        interval_nats=None if look is None else (-look.high, -look.low),
        std_nats=None if look is None else look.std,
        confidence=1 - 2 * session.test.level,
        seeds=tuple(sorted(trial.seed for trial in trials)),
        reasons=decision.reasons,
        cost=cost_of(ledger, row),
        baseline_cost=cost_of(ledger, ledger.candidate(BASELINE)),
        source_hash=row.source_hash,
        command=f"arena.py candidate={json.dumps(row.spec)} output={session.folder}",
        is_repeated=is_repeated,
        candidates_left=candidates_left(session, ledger),
    )


def last_look(ledger: Ledger, name: str) -> LookRow | None:
    """Returns the last look of a candidate; None without one, and if it lost within a run.

    Such a run has no loss, so that what its whole runs say alone would be too good.
    """
    if any(trial.state != "completed" for trial in ledger.of(TrialRow, name)):
        return None
    return next(iter(reversed(ledger.of(LookRow, name))), None)


def bits_per_byte(nats_per_token: float, trials: Sequence[TrialRow]) -> float | None:
    """Converts a loss; None if the bytes of the validation text are unknown."""
    known = [trial.bytes_per_token for trial in trials if trial.bytes_per_token]
    return nats_per_token / known[0] / math.log(2) if known else None


def cost_of(ledger: Ledger, row: CandidateRow | None) -> dict[str, Any]:
    """Returns what a run costs: as counted, and as measured in its runs."""
    if row is None or row.cost is None:
        return {}
    cost: dict[str, Any] = {**row.cost, "steps": row.steps}
    cost["flops"] = row.cost["flops_per_token"] * row.cost["tokens_per_step"] * row.steps
    cost["tokens"] = row.cost["tokens_per_step"] * row.steps
    completed = [trial for trial in ledger.of(TrialRow, row.name) if trial.state == "completed"]
    if completed:
        cost["train_seconds"] = statistics.fmean(trial.train_seconds for trial in completed)
    if row.seconds_per_step is not None:
        cost["seconds_per_step"] = row.seconds_per_step
    return cost


def num_tried(ledger: Ledger) -> int:
    """Returns how many candidates have a share of alpha: all that were not refused at first."""
    return sum(not row.reasons for row in ledger.candidates)


def candidates_left(session: Session, ledger: Ledger) -> int:
    """Returns how many further candidates the session may run."""
    return session.spec.num_candidates - num_tried(ledger)


def final_difference(row: FinalRow) -> Estimate:
    """Returns the difference on the hidden half, with Student's 95 % interval over seeds."""
    baseline, kept = (
        {int(seed): loss for seed, loss in losses.items()}
        for losses in (row.baseline_losses, row.losses)
    )
    return paired_difference(baseline, kept)


def describe_final(row: FinalRow) -> str:
    """Returns a sentence about the difference on the hidden half."""
    return "on the hidden half: " + format_difference(BASELINE, row.owner, final_difference(row))


def exit_code_of(verdicts: Sequence[Verdict]) -> int:
    """Returns the code of the best verdict: keep, undecided, discard, refused."""
    outcomes = {verdict.verdict for verdict in verdicts}
    codes = [code for outcome, code in _EXIT_CODES.items() if outcome in outcomes]
    return codes[0] if codes else exit_codes.SUCCESS
