"""Verdicts, predictions written in advance, power, and the ladder's files and page."""

import csv
import dataclasses
import json
import math
import re

import numpy as np
import pytest

from benchmarks.ladder_coverage import Design, cover
from MaxText.errors import UserError
from MaxText.experiments.ladder import ladder_report, preregistration
from MaxText.experiments.ladder.effective_speedup import FLOPS, TIME, measure_speedup
from MaxText.experiments.ladder.ladder_power import smallest_speedup
from MaxText.experiments.ladder.ladder_results import (
    RUNG_HEADER,
    analyze_ladder,
    law_sentence,
    rung_table,
    summary_of,
)
from MaxText.experiments.ladder.ladder_verdict import judge, warnings_of
from MaxText.experiments.ladder.measurements import LEVEL, Arm, Rung
from MaxText.experiments.ladder.scaling_law import fit_law
from MaxText.experiments.ladder.simulated_ladder import (
    LadderNoise,
    SimulatedLaw,
    measure_noise,
    simulate_ladder,
)
from MaxText.monitoring.run_record import read_run
from MaxText.reports.report_writer import write_report
from tests.reports.run_files import completed

COMPUTES = np.geomspace(1e13, 1e16, 6)
QUIET = LadderNoise(0.002, 0.002)


def ladder(speedup: float, drift: float = 0.0, noise: LadderNoise = QUIET, rungs: int = 6):
    law = SimulatedLaw(1.6, 0.1, 1.9, log_speedup=math.log(speedup), drift=drift)
    computes = np.geomspace(COMPUTES[0], COMPUTES[-1], rungs)
    return simulate_ladder(np.random.default_rng(0), computes, 2, law=law, noise=noise)


def timed(arm: Arm, factor: float) -> Arm:
    generator = np.random.default_rng(1)
    return Arm(
        arm.label,
        tuple(
            dataclasses.replace(
                rung,
                width=64 * index,
                token_seconds=tuple(1e-6 * factor * generator.lognormal(0, 0.01, 5)),
            )
            for index, rung in enumerate(arm.rungs, 1)
        ),
    )


def diverging(arm: Arm, seed: int) -> Arm:
    """The arm, whose top rung diverged with one seed."""
    top = arm.rungs[-1]
    losses = {number: loss for number, loss in top.losses.items() if number != seed}
    return Arm(
        arm.label,
        (*arm.rungs[:-1], dataclasses.replace(top, losses=losses, diverged=(seed,))),
    )


@pytest.mark.parametrize(
    ("speedup", "drift", "slowdown", "outcome", "reason"),
    [
        (1.25, 0.0, None, "worked", "above 1 in FLOPs"),
        (1.25, 0.0, 1.05, "worked", "above 1 in measured time"),
        (0.8, 0.0, None, "did not work", "below 1 in FLOPs"),
        (1.0, 0.0, None, "not decided", "contains 1"),
        (1.35, 0.1, None, "mixed", "grows with compute"),
        (0.75, -0.1, None, "mixed", "falls with compute"),
        (1.25, -0.12, None, "not decided", "falls with compute: 0.9"),
        (1.2, 0.0, 1.6, "mixed", "above 1 in FLOPs and below 1 in measured time"),
        (1.0, 0.0, 1.6, "did not work", "below 1 in measured time"),
    ],
)
def test_verdicts(speedup, drift, slowdown, outcome, reason):
    arms = ladder(speedup, drift)
    if slowdown is not None:
        arms = timed(arms[0], 1.0), timed(arms[1], slowdown)
    verdict = analyze_ladder(arms).verdicts["variant"]
    assert (verdict.outcome, verdict.currency) == (outcome, FLOPS if slowdown is None else TIME)
    assert reason in verdict.reason
    text = " ".join(verdict.sentences)
    assert "1e+13 to 1e+16 FLOPs, 20 tokens per parameter" in text
    assert "2 seeds per rung" in text
    assert ("widths 64 to 384" in text) == (slowdown is not None)


def test_a_diverged_run_is_a_result():
    baseline, variant = ladder(1.3)
    results = analyze_ladder([baseline, diverging(variant, 1)])
    assert results.verdicts["variant"].outcome == "did not work"
    assert "1 of 2 runs at 1e+16 FLOPs diverged" in " ".join(summary_of(results))
    top = rung_table(results)[-1]
    assert top[RUNG_HEADER.index("runs")] == "1 (1 diverged)"
    # If the baseline diverges too, the losses decide.
    both = analyze_ladder([diverging(baseline, 1), diverging(variant, 1)])
    assert both.verdicts["variant"].outcome == "worked"


def test_an_arm_that_diverged_everywhere_has_a_verdict_and_no_law():
    baseline, variant = ladder(1.3)
    failed = Arm(
        "variant",
        tuple(dataclasses.replace(rung, losses={}, diverged=(0, 1)) for rung in variant.rungs),
    )
    results = analyze_ladder([baseline, failed])
    assert results.verdicts["variant"].outcome == "did not work"
    assert [*results.laws] == ["baseline"]
    assert [chart.name for chart in ladder_report.ladder_charts(results)][-1] != "ladder_speedup"
    assert len(ladder_report.ladder_sections(results)) == 3


def test_several_variants_share_the_level():
    baseline, variant = ladder(1.1)
    labels = ("a", "b", "c", "d")
    variants = [dataclasses.replace(variant, label=label) for label in labels]
    results = analyze_ladder([baseline, *variants])
    alone = analyze_ladder([baseline, variant]).verdicts["variant"]
    shared = results.verdicts["a"]
    assert shared.level == pytest.approx(1 - (1 - LEVEL) / 4)
    wide, narrow = shared.intervals[FLOPS]["top"], alone.intervals[FLOPS]["top"]
    assert wide.low < narrow.low < narrow.high < wide.high


def test_four_rungs_give_no_verdict():
    baseline, variant = ladder(1.3, rungs=4)
    speedup = measure_speedup(baseline, variant, fit_law(baseline))
    with pytest.raises(UserError, match="needs 5 rungs, and baseline has 4"):
        judge(baseline, variant, speedup)
    results = analyze_ladder([baseline, variant])
    assert not results.verdicts
    assert "4 rungs give no verdict" in results.warnings[-1]
    assert "times the top" not in law_sentence(results.laws["baseline"])


def test_warnings_of_unequal_seeds_and_uneven_spread():
    baseline, _ = ladder(1.0)
    assert warnings_of(baseline) == []
    fewer = dataclasses.replace(baseline.rungs[0], losses={0: baseline.rungs[0].loss})
    assert "1 to 2 completed seeds" in warnings_of(Arm("a", (fewer, *baseline.rungs[1:])))[0]
    spread = Arm(
        "a",
        tuple(
            dataclasses.replace(
                rung,
                losses={
                    seed: rung.loss + (0.05 if index < 3 else 0.001) * offset
                    for seed, offset in enumerate((-1, -0.5, 0, 0.5, 1))
                },
            )
            for index, rung in enumerate(baseline.rungs)
        ),
    )
    assert "spread 50.0 times" in warnings_of(spread)[0]


def test_arms_survive_json_and_must_ascend():
    arm = diverging(timed(ladder(1.0)[0], 1.0), 0)
    assert Arm.from_json(json.loads(json.dumps(arm.to_json()))) == arm
    with pytest.raises(ValueError, match="must ascend"):
        Arm("a", arm.rungs[::-1])


# --- preregistration ---------------------------------------------------------------------------


def below_top(arm: Arm) -> Arm:
    return Arm(arm.label, arm.rungs[:-1])


def preregister(folder, arms):
    tops = {arm.label: arm.rungs[-1].compute for arm in arms}
    return preregistration.preregister(folder, [below_top(arm) for arm in arms], tops)


def test_a_prediction_is_written_once_and_compared_with_its_outcome(tmp_path):
    arms = ladder(1.2)
    assert preregistration.check_preregistered(tmp_path, arms) == []
    record = preregister(tmp_path, arms)
    assert preregistration.load_preregistration(tmp_path) == record
    with pytest.raises(UserError, match="made once"):
        preregister(tmp_path, arms)

    pending = preregistration.check_preregistered(tmp_path, [below_top(arm) for arm in arms])
    assert [(outcome.loss, outcome.is_inside) for outcome in pending] == [(None, None)] * 2
    outcomes = preregistration.check_preregistered(tmp_path, arms)
    for arm, outcome in zip(arms, outcomes, strict=True):
        assert outcome.prediction == fit_law(below_top(arm)).predict(1e16)
        assert (outcome.loss, outcome.is_inside) == (arm.rungs[-1].loss, True)
    far = dataclasses.replace(arms[0].rungs[-1], losses={0: 3.5})
    moved = Arm("baseline", (*arms[0].rungs[:-1], far))
    assert not preregistration.check_preregistered(tmp_path, [moved, arms[1]])[0].is_inside

    rows = (tmp_path / preregistration.LADDER_EVENTS_FILE).read_text("utf-8").splitlines()
    assert json.loads(rows[0])["sha256"] == preregistration.preregistered_sha256(tmp_path)
    assert [json.loads(row)["event"] for row in rows] == ["preregistered"]


def test_a_prediction_does_not_survive_changes(tmp_path):
    arms = ladder(1.2)
    preregister(tmp_path, arms)
    first = arms[0].rungs[0]
    more_seeds = dataclasses.replace(first, losses={**first.losses, 7: 4.0})
    other_loss = dataclasses.replace(first, losses={**first.losses, 0: 4.0})
    with_rung = [
        [Arm("baseline", (rung, *arms[0].rungs[1:])), arms[1]] for rung in (more_seeds, other_loss)
    ]
    assert len(preregistration.check_preregistered(tmp_path, with_rung[0])) == 2
    with pytest.raises(UserError, match="seed 0 at 1e\\+13 FLOPs: the prediction was made from"):
        preregistration.check_preregistered(tmp_path, with_rung[1])
    with pytest.raises(UserError, match="predicts variant"):
        preregistration.check_preregistered(tmp_path, arms[:1])
    path = tmp_path / preregistration.PREREGISTRATION_FILE
    changed = re.sub(r'("prediction": \[)[\d.]+', r"\g<1>2.0", path.read_text("utf-8"), count=1)
    path.write_text(changed, "utf-8")
    with pytest.raises(UserError, match="SHA-256 differs"):
        preregistration.check_preregistered(tmp_path, arms)


def test_a_rung_that_has_run_is_not_predicted(tmp_path):
    arms = ladder(1.2)
    with pytest.raises(ValueError, match="has run already"):
        preregistration.preregister(tmp_path, arms, {"baseline": 1e16, "variant": 1e16})


# --- power and noise ---------------------------------------------------------------------------


def test_larger_and_quieter_ladders_find_smaller_speedups():
    def smallest(rungs: int, seeds: int, noise: LadderNoise) -> float:
        return smallest_speedup(np.geomspace(1e13, 1e16, rungs), seeds, noise, num_ladders=50)

    base = smallest(6, 2, LadderNoise(0.005, 0.005))
    assert 1.01 < smallest(8, 2, LadderNoise(0.005, 0.005)) < base
    assert smallest(6, 4, LadderNoise(0.005, 0.0)) < smallest(6, 2, LadderNoise(0.005, 0.0)) < base
    assert smallest(6, 2, LadderNoise(0.01, 0.01)) > base


def test_noise_of_a_ladder_is_measured():
    noise = LadderNoise(0.01, 0.02, shared=0.8)
    law = SimulatedLaw(1.6, 0.1, 1.9)
    baseline, variant = simulate_ladder(
        np.random.default_rng(2), np.geomspace(1e12, 1e18, 40), 8, law=law, noise=noise
    )
    measured = measure_noise(baseline, fit_law(baseline), variant)
    assert measured.seed_deviation == pytest.approx(0.01, rel=0.15)
    assert measured.rung_deviation == pytest.approx(0.02, rel=0.3)
    assert measured.shared == pytest.approx(0.8, abs=0.1)
    with pytest.raises(ValueError, match="needs two seeds"):
        measure_noise(
            Arm("a", tuple(_one_seed(rung) for rung in baseline.rungs)), fit_law(baseline)
        )


def _one_seed(rung: Rung) -> Rung:
    return dataclasses.replace(rung, losses={0: rung.losses[0]})


@pytest.mark.slow
def test_the_smallest_speedup_is_found_in_80_percent():
    smallest = smallest_speedup(np.geomspace(1e13, 1e16, 6), 2)
    found = cover(Design(speedup=smallest), 600)["worked"]
    assert found == pytest.approx(0.8, abs=0.05)


@pytest.mark.slow
def test_intervals_cover_simulated_laws():
    shares = cover(Design(), 1000)
    for name in ("prediction", "line", "constant"):
        assert 0.93 <= shares[name] <= 0.97, name
    equal_arms = cover(Design(speedup=1.0), 2000)
    for name in ("line", "constant"):
        assert 1 - equal_arms[name] == pytest.approx(0.05, abs=0.015), name


# --- files and page ----------------------------------------------------------------------------


def test_files_of_a_ladder(tmp_path):
    baseline, variant = ladder(1.2)
    arms = [timed(baseline, 1.0), timed(variant, 1.02)]
    preregister(tmp_path, arms)
    outcomes = preregistration.check_preregistered(tmp_path, arms)
    results = analyze_ladder(arms, outcomes=outcomes)
    written = ladder_report.write_ladder_files(tmp_path, results)
    assert {path.name for path in written} == {
        "ladder.json",
        "ladder.csv",
        "ladder_loss.png",
        "ladder_residuals.png",
        "ladder_speedup.png",
    }
    figures = [path.read_bytes() for path in written if path.suffix == ".png"]
    assert all(figure.startswith(b"\x89PNG") for figure in figures)

    content = json.loads((tmp_path / "ladder.json").read_text("utf-8"))
    assert [Arm.from_json(arm) for arm in content["arms"]] == arms
    verdict = content["verdicts"]["variant"]
    assert (verdict["outcome"], verdict["currency"]) == ("worked", "time")
    assert content["predictions"][0]["is_inside"] is True
    with (tmp_path / "ladder.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert float(rows[0]["loss"]) == baseline.rungs[0].loss
    assert rows[0]["speedup"] == ""
    assert float(rows[6]["speedup_low"]) < float(rows[6]["speedup"])
    residuals = [float(row["residual"]) for row in rows[:6]]
    assert np.mean(np.abs(residuals)) < 3 * QUIET.rung_deviation

    run = completed(tmp_path / "run")
    page = write_report(
        [read_run(run)], tmp_path / "page", leading=ladder_report.ladder_sections(results)
    )
    text = page.read_text("utf-8")
    for heading in ("Verdict", "Ladder", "Prediction against outcome", "Rungs", "Curves"):
        assert f"<h2>{heading}</h2>" in text
    assert text.index("<h2>Curves</h2>") < text.index('<form id="controls"')
    assert text.count('<form id="controls"') == 1
    assert outcomes[0].sha256 in text
    num_runs = sum(len(rung.losses) for arm in arms for rung in arm.rungs)
    flops = 4 * sum(COMPUTES)
    assert f"{num_runs} runs: {flops:.3g} FLOPs" in text


def test_a_single_arm_has_a_law_and_no_verdict():
    baseline, _ = ladder(1.0)
    results = analyze_ladder([baseline])
    assert not results.verdicts
    assert "10 times the top" in " ".join(summary_of(results))
    charts = [chart.name for chart in ladder_report.ladder_charts(results)]
    assert charts == ["ladder_loss", "ladder_residuals"]
    assert ladder_report.ladder_sections(results)[0].title == "Scaling law"
