"""Small configurations, and whole comparisons of them in process."""

import csv
import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.experiments.compare_args import parse_args
from MaxText.experiments.comparison_plan import ComparisonSpec, Plan, load_or_create_plan
from MaxText.experiments.execution import run_comparison
from MaxText.experiments.variants import Variant, expand_variants, solve_key_by_label

A = """
dataset_type: synthetic
decoder_block: gpt2
steps: 4
base_emb_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 16
base_mlp_dim: 64
base_num_decoder_layers: 2
vocab_size: 64
max_target_length: 16
per_device_batch_size: 4
learning_rate: 1.0e-2
eval_steps: 2
enable_checkpointing: false
enable_tensorboard: false
loss_curve: false
log_config: false
hardware: cpu
"""
B = "base_config: a.yml\ndecoder_block: llama2\n"
# A chain of two stages, whose model changes in nothing.
C = """
base_config: a.yml
stages:
  - {steps: 3}
  - {steps: 2, learning_rate: 2.0e-2}
"""


def variants(*arguments: str) -> list[Variant]:
    """The configurations of a command line without mistakes in the program's own words."""
    request, problems = parse_args(arguments)
    assert not problems
    return expand_variants(request)


def compare(*arguments: str) -> list[str]:
    """What compare.py shows; its folder is out/ unless it is named."""
    lines: list[str] = []
    request, problems = parse_args(arguments)
    request = request if request.output else dataclasses.replace(request, output=Path("out"))
    found = expand_variants(request, problems)
    command = ["compare.py", *arguments]
    run_comparison(request, found, solve_key_by_label(request, found), command, lines.append)
    return lines


def plan_of(
    *arguments: str, seeds: tuple[int, ...] = (0,)
) -> tuple[Plan, list[Variant], ComparisonSpec]:
    """The plan in out/ of a comparison that solves for steps."""
    request, _ = parse_args(arguments)
    found = expand_variants(request)
    solve_for = {one.label: "steps" for one in found}
    question = ComparisonSpec(request.match, request.budget, solve_for, 0.02, 1)
    Path("out").mkdir(exist_ok=True)
    return load_or_create_plan(Path("out"), found, question, seeds), found, question


def key_at_fault(text: str) -> str:
    """The last key of a command line or of YAML, behind which a mistake was made."""
    return re.findall(r"\w+(?=[:=](?!//))|^$|(?<=--)\w+|\w+\.yml$", text)[-1]


def refusals(cases: Iterable[str], act: Callable[[str], object]) -> str:
    """What is said of each command line or YAML text; the key at fault is named, or its list."""
    said = []
    for case in cases:
        with pytest.raises(ConfigurationError) as caught:
            act(case)
        assert re.search(f"{key_at_fault(case)}|stages: |only one", str(caught.value)), case
        said.append(f"{case}\n{caught.value}")
    return "\n\n".join(said)


def rows_of(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of runs.csv by configuration."""
    rows: dict[str, list[dict[str, str]]] = {}
    with (folder / "runs.csv").open() as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["config"], []).append(row)
    return rows
