"""The order of layers, inheritance, and where values are said to come from."""

import os
import shutil
from pathlib import Path

import pytest

from MaxText.config import config_files, sources
from MaxText.config.loading import Source, load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.serialization import resolved_yaml


def test_each_layer_beats_the_one_before(write, monkeypatch):
    write("rope_max_timescale: 2\nrotary_pct: 0.5\nsteps: 2\nwarmup_steps_fraction: 0.2\n", "b.yml")
    path = write(
        "base_config: b.yml\ndecoder_block: gpt_neox\nsteps: 3\nbase_emb_dim: 8\n"
        "rope_max_timescale: 3\n"
    )
    arguments = [path, "model_name=pythia-70m"]
    loaded = load(arguments)
    config = loaded.config
    assert config.model.block.block_arrangement == "parallel"  # decoder_block over default
    assert config.model.position.rotary_pct == 0.5  # base_config over decoder_block
    assert config.run.steps == 3  # file over base_config
    assert config.schedule.warmup_steps_fraction == 0.2
    assert config.model.shape.base_emb_dim == 512  # preset over file
    layers = {
        "block_arrangement": Source.DECODER_BLOCK,
        "rotary_pct": Source.BASE_CONFIG,
        "steps": Source.CONFIG_FILE,
        "base_emb_dim": Source.PRESET,
        "learning_rate": Source.DEFAULT,
    }
    assert {name: loaded.origins[name].source for name in layers} == layers
    assert loaded.origins["steps"].line == 3
    assert loaded.origins["steps"].place.endswith("config.yml:3")

    monkeypatch.setenv("M_BASE_EMB_DIM", "1024")
    loaded = load(arguments)
    assert loaded.config.model.shape.base_emb_dim == 1024
    assert loaded.origins["base_emb_dim"].place == "environment variable M_BASE_EMB_DIM"
    loaded = load([*arguments, "base_emb_dim=2048"])
    assert loaded.config.model.shape.base_emb_dim == 2048
    assert loaded.origins["base_emb_dim"].source is Source.COMMAND_LINE


def test_environment_takes_lists_and_warns_of_near_misses(monkeypatch, capsys):
    for name, value in {
        "M_MLP_ACTIVATIONS": "[gelu]",
        "M_LERNING_RATE": "1",
        "M_GCS_METRICS": "1",
        "M_XQZ": "1",
        "M_MAX_NUM_CHECKPOINTS_TO_KEEP": "3",  # MaxText's name
        "HARDWARE": "tpu",
    }.items():
        monkeypatch.setenv(name, value)
    config = load([]).config
    assert config.model.feed_forward.mlp_activations == ("gelu",)
    assert (config.run.hardware, config.checkpoint.max_to_keep) == ("auto", 3)
    warnings = capsys.readouterr().err
    assert "M_LEARNING_RATE?" in warnings
    assert "M_GCS_METRICS" in warnings
    assert "XQZ" not in warnings


def test_inheritance_is_recursive_and_looks_next_to_the_file_first(write):
    write("steps: 1\nlog_period: 1\neval_steps: 1\n", "a/deep.yml")
    write("base_config: deep.yml\nlog_period: 2\neval_steps: 2\n", "a/middle.yml")
    config = load_config(write("base_config: a/middle.yml\neval_steps: 3\n"))
    found = (config.run.steps, config.monitoring.log_period, config.evaluation.eval_steps)
    assert found == (1, 2, 3)
    config = load_config(write("base_config: gpt2.yml\nsteps: 7\n", "b/own.yml"))
    assert config.model.shape.decoder_block == "gpt3"


def test_a_cycle_is_an_error(write):
    path = write("base_config: b.yml\n", "a.yml")
    write("base_config: a.yml\n", "b.yml")
    with pytest.raises(ConfigurationError, match=r"a\.yml -> .*b\.yml -> .*a\.yml"):
        load_config(path)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2.yml",
        "configs/gpt2.yml",
        "MaxText/configs/gpt2.yml",
        "./configs/gpt2.yml",
        "models/gpt2-124m.yml",
        "gpt2-124m.yml",
    ],
)
def test_shipped_configs_are_found_from_any_folder(name, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = load([name]).config_path
    assert path is not None
    assert path.is_relative_to(config_files.SHIPPED)
    assert path.name == Path(name).name
    write("steps: 5\n", name)  # what lies at the path itself comes first
    assert load([name]).config.run.steps == 5


@pytest.mark.parametrize("name", ["gpt22.yml", "mine/gpt2.yml", "/nowhere/configs/gpt2.yml"])
def test_a_missing_config_names_near_ones(name):
    with pytest.raises(ConfigurationError, match=r"nearest: .*configs/gpt2\.yml") as caught:
        load([name], "train.py")
    assert len(caught.value.problems) == 1  # not also what the file would have said


def test_a_preset_is_a_name_and_no_path():
    with pytest.raises(ConfigurationError, match="configs/models"):
        load(["model_name=../gpt2"])
    for nothing in ("model_name=", "model_name=none", "model_name=default"):
        assert load([nothing]).config.model == load_config().model


@pytest.mark.parametrize(("key", "stem"), [("model_name", "mine"), ("decoder_block", "run")])
def test_a_preset_or_bundle_may_be_a_path(key, stem, write):
    config = load_config(**{key: write("block_arrangement: parallel\n", "mine.yml")})
    assert config.model.block.block_arrangement == "parallel"
    assert config.run.run_name.startswith(f"{stem}_20")
    assert config.run.base_output_directory == "./maxtext_output"
    saved = write(resolved_yaml(config), "saved.yml")
    (Path(saved).parent / "mine.yml").unlink()
    assert load_config(saved).model == config.model


def test_a_preset_may_inherit_but_not_choose_another(write, monkeypatch, tmp_path):
    models = tmp_path / "models"
    shutil.copytree(config_files.MODELS, models)
    monkeypatch.setattr(config_files, "MODELS", models)
    (models / "small.yml").write_text("base_config: pythia-70m.yml\nbase_emb_dim: 256\n")
    (models / "odd.yml").write_text("model_name: pythia-70m\n")
    config = load_config(write("base_emb_dim: 8\n"), model_name="small")
    assert config.model.shape.base_emb_dim == 256
    assert config.model.block.block_arrangement == "parallel"
    with pytest.raises(ConfigurationError, match="model_name"):
        load_config(model_name="odd")


@pytest.mark.parametrize("use", ["file", "base_config"])
def test_base_yml_does_not_beat_a_decoder_block(use, write):
    path = "base.yml" if use == "file" else write("base_config: base.yml\n")
    config = load_config(path, decoder_block="gpt_neox")
    assert config.model.position.rotary_pct == 0.25
    assert config.model.block.normalization_type == "layer_norm"


def test_aliases():
    assert load(["max_num_checkpoints_to_keep=3"]).config.checkpoint.max_to_keep == 3
    assert load(["packing_train=false", "packing=false"]).config.data.packing is False
    assert load(["packing=true", "packing_train=false"]).config.data.packing is False


def test_derived_values(monkeypatch):
    assert load_config(steps=10).schedule.learning_rate_schedule_steps == 10
    loaded = load(["steps=-1", "learning_rate_schedule_steps=20"])
    assert loaded.config.run.steps == 20
    assert loaded.origins["steps"].place == "derived from learning_rate_schedule_steps"

    for keys, folder, name in (
        ({"run_name": "x"}, "./maxtext_output", "x"),
        ({"run_name": "gs://b/o/x"}, "gs://b/o", "x"),
        ({"run_name": "/x"}, "/", "x"),
        ({"run_name": "group/x", "base_output_directory": "out"}, "out", "group/x"),
        ({"run_name": "group/x"}, "./maxtext_output", "group/x"),
        ({"run_name": "/tmp/o/x", "base_output_directory": "out"}, "/tmp/o", "x"),
    ):
        run = load_config(**keys).run
        assert (run.base_output_directory, run.run_name) == (folder, name)
    for name in ("a/../../b", "a//b", "..", "./a"):
        with pytest.raises(ConfigurationError, match="run_name"):
            load_config(run_name=name)

    assert load_config("gpt2.yml").run.run_name.startswith("gpt2_20")
    assert load_config("gpt2.yml", model_name="llama2-7b").run.run_name.startswith("llama2-7b_20")
    monkeypatch.setitem(os.environ, "JOBSET_NAME", "job")
    loaded = load([])
    assert loaded.config.run.run_name == "job"
    assert "$JOBSET_NAME" in loaded.origins["run_name"].place


def test_axis_rules_merge_by_name(write):
    base = dict(load_config().mesh.logical_axis_rules)
    path = write("logical_axis_rules: [[vocab, [fsdp, tensor]], [kv, tensor], [kv, []]]\n")
    rules = load_config(path, logical_axis_rules=[["embed", None]]).mesh.logical_axis_rules
    assert rules[:4] == (
        ("embed", ()),
        ("vocab", ("fsdp", "tensor")),
        ("kv", ("tensor",)),
        ("kv", ()),
    )
    assert dict(rules)["mlp"] == base["mlp"]
    assert [name for name, _ in rules].count("vocab") == 1
    whole = [["mlp", "fsdp"], *([name, None] for name in base if name != "mlp")]
    replaced = load_config(logical_axis_rules=whole, override_logical_axis_rules=True).mesh
    assert replaced.logical_axis_rules[0] == ("mlp", ("fsdp",))
    assert len(replaced.logical_axis_rules) == len(base)


def test_axis_rules_that_replace_all_others_are_a_whole_set():
    rules = "logical_axis_rules=[[embed,null],[mlp,fsdp]]"
    with pytest.raises(ConfigurationError, match="no rule for activation_batch") as caught:
        load([rules, "override_logical_axis_rules=true"])
    (problem,) = caught.value.problems
    assert "mlp" not in problem.message.partition("rule for ")[2].replace("activation_mlp", "")


@pytest.mark.parametrize("text", ["sweep:\n  steps: [1, 2]\n", "stages: [{steps: 1}]\n"])
def test_a_sweep_and_stages_are_refused_by_all_who_do_not_expand_them(text, write):
    path = write(f"steps: 5\n{text}", "swept.yml")
    above = write("base_config: swept.yml\n", "above.yml")
    for arguments in ([path], [above]):
        with pytest.raises(ConfigurationError, match=r"swept\.yml:2"):
            load(arguments)
        assert load(arguments, for_compare=True).config.run.steps == 5
    with pytest.raises(ConfigurationError, match="steps: given twice"):
        load([write("sweep: 1\nsteps: 1\nsteps: 2\n")], for_compare=True)


def test_the_nearest_sweep_of_a_chain_counts(write):
    write("sweep: {steps: [1]}\n", "deep.yml")
    path = write("base_config: deep.yml\nsweep: {steps: [2, 3]}\n")
    found = sources.collect([path], {}).sweep_blocks["sweep"]
    assert found.value == {"steps": ["2", "3"]}
    assert found.origin.place.endswith("config.yml:2")
