"""Tables, sentences and CSV files, from results that are known."""

import csv
import math
from pathlib import Path

import pytest

from MaxText.comparison import outcome
from MaxText.comparison.outcome import RunResult, group_results
from MaxText.comparison.plan import Plan, Planned, PlannedStage, Question

LOSSES = {"a": {0: 4.0, 1: 4.2, 2: 4.1}, "b": {0: 3.5, 1: 3.6, 2: 3.6}}


def result(config: str, seed: int, loss: float | None, **fields) -> RunResult:
    values = {
        "config": config, "seed": seed, "state": "diverged" if loss is None else "completed",
        "validation_loss": loss, "validation_tokens": 512.0, "training_loss": 5.0,
        "parameters": 1000, "steps": 10, "tokens": 640.0, "flops": 1e6, "train_seconds": 2.0,
        "folder": f"{config}/seed_{seed}",
    }  # fmt: skip
    return RunResult(**(values | fields))


def results(losses=LOSSES) -> list[RunResult]:
    return [result(name, seed, loss) for name, of in losses.items() for seed, loss in of.items()]


def plan(**fields) -> Plan:
    planned = Planned((PlannedStage({}, 1000, 1e6, 640, 10, **fields),), 0.0)
    question = Question("tokens", None, {}, 0.02, 1)
    labels = ("a", "b", "c")
    return Plan(Path("x"), question, {}, planned=dict.fromkeys(labels, planned), seeds=(0, 1, 2))


def test_groups_have_means_and_differences_to_the_first():
    a, b = group_results(["a", "b"], results())
    assert a.loss.mean == pytest.approx(4.1)
    assert a.loss.deviation == pytest.approx(0.1)
    assert a.difference is None
    assert a.perplexity == pytest.approx(math.exp(4.1))
    assert b.difference.mean == pytest.approx(-(0.5 + 0.6 + 0.5) / 3)
    assert b.mean("tokens_per_second") == 320.0


def test_the_table():
    row = outcome.table_rows(group_results(["a", "b"], results()))[0]
    assert row == ["a", "4.1000", "0.1000", "3", "60.34", "1K", "1e+06", "640", "2.0"]


def test_the_sentences_say_what_is_seen():
    (sentence,) = outcome.sentences(group_results(["a", "b"], results()), plan())
    assert sentence.startswith("b is lower than a by 0.5333 nats/token (95 % interval 0.3899 to")


def test_diverged_runs_are_counted_and_left_out():
    losses = {"a": {0: 4.0, 1: 4.2}, "b": {0: 3.5, 1: None}}
    a, b = group_results(["a", "b"], results(losses))
    assert (b.loss.count, b.loss.mean, b.diverged) == (1, 3.5, 1)
    assert b.difference.count == 1
    assert outcome.table_rows([a, b])[1][3] == "1 (1 diverged)"
    assert "b: 1 diverged, in no mean." in outcome.sentences([a, b], plan())


def test_several_intervals_are_said_to_be_uncorrected():
    groups = group_results(["a", "b", "c"], results({**LOSSES, "c": LOSSES["a"]}))
    text = "\n".join(outcome.sentences(groups, plan()))
    assert "2 intervals of 95 % each, not corrected" in text
    assert "c" in text


def test_validation_on_other_texts_is_named():
    found = [*results({"a": {0: 4.0, 1: 4.1}}), result("b", 1, 3.5, validation_tokens=1024.0)]
    text = "\n".join(outcome.sentences(group_results(["a", "b"], found), plan()))
    assert text.count("b was validated on 1,024 tokens and a on 512") == 1


def test_runs_that_had_less_are_named():
    short = [*results({"a": {0: 4.0}}), result("b", 0, 3.5, steps=6)]
    text = "\n".join(outcome.sentences(group_results(["a", "b"], short), plan()))
    assert "b seed 0 ended after 6 of 10 steps" in text


def test_seconds_that_are_not_those_planned_are_named():
    groups = group_results(["a", "b"], results())
    assert len(outcome.sentences(groups, plan(seconds=10 * 0.2))) == 1
    text = "\n".join(outcome.sentences(groups, plan(seconds=10 * 0.1)))
    assert "a trained for 2.0 s where 1.0 s were planned (+100%)" in text


def test_csv_files(tmp_path):
    found = results({"a": {0: 4.0, 1: 4.5}, "b": {0: 3.5, 1: None}})
    outcome.write_runs_csv(tmp_path / "runs.csv", found)
    outcome.write_summary_csv(tmp_path / "summary.csv", group_results(["a", "b"], found))
    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(row["config"], row["seed"], row["state"]) for row in runs] == [
        ("a", "0", "completed"), ("a", "1", "completed"), ("b", "0", "completed"),
        ("b", "1", "diverged"),
    ]  # fmt: skip
    assert [row["validation_loss"] for row in runs] == ["4.0", "4.5", "3.5", ""]
    assert runs[0]["tokens_per_second"] == "320.0"
    with (tmp_path / "summary.csv").open() as file:
        a, b = csv.DictReader(file)
    assert (a["validation_loss"], a["runs"], a["difference"]) == ("4.25", "2", "")
    assert (b["difference"], b["difference_seeds"], b["difference_low_95"]) == ("-0.5", "1", "")
    assert b["diverged"] == "1"


def test_losses_of_different_kinds_have_no_difference():
    entmax = [result("b", seed, 2.0, loss_kind="entmax, alpha 1.3") for seed in (0, 1)]
    plain = [result("a", seed, 4.0 + seed, loss_kind="cross-entropy") for seed in (0, 1)]
    a, b = group_results(["a", "b"], [*plain, *entmax])
    assert b.difference is None
    assert (b.perplexity, a.perplexity) == (None, pytest.approx(math.exp(4.5)))
    rows = outcome.table_rows([a, b])
    assert [row[1] for row in rows] == ["4.5000 (cross-entropy)", "2.0000 (entmax, alpha 1.3)"]
    (sentence,) = [text for text in outcome.sentences([a, b], plan()) if "kinds" in text]
    assert "cannot be compared: cross-entropy (a); entmax, alpha 1.3 (b)" in sentence
    assert not any("nats/token" in text for text in outcome.sentences([a, b], plan()))
