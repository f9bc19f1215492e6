"""A whole session in processes of its own, killed and resumed."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.house.sources import REPOSITORY
from tests.input_pipeline.small_data import write_data_set

VOCAB_SIZE = 32
BASELINE = f"""
run_name: baseline
dataset_path: data
vocab_size: {VOCAB_SIZE}
decoder_block: llama2
base_emb_dim: 16
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 8
base_mlp_dim: 16
base_num_decoder_layers: 1
max_target_length: 16
per_device_batch_size: 8
steps: 30
learning_rate: 1.0e-4
hardware: cpu
"""
CANDIDATE = "base_config: baseline.yml\nlearning_rate: 3.0e-2\n"
# What differs between runs of the same session.
_MEASURED = ("time", "duration", "train_seconds")


def documents(seed, count):
    """Documents in which the next id is mostly three times the last one."""
    generator = np.random.default_rng(seed)
    ids = np.zeros((count, 40), np.int64)
    ids[:, 0] = generator.integers(1, VOCAB_SIZE, count)
    for position in range(1, 40):
        follows = (3 * ids[:, position - 1] + 1) % (VOCAB_SIZE - 1) + 1
        is_random = generator.random(count) < 0.4
        ids[:, position] = np.where(is_random, generator.integers(1, VOCAB_SIZE, count), follows)
    ids[:, -1] = 0
    return list(ids)


@pytest.fixture
def start(tmp_path, users_environment):
    """Starts arena.py in a folder with a data set, a baseline and a better candidate."""
    splits = {"train": documents(0, 400), "validation": documents(1, 60)}
    write_data_set(tmp_path / "data", splits, VOCAB_SIZE)
    (tmp_path / "baseline.yml").write_text(BASELINE)
    (tmp_path / "faster.yml").write_text(CANDIDATE)

    def start_arena(*arguments):
        with (tmp_path / "arena.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(REPOSITORY / "MaxText/arena.py"), *arguments],
                cwd=tmp_path,
                env=users_environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    return start_arena


def finish(process):
    """Returns the exit code and the verdicts of arena.py, without measured times."""
    output, _ = process.communicate()
    verdicts = [json.loads(line) for line in output.splitlines()]
    for verdict in verdicts:
        for cost in (verdict["cost"], verdict["baseline_cost"]):
            cost.pop("train_seconds", None)
        del verdict["command"]  # names the folder
    return process.returncode, verdicts


def ledger(folder):
    """Returns the rows of a session, without measured times; runs that are parallel in order."""
    rows = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    kept = [{name: row[name] for name in row if name not in _MEASURED} for row in rows]
    return sorted(kept, key=json.dumps)


def rewind(folder):
    """Takes a session back to the candidate's first run."""
    path = folder / "ledger.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    events = list(map(json.loads, rows))
    first = next(
        number
        for number, row in enumerate(events)
        if row["event"] == "trial" and (row["owner"], row["seed"]) == ("faster", 0)
    )
    path.write_text("".join(rows[: first + 1]))
    done = {(row["owner"], row["seed"]) for row in events[: first + 1] if row["event"] == "trial"}
    for owner, runs in (("baseline", "baseline"), ("faster", "candidates/faster")):
        for run in (folder / runs).glob("seed_*/"):
            if (owner, int(run.name.removeprefix("seed_"))) not in done:
                shutil.rmtree(run)


def wait_for(path):
    """Waits for a file that is not empty."""
    end = time.monotonic() + 600
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < end, path
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_session_resumes_to_the_same_ledger_and_measures_its_keeper(start, tmp_path):
    settings = ["baseline=baseline.yml", "alpha=0.4", "num_candidates=1", "max_seeds=3"]
    settings += ["baseline_seeds=2", "jobs=2", "candidate=faster.yml"]
    code, verdicts = finish(start("output=whole", *settings))
    log = (tmp_path / "arena.log").read_text()
    assert code == 0, log
    assert verdicts[0]["verdict"] == "keep"

    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    rewind(tmp_path / "killed")
    process = start("output=killed", "jobs=2")
    run = tmp_path / "killed/candidates/faster/seed_1"
    wait_for(run / "events.jsonl")
    process.kill()
    process.communicate()
    orphan = int(run.with_name("seed_1.pid").read_text())
    os.kill(orphan, 0)  # it has outlived the session
    resumed = start("output=killed", "jobs=2", "--final")
    assert finish(resumed) == (0, verdicts)
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)

    rows = ledger(tmp_path / "killed")
    (final,) = (row for row in rows if row["event"] == "final")
    assert [row for row in rows if row != final] == ledger(tmp_path / "whole")
    assert (final["owner"], sorted(final["losses"])) == ("faster", ["0", "1", "2"])
    assert all(final["losses"][seed] < final["baseline_losses"][seed] for seed in "012")
