"""The words of the command line that are compare.py's own."""

import shlex
from pathlib import Path

import pytest

from MaxText.config.program_options import options_of
from MaxText.config.schema import all_keys
from MaxText.experiments.compare_args import SET_PER_RUN, CompareArgs, CompareOptions, parse_args
from tests.experiments.small_comparison import key_at_fault


def request(*arguments: str) -> CompareArgs:
    parsed, problems = parse_args(arguments)
    assert not problems
    return parsed


def test_own_words_are_taken_out_and_the_rest_is_left():
    parsed = request(
        "a.yml",
        "steps=3",
        "b.yaml",
        "match=flops",
        "budget=1.5B",
        "solve_for=[steps, width]",
        "seeds=2",
        "tolerance=0.1",
        "launch=print",
        "num_devices=8",
        "output=there",
    )
    assert parsed == CompareArgs(
        configs=("a.yml", "b.yaml"),
        keys=("steps=3",),
        match="flops",
        seeds=(0, 1),
        budget=1.5e9,
        solve_for=("steps", "width"),
        tolerance=0.1,
        launch="print",
        output=Path("there"),
        num_devices=8,
    )


def test_own_words_hide_no_key():
    assert not set(options_of(CompareOptions)) & set(all_keys())
    assert set(SET_PER_RUN) <= set(all_keys())


def test_seeds_are_a_number_or_a_list():
    for text, seeds in {"3": (0, 1, 2), "[3]": (3,), "4,7": (4, 7), "[0, 2]": (0, 2)}.items():
        assert request(f"seeds={text}").seeds == seeds


@pytest.mark.parametrize(
    ("match", "text", "amount"),
    [
        ("params", "10M", 1e7),
        ("params", "10m", 1e7),
        ("params", "1_000", 1000),
        ("flops", "1e15", 1e15),
        ("tokens", ".5k", 500),
        ("tokens", "2T", 2e12),
        ("time", "90", 90),
        ("time", "10m", 600),
        ("time", "1.5h", 5400),
        ("time", "30s", 30),
    ],
)
def test_budgets_have_suffixes(match, text, amount):
    assert request(f"match={match}", f"budget={text}").budget == amount


MISTAKES = [
    "match=parms",
    "match=none",
    "launch=go",
    "seeds=0",
    "seeds=1,1",
    "seeds=-1",
    "budget=much",
    "budget=0",
    "match=time budget=10B",
    "stages=[{}]",
    "solve_for=widht",
    "solve_for=learning_rate",
    "tolerance=2%",
    "num_devices=0",
    "match=time num_devices=2",
    "init_weights_seed=3",
    "run_name=x",
    "sweep={a",
    "sweep=",
    "'sweep=[{steps: 1}, steps]'",
    "output=gs://bucket/x",
    "seed=3",
    "macth=params",
]


def test_mistakes(snapshot):
    messages = {}
    for line in MISTAKES:
        _, (problem,) = parse_args(shlex.split(line))
        messages[line] = "\n".join(problem.lines())
        assert key_at_fault(line) in problem.message, line
    assert messages == snapshot
