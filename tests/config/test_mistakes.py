"""Every kind of mistake: one problem each, all at once, with place and remedy."""

import contextlib
import random
import re
import shlex
from pathlib import Path

import pytest

from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.rules import RULES
from MaxText.config.schema import all_keys
from MaxText.errors import UserError
from tests.small_models import some_quick


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """Keys without effect are mistakes; test_notices.py has what they are by default."""
    monkeypatch.setenv("M_STRICT_CONFIG", "true")


def command_lines() -> dict[str | None, list[str]]:
    """The lines of mistakes.txt by the program for which they are a mistake; None for all."""
    program, lines = None, {None: []}
    for line in Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
            lines[program] = []
        elif line and not line.startswith("#"):
            lines[program].append(line)
    return lines


MISTAKES = command_lines()
# A key without which a program has nothing to do.
NEEDED_BY = {
    "train.py": "dataset_type",
    "eval.py": "eval_tasks",
    "train_compile.py": "compile_topology",
}


def keys_of(line: str) -> set[str]:
    parts = (word.lstrip("-").partition("=") for word in shlex.split(line))
    return {name for name, equals, _ in parts if equals}


@pytest.mark.parametrize("program", MISTAKES)
def test_one_problem_for_one_mistake(program, snapshot):
    messages = {}
    for line in MISTAKES[program]:
        with pytest.raises(ConfigurationError) as caught:
            load(shlex.split(line), program)
        (problem,) = caught.value.problems
        # A key of the line is blamed: where it was set is shown.
        set_at = [place.removeprefix("command line, ") for place in problem.location]
        assert keys_of(line) & {place.partition("=")[0].lstrip("-") for place in set_at}, line
        messages[line] = "\n".join(problem.lines())
        advice = [text for label, text in problem.facts if label in ("try", "closest", "write")]
        named = re.findall(r"(?<![\w./-])([a-z][a-z_0-9.]{2,})=", " ".join(advice))
        assert set(named) <= set(all_keys()), line
    assert messages == snapshot


def test_every_rule_is_tested():
    lines = [line for of_program in MISTAKES.values() for line in of_program]
    tested = {*NEEDED_BY.values(), *(name for line in lines for name in keys_of(line))}
    tested.add("mixer")  # of a part: tests/layers/test_parts.py
    for rule in RULES:
        assert tested.intersection(rule.keys), rule.keys


def test_all_problems_are_listed_at_once(write, monkeypatch, told):
    path = write("steps: ten\n\nlearning_rat: 1\n")
    monkeypatch.setenv("M_VOCAB_SIZE", "many")
    words = ["dtype=bf16", "quantize_kvcache=true", "base_num_kv_heads=5", "--x=1", "y", "--z"]
    with pytest.raises(UserError) as caught:
        load([path, *words])
    assert len(caught.value.problems) == 9
    places = str([problem.location for problem in caught.value.problems])
    for place in ("config.yml:1, steps: ten", "config.yml:3", "M_VOCAB_SIZE=many", "dtype=bf16"):
        assert place in places
    told(caught.value)


@pytest.mark.parametrize("program", NEEDED_BY)
def test_what_a_program_needs(program, told):
    with pytest.raises(ConfigurationError, match=NEEDED_BY[program]) as caught:
        load([], f"MaxText/{program}")
    told(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "steps: 1\nrun_name: a\nsteps: 2\n",
        "- steps\n",
        "base_config: [a, b]\n",
        "base_config: nowhere.yml\n",
        "schema_version: 999\n",
        "schema_version: x\n",
        "lora: {rank: 3}\n",
        "run_name: !!python/object/apply:os.getcwd []\n",
        "adamw_mask: &a [*a]\n",
        'run_name: "a\\0b"\n',
    ],
)
def test_bad_files(text, write, told):
    with pytest.raises(ConfigurationError, match=r"config\.yml") as caught:
        load_config(write(text))
    assert len(caught.value.problems) == 1
    told(caught.value)


def test_a_config_file_has_a_bound(write):
    path = write("".join(f"k{number}: 1\n" for number in range(150_000)))
    with pytest.raises(ConfigurationError, match="1,000,000"):
        load([path])


def test_an_empty_file_gives_the_defaults(write):
    assert load_config(write("# nothing\n"), run_name="r") == load_config(run_name="r")


@pytest.mark.parametrize("layer", ["environment", "file", "argument"])
def test_keys_without_effect_that_were_set_on_purpose(layer, write, monkeypatch):
    path, keys = None, {"rotary_pct": "0.5", "position_embedding": "none"}
    if layer == "environment":
        for name, value in keys.items():
            monkeypatch.setenv(f"M_{name.upper()}", value)
    elif layer == "file":
        path = write("".join(f"{name}: {value}\n" for name, value in keys.items()))
    with pytest.raises(ConfigurationError, match=r"rotary_pct: .*position_embedding="):
        load_config(path, **(keys | {"rotary_pct": 0.5} if layer == "argument" else {}))


def test_keys_that_have_an_effect_or_were_not_chosen_are_accepted(write):
    write("muon_beta: 0.9\n", "b.yml")
    load_config(write("base_config: b.yml\n"))  # inherited
    load_config(model_name="pythia-70m", position_embedding="none")


def test_a_stronger_choice_makes_the_file_inert(write):
    path = write("dataset_path: folder\n")
    load([path, "dataset_type=synthetic"])
    with pytest.raises(ConfigurationError, match="dataset_path: "):
        load([path, "dataset_type=synthetic", "dataset_path=other"])


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("train_compile.py", "compile_topology=v5e-16"),
        ("train.py", "ici_pipeline_parallelism=2 dataset_type=synthetic"),
        ("plan.py", ""),
        ("train.py", "dataset_path=folder"),
        ("train.py", "grain_train_files=a* eval_interval=-1"),
        ("train.py", "grain_train_files=a* grain_eval_files=b* eval_interval=5"),
        ("eval.py", "dataset_path=folder max_target_length=64 eval_stride=64"),
        ("eval.py", "grain_eval_files=b*"),
        ("eval.py", "dataset_type=synthetic eval_steps=2"),
        ("eval.py", "eval_tasks=[lambada] task_files.lambada=a.jsonl"),
        ("eval.py", "harness.tasks=[hellaswag]"),
        (None, "attention_projections=pattention slot_num=8"),  # one condition of several is met
        (None, "feed_forward_type=pattention normalize_type=gelu gelu_approximate=false"),
        (None, "rotary_pct=1 position_embedding=none"),  # the default value
        (None, "steps=3 steps=3"),
        (None, "base_num_kv_heads=4 head_dim=-1"),
        (None, "decoder_block=gpt2 trainable_position_size=4096"),
        (None, "lr_schedule_type=wsd warmup_steps_fraction=0.9 wsd_decay_steps_fraction=0.1"),
        (None, "ici_data_parallelism=-1 ici_fsdp_parallelism=1"),
        (None, "base_num_decoder_layers=10000 eval_stride=-1"),
    ],
)
def test_near_misses_are_accepted(program, line):
    load(line.split(), program)


RAW = ["[[a,1]]", "", "{a: b}", "9" * 5000, "\x00"]


@pytest.mark.parametrize("raw", some_quick(RAW, 8))
def test_no_value_of_any_key_makes_a_traceback(raw):
    names = sorted(all_keys())
    # The slow tests draw other words in each run.
    for name in names if raw == RAW[0] else random.sample(names, len(names) // 3):
        with contextlib.suppress(UserError):
            load([f"{name}={raw}"])
