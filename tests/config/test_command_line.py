"""Options, messages and exit codes."""

import re
import sys

import pytest

from MaxText.config import config_files
from MaxText.config.command_line import exit_on_user_error, parse, program_command
from MaxText.config.loading import load
from MaxText.config.schema import all_keys
from MaxText.errors import UserError

USAGE = "Trains a model."


@pytest.fixture
def answer(capsys):
    def answer(*arguments: str, code: int = 0) -> str:
        """What is printed: on stdout, or after a mistake on stderr."""
        with pytest.raises(SystemExit) as caught:
            parse("train.py", arguments, USAGE)
        assert caught.value.code == code
        streams = capsys.readouterr()
        assert (streams.err if code == 0 else streams.out) == ""
        return streams.err if code else streams.out

    return answer


def test_help_lists_every_key(answer):
    text = answer("-h")
    assert USAGE in text
    for name in all_keys():
        assert f"\n  {name}=" in text
    assert answer("gpt2.yml", "--help", "steps=x") == text


def test_help_lists_presets_by_family(answer):
    text = answer("--help", "model_name")
    assert "\n    llama3.1: llama3.1-405b, llama3.1-70b, llama3.1-8b\n" in text
    assert "gemma3" in answer("--help", "decoder_block")


def test_help_of_a_key(answer, told):
    text = answer("--help", "rotary_pct", "decoder_block=gpt_neox")
    assert "now:      0.25 (configs/decoder_blocks/gpt_neox.yml:" in text
    told(text)
    assert "steps" in answer("--help", "steps").partition("unit:")[2]
    # The mistake of a command line does not withhold the help that corrects it.
    assert "now:" not in answer("--help", "steps", "stepz=1")


@pytest.mark.parametrize(
    "words",
    [
        "gpt2.yml dataset_path=x lerning_rate=1",
        "--help stepz",
        "--why stepz",
        "--why gcs_metrics",
        "--why",
        "--from-maxtext",
        "--from-maxtext nowhere.yml",
        "~no_such_user_here/a.yml",
        "",
    ],
)
def test_mistakes(words, answer, told):
    told(answer(*words.split(), code=2))


def test_why_names_the_winner_and_what_it_beat(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text("base_config: gpt2.yml\n\nlearning_rate: 1.0e-3\n")
    monkeypatch.setenv("M_LEARNING_RATE", "2e-3")
    shipped = (config_files.SHIPPED / "gpt2.yml").read_text()
    line = 1 + shipped[: shipped.index("\nlearning_rate") + 1].count("\n")
    value, *places = answer(
        "mine.yml", "learning_rate=3e-3", "dataset_path=d", "--why", "learning_rate"
    ).splitlines()
    assert value == "learning_rate=0.003"
    assert [place.split(":", 1)[1].strip() for place in places] == [
        "command line, learning_rate=3e-3",
        "environment variable M_LEARNING_RATE=2e-3",
        "config file, mine.yml:3, learning_rate: 1.0e-3",
        f"base_config, configs/gpt2.yml:{line}, learning_rate: 6.0e-4",
        "schema default, 3.0e-05",
    ]
    text = answer("dataset_path=d", "--why", "steps", "steps=-1", "learning_rate_schedule_steps=9")
    assert text.startswith("steps=9\n  set by: derived from learning_rate_schedule_steps\n")


def test_what_the_program_would_refuse_is_a_note(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("train.py", ["gpt2.yml", "--why", "steps"], "")
    shown = capsys.readouterr()
    assert ended.value.code == 0
    assert shown.out.startswith("steps=")
    assert shown.err.startswith("note: train.py ")
    assert "dataset_type=synthetic" in shown.err


def test_show_config_can_be_fed_back(answer, write):
    arguments = ["model_name=gpt2-124m", "base_emb_dim=1536", "dataset_path=d", "run_name=r"]
    text = answer("--show-config", *arguments)
    assert "base_emb_dim: 1536  # command line" in text
    assert "# configs/models/gpt2-124m.yml:" in text
    assert load([write(text)]).config == load(arguments).config


def test_from_maxtext(answer, write, told):
    path = write(
        "steps: 5\nmax_num_checkpoints_to_keep: 2\ngcs_metrics: true\nmegablox: true\n"
        "dataset_type: tfds\nstepz: 1\nlogical_axis_rules: [[embed, tensor_sequence]]\n"
        "dropout_rate: 3\ndense_conn: true\nmudd_postnorm: true\nddw_gen_chunk_size: null\n"
    )
    told(answer("--from-maxtext", path))


def test_a_data_set_without_its_key_gets_a_hint_to_the_key(answer, tmp_path):
    (tmp_path / "corpus").mkdir()
    assert f"dataset_path={tmp_path / 'corpus'}" in answer(str(tmp_path / "corpus"), code=2)
    assert f"dataset_path={tmp_path}" not in answer(str(tmp_path / "none"), code=2)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_how_programs_end(error, code, said, capfd):
    with pytest.raises(SystemExit) as caught, exit_on_user_error("stopped"):
        raise error
    assert (caught.value.code, capfd.readouterr().err) == (code, said)
    print("more", flush=True)
    assert capfd.readouterr().out == ("" if code == 141 else "more\n")


@pytest.mark.parametrize(
    "line",
    [
        "decoder_block: no_such_block",
        "model_name: no-such-preset",
        "opt_type: adagrad",
        "base_num_kv_heads: 5",
        "dataset_type: hf",
        "steps: many",
    ],
)
def test_from_maxtext_supports_nothing_that_training_refuses(line, answer, write):
    path = write(f"{line}\nlearning_rate: 1.0e-3\nhead_dim: 64\ndataset_path: folder\n")
    with pytest.raises(UserError):
        load([path], "train.py")
    supported, refused = answer("--from-maxtext", path).split("Not supported")
    assert line not in supported
    assert line.partition(":")[0] in refused
    assert "learning_rate: 1.0e-3" in supported
    # Whether a key of the model is supported depends on the model.
    assert ("head_dim: 64" in supported) == ("no" not in line)


def test_from_maxtext_shows_names_of_entries_and_keys_without_effect(answer, write):
    path = write(
        "checkpoint_storage_use_ocdbt: false\nprofiler_steps: 3\nprofiler: xplane\n"
        "dataset_path: d\nposition_embedding: none\nrotary_pct: 0.5\n"
    )
    text = answer("--from-maxtext", path)
    assert "  checkpoint_storage.use_ocdbt: false\n" in text
    assert "  profiler_window.steps: 3\n" in text
    assert "  rotary_pct: 0.5\n" not in text
    assert "rotary_pct: has no effect with position_embedding=" in text


def test_from_maxtext_reads_json_and_arguments_over_the_file(answer, write):
    path = write('{"decoder_block": "nothing", "steps": 5}', "maxtext.json")
    assert "decoder_block: there is no" in answer("--from-maxtext", path)
    assert "(0):\n\nStill needed" in answer("--from-maxtext", path, "decoder_block=llama2")


@pytest.mark.parametrize(
    "argument",
    [
        "no_such_file.json",
        "model_name=no-such-preset",
        "decoder_block=no_such_block",
        "nowhere.yml",
        ".",
        "configs/gpt2",
    ],
)
def test_consequences_of_a_missing_configuration_are_not_listed(argument, answer):
    text = answer(argument, code=2)
    assert text.startswith("error: 1 problem in the configuration")
    assert "no dataset is set" not in text


@pytest.mark.parametrize("argument", ["--resume", "--no-such-option", "--restore", "-v"])
def test_advice_names_no_key_that_does_not_exist(argument, answer):
    text = answer(argument, "dataset_path=d", code=2)
    named = re.findall(r"write (\w+)=", text)
    assert not named
    assert "write steps=VALUE" in answer("--steps", "dataset_path=d", code=2)


def test_commands_to_type_next_start_this_python(tmp_path, monkeypatch):
    """Typed as it is printed, a command uses the same environment, active or not."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["programs/prepare_data.py"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_command("train") == ".venv/bin/python programs/train.py"
    active = tmp_path / ".venv" / "bin"
    active.mkdir(parents=True)
    (active / "python").write_text("")
    (active / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(active))
    assert program_command("train") == "python programs/train.py"
    assert program_command("decode") == "python -m MaxText.decode"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/maxtext-prepare-data"])
    assert program_command("inspect_data") == "maxtext-inspect-data"
