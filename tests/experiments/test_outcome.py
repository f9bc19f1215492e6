"""Means, intervals, tables, summary_lines and CSV files, from results that are known."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from MaxText.experiments import comparison_results
from MaxText.experiments.compare_args import Match
from MaxText.experiments.comparison_plan import ComparisonSpec, Plan, SolvedConfig, SolvedStage
from MaxText.experiments.comparison_results import RunResult, group_results
from MaxText.experiments.seed_statistics import (
    CONFIDENCE,
    Estimate,
    format_difference,
    holm_corrected,
    paired_difference,
)
from tests.experiments.small_comparison import variants

LOSSES = {"a": {0: 4.0, 1: 4.2, 2: 4.1}, "b": {0: 3.5, 1: 3.6, 2: 3.6}}


@pytest.mark.parametrize("count", [2, 3, 30])
def test_intervals_equal_those_of_scipy(count):
    first, other = np.random.default_rng(count).normal(4.0, 0.1, (2, count))
    # Only seeds of both count.
    difference = paired_difference(
        dict(enumerate(first)) | {98: 7.0}, dict(enumerate(other)) | {99: 1.0}
    )
    interval = scipy.stats.ttest_rel(other, first).confidence_interval(0.95)
    assert (difference.count, difference.mean) == (count, pytest.approx(np.mean(other - first)))
    assert (difference.ci_low, difference.ci_high) == pytest.approx(
        (interval.low, interval.high), rel=1e-10
    )
    assert difference.p_value == pytest.approx(
        scipy.stats.ttest_rel(other, first).pvalue, rel=1e-10
    )
    assert difference.is_significant == (interval.low > 0 or interval.high < 0)


def test_holm_corrects_p_values_for_their_number():
    corrected = holm_corrected(
        {
            "a": Estimate(2, p_value=0.03),
            "b": Estimate(1),
            "c": Estimate(2, p_value=0.01),
            "d": Estimate(2, p_value=0.02),
        }
    )
    assert [estimate.p_value for estimate in corrected.values()] == pytest.approx(
        [0.04, None, 0.03, 0.04]
    )


@pytest.mark.parametrize("num_configs", [2, 4])
def test_equal_configurations_differ_in_one_set_of_twenty(num_configs):
    """A/A: without a true difference, 5 % of the sets have a significant one."""
    generator, num_false, count = np.random.default_rng(0), 0, 400
    labels = [f"c{number}" for number in range(num_configs)]
    for _ in range(count):
        of_seed = generator.normal(4.0, 0.1, 3)  # the order of the data, which pairing cancels
        losses = of_seed + generator.normal(0.0, 0.02, (num_configs, 3))
        run_results = results(
            {name: dict(enumerate(values)) for name, values in zip(labels, losses, strict=True)}
        )
        differences = comparison_results.differences(group_results(labels, run_results))
        num_false += any(estimate.is_significant for estimate in differences.values())
    assert num_false / count == pytest.approx(1 - CONFIDENCE, abs=0.015)


def result(config: str, seed: int, loss: float | None, **fields) -> RunResult:
    values = {
        "config": config,
        "seed": seed,
        "state": "diverged" if loss is None else "completed",
        "validation_loss": loss,
        "validation_tokens": 512.0,
        "training_loss": 5.0,
        "parameters": 1000,
        "steps": 10,
        "tokens": 640.0,
        "flops": 1e6,
        "train_seconds": 2.0,
        "folder": f"{config}/seed_{seed}",
        "loss_kind": "cross-entropy",
    }
    return RunResult(**(values | fields))


def results(losses=LOSSES) -> list[RunResult]:
    return [
        result(name, seed, loss)
        for name, loss_by_seed in losses.items()
        for seed, loss in loss_by_seed.items()
    ]


def plan(match: Match = "tokens", seconds: float | None = None, **deviations: float) -> Plan:
    planned = {}
    for label in "abc":
        off = deviations.get(label, 0.0)
        stage = SolvedStage({}, 1000, 1e6, 640, 10, seconds and seconds * (1 + off))
        planned[label] = SolvedConfig((stage,), off)
    question = ComparisonSpec(match, None, {}, 0.4, 1)
    return Plan(Path("x"), question, {}, budget=seconds, planned=planned, seeds=(0, 1, 2))


def test_different_objectives_are_compared_by_the_cross_entropy_beside_them():
    beside = {"lm_loss_kind": "cross-entropy"}
    run_results = [
        result("a", seed, 4.0 + 0.1 * seed, validation_lm_loss=4.0 + 0.1 * seed, **beside)
        for seed in (0, 1)
    ]
    run_results += [
        result("b", seed, 1.0, loss_kind="focal", validation_lm_loss=3.5 + 0.1 * seed, **beside)
        for seed in (0, 1)
    ]
    groups = group_results(["a", "b"], run_results)
    assert groups[1].losses == {0: 3.5, 1: 3.6}
    assert comparison_results.differences(groups)["b"].mean == pytest.approx(-0.5)
    lines = comparison_results.text_lines(groups, plan(), [])
    assert any("cross entropies beside them" in line for line in lines)
    assert any("b is lower than a by 0.5000 nats/token" in line for line in lines)
    # A diverged run has none; other tokenizers, and runs of earlier versions, stay incomparable.
    diverged = result("b", 2, None, loss_kind="focal", **beside)
    assert group_results(["a", "b"], [*run_results, diverged])[1].losses == {0: 3.5, 1: 3.6}
    other = [
        run_result._replace(lm_loss_kind=f"cross-entropy of {run_result.config}")
        for run_result in run_results
    ]
    assert comparison_results.differences(group_results(["a", "b"], other)) == {}
    older = [run_result._replace(validation_lm_loss=None) for run_result in run_results]
    assert comparison_results.differences(group_results(["a", "b"], older)) == {}


def test_diverged_runs_are_counted_and_in_no_mean():
    a, b = group_results(["a", "b"], results({"a": {0: 4.0, 1: 4.2}, "b": {0: 3.5, 1: None}}))
    assert (b.loss.count, b.loss.mean, b.diverged) == (1, 3.5, 1)
    assert comparison_results.differences([a, b])["b"].count == 1
    assert comparison_results.table_rows([a, b])[0][3] == "1 (1 diverged)"
    lines = comparison_results.summary_lines([a, b], plan(), [])
    assert any(line.startswith("b: 1 diverged") for line in lines)


def test_table_and_sentences(told):
    """As printed: of one difference, of several, of unlike runs, and of few seeds."""
    printed = {
        "one": comparison_results.text_lines(group_results(["a", "b"], results()), plan(), []),
        "several": comparison_results.summary_lines(
            group_results(["a", "b", "c"], results({**LOSSES, "c": LOSSES["a"]})), plan(), []
        ),
        "reservations": comparison_results.summary_lines(
            group_results(
                ["a", "b"],
                [
                    *results({"a": {0: 4.0, 1: 4.1}}),
                    result("b", 0, 3.5, steps=6),
                    result("b", 1, 3.5, validation_tokens=1024.0),
                ],
            ),
            plan("time", 1.0),
            [],
        ),
        "higher": [format_difference("a", "b", Estimate(2, 0.021, 0.01, 0.010, 0.032, 0.01))],
        "not seen": [format_difference("a", "b", Estimate(3, -0.01, 0.01, -0.03, 0.01, 0.2))],
        "one seed": [format_difference("a", "b", Estimate(1, -0.01))],
        "no seed": [format_difference("a", "b", Estimate(0))],
    }
    told("\n".join(f"-- {name}\n" + "\n".join(lines) for name, lines in printed.items()))


def test_a_budget_is_called_equal_only_if_it_was():
    """By each arm's plan, and by each seed's time; on the terminal, nothing precedes this."""
    equal = group_results(["a", "b"], results())
    losses = results()
    losses[-1] = losses[-1]._replace(train_seconds=2.1)
    one_slow = group_results(["a", "b"], losses)
    short = [
        run_result._replace(train_seconds=1.4) for run_result in losses if run_result.config == "b"
    ]
    as_planned = group_results(["a", "b"], [*results({"a": LOSSES["a"]}), *short])
    for groups, tested_plan, line in (
        (equal, plan("params", b=0.019), ""),
        (equal, plan("params", b=0.3), "b has 30.0% more parameters than the budget"),
        (equal, plan("flops", a=-0.03), "a has 3.0% fewer FLOPs than the budget"),
        (equal, plan("time", 2.0), ""),
        (equal, plan("time", 2.19), "a seed 0 trained for 2.0 s instead of 2.2 s (-8."),
        (one_slow, plan("time", 2.0), "b seed 2 trained for 2.1 s instead of 2.0 s (+5."),
        (as_planned, plan("time", 2.0, b=-0.3), "b has 30.0% fewer seconds than the budget"),
    ):
        unequal = ", unequal" in comparison_results.title_of(tested_plan, groups)
        assert unequal == bool(line)
        assert comparison_results.text_lines(groups, tested_plan, [])[0].startswith(
            line or "config"
        )
        *lines, last = comparison_results.summary_lines(groups, tested_plan, [])
        assert last.startswith("b is lower")
        assert bool(lines) == bool(line)
        assert ("the machine" in " ".join(lines)) == ("trained for" in line)
    gone = group_results(["a", "b"], results(LOSSES | {"b": {0: None, 1: None}}))
    assert "unequal seconds" in comparison_results.title_of(plan("time", 2.0, b=-0.3), gone)


def test_csv_files(tmp_path, told):
    run_results = results({"a": {0: 4.0, 1: 4.5}, "b": {0: 3.5, 1: None}})
    comparison_results.write_runs_csv(tmp_path / "runs.csv", run_results)
    comparison_results.write_summary_csv(
        tmp_path / "summary.csv", group_results(["a", "b"], run_results)
    )
    told("\n".join((tmp_path / name).read_text() for name in ("runs.csv", "summary.csv")))


def test_losses_of_different_kinds_have_no_difference():
    entmax = [result("b", seed, 2.0, loss_kind="entmax, alpha 1.3") for seed in (0, 1)]
    plain = [result("a", seed, 4.0 + seed, loss_kind="cross-entropy") for seed in (0, 1)]
    a, b = group_results(["a", "b"], [*plain, *entmax])
    assert not comparison_results.differences([a, b])
    assert (b.perplexity, a.perplexity) == (None, pytest.approx(math.exp(4.5)))
    rows = comparison_results.table_rows([a, b])
    assert [row[1] for row in rows] == ["4.5000 (cross-entropy)", "2.0000 (entmax, alpha 1.3)"]
    (sentence,) = comparison_results.summary_lines([a, b], plan(), [])
    assert sentence.endswith("cross-entropy (a); entmax, alpha 1.3 (b).")


ACCURACIES = {"a": {0: 0.2, 1: 0.3, 2: 0.25}, "b": {0: 0.995, 1: 1.0, 2: 0.99}}


def labeled(accuracies=ACCURACIES) -> list[RunResult]:
    """Results of a probe; losses say the opposite of accuracies."""
    return [
        result(name, seed, None if value is None else 1.0 + value, validation_accuracy=value)
        for name, value_by_seed in accuracies.items()
        for seed, value in value_by_seed.items()
    ]


def test_labeled_data_are_compared_by_accuracy(tmp_path):
    groups = group_results(["a", "b"], labeled())
    difference = comparison_results.differences(groups)["b"]
    expected = scipy.stats.ttest_rel(*(list(ACCURACIES[label].values()) for label in "ba"))
    interval = expected.confidence_interval(0.95)
    assert (difference.mean, difference.ci_low, difference.ci_high, difference.p_value) == (
        pytest.approx((0.745, interval.low, interval.high, expected.pvalue))
    )
    *_, sentence = comparison_results.text_lines(groups, plan(), [])
    assert sentence.startswith("b is higher than a by 0.7450 in accuracy (95 % interval ")
    columns = comparison_results.table_header(groups)
    rows = [dict(zip(columns, row, strict=True)) for row in comparison_results.table_rows(groups)]
    assert [(row["configuration"], row["accuracy"], row["probe"]) for row in rows] == [
        ("b", "0.9950", "solved"),
        ("a", "0.2500", "failed"),
    ]
    assert [row["validation loss"] for row in rows] == ["1.9950", "1.2500"]  # in nats, too
    comparison_results.write_summary_csv(tmp_path / "summary.csv", groups)
    with (tmp_path / "summary.csv").open(encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["accuracy"], first["probe"], first["difference"]) == ("0.25", "failed", "")
    assert (second["accuracy"], second["probe"]) == ("0.995", "solved")
    assert float(second["difference"]) == pytest.approx(0.745)


@pytest.mark.parametrize(
    ("accuracies", "outcome"),
    [
        ({0: 0.99, 1: 1.0}, "solved"),
        ({0: 0.9899, 1: 1.0}, "between"),
        ({0: 1.0, 1: None}, "between"),  # a diverged seed
        ({0: 0.5, 1: 0.1}, "failed"),
        ({0: 0.5001, 1: 0.1}, "between"),
        ({0: None}, "-"),
    ],
)
def test_a_probe_is_solved_or_failed_by_all_seeds(accuracies, outcome):
    (group,) = group_results(["a"], labeled({"a": accuracies}))
    assert group.outcome == outcome


def test_the_best_value_of_a_sweep_of_labeled_data_has_the_highest_accuracy(configs):
    rates = "sweep={learning_rate: [1e-3, 3e-3, 6e-3]}"
    all_variants = variants("a.yml", rates)
    labels = [variant.label for variant in all_variants]
    accuracies = {
        label: {0: value, 1: value} for label, value in zip(labels, (0.2, 0.9, 0.5), strict=True)
    }
    planned = dict.fromkeys(labels, plan().planned["a"])
    solved_plan = Plan(Path("x"), plan().question, {}, planned=planned)
    lines = comparison_results.summary_lines(
        group_results(labels, labeled(accuracies)), solved_plan, all_variants
    )
    assert "learning_rate=3e-3 has the best learning_rate of 0.001, 0.003, 0.006." in lines


def swept(losses: Sequence[Sequence[float | None]], *arguments: str) -> list[str]:
    """What is said of a sweep, by losses of its configurations and seeds."""
    all_variants = variants("a.yml", *arguments)
    labels = [variant.label for variant in all_variants]
    by_label = {
        label: dict(enumerate(values)) for label, values in zip(labels, losses, strict=True)
    }
    planned = dict.fromkeys(labels, plan().planned["a"])
    solved_plan = Plan(Path("x"), plan().question, {}, planned=planned)
    return comparison_results.text_lines(
        group_results(labels, results(by_label)), solved_plan, all_variants
    )


def test_sweeps_are_sorted_and_the_best_of_each_arm_compared(configs, told):
    rates = "learning_rate: [1e-3, 3e-3, 6e-3]"
    two_arms = f"sweep={{position_embedding: [rotary, learned], {rates}}}"
    losses = [[4.0, 4.1], [3.9, 3.95], [3.95, 4.0], [5.0, 5.1], [4.5, 4.6], [4.2, 4.25]]
    printed = {
        "two arms": swept(losses, two_arms),
        "one arm, of which one diverged": swept([[4.0], [3.9], [None]], f"sweep={{{rates}}}"),
    }
    told("\n".join(f"-- {name}\n" + "\n".join(lines) for name, lines in printed.items()))
