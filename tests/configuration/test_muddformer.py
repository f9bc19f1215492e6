"""MUDDFormer as its users know it: commands, words and recipe of its JAX program."""

import re

import pytest

from MaxText.configuration.config_files import REPOSITORY
from MaxText.configuration.loading import configure, load
from MaxText.configuration.maxtext_report import report
from MaxText.configuration.problems import ConfigurationError

# As its README gives them, after the name of the program.
_COMMAND = "MaxText/configs/base_v2.yml run_name=gs://bucket/output/ dataset_path=gs://bucket/pile"
PUBLISHED_COMMANDS = {
    "TPU": f"{_COMMAND} model_name=MUDDLlama2Medium hardware=tpu",
    "GPU": f"{_COMMAND} model_name=MUDDLlama2Medium hardware=gpu compile_topology_num_slices=1",
    "baseline": f"{_COMMAND} model_name=Llama2Medium hardware=gpu compile_topology_num_slices=1",
}


@pytest.mark.parametrize("line", PUBLISHED_COMMANDS.values(), ids=PUBLISHED_COMMANDS)
def test_published_commands(line):
    config = load(line.split(), "MaxText/train.py").config
    assert (config.run.base_output_directory, config.run.run_name) == ("gs://bucket", "output")
    assert config.model.dense_connections.dense_conn is ("MUDD" in line)
    assert config.run.hardware in line.split("hardware=")[1]


@pytest.mark.parametrize("name", ["MUDDLlama2Medium", "Llama2Medium"])
def test_recipe(name):
    """The values of its class of this name and of its base_v2.yml."""
    config = configure("base_v2.yml", model_name=name)
    run, schedule, optimizer = config.run, config.schedule, config.optimizer
    assert run.steps == schedule.learning_rate_schedule_steps == 13_500
    assert int(schedule.learning_rate_schedule_steps * schedule.warmup_steps_fraction) == 135
    assert (schedule.learning_rate, schedule.learning_rate_final_fraction) == (3e-4, 0.1)
    assert schedule.lr_schedule_type == "cosine"
    moments = (optimizer.adam_b1, optimizer.adam_b2, optimizer.adam_eps)
    assert (optimizer.opt_type, *moments) == ("adamw", 0.9, 0.95, 1e-8)
    assert (optimizer.adam_weight_decay, optimizer.adamw_mask) == (0.1, ())
    assert optimizer.gradient_clipping_threshold == 1.0
    assert config.batch.per_device_batch_size == 32
    assert config.model.shape.max_target_length == 2048
    assert config.model.shape.vocab_size == 50_432
    assert config.model.initialization.weight_init == "normal"
    assert config.model.initialization.init_std == 0.006
    checkpoint = config.checkpoint
    periods = (checkpoint.checkpoint_period, checkpoint.keep_period, checkpoint.max_to_keep)
    assert periods == (500, 1000, 4)
    evaluation = config.evaluation
    assert (evaluation.eval_interval, evaluation.eval_steps) == (13_500, 162)
    assert evaluation.eval_per_device_batch_size == 32
    assert not config.data.zero_loss


def test_a_preset_and_its_baseline_differ_in_their_connections_alone():
    for name in ("405m", "834m", "1.4b", "797m", "1.34b", "2.8b"):
        model, baseline = (
            configure(model_name=f"{kind}-{name}", run_name="r")
            for kind in ("muddformer", "transformer_pp")
        )
        for section in ("shape", "initialization"):
            own, other = (getattr(c.model, section).model_dump() for c in (model, baseline))
            # Only the form of a deep model's bundle names a deviation, which xavier has no use for.
            for key in ("decoder_block", "init_std"):
                own.pop(key, None)
                other.pop(key, None)
            assert own == other
        assert model.model.block == baseline.model.block
        assert model.model.attention == baseline.model.attention
        assert (model.schedule, model.optimizer) == (baseline.schedule, baseline.optimizer)
        assert (model.batch, model.run.steps) == (baseline.batch, baseline.run.steps)


def test_the_words_of_its_class_give_the_preset():
    theirs = load(
        [
            "Llama2Medium.yml", "dense_conn=True", "dynamic_dense_type=qkvm",
            "dynamic_dense_act_cls=gelu", "dynamic_dense_fix_last_layer=True",
            "dynamic_dense_hidden_round=True", "ddw_gen_pattern=q,k,v,m", "ddw_gen_chunk_size=None",
            "mudd_prenorm=True", "mudd_postnorm=True", "dynamic_mlp_dim=True",
            "train_shuffle_buffer_size=None", "dataset_type=pile", "opt_type=adam_pax",
            "eval_loop_num_batches=162", "record_internal_nn_metrics=0",
        ]
    ).config  # fmt: skip
    ours = configure(model_name="MUDDLlama2Medium")
    assert theirs.model.dense_connections == ours.model.dense_connections
    assert theirs.model.feed_forward == ours.model.feed_forward
    assert theirs.optimizer == ours.optimizer
    assert not theirs.data.enable_data_shuffling
    assert theirs.evaluation.eval_steps == 162


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("dense_conn=true mudd_postnorm=true", "residual"),
        ("dense_conn=true mudd_postnorm=True", "residual"),
        ("dense_conn=true mudd_postnorm=false", "none"),
        ("decoder_block=muddformer_prepost mudd_postnorm=false", "none"),
        ("dense_conn=true mudd_postnorm=all", "all"),
    ],
)
def test_a_switch_as_a_choice(typed, meant, capsys):
    assert load(typed.split()).config.model.dense_connections.mudd_postnorm == meant
    said = f"is mudd_postnorm={meant} here" in capsys.readouterr().err
    assert said is (f"mudd_postnorm={meant}" not in typed)


def test_python_values_and_files_are_translated_too(write):
    assert configure(dense_conn=True, mudd_postnorm=True).model.dense_connections.adds
    path = write("dense_conn: true\nmudd_postnorm: true\nddw_gen_chunk_size: null\n")
    assert configure(path).model.dense_connections.mudd_postnorm == "residual"
    assert "mudd_postnorm: true is mudd_postnorm=residual here" in report(path)
    assert "ddw_gen_chunk_size: null has no effect here" in report(path)


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """Keys without effect are mistakes; test_notices.py has what they are by default."""
    monkeypatch.setenv("M_STRICT_CONFIG", "true")


WRONG = [
    ("hardware=gpu_multiprocess", "processes are started by a launcher"),
    ("dynamic_dense_type=qkv", "a list, with r for their m; use dense_ways"),
    ("dynamic_dense_hidden_expand=[1,1,4]", "use dense_last_expand"),
    ("dynamic_dense_fix_last_layer=false", "one sum, for all inputs, follows the last layer"),
    ("training_num_batches_to_skip=100", "part of each checkpoint"),
    ("pre_compose=true", "composition of heads is not available"),
    ("dense_ways=qkvr dense_conn=true", "is not a list"),
    ("dense_ways=[q,k,v,m] dense_conn=true", "one of q, k, v, r"),
    ("dense_ways=[r]", "dense_ways: has no effect with dense_conn=false"),
    ("mudd_postnorm=true", "mudd_postnorm: has no effect with dense_conn=false"),
    ("mudd_postnorm=pre dense_conn=true", "one of none, residual, all"),
    ("model_name=MUDDLlama", "nearest: +MUDDLlama2Medium"),
    ("model_name=MUDDFormer-2.8B", "nearest: +muddformer-2.8b"),
    ("decoder_block=mudformer", "nearest: +muddformer"),
    ("base_v2.yml dense_window=4", "needs: +dense_sources=window"),
    ("base_v2.yml scan_layers=true", "no two layers have the same width"),
    ("base_v2.yml base_num_decoder_layers=1", "there is only one"),
    ("base_v2.yml base_mlp_dim=32", "mlp_dim_multiple=4"),
    ("base_v2.yml dense_ways=[q]", "no way r"),
    ("base_v2.yml dense_after_layers=[25]", "from 1 to 24; 25 is none of them"),
    ("base_v2.yml dense_after_layers=[2] dense_period=2", "has no effect with dense_period=2"),
]


@pytest.mark.parametrize(("typed", "message"), WRONG, ids=[typed for typed, _ in WRONG])
def test_one_message_for_a_mistake(typed, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(typed.split())
    assert len(caught.value.problems) == 1


def documented_commands() -> list[str]:
    """Arguments of train.py in docs/muddformer.md, with data where it says that there are more."""
    text = (REPOSITORY / "docs/muddformer.md").read_text(encoding="utf-8").replace("\\\n", " ")
    whole = re.findall(r"^    python MaxText/train\.py (.*?)(?:  +#.*)?$", text, re.MULTILINE)
    in_tables = re.findall(r"^\| .* \| `(model_name=[^`]*)` \|$", text, re.MULTILINE)
    assert len(whole) > 10
    assert len(in_tables) > 7
    whole += [f"{line} ..." for line in in_tables]
    return [re.sub(r" +", " ", line.replace("...", "dataset_path=FOLDER")) for line in whole]


@pytest.mark.parametrize("line", documented_commands())
def test_documented_commands(line):
    load(line.split(), "MaxText/train.py")
