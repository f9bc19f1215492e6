"""What is no mistake: keys without effect, values given twice, dashes, several config files."""

import pytest

from MaxText.configuration.loading import configure, load
from MaxText.configuration.problems import ConfigurationError
from MaxText.configuration.saved import under_todays_names
from MaxText.errors import UserError

# Arguments, and the beginning of the one line that says what they do not do.
NOTICED = [
    ("zoom_dim=4", "warning: zoom_dim: has no effect with "),
    (
        "position_embedding=none rope_max_timescale=5e5",
        "warning: rope_max_timescale: has no effect",
    ),
    ("sliding_window_size=64", "warning: sliding_window_size is for layers of kind local"),
    ("num_experts=1 num_experts_per_tok=2", "warning: num_experts_per_tok is for layers with exp"),
    ("opt_type=sgd adam_b2=0.99", "note: adam_b2: has no effect with opt_type=sgd"),
    ("checkpoint_period=5 enable_checkpointing=false", "note: checkpoint_period: has no effect"),
    ("lr_schedule_type=constant learning_rate_final_fraction=0", "note: learning_rate_final_fr"),
    ("steps=100 warmup_steps=2000", "note: steps=100 ends within the warm-up of 2000 steps"),
    ("sa_block_kv=512", "note: sa_block_kv=512 has no effect here: blocks of the kernel"),
    ("quantization=", "note: quantization= has no effect here: quantized training is not"),
    ("num_experts=4 ici_expert_parallelism=2", "note: capacity_factor=1.25: experts are on sev"),
    ("profiler=xplane steps=1", "note: the profiler waits 1 steps"),
    ("target_eval_loss=3 eval_interval=-1", "note: target_eval_loss can never be seen"),
    ("growth_mode=zero", "note: growth_mode: has no effect without load_parameters_path"),
    ("wikitext_path=wiki.raw", "note: wikitext_path: has no effect, because eval_tasks"),
    ("steps=10 steps=20", "note: steps is given twice: command line, steps=20 wins"),
    ("gpt2.yml grain_train_files=x dataset_path=", "note: no evaluation: grain_eval_files names"),
]


@pytest.mark.parametrize(("typed", "line"), NOTICED, ids=[typed for typed, _ in NOTICED])
def test_one_line_and_the_run_goes_on(typed, line, capsys):
    data = [] if "grain_train_files" in typed else ["dataset_path=d"]
    load([*data, *typed.split()], "train.py")
    notices = [row for row in capsys.readouterr().err.splitlines() if row.startswith(line)]
    assert len(notices) == 1


@pytest.mark.parametrize(
    "typed",
    [
        # The bundle sets attention_scale, which linear layers do not read.
        "decoder_block=gpt_neo base_num_decoder_layers=12 attention_types=[[[linear],12]]",
        "gpt2.yml dataset_type=synthetic",
        "tokenformer.yml dataset_type=synthetic",
        "skip_step_on_spikes=false max_rewinds=3",
        "drop_path_schedule=constant drop_path=0",
    ],
)
def test_nothing_is_said_of_values_that_the_user_did_not_choose(typed, capsys):
    load(typed.split())
    assert "has no effect" not in capsys.readouterr().err


def test_dashes():
    config = load(["--steps=7", "--learning-rate", "3e-4", "--eval_interval", "-1"]).config
    assert (config.run.steps, config.schedule.learning_rate) == (7, 3e-4)


def test_of_a_key_given_twice_the_last_one_wins():
    assert load(["steps=10", "steps=20"]).config.run.steps == 20


def test_of_several_files_the_last_one_wins(write):
    first = write("steps: 5\nlearning_rate: 0.1\n", "first.yml")
    second = write("steps: 6\n", "second.yml")
    config = load([first, second]).config
    assert (config.run.steps, config.schedule.learning_rate) == (6, 0.1)


def test_keys_of_the_file_that_names_the_preset_beat_it(write):
    path = write(
        "model_name: gpt2-124m\nbase_emb_dim: 512\nbase_num_query_heads: 8\nbase_num_kv_heads: 8\n"
    )
    shape = configure(path).model.shape
    assert (shape.base_emb_dim, shape.base_num_decoder_layers) == (512, 12)
    # A preset named elsewhere lies over the file.
    path = write("base_emb_dim: 512\n", "other.yml")
    assert configure(path, model_name="gpt2-124m").model.shape.base_emb_dim == 768


def test_a_dense_baseline_of_a_file_with_experts(write):
    path = write("num_experts: 8\nnum_experts_per_tok: 2\nmoe_mlp_dim: 64\n")
    assert load([path, "num_experts=1"]).config.model.mixture_of_experts.num_experts == 1


def test_strict_config_refuses_what_has_no_effect():
    with pytest.raises(ConfigurationError, match="zoom_dim: has no effect"):
        load(["zoom_dim=4", "strict_config=true"])


def test_what_is_trained_on_was_named_last(write):
    """A stronger layer beats a weaker one; two choices of one layer are a contradiction."""
    path = write("dataset_path: corpus\n")
    mixed = configure(path, dataset_mix=[["a", 1.0]]).data
    assert (mixed.dataset_path, mixed.dataset_mix) == ("", (("a", 1.0),))
    path = write("dataset_mix: [[a, 1]]\n")
    assert configure(path, grain_train_files="b").data.dataset_mix == ()


def test_no_interval_is_never():
    assert configure("gpt2.yml", dataset_path="x", eval_interval=0).evaluation.eval_interval == -1


def test_the_place_is_that_of_the_key_at_fault(write):
    path = write("warmup_steps_fraction: 0.1\nnum_experts_per_tok: 3\n")
    with pytest.raises(ConfigurationError) as caught:
        configure(path, num_experts=2)
    assert "num_experts_per_tok: 3" in str(caught.value)
    assert "mlp_activations" not in str(caught.value)


def test_a_message_shows_what_was_typed_and_the_defaults_it_speaks_of():
    with pytest.raises(ConfigurationError) as caught:
        load(["steps=[4, 5]", "dataset_mix=[[a,1],[a,2]]"])
    assert "steps: [4, 5] is not an integer" in str(caught.value)
    assert "num_epoch" not in str(caught.value)


def test_what_a_checkpoint_recorded_is_read_under_todays_names():
    recorded = {"steps": 3, "max_num_checkpoints_to_keep": 2, "quantization": ""}
    assert under_todays_names(recorded, "run") == {"steps": 3, "max_to_keep": 2}
    with pytest.raises(UserError, match=r"made by another version .* has rope_maximum, which"):
        under_todays_names({"rope_maximum": 5e5}, "run/checkpoints/7")


def test_a_config_file_has_a_bound(write):
    path = write("".join(f"k{number}: 1\n" for number in range(150_000)))
    with pytest.raises(ConfigurationError, match="a config file has 1,000,000 at most"):
        load([path])
