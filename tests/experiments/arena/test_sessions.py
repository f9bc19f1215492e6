"""Sessions: settings, ledger, and the verdicts that follow from runs."""

import statistics

import pytest

from MaxText import exit_codes
from MaxText.config.problems import ConfigurationError
from MaxText.errors import UserError
from MaxText.experiments.arena import verdict
from MaxText.experiments.arena.arena_args import Budget, parse_args
from MaxText.experiments.arena.leaderboard import table_rows
from MaxText.experiments.arena.ledger import (
    BASELINE,
    CandidateRow,
    Ledger,
    TrialRow,
    VerdictRow,
    open_ledger,
)
from MaxText.experiments.arena.sequential_test import SequentialTest
from MaxText.experiments.arena.session import Session, open_session

CONFIG = """
dataset_path: data
decoder_block: llama2
steps: 4
vocab_size: 64
base_emb_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 16
max_target_length: 16
per_device_batch_size: 1
hardware: cpu
"""
BASELINE_LOSSES = (4.00, 4.03, 3.98, 4.01)
EQUAL_LOSSES = (4.01, 4.01, 3.99, 4.02)


@pytest.fixture
def request_of(tmp_path, monkeypatch):
    """Parses a command line of a session in out/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yml").write_text(CONFIG)
    (tmp_path / "out").mkdir()
    return lambda *arguments: parse_args(["output=out", *arguments])


def trials(owner, losses):
    return [
        TrialRow(owner=owner, seed=seed, state="completed", loss=loss, bytes_per_token=4.0)
        for seed, loss in enumerate(losses)
    ]


@pytest.fixture
def ledger():
    candidate = CandidateRow(name="b", spec="b.yml", source_hash="1")
    baseline = CandidateRow(name=BASELINE, spec="")
    return Ledger([baseline, *trials(BASELINE, BASELINE_LOSSES), candidate])


def test_mistakes_of_a_command_line_are_all_reported():
    with pytest.raises(ConfigurationError) as caught:
        parse_args(["baseline=a.yml", "b.yml", "match=flops", "budget=1x", "init_weights_seed=3"])
    message = str(caught.value)
    for part in ("output= is missing", "candidate=b.yml", "'flops'", "'1x'", "init_weights_seed"):
        assert part in message


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("1e15", Budget(1e15, "FLOPs")),
        ("5m", Budget(300, "seconds")),
        ("2T", Budget(2e12, "FLOPs")),
    ],
)
def test_a_budget_is_of_flops_or_of_time(text, budget):
    assert parse_args(["output=out", f"budget={text}"]).options.budget == budget


def test_later_calls_need_no_settings_and_another_question_is_refused(request_of):
    first = open_session(request_of("baseline=a.yml", "alpha=0.1", "learning_rate=0.5"), 1)
    assert open_session(request_of("candidate=b.yml"), 1) == first
    assert first.load_baseline().schedule.learning_rate == 0.5
    assert first.test.level == 0.1 / 20
    another = request_of("baseline=a.yml", "alpha=0.2", "learning_rate=0.25", "budget=1e9")
    with pytest.raises(UserError) as caught:
        open_session(another, 2)
    for line in (
        "alpha: 0.1 -> 0.2",
        "budget: none -> 1e+09 FLOPs",
        "learning_rate: 0.5 -> 0.25",
        "devices per run: 1 -> 2",
    ):
        assert line in str(caught.value)


def test_a_session_begins_with_a_baseline(request_of):
    with pytest.raises(ConfigurationError, match="baseline= is missing"):
        open_session(request_of("candidate=b.yml"), 1)


def test_a_ledger_survives_a_row_that_was_cut_off(tmp_path, ledger):
    written = open_ledger(tmp_path)
    for row in ledger.rows:
        written.append(row)
    written.close()
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "trial", "own')
    resumed = open_ledger(tmp_path)
    assert resumed.rows == ledger.rows
    resumed.close()
    (tmp_path / "ledger.jsonl").write_text('{"event": "trial", "owner": 3}\n')
    with pytest.raises(UserError, match="row 1 cannot be read"):
        open_ledger(tmp_path, writes=False)


def test_the_noise_of_the_baseline_is_reported(ledger):
    assert verdict.baseline_std(ledger) == pytest.approx(statistics.stdev(BASELINE_LOSSES))
    assert "0.0208 nats/token (sd over 4 seeds)" in verdict.describe_noise(ledger)
    assert verdict.baseline_std(Ledger([])) is None


@pytest.mark.parametrize(
    ("improvement", "num_seeds", "outcome"),
    [(0.3, 4, "keep"), (-0.1, 4, "discard"), (0.12, 3, None), (0.01, 4, "undecided")],
)
def test_a_look_decides(ledger, improvement, num_seeds, outcome):
    test = SequentialTest(level=0.0025, max_seeds=4)
    losses = [loss - improvement for loss in EQUAL_LOSSES[:num_seeds]]
    ledger.rows += trials("b", losses)
    look = verdict.look_at(ledger, test, "b", num_seeds)
    expected = statistics.fmean(BASELINE_LOSSES[:num_seeds]) - statistics.fmean(losses)
    assert look.improvement == pytest.approx(expected)
    assert look.low < look.improvement < look.high
    decision = verdict.decide(test, look)
    assert (decision and decision[0]) == outcome


def test_a_clear_loser_is_far_above_the_baseline_from_half_of_a_run_on():
    baseline = [(5.0, 4.5, 4.2, 4.0), (5.2, 4.52, 4.21, 4.02)]
    assert not verdict.clear_loss((9.0,), baseline, baseline[0])  # a slow start
    assert not verdict.clear_loss((9.0, 4.6), baseline, baseline[0])
    assert "50%" in verdict.clear_loss((5.0, 4.7), baseline, baseline[0])


def test_verdicts_are_reported_and_a_lost_run_has_no_effect(request_of, ledger):
    session: Session = open_session(request_of("baseline=a.yml"), 1)
    ledger.rows += trials("b", [3.0, 3.1, 3.0])
    ledger.append(verdict.look_at(ledger, session.test, "b", 3))
    ledger.append(VerdictRow(owner="b", verdict="keep", reasons=("clear",)))
    result = verdict.verdict_of(session, ledger, "b", is_repeated=False)
    assert result.effect_nats == pytest.approx(-0.97)
    assert result.effect_bits_per_byte == pytest.approx(-0.97 / 4 / 0.6931, rel=1e-3)
    assert result.interval_nats[0] < result.effect_nats < result.interval_nats[1]
    assert (result.candidates_left, result.exit_code) == (19, exit_codes.SUCCESS)
    ledger.append(CandidateRow(name="c", spec="c.yml", reasons=("seeds",)))
    ledger.append(VerdictRow(owner="c", verdict="refused", reasons=("seeds",)))
    refused = verdict.verdict_of(session, ledger, "c", is_repeated=True)
    assert (refused.candidates_left, refused.effect_nats) == (19, None)
    assert verdict.exit_code_of([refused]) == exit_codes.REFUSED
    assert verdict.exit_code_of([refused, result]) == exit_codes.SUCCESS
    assert [row[:2] for row in table_rows(session, ledger)] == [["b", "keep"], ["c", "refused"]]
    ledger.append(TrialRow(owner="b", seed=3, state="stopped"))
    assert verdict.last_look(ledger, "b") is None
