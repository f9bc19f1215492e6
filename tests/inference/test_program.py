"""decode.py as users type it, and which of its sampling settings a strategy uses."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from MaxText.config.training_sections import DecodingConfig
from MaxText.errors import UserError
from MaxText.inference.checkpoint_config import load
from MaxText.inference.decoding import UnexpectedOutputError, decode, sampling_params
from MaxText.inference.sampling import SamplingParams
from MaxText.inference.trained_model import load_model
from tests.house.sources import REPOSITORY
from tests.inference.small_models import llama_folder
from tests.programs import run as start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return llama_folder(tmp_path_factory.mktemp("weights") / "hf")


def run(folder, *arguments):
    pieces = []
    decode(load([f"load_parameters_path={folder}", "jax_cache_dir=", *arguments]), pieces.append)
    return "".join(pieces)


def test_one_prompt_and_one_mistake(folder, tmp_path, users_environment):
    arguments = [f"load_parameters_path=hf:{folder}", "prompt=Once", "max_new_tokens=5"]
    done = start("decode.py", arguments, tmp_path, users_environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nInput `Once` -> `" in done.stdout
    assert "5 tokens" in done.stdout
    done = start("decode.py", [*arguments, "decode_sampling_top_k=-1"], tmp_path, users_environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 1 problem in the configuration")
    assert list(tmp_path.iterdir()) == []


def test_prompts_of_a_file_to_json_lines(folder, tmp_path):
    prompts = [{"prompt": "a", "id": "x"}, {"prompt": "longer prompt", "id": "y"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    output = tmp_path / "new" / "texts.jsonl"
    arguments = (f"prompt_file={path}", f"decode_output_path={output}", "max_new_tokens=6")
    shown = run(folder, *arguments, "decode_num_return_sequences=2", "decode_ignore_eos=true")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted((row["index"], row["sample"], row["id"]) for row in rows) == [
        (0, 0, "x"),
        (0, 1, "x"),
        (1, 0, "y"),
        (1, 1, "y"),
    ]
    assert rows[0]["completion"] != rows[1]["completion"]
    for row in rows:
        assert len(row["tokens"]) == len(row["log_probabilities"]) == 6
        assert max(row["log_probabilities"]) <= 0
        assert row["finish_reason"] == "length"
        assert f"Input `{row['prompt']}` -> `{row['completion']}`\n" in shown


def test_what_is_in_the_output_file_stays_until_there_is_a_text(folder, tmp_path):
    output_path = tmp_path / "kept.jsonl"
    output_path.write_text('{"prompt": "before"}\n')
    with pytest.raises(UserError, match="no such file"):
        run(folder, f"decode_output_path={output_path}", "tokenizer_path=gone/tokenizer.json")
    with pytest.raises(UserError, match="is the file of prompt_file"):
        run(folder, f"decode_output_path={output_path}", f"prompt_file={output_path}")
    assert output_path.read_text() == '{"prompt": "before"}\n'
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        run(folder, f"decode_output_path={tmp_path}")


@pytest.mark.slow
def test_a_broken_pipe_does_not_stop_generation(folder, tmp_path, users_environment):
    line = (
        f"{sys.executable} {REPOSITORY}/MaxText/decode.py load_parameters_path={folder} "
        "max_new_tokens=3 decode_num_return_sequences=40 "
        "per_device_batch_size=4 decode_ignore_eos=true decode_output_path=out.jsonl | head -1"
    )
    environment = users_environment | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 40


def test_matrices_have_the_format_that_they_are_multiplied_in(folder):
    config = load([f"load_parameters_path={folder}", "dtype=bfloat16"]).config
    trained = load_model(config, lambda line: None)
    model, tokens = trained.model, jnp.asarray([[5, 6, 7]])
    read = jax.jit(lambda params: model.merge(params).prefill(tokens, jnp.array([3]), 8)[0])
    expected = read(trained.params)
    parts = model.unstack_params(jax.tree.map(jnp.copy, trained.params))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(parts)} == {"bfloat16", "float32"}
    assert parts["layers"][0]["mlp"]["wo"]["kernel"].dtype == jnp.bfloat16
    assert parts["layers"][0]["pre_mlp_layer_norm"]["scale"].dtype == jnp.float32
    assert (read(parts) == expected).all()


def test_the_expected_text(folder):
    arguments = ["prompt=Once", "max_new_tokens=4", "decode_ignore_eos=true"]
    arguments.append("decode_sampling_strategy=greedy")
    text = run(folder, *arguments).partition("Input `Once` -> `")[2].rpartition("`\n")[0]
    assert text
    run(folder, *arguments, f"autoregressive_decode_assert={text}")
    with pytest.raises(UnexpectedOutputError, match="not the expected one") as caught:
        run(folder, *arguments, "autoregressive_decode_assert=other")
    assert caught.value.exit_code == 1


def test_a_long_prompt_says_what_was_not_read(folder):
    shown = run(folder, f"prompt={'word ' * 20}", "max_new_tokens=2")
    assert "truncated to the last 30 of 100 tokens; max_target_length is 32" in shown


EVERY = {
    "temperature": 0.7,
    "top_k": 40,
    "nucleus_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.8,
    "eta": 0.2,
    "entmax_alpha": 1.5,
}


@pytest.mark.parametrize(
    ("strategy", "used"),
    [
        ("weighted", ["temperature"]),
        ("topk", ["temperature", "top_k"]),
        ("nucleus", ["temperature", "nucleus_p"]),
        ("composite", EVERY),
        ("greedy", []),
    ],
)
def test_settings_of_other_strategies_have_no_effect(strategy, used):
    of_maxtext = ("temperature", "top_k", "nucleus_p")
    keys = {
        ("decode_sampling_" if name in of_maxtext else "decode_filters.") + name: value
        for name, value in EVERY.items()
    }
    section = DecodingConfig(decode_sampling_strategy=strategy, repetition_penalty=1.2, **keys)
    expected = {name: EVERY[name] for name in used} or {"temperature": 0}
    assert sampling_params(section) == SamplingParams(repetition_penalty=1.2, **expected)
    assert sampling_params(DecodingConfig()) == SamplingParams()
