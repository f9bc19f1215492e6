"""What is not a mistake: keys without effect, values given twice, dashes, several config files."""

import pytest

from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.config.serialization import check_recorded
from MaxText.errors import UserError

# Command lines of which one line says what they do not do.
NOTICED = """
zoom_dim=4
position_embedding=none rope_max_timescale=5e5
sliding_window_size=64
num_experts=1 num_experts_per_tok=2
opt_type=sgd adam_b2=0.99
checkpoint_period=5 enable_checkpointing=false
lr_schedule_type=constant learning_rate_final_fraction=0
steps=100 warmup_steps=2000
sa_block_kv=512
quantize_kvcache=false
profiler=xplane steps=1
target_eval_loss=3 eval_interval=-1
growth.mode=zero
steps=10 steps=20
max_num_checkpoints_to_keep=3
dense_conn=true mudd_postnorm=true
dense_conn=true mudd_postnorm=false
""".strip().splitlines()
# Those of which a notice is about what follows from them, or that give two.
OF_OTHER_KEYS = """
dataset_path=d ici_expert_parallelism=2 num_experts=4 eval_capacity_factor=3
dataset_path=d packing=true packing_train=false
gpt2.yml grain_train_files=x
""".strip().splitlines()


def test_one_line_and_the_run_goes_on(capsys, snapshot):
    shown = {}
    for line in NOTICED:
        load(["dataset_path=d", *line.split()], "train.py")
        shown[line] = capsys.readouterr().err
        (notice,) = shown[line].splitlines()
        kind, message = notice.split(": ", 1)
        assert kind in ("note", "warning")
        assert any(word.partition("=")[0] in message for word in line.split())
    for line in OF_OTHER_KEYS:
        load(line.split(), "train.py")
        shown[line] = capsys.readouterr().err
    assert shown == snapshot


@pytest.mark.parametrize(
    "typed",
    [
        "gpt2.yml dataset_type=synthetic",
        "tokenformer.yml dataset_type=synthetic",
        "skip_step_on_spikes=false rollback.maximum=3",
        "drop_path_schedule=constant drop_path=0",
        "dense_conn=true mudd_postnorm=all",
    ],
)
def test_nothing_is_said_of_values_that_the_user_did_not_choose(typed, capsys):
    load(typed.split())
    assert capsys.readouterr().err == ""


def test_dashes_and_the_last_of_two_values():
    config = load(["--steps=8", "--learning-rate", "3e-4", "--eval_interval", "-1", "steps=7"])
    run, schedule = config.config.run, config.config.schedule
    assert (run.steps, schedule.learning_rate) == (7, 3e-4)
    assert load_config("gpt2.yml", dataset_path="x", eval_interval=0).evaluation.eval_interval == -1


def test_of_several_files_the_last_one_wins(write):
    first = write("steps: 5\nlearning_rate: 0.1\n", "first.yml")
    config = load([first, write("steps: 6\n", "second.yml")]).config
    assert (config.run.steps, config.schedule.learning_rate) == (6, 0.1)


def test_keys_of_the_file_that_names_the_preset_beat_it(write):
    path = write(
        "model_name: gpt2-124m\nbase_emb_dim: 512\nbase_num_query_heads: 8\nbase_num_kv_heads: 8\n"
    )
    shape = load_config(path).model.shape
    assert (shape.base_emb_dim, shape.base_num_decoder_layers) == (512, 12)
    # A preset named elsewhere lies over the file.
    path = write("base_emb_dim: 512\n", "other.yml")
    assert load_config(path, model_name="gpt2-124m").model.shape.base_emb_dim == 768


def test_a_dense_baseline_of_a_file_with_experts(write):
    path = write("num_experts: 8\nnum_experts_per_tok: 2\nmoe_mlp_dim: 64\n")
    assert load([path, "num_experts=1"]).config.model.mixture_of_experts.num_experts == 1


def test_what_is_trained_on_was_named_last(write):
    """A stronger layer beats a weaker one; two choices of one layer are a contradiction."""
    path = write("dataset_path: corpus\n")
    mixed = load_config(path, data_mixture_weights=[["a", 1.0]]).data
    assert (mixed.dataset_path, mixed.data_mixture_weights) == ("", (("a", 1.0),))
    path = write("data_mixture_weights: [[a, 1]]\n")
    assert load_config(path, grain_train_files="b").data.data_mixture_weights == ()


def test_the_place_is_that_of_the_key_at_fault(write):
    path = write("warmup_steps_fraction: 0.1\nnum_experts_per_tok: 3\n")
    with pytest.raises(ConfigurationError) as caught:
        load_config(path, num_experts=2)
    (problem,) = caught.value.problems
    assert problem.location[0].partition("config.yml:")[2].startswith("2, num_experts_per_tok: 3")
    assert "mlp_activations" not in str(caught.value)


def test_a_checkpoint_with_an_unknown_key_is_refused():
    check_recorded({"steps": 3}, "run")
    with pytest.raises(UserError, match="rope_maximum"):
        check_recorded({"rope_maximum": 5e5}, "run/checkpoints/7")
