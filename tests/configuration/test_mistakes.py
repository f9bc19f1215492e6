"""Every kind of mistake, all in one message, with place and remedy."""

import contextlib

import pytest

from MaxText.configuration.catalogue import all_keys
from MaxText.configuration.loading import configure, load
from MaxText.configuration.problems import ConfigurationError, nearest
from MaxText.configuration.rules import RULES
from MaxText.errors import UserError
from tests.small_models import some_quick


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """Keys without effect are mistakes; test_notices.py has what they are by default."""
    monkeypatch.setenv("M_STRICT_CONFIG", "true")


def test_all_problems_are_said_at_once(write, monkeypatch):
    path = write("steps: ten\n\nlearning_rat: 1\n")
    monkeypatch.setenv("M_VOCAB_SIZE", "many")
    with pytest.raises(UserError) as caught:
        load([path, "dtype=bf16", "quantization=int8", "base_num_kv_heads=5", "--x=1", "y", "--z"])
    message = str(caught.value)
    assert message.startswith("9 problems in the configuration")
    for part in (
        "config.yml:1, steps: ten",
        "config.yml:3, learning_rat: 1",
        "environment variable M_VOCAB_SIZE=many",
        "command line, dtype=bf16",
        "quantization: not a key here: quantized training is not available yet",
        "base_num_query_heads=16 is not a multiple of base_num_kv_heads=5",
        "x: unknown key",
        "argument '--z' has no value",
        "argument 'y'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lerning_rate", "learning_rate"),
        ("rate_learning", "learning_rate"),
        ("batch_size_per_device", "per_device_batch_size"),
        ("Steps", "steps"),
        ("checkpointing_enable", "enable_checkpointing"),
        ("num_query_heads", "base_num_query_heads"),
    ],
)
def test_nearest_names(typed, meant):
    assert nearest(typed, all_keys())[0] == meant
    with pytest.raises(ConfigurationError, match=f"nearest: +{meant}"):
        load([f"{typed}=1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz=3"], "nearest: +steps"),
        (["--flag"], "'--flag' has no value"),
        (["steps"], "neither key=value nor a config file"),
        (["base_config=base.yml"], "only a YAML file"),
        (["only_eval=true"], "not a key here"),
        (["grain_train_file=x"], "unknown key|not a key here"),
    ],
)
def test_malformed_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        load(arguments)


def test_the_same_value_twice_is_fine():
    assert load(["steps=3", "steps=3"]).config.run.steps == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nrun_name: a\nsteps: 2\n", r"steps: given twice in one file, first on line 1"),
        ("steps: [1\n", r"config\.yml:\d+ is not valid YAML"),
        ("- steps\n", "holds no `key: value` lines"),
        ("steps: 1\n---\nsteps: 2\n", "is not valid YAML"),
        ("base_config: [a, b]\n", "not the path of one YAML file"),
        ("base_config: nowhere.yml\n", r"(?s)not found.*config\.yml:1"),
        ("schema_version: 999\n", "newer version"),
        ("schema_version: x\n", "schema_version: 'x' is not an integer"),
        ("lora: {rank: 3}\n", "lora: unknown key"),
    ],
)
def test_bad_files(text, message, write):
    with pytest.raises(ConfigurationError, match=message):
        configure(write(text))


def test_yaml_runs_no_code(write):
    path = write("run_name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigurationError, match=r"run_name: has the tag !!python/object/apply"):
        configure(path)


def test_an_empty_file_gives_the_defaults(write):
    assert configure(write("# nothing\n"), run_name="r") == configure(run_name="r")


class TestKeysWithoutEffect:
    """Only what was set on purpose, and not overruled by a stronger choice, is an error."""

    @pytest.mark.parametrize("layer", ["command line", "environment", "file", "argument"])
    def test_set_on_purpose(self, layer, write, monkeypatch):
        arguments, overrides = [], {}
        if layer == "command line":
            arguments = ["rotary_pct=0.5", "position_embedding=none"]
        elif layer == "environment":
            monkeypatch.setenv("M_ROTARY_PCT", "0.5")
            monkeypatch.setenv("M_POSITION_EMBEDDING", "none")
        elif layer == "file":
            arguments = [write("rotary_pct: 0.5\nposition_embedding: none\n")]
        else:
            overrides = {"rotary_pct": 0.5, "position_embedding": "none"}
        with pytest.raises(ConfigurationError, match="rotary_pct: has no effect with position_emb"):
            configure(**overrides) if overrides else load(arguments)

    def test_against_a_default(self):
        with pytest.raises(
            ConfigurationError, match="muon_beta: has no effect with opt_type=adamw"
        ):
            load(["muon_beta=0.9"])

    def test_one_of_several_conditions_is_enough(self):
        load(["attention_projections=pattention", "slot_num=8"])
        load(["feed_forward_type=pattention", "normalize_type=gelu", "gelu_approximate=false"])
        with pytest.raises(ConfigurationError) as caught:
            load(["slot_num=8"])
        message = str(caught.value)
        assert "no effect with attention_projections=dense and feed_forward_type=mlp" in message
        assert "attention_projections=pattention, or feed_forward_type=pattention" in message
        # Here the other condition fails.
        with pytest.raises(ConfigurationError, match="zoom_dim: has no effect with normalize_ty"):
            load(["feed_forward_type=pattention", "normalize_type=gelu", "zoom_dim=4"])

    def test_keys_of_a_part_that_slots_replace(self):
        with pytest.raises(ConfigurationError) as caught:
            load(["tokenformer.yml", "base_mlp_dim=3072", "mlp_activations=[silu]"])
        assert len(caught.value.problems) == 2
        with pytest.raises(ConfigurationError, match="ffn_slot_num: has no effect with feed_forw"):
            load(["attention_projections=pattention", "ffn_slot_num=64"])

    def test_the_default_value_is_no_mistake(self):
        load(["rotary_pct=1", "position_embedding=none"])

    def test_inherited_values_are_inert(self, write):
        write("muon_beta: 0.9\n", "b.yml")
        configure(write("base_config: b.yml\n"))
        configure(model_name="pythia-70m", position_embedding="none")

    def test_a_stronger_choice_makes_the_file_inert(self, write):
        path = write("dataset_path: folder\n")
        load([path, "dataset_type=synthetic"])
        with pytest.raises(ConfigurationError, match="dataset_path: has no effect"):
            load([path, "dataset_type=synthetic", "dataset_path=other"])


BROKEN = [
    ("use_rezero=true normalization_type=scale_norm", "chooses one for them"),
    ("use_rezero=true block_norm_parametric=false", "has no effect"),
    (
        "use_rezero=true block_arrangement=parallel parallel_residual_shared_norm=true",
        "leaves no norm to share",
    ),
    ("compile_topology_num_slices=0", "0 is not possible; use 1 or more, or -1 for one"),
    ("base_num_query_heads=16 base_num_kv_heads=3", "not a multiple"),
    ("head_dim=-1 base_emb_dim=100", "is no integer"),
    ("head_dim=0", "head_dim: 0"),
    ("rotary_pct=0.01", "not an even number from 2"),
    ("head_dim=6 rotary_pct=0.5", "gives 3"),
    ("rope_type=llama3.1 low_freq_factor=4", "low_freq_factor=4 must be below high_freq_factor=4"),
    ("rope_type=yarn beta_slow=40", "beta_slow=40 must be below beta_fast=32"),
    ("global_parameter_scale=3", "power of two"),
    ("decoder_block=gpt2 trainable_position_size=10", "no row for every place"),
    ("mlp_activations=[]", "the list is empty"),
    ("num_vocab_tiling=3", "does not divide"),
    ("decoder_block=tokenformer slot_num=0", "slot_num: 0 is not possible"),
    ("decoder_block=tokenformer ffn_slot_num=0", "or -1 for what slot_num says"),
    ("decoder_block=tokenformer ffn_zoom_dim=-0.5", "ffn_zoom_dim=-0.5 has no root"),
    (
        "decoder_block=tokenformer head_dim=64 base_emb_dim=768",
        "16 query heads of 64 are 1024 dimensions, and the width is 768",
    ),
    ("drop_path_schedule=linear", "nothing to ramp up to with drop_path=0"),
    ("attention_types=[[[global],3]]", "names 3 layers"),
    ("attention_types=[[[],3]]", "which names a kind or more"),
    ("sliding_window_size=7", "is for layers of kind local"),
    ("attention_types=[[[linear],16]] position_embedding=alibi", "linear attention has none"),
    ("position_embedding=axial", "two numbers whose product"),
    ("position_embedding=axial axial_pos_shape=[4,4]", "16 positions, fewer"),
    ("use_macaron=true dense_conn=true", "a feed-forward before attention"),
    ("share_parameters=true dynamic_mlp_dim=true", "layers have different widths"),
    ("share_parameters=true num_experts=2 moe_layers=[0]", "some layers experts and others none"),
    ("scan_layers=true num_experts=2 moe_layers=[0]", "some layers experts and others none"),
    (
        "scan_layers=true attention_types=[[[none,global],8]]",
        "kinds global, none have different parameters",
    ),
    ("static_sgu=true base_emb_dim=33", "33 is not even"),
    ("static_sgu=true decoder_block=tokenformer", "as wide as the model"),
    ("moe_layers=[0]", "num_experts=1 has none"),
    ("num_experts=2 num_experts_per_tok=3", "more than there are experts"),
    ("num_experts=2 moe_layers=[16]", "so 16 is none"),
    ("num_experts=2 capacity_factor=0", "use a number above 0"),
    ("num_experts=2 moe_group_size=0", "0 is not possible"),
    ("num_experts=2 moe_group_size=3", "does not divide"),
    ("num_experts=2 mlp_activations=[softmax]", "softmax is no function of one number"),
    ("ici_expert_parallelism=2 num_experts=3", "does not divide num_experts=3"),
    ("ici_expert_parallelism=2 num_experts=4 capacity_factor=-1", "need capacity_factor"),
    (
        "ici_expert_parallelism=2 dcn_expert_parallelism=3 num_experts=4 capacity_factor=1 "
        "eval_capacity_factor=1",
        "dcn_expert_parallelism=3 does not divide",
    ),
    ("num_vocab_tiling=8 sequence_length_stages=[[0,4],[5,2048]]", "does not divide 4"),
    (
        "num_experts=2 moe_group_size=8 sequence_length_stages=[[0,4],[5,2048]]",
        "moe_group_size=8 does not divide 4",
    ),
    ("num_experts=2 moe_layers=[]", "so no layer has experts"),
    ("use_macaron=true decoder_block=tokenformer", "the first half is an MLP"),
    ("head_qk=true mlm_training=true", "points back at earlier tokens"),
    ("dynamic_mlp_dim=true base_mlp_dim=64 mlp_dim_multiple=128", "is rounded to 0"),
    ("dynamic_mlp_dim=true base_num_decoder_layers=1", "there is only one"),
    ("dense_conn=true scan_layers=true mudd_prenorm=true", "sums over normalised outputs"),
    ("dense_conn=true scan_layers=true dense_kept_sums=1", "no sums are kept"),
    ("dense_conn=true scan_layers=true dense_after_layers=[2]", "follow no pattern"),
    ("dense_conn=true scan_layers=true dense_period=5", "twice or more dense_period=5"),
    ("dense_conn=true scan_layers=true share_parameters=true", "one layer for all depths"),
    ("dense_conn=true scan_layers=true dense_first_norms=one", "the first layer has fewer norms"),
    ("dynamic_mlp_dim=true scan_layers=true", "no two layers have the same width"),
    ("dense_conn=true dense_dynamic=false dense_static=false", "sums without weights"),
    ("dense_conn=true dense_ways=[]", "the list is empty"),
    ("dense_conn=true dense_ways=[q,q]", "names a way twice"),
    ("dense_conn=true dense_ways=[q,k] mudd_postnorm=residual", "no way r"),
    ("dense_conn=true dense_period=20", "more than there are layers"),
    ("dense_conn=true dense_after_layers=[0]", "0 is none of them"),
    ("dense_conn=true dense_sources=list", "the list is empty"),
    ("dense_conn=true dense_sources=list dense_source_list=[17]", "17 is neither"),
    ("prepare_source=x tokenizer_vocab_size=50000", "no row for"),
    ("steps=0", "steps: 0 is not possible"),
    ("learning_rate_schedule_steps=0", "learning_rate_schedule_steps: 0"),
    ("steps=-1", "refer to each other"),
    ("lr_schedule_type=wsd warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5", "more than 1"),
    ("steps=100 warmup_steps=101", "steps=100 ends within the warm-up of 101 steps"),
    ("lr_schedule_type=wsd steps=100 warmup_steps=95", "the 100 steps of the schedule together"),
    ("num_epoch=0", "num_epoch: 0"),
    ("load_parameters_path=a load_full_state_path=b", "only one"),
    ("growth_mode=zero", "growth_mode: has no effect without load_parameters_path"),
    ("load_parameters_path=a load_parameters_path_slot_number=0", "slot_number: 0 is not possible"),
    (
        "load_parameters_path=a load_parameters_zero_init=true growth_mode=random",
        "but growth_mode=random is set",
    ),
    (
        "load_parameters_path=a growth_moments=warmed opt_type=lion",
        "Adam's second moments, which opt_type=lion has not",
    ),
    ("ici_data_parallelism=-1", "only one of ici_data_parallelism and ici_fsdp_parallelism"),
    ("ici_tensor_parallelism=0", "ici_tensor_parallelism: 0"),
    ("dcn_fsdp_parallelism=-1", "only one of dcn_data_parallelism and dcn_fsdp_parallelism"),
    ("dcn_context_parallelism=0", "dcn_context_parallelism: 0"),
    ("num_pipeline_microbatches=0", "num_pipeline_microbatches: 0"),
    ("num_pipeline_repeats=0", "num_pipeline_repeats: 0"),
    ("ici_pipeline_parallelism=2 num_pipeline_repeats=0", "num_pipeline_repeats: 0"),
    (
        "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=0",
        "num_layers_per_pipeline_stage: 0",
    ),
    ("num_layers_per_pipeline_stage=0", "num_layers_per_pipeline_stage: 0"),
    ("ici_pipeline_parallelism=3", r"(?s)16 layers are not 3 stages.*ici_pipeline_parallelism=1"),
    (
        "ici_pipeline_parallelism=4 num_pipeline_repeats=3",
        r"(?s)are not 4 stages x 3 repeats.*num_layers_per_pipeline_stage=4",
    ),
    (
        "dcn_pipeline_parallelism=4 num_layers_per_pipeline_stage=1 sliding_window_size=8 "
        'attention_types=[[["local","global"],8]]',
        "are no multiple of the 2 after which kinds of attention",
    ),
    (
        "ici_pipeline_parallelism=4 num_pipeline_microbatches=3",
        "is below the 4 stages",
    ),
    (
        "ici_pipeline_parallelism=2 dense_conn=true mudd_prenorm=true",
        r"(?s)stages walk their layers in a scan: sums over normalised.*ici_pipeline_parallelism=1",
    ),
    (
        "ici_pipeline_parallelism=4 dense_conn=true dense_period=2 num_layers_per_pipeline_stage=1",
        r"(?s)no multiple of the 2 after which.*num_layers_per_pipeline_stage=4",
    ),
    ("ici_pipeline_parallelism=2 share_parameters=true", "there is one layer"),
    (
        "ici_pipeline_parallelism=2 num_experts=4 moe_layers=[0,2]",
        "weights of different shapes",
    ),
    ("ici_context_parallelism=3", "max_target_length=2048 is no multiple of 3"),
    (
        "ici_context_parallelism=4 sequence_length_stages=[[0,2],[5,2048]]",
        "a stage of 2 in sequence_length_stages is no multiple of 4",
    ),
    (
        "ici_context_parallelism=2 context_parallel_strategy=ring dropout_rate=0.1",
        "drops none of them",
    ),
    ("eval_steps=0", "eval_steps: 0"),
    ("target_eval_loss=2", "can never be seen"),
    ("eval_stride=0", "eval_stride: 0 is not possible"),
    ("eval_tasks=[lambada]", "lambada_path names no file"),
    ("wikitext_path=wiki.test.raw", "eval_tasks does not name wikitext"),
    ("harness_num_fewshot=0", "has no effect without harness_tasks"),
    ("profiler=xplane steps=1", "the profiler waits 1 steps"),
    ("run_name=gs://bucket", "bucket without a folder"),
    ("run_name=..", "not the name of a folder"),
    ("adamw_mask=['(']", "not a regular expression"),
    ("weight_decay_overrides=[['(',1]]", "not a regular expression"),
    ("learning_rate_overrides=[['(',1]]", "not a regular expression"),
    ("trainable_parameters_mask=['[']", "not a regular expression"),
    ("weight_decay_overrides=[[a,-1]]", "is negative"),
    ("learning_rate_overrides=[[a,-1]]", "is negative"),
    ("dataset_mix=[[a,1]] grain_train_files=b", "both name what to train on"),
    ("dataset_mix=[[a,1]] dataset_path=b", "both name what to train on"),
    ("dataset_mix=[[a,1,documents,1]]", "none of chunks, documents_random, documents_fixed"),
    ("dataset_mix=[[a,0]]", "weight 0, which must be above 0"),
    ("dataset_mix=[[a,0,chunks,1]]", "stitch 0"),
    ("dataset_mix=[[a,1],[b,1]] num_epoch=1", "end at different times"),
    ("dataset_mix=[[a,1],[b,1],[a,2]]", "a is named twice"),
    ("prepare_record=strided prepare_output_format=tfrecord", "strided has labels"),
    (
        "prepare_record=strided prepare_output_format=parquet prep_stride=300",
        "prep_stride=300 above prep_max_length=256",
    ),
    (
        "per_device_batch_size=8 enable_rampup_batch_size=true per_device_batch_size_start=4 "
        "per_device_batch_size_increment=3",
        "does not make per_device_batch_size=8",
    ),
    ("sequence_length_stages=[[1,256]]", "must begin with 0"),
    ("sequence_length_stages=[[0,256],[9,512],[9,1024]]", "and increase"),
    ("sequence_length_stages=[[0,300]]", "300 does not divide max_target_length"),
    ("sequence_length_stages=[[0,256]] mlm_training=true", "CLS begins a window"),
    ("max_new_tokens=0", "use 1 or more, or -1 for what max_target_length"),
    ("decode_sampling_strategy=topk", "needs decode_sampling_top_k"),
    ("decode_sampling_strategy=nucleus", "needs decode_sampling_nucleus_p"),
    ("autoregressive_decode_assert=a decode_num_samples=2", "compares one text"),
    (
        "decode_sampling_temperature=0 decode_sampling_min_p=0.1",
        "decode_sampling_min_p has no effect with decode_sampling_temperature=0",
    ),
    ('decode_stop=["a",""]', "an empty string is everywhere"),
    ("causal=false", "lets each token see"),
    ("causal=true mlm_training=true", "hides one of them"),
    (
        "mlm_training=true mlm_same_token_prob=0.6 mlm_random_token_prob=0.5",
        "more than 1 together",
    ),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_impossible_combinations(line, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(line.split(" "))
    assert len(caught.value.problems) == 1
    assert "command line, " in str(caught.value)


def test_every_rule_is_tested():
    blamed = {name for line, _ in BROKEN for name in (a.split("=")[0] for a in line.split(" "))}
    for rule in RULES:
        assert rule.programs or blamed.intersection(rule.keys), rule.keys


def test_compiling_ahead_needs_a_machine():
    with pytest.raises(ConfigurationError, match=r"(?s)not named.*compile_topology=v5p-8"):
        load([], "MaxText/train_compile.py")
    load(["compile_topology=v5e-16"], "train_compile.py")


def test_stages_are_for_training():
    load(["ici_pipeline_parallelism=2", "dataset_type=synthetic"], "train.py")
    for program in ("decode.py", "eval.py"):
        with pytest.raises(ConfigurationError, match=r"(?s)stages.*ici_pipeline_parallelism=1"):
            load(["ici_pipeline_parallelism=2", "dataset_path=folder"], program)
    # What a run was trained with comes with its weights.
    load(["num_pipeline_microbatches=4"], "decode.py")
    for extra, message in (
        ("num_pipeline_microbatches=4", "has no effect without stages"),
        ("ici_pipeline_parallelism=2 sample_tokens=3", "sample_tokens generates text"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load([*extra.split(), "dataset_type=synthetic"], "train.py")


def test_a_program_that_reads_data_needs_some():
    with pytest.raises(ConfigurationError, match=r"(?s)quickstart\.yml.*prepare_data.*synthetic"):
        load([], "MaxText/train.py")
    load([], "plan.py")
    load(["dataset_type=synthetic"], "train.py")
    load(["dataset_path=folder"], "train.py")
    load(["grain_train_files=a*", "eval_interval=-1"], "train.py")
    load(["grain_train_files=a*", "grain_eval_files=b*", "eval_interval=5"], "train.py")
    with pytest.raises(ConfigurationError, match="names no records for it"):
        load(["grain_train_files=a*", "eval_interval=5"], "train.py")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"(?s)nothing to score.*grain_eval_files.*eval_tasks"),
        ("grain_train_files=a*", "nothing to score"),
        ("dataset_type=synthetic", "needs eval_steps"),
        ("dataset_path=a max_target_length=64 eval_stride=65", "eval_stride=65 is above"),
        ("dataset_path=a mlm_training=true eval_stride=8", "predicts hidden tokens"),
        ("dataset_path=a packing=false use_truncation=true eval_stride=8", "scores every token"),
        ("dataset_path=a megatron_order=gpt_neox eval_stride=8", "samples of its own"),
    ],
)
def test_what_cannot_be_scored(line, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(line.split(), "eval.py")
    assert len(caught.value.problems) == 1


def test_what_can_be_scored():
    load(["dataset_path=folder", "max_target_length=64", "eval_stride=64"], "eval.py")
    load(["grain_eval_files=b*"], "eval.py")
    load(["dataset_type=synthetic", "eval_steps=2"], "eval.py")
    load(["eval_tasks=[lambada]", "lambada_path=a.jsonl"], "eval.py")
    load(["harness_tasks=[hellaswag]"], "eval.py")


def test_near_misses_of_possible_combinations_pass():
    configure(base_num_kv_heads=4)
    configure(head_dim=-1)
    configure(decoder_block="gpt2", trainable_position_size=4096)
    configure(lr_schedule_type="wsd", warmup_steps_fraction=0.9, wsd_decay_steps_fraction=0.1)
    configure(ici_data_parallelism=-1, ici_fsdp_parallelism=1)


RAW = ["", "[", "{a: b}", "[[a,1]]", "&a", "9" * 5000, "[" * 30, "\x00"]


@pytest.mark.parametrize("raw", some_quick(RAW, 2))
def test_no_value_of_any_key_makes_a_traceback(raw):
    for name in all_keys():
        with contextlib.suppress(UserError):
            load([f"{name}={raw}"])
