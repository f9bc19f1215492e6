"""Options, messages and exit codes, in this process and in one of its own."""

import json
import subprocess
import sys

import pytest

from MaxText.configuration import config_files
from MaxText.configuration.catalogue import all_keys
from MaxText.configuration.command_line import parse
from MaxText.configuration.loading import load

USAGE = "Trains a model."


def answer(capsys, *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        parse("train.py", arguments, USAGE)
    assert caught.value.code == code
    streams = capsys.readouterr()
    assert "Traceback" not in streams.err
    return streams.err if code else streams.out


def test_parse_returns_what_load_does():
    arguments = ["dataset_type=synthetic", "steps=3"]
    loaded = parse("MaxText/train.py", arguments, USAGE)
    assert loaded.config.run.steps == load(arguments).config.run.steps == 3


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_every_key(option, capsys):
    text = answer(capsys, option)
    assert USAGE in text
    for name in all_keys():
        assert f"\n  {name}=" in text
    assert answer(capsys, "gpt2.yml", option, "steps=x") == text


def test_help_of_a_key(capsys):
    text = answer(capsys, "--help", "rotary_pct", "decoder_block=gpt_neox")
    for part in ("> 0 and <= 1", "default:  1.0", "position_embedding=rotary", "a number", "0.25"):
        assert part in text
    assert "configs/decoder_blocks/gpt_neox.yml:" in text
    assert "unit:     steps" in answer(capsys, "--help", "steps")
    assert "bfloat16" in answer(capsys, "--help", "dtype")
    assert "default:  null" in answer(capsys, "--help", "max_num_checkpoints_to_keep")
    assert "now:" not in answer(capsys, "--help", "steps", "stepz=1")


def test_help_and_why_of_an_unknown_key(capsys):
    assert "nearest:  steps" in answer(capsys, "--help", "stepz", code=2)
    assert "nearest:  steps" in answer(capsys, "--why", "stepz", code=2)
    assert "always in the folder" not in answer(capsys, "--why", "gcs_metrics", code=2)
    assert "needs a key" in answer(capsys, "--why", code=2)
    assert "needs a YAML file" in answer(capsys, "--from-maxtext", code=2)


def test_why_names_the_winner_and_what_it_beat(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text("base_config: gpt2.yml\n\nlearning_rate: 1.0e-3\n")
    monkeypatch.setenv("M_LEARNING_RATE", "2e-3")
    shipped = (config_files.SHIPPED / "gpt2.yml").read_text()
    line = next(
        number
        for number, text in enumerate(shipped.splitlines(), start=1)
        if text.startswith("learning_rate")
    )
    text = answer(capsys, "mine.yml", "learning_rate=3e-3", "--why", "learning_rate")
    assert text.splitlines() == [
        "learning_rate=0.003",
        "  set by: command line, learning_rate=3e-3",
        "  over:   environment variable M_LEARNING_RATE=2e-3",
        "  over:   config file, mine.yml:3, learning_rate: 1.0e-3",
        f"  over:   base_config, configs/gpt2.yml:{line}, learning_rate: 6.0e-4",
        "  over:   schema default, 3.0e-05",
    ]
    text = answer(capsys, "--why", "steps", "steps=-1", "learning_rate_schedule_steps=9")
    assert text.splitlines()[:2] == [
        "steps=9",
        "  set by: derived from learning_rate_schedule_steps",
    ]


def test_show_config_can_be_fed_back(capsys, write):
    arguments = ["model_name=gpt2-124m", "base_emb_dim=1536", "dataset_path=d", "run_name=r"]
    text = answer(capsys, "--show-config", *arguments)
    assert "base_emb_dim: 1536  # command line" in text
    assert "# configs/models/gpt2-124m.yml:" in text
    assert load([write(text)]).config == load(arguments).config


def test_from_maxtext(capsys, write):
    path = write(
        "steps: 5\nmax_num_checkpoints_to_keep: 2\ngcs_metrics: true\nmegablox: true\n"
        "dataset_type: tfds\nstepz: 1\nlogical_axis_rules: [[embed, tensor_sequence]]\n"
        "dropout_rate: 3\n"
    )
    text = answer(capsys, "--from-maxtext", path)
    understood, changed, idle, refused, ignored, unknown = text.split("\n\n")[1:]
    assert "  steps: 5" in understood
    assert "  max_num_checkpoints_to_keep: max_to_keep: 2" in changed
    assert "megablox: true has no effect here: the form of the products of experts" in idle
    assert "dataset_type: 'tfds'" in refused
    assert "tensor_sequence" in refused
    assert "dropout_rate: 3 is not" in refused
    assert "gcs_metrics: metrics.jsonl always lies" in ignored
    assert "stepz: nearest: steps" in unknown
    assert "not found" in answer(capsys, "--from-maxtext", "nowhere.yml", code=2)


def test_a_newcomer_without_arguments_learns_what_to_type(capsys):
    text = answer(capsys, code=2)
    assert "python MaxText/train.py configs/quickstart.yml" in text
    assert text.startswith("error: 1 problem in the configuration")


def test_a_typo_exits_with_2_before_jax_is_imported(tmp_path):
    program = f"""
import json, sys
sys.path.insert(0, {str(config_files.REPOSITORY)!r})
from MaxText.configuration.command_line import parse
try:
    parse("train.py", ["gpt2.yml", "dataset_path=x", "lerning_rate=1"], "")
finally:
    heavy = {{"jax", "jaxlib", "numpy", "flax", "grain", "orbax"}}
    print(json.dumps(sorted(heavy & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert json.loads(done.stdout) == []
    assert "lerning_rate: unknown key" in done.stderr
    assert "nearest:  learning_rate" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_set_without_its_key_is_told_how_to_be_named(capsys, tmp_path):
    (tmp_path / "corpus").mkdir()
    text = answer(capsys, "steps=3", str(tmp_path / "corpus"), code=2)
    assert "is neither key=value nor a config file" in text
    assert f"write:    dataset_path={tmp_path / 'corpus'}, if it is a data set" in text
    assert "write:" not in answer(capsys, "steps=3", str(tmp_path / "none"), code=2)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("raise UserError('no such thing')", 2, "error: no such thing\n"),
        ("raise KeyboardInterrupt", 130, "stopped: all is kept\n"),
        ("raise BrokenPipeError", 141, ""),
        ("print('done')", 0, ""),
    ],
)
def test_how_programs_end(body, code, said):
    program = f"""
import sys
sys.path.insert(0, {str(config_files.REPOSITORY)!r})
from MaxText.configuration.command_line import ending_well
from MaxText.errors import UserError
with ending_well("stopped: all is kept"):
    {body}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_what_the_program_would_refuse_is_a_note(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("train.py", ["gpt2.yml", "--why", "steps"], "")
    shown = capsys.readouterr()
    assert ended.value.code == 0
    assert shown.out.startswith("steps=")
    assert "note: train.py would refuse this: 1 problem" in shown.err
    assert "no data set is named" in shown.err
