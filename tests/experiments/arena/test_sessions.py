"""Sessions: settings, ledger, and the verdicts that follow from runs."""

import json
import statistics
from collections import Counter
from pathlib import Path

import pytest

from MaxText import exit_codes
from MaxText.config.problems import ConfigurationError
from MaxText.errors import UserError
from MaxText.experiments.arena import judging, verdict
from MaxText.experiments.arena.arena_args import Budget, parse_args
from MaxText.experiments.arena.candidates import hash_files, read_candidate
from MaxText.experiments.arena.leaderboard import sections_of_sessions, table_rows
from MaxText.experiments.arena.ledger import (
    BASELINE,
    CandidateRow,
    Ledger,
    TrialRow,
    VerdictRow,
    open_ledger,
)
from MaxText.experiments.arena.sequential_test import SequentialTest
from MaxText.experiments.arena.session import Session, load_session, open_session
from MaxText.experiments.execution import DeviceCount

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


def test_a_baseline_of_masked_tokens_is_refused(request_of):
    with pytest.raises(ConfigurationError, match="mlm_training=true: the arena measures"):
        open_session(request_of("baseline=a.yml", "mlm_training=true"), 1)


def test_keys_of_the_environment_are_those_of_candidates(request_of, monkeypatch):
    monkeypatch.setenv("M_JAX_CACHE_DIR", "/cache")
    monkeypatch.setenv("M_STEPS", "8")
    session = open_session(request_of("baseline=a.yml", "learning_rate=0.5"), 1)
    assert sorted(session.spec.environment) == ['jax_cache_dir="/cache"', "steps=8"]
    monkeypatch.delenv("M_STEPS")
    monkeypatch.delenv("M_JAX_CACHE_DIR")
    loaded = load_session(session.folder)
    candidate = read_candidate(
        "a.yml", session.load_baseline(), (*loaded.spec.environment, *loaded.spec.keys)
    )
    candidate.guard.watch.stop()
    assert candidate.changes.keys() <= {"run_name"}


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


@pytest.fixture
def judge_in_process(request_of, monkeypatch):
    """Judges with runs that end at the second poll, better by 0.3 for candidates named good."""
    runs = []  # (owner, seed), as they start
    done = Counter()

    class Run:
        def __init__(self, trial, **_):
            self.trial = trial
            self.polls = 0
            at_work = Counter(owner for owner, _ in runs) - done
            assert done[trial.owner] or not at_work[trial.owner], "two first runs at once"
            runs.append((trial.owner, trial.seed))

        def poll(self):
            self.polls += 1
            if self.polls < 2:
                return None
            owner, seed = self.trial.owner, self.trial.seed
            done[owner] += 1
            loss = 4 + 0.1 * seed**2 - 0.3 * owner.startswith("good")
            return TrialRow(owner=owner, seed=seed, state="completed", loss=loss)

        def evaluations(self):
            return (4.0, 4.0)

        def interrupt(self):
            pass

    def examine(session, folder, spec, **_):
        return CandidateRow(name=folder.name, spec=spec or "", source_hash=folder.name, steps=4)

    devices = DeviceCount(1, "cpu", "cpu")
    monkeypatch.setattr(judging, "find_devices", lambda hardware: devices)
    monkeypatch.setattr(judging, "TrialProcess", Run)
    monkeypatch.setattr(judging.trials, "examine", examine)

    def judge(*arguments):
        request = request_of(*arguments)
        return runs, judging.judge(request, log=lambda line: None, report=lambda row: None)

    return judge


@pytest.mark.parametrize("jobs", [1, 3])
def test_candidates_run_seed_by_seed_and_a_first_run_alone(judge_in_process, jobs):
    specs = ["good.yml", "equal.yml", "good_too.yml"]
    candidates = [f"candidate={spec}" for spec in specs]
    settings = ["baseline=a.yml", "baseline_seeds=2", "hardware=auto", f"jobs={jobs}"]
    runs, verdicts = judge_in_process(*settings, *candidates)
    outcomes = {row.candidate: row.verdict for row in verdicts}
    assert outcomes == {"good": "keep", "equal": "discard", "good_too": "keep"}
    owners = ["good", "equal", "good_too"]
    expected = [(owner, seed) for owner in [BASELINE, *owners] for seed in range(3)]
    assert sorted(runs) == sorted(expected)
    assert runs[0] == (BASELINE, 0)
    # Nothing is left to do.
    assert judge_in_process() == (runs, [])


def test_a_baseline_whose_code_has_changed_does_not_continue(judge_in_process, tmp_path):
    judge_in_process("baseline=a.yml", "baseline_seeds=2")
    part = tmp_path / "part.py"
    part.write_text("a = 1")
    path = tmp_path / "out/ledger.jsonl"
    first, *rows = path.read_text().splitlines()
    row = json.loads(first) | {"files": hash_files([str(part)])}
    path.write_text("\n".join([json.dumps(row), *rows, ""]))
    judge_in_process()
    part.write_text("a = 2")
    with pytest.raises(UserError, match=r"part\.py. Restore it"):
        judge_in_process()


def test_a_report_of_a_session_has_its_leaderboard_and_groups(judge_in_process):
    judge_in_process("baseline=a.yml", "candidate=good.yml")
    groups = json.loads(Path("out/comparison.json").read_text())["groups"]
    assert groups["baseline"] == [f"baseline/seed_{seed}" for seed in range(4)]
    assert groups["good"] == [f"candidates/good/seed_{seed}" for seed in range(3)]
    leaderboard, *_ = sections_of_sessions(["out"])
    assert [row[:2] for row in leaderboard.table.rows] == [["good", "keep"]]
    assert sections_of_sessions(["."]) == []
