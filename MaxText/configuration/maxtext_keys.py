"""What became of MaxText's keys: other names for ours, and keys that are not here.

People come with command lines and YAML files of MaxText and its forks. A key that means exactly
what one of ours means is accepted under its old name, and so is a value that a key of ours says in
other words or that holds here anyway; any other is refused with one sentence that says why it is
not here and what to use.
"""

from typing import Any, Literal, NamedTuple

from MaxText.configuration import values
from MaxText.configuration.axis_rules import MESH_AXES
from MaxText.configuration.reference_keys import REFERENCE_KEYS

# Old name -> ours, where both mean exactly the same.
ALIASES: dict[str, str] = {
    "max_num_checkpoints_to_keep": "max_to_keep",
    "params_sharded_tolerance": "sharding_tolerance",
    "packing_train": "packing",
    "cosine_learning_rate_final_fraction": "learning_rate_final_fraction",
    # MUDDFormer
    "dynamic_dense_act_cls": "dense_activation",
    "epoch": "num_epoch",
    "eval_loop_num_batches": "eval_steps",
}


class Absent(NamedTuple):
    """Why a key is not here.

    Attributes:
      why: the reason, in words.
      instead: the key of ours that serves its purpose, if one does.
      accepts: values that are passed over: those that switch the thing off, any because none
        would change a result here, or nothing.
    """

    why: str
    instead: str = ""
    accepts: Literal["off", "any", "nothing"] = "off"

    @property
    def sentence(self) -> str:
        """Both in one line."""
        return f"{self.why}; use {self.instead}" if self.instead else self.why


_NOT_YET = "not available yet"
_NO_DOWNLOAD = "nothing is downloaded while training: name files that are there"
_FILES = "files of any kind are named by one key"
_MOE = Absent("the form of the products of experts is chosen by the program", accepts="any")
_KERNEL = "blocks of the kernel of attention=flash go by the length"
_FLOAT32 = Absent("always on: attention scores and softmax accumulate in float32", accepts="any")
_TIERS = "checkpoints of several tiers are not available yet"
_GOODPUT = "goodput upload is not available; the time of every step is in metrics.jsonl"
_QUANTIZE = "quantized training is not available yet"
_DCFORMER = "DCFormer's composition of heads is not available yet"
_SUMS = "how the sums are computed changes no result"
_ONE_SUM = "one sum, for all inputs, follows the last layer"
_IN_LAYER = "sums belong to the part of a layer that remat_policy is about"

UNAVAILABLE: dict[str, Absent] = {
    # Run and output
    "override_model_config": Absent(
        "not needed: the command line always wins over the preset", accepts="any"
    ),
    "save_config_to_gcs": Absent(
        "config.yml is always saved in the folder of the run", accepts="any"
    ),
    "gcs_metrics": Absent(
        "metrics.jsonl always lies in the folder of the run, which may be gs://",
        "base_output_directory",
    ),
    "wandb_run_name": Absent("a run has the same name in W&B as here", "run_name"),
    # Model
    "cast_logits_to_fp32": Absent("always on: the loss is computed in float32", accepts="any"),
    "fused_qkv": Absent(
        "always off: query, key and value projections are separate weights", accepts="any"
    ),
    "fused_mlp": Absent(
        "always off: the projections of a gated MLP are separate weights", accepts="any"
    ),
    "rope_min_timescale": Absent("always 1", "rope_max_timescale"),
    "rope_use_scale": Absent("always on with rope_type=llama3.1", "rope_type"),
    "rope_linear_scaling_factor": Absent("rope_type=linear divides all angles", "rope_factor"),
    "rope_interleave": Absent("dimension i of a head always pairs with i + R/2"),
    "rope_truncate": Absent("always on with rope_type=yarn", "beta_fast"),
    "rope_attention_scaling": Absent("always on with rope_type=yarn", "rope_type"),
    "mscale": Absent("with rope_type=yarn scores grow by rope_factor alone", "rope_factor"),
    "local_rope_max_timescale": Absent("all layers have the same angles", "rope_max_timescale"),
    "use_untrainable_positional_embedding": Absent(
        "sinusoidal positions are not available yet", "position_embedding"
    ),
    "max_position_embeddings": Absent("windows decide the length", "max_target_length"),
    "use_iota_embed": Absent(
        "the form of the token lookup is chosen by the program", accepts="any"
    ),
    "megablox": _MOE,
    "sparse_matmul": _MOE,
    "mtp_num_layers": Absent("multi-token prediction is not available yet"),
    "mtp_loss_scaling_factor": Absent("multi-token prediction is not available yet"),
    "use_multimodal": Absent("models read text alone"),
    # Model, of MUDDFormer and DCFormer
    "dynamic_dense_type": Absent("the ways are a list, with r for their m", "dense_ways"),
    "dynamic_dense_fix_last_layer": Absent(_ONE_SUM, accepts="nothing"),
    "dynamic_dense_hidden_expand": Absent(
        "only the width after the last layer can be multiplied", "dense_last_expand"
    ),
    "dynamic_dense_hidden_round": Absent("a choice of three", "dense_hidden_rounding"),
    "dynamic_dense_scale_dw": Absent("weights of sums are not divided by anything"),
    "ddw_gen_pattern": Absent(_SUMS, "dense_mixing", accepts="any"),
    "ddw_gen_chunk_size": Absent(_SUMS, "dense_mixing", accepts="any"),
    "mudd_compose_method": Absent(_SUMS, "dense_mixing", accepts="any"),
    "mudd_in_layer": Absent(_IN_LAYER, "remat_policy", accepts="any"),
    "compose_layers": Absent("layers are counted from 1", "dense_after_layers"),
    "mgate": Absent("gates over groups of the feed-forward are not available yet"),
    "pre_compose": Absent(_DCFORMER),
    "post_compose": Absent(_DCFORMER),
    "window_size": Absent("windows go by the kind of a layer", "sliding_window_size"),
    "num_layers_per_block": Absent("all layers attend alike"),
    "query_chunk_size": Absent(
        "rows of queries are a block", "attention_block_size", accepts="any"
    ),
    # Precision, memory, kernels
    "grad_dtype": Absent("gradients have the format of the parameters", "weight_dtype"),
    "quantization": Absent(_QUANTIZE),
    "use_qwix_quantization": Absent(_QUANTIZE),
    "param_scan_axis": Absent("layers are always stacked on axis 0 on disk", accepts="any"),
    "parameter_memory_host_offload": Absent(
        "parameters are read all through the step, unlike moments", "ici_fsdp_parallelism"
    ),
    "attention_type": Absent("kinds of attention go by layer", "attention_types"),
    "sa_block_q": Absent(_KERNEL, accepts="any"),
    "use_tokamax_splash": Absent(
        "the kernel of TPU is JAX's splash attention", "attention", accepts="any"
    ),
    "float32_qk_product": _FLOAT32,
    "float32_logits": _FLOAT32,
    # Parallelism
    "mesh_axes": Absent(f"the mesh axes are always {', '.join(MESH_AXES)}", "logical_axis_rules"),
    "data_sharding": Absent("follows from the rule of activation_batch", "logical_axis_rules"),
    "ici_tensor_sequence_parallelism": Absent(
        "sequences are split by an axis of their own", "ici_context_parallelism"
    ),
    "ici_autoregressive_parallelism": Absent(
        "decoding has no mesh axis of its own", "ici_tensor_parallelism"
    ),
    "num_slices": Absent(
        "not needed: the slices are counted at start", "dcn_data_parallelism", accepts="any"
    ),
    "shard_mode": Absent("always auto: the compiler places what the rules leave open"),
    "custom_mesh_and_rule": Absent("rules are given in the configuration", "logical_axis_rules"),
    "shardy": Absent("jax's default partitioner is used", accepts="any"),
    # Batch, data, tokenizer
    "dataset_name": Absent(_NO_DOWNLOAD, "dataset_path"),
    "eval_dataset_name": Absent(_NO_DOWNLOAD, "grain_eval_files"),
    "hf_path": Absent(_NO_DOWNLOAD, "grain_train_files"),
    "my_train_data": Absent(_FILES, "grain_train_files"),
    "my_eval_data": Absent(_FILES, "grain_eval_files"),
    "hf_data_dir": Absent(_FILES, "grain_train_files"),
    "hf_train_files": Absent(_FILES, "grain_train_files"),
    "hf_eval_files": Absent(_FILES, "grain_eval_files"),
    "hf_access_token": Absent(
        "a token belongs in the environment variable HF_TOKEN, where no log can show it"
    ),
    "grain_train_mixture_config_path": Absent(
        "a mixture is given in the configuration", "dataset_mix"
    ),
    "max_segments_per_seq": Absent("a window may hold any number of documents", "packing"),
    "tokenize_train_data": Absent(
        "text and tokens are told apart by what records hold", "grain_train_files"
    ),
    "tokenize_eval_data": Absent(
        "text and tokens are told apart by what records hold", "grain_eval_files"
    ),
    "expansion_factor_real_data": Absent(
        "not needed: the order of the data does not depend on the number of hosts", accepts="any"
    ),
    "generate_padding_batch_train": Absent(
        "not needed: all hosts have the same number of batches", accepts="any"
    ),
    "train_shuffle_buffer_size": Absent(
        "all windows are shuffled, without a buffer", "enable_data_shuffling"
    ),
    "eval_shuffle_buffer_size": Absent("evaluation reads in order"),
    "training_num_batches_to_skip": Absent("the position in the data is part of each checkpoint"),
    # Optimizer
    "use_constant_lr": Absent("a schedule among others, constant", "lr_schedule_type"),
    # Checkpoints
    "enable_autocheckpoint": Absent("every run saves and stops on SIGTERM", accepts="any"),
    "enable_emergency_checkpoint": Absent(_TIERS, "checkpoint_period"),
    "enable_multi_tier_checkpointing": Absent(_TIERS, "checkpoint_period"),
    "local_checkpoint_directory": Absent(_TIERS, "base_output_directory"),
    "local_checkpoint_period": Absent(_TIERS, "checkpoint_period"),
    "enable_single_replica_ckpt_restoring": Absent("every host reads its own part", accepts="any"),
    "force_unroll": Absent(
        "not needed: checkpoints look the same with any scan_layers", accepts="any"
    ),
    "checkpoint_storage_use_ocdbt": Absent(
        "the storage format is chosen by the program", accepts="any"
    ),
    "checkpoint_storage_use_zarr3": Absent(
        "the storage format is chosen by the program", accepts="any"
    ),
    # Evaluation, decoding, profiling, compilation
    "only_eval": Absent("eval.py measures trained weights", "load_parameters_path"),
    "record_internal_nn_metrics": Absent("metrics are of the whole model, not of each layer"),
    "max_prefill_predict_length": Absent("a prompt may have any length that fits the window"),
    "profile_periodically_period": Absent("one trace is recorded", "profiler_steps"),
    "dump_hlo": Absent("set the environment variable XLA_FLAGS=--xla_dump_to=FOLDER"),
    "enable_goodput_recording": Absent(_GOODPUT),
    "monitor_goodput": Absent(_GOODPUT),
    "elastic_enabled": Absent("not available: restart with the devices that are left"),
    "enable_diloco": Absent("not available: every step synchronises all devices"),
    "use_sft": Absent("not available: this program pre-trains"),
    "use_dpo": Absent("not available: this program pre-trains"),
}

# Families too large to list; the first prefix that fits counts.
_FAMILIES: dict[str, Absent] = {
    "sa_": Absent(_KERNEL, accepts="any"),
    "hf_": Absent(_FILES, "grain_train_files"),
    "grain_": Absent("Grain reads by these keys", "grain_worker_count"),
    "dcn_": Absent(f"the mesh axes are {', '.join(MESH_AXES)}", "logical_axis_rules"),
    "ici_": Absent(f"the mesh axes are {', '.join(MESH_AXES)}", "logical_axis_rules"),
    "lora.": Absent("not available: this program pre-trains"),
    "rl.": Absent("not available: this program pre-trains"),
}

# (key, value) -> what to choose for a value of MaxText that is not among ours.
VALUE_NOTES: dict[tuple[str, str], str] = {
    ("dataset_type", "tfds"): "grain reads tfrecord and ArrayRecord files by grain_train_files",
    ("dataset_type", "hf"): "grain reads parquet and arrow files by grain_train_files",
    ("dataset_type", "olmo_grain"): "prepare the text once with prepare_data.py",
    ("hardware", "gpu_multiprocess"): "processes are started by a launcher (docs/launch.md)",
    ("profiler", "nsys"): "start the program under nsys itself",
    ("context_parallel_strategy", "ulysses"): "all_gather and ring keep heads where they are",
    ("context_parallel_strategy", "usp"): "all_gather and ring keep heads where they are",
    ("remat_policy", "custom"): "choose one of the named policies",
}


class Translation(NamedTuple):
    """What `key=value` of another program is here.

    Attributes:
      name: key of ours; empty where nothing has to be set.
      text: value of that key, as it is typed.
      why: a sentence for where nothing has to be set.
    """

    name: str
    text: str = ""
    why: str = ""

    @property
    def value(self) -> Any:
        """The value of that key, its type not decided yet."""
        return values.from_text(self.text)

    @property
    def sentence(self) -> str:
        """What to tell who wrote it."""
        if self.name:
            return f"is {self.name}={self.text} here"
        return f"has no effect here: {self.why}"


def _nothing(why: str) -> Translation:
    return Translation("", why=why)


# (key, value) -> ours. Values in lower case; null stands for all ways to write nothing.
TRANSLATIONS: dict[tuple[str, str], Translation] = {
    ("opt_type", "adam_pax"): Translation("opt_type", "adamw"),
    ("attention", "cudnn_flash_te"): Translation("attention", "flash"),
    ("attention", "cudnn_flash_jax"): Translation("attention", "flash"),
    ("remat_policy", "minimal_flash"): Translation("remat_policy", "minimal_with_context"),
    ("dataset_type", "pile"): Translation("dataset_type", "grain"),
    ("train_shuffle_buffer_size", "null"): Translation("enable_data_shuffling", "false"),
    ("mudd_postnorm", "true"): Translation("mudd_postnorm", "residual"),
    ("mudd_postnorm", "false"): Translation("mudd_postnorm", "none"),
    ("dynamic_dense_type", "qkvm"): Translation("dense_ways", "[q,k,v,r]"),
    ("dynamic_dense_type", "qkvr"): Translation("dense_ways", "[q,k,v,r]"),
    ("dynamic_dense_type", "null"): _nothing("dense_conn switches connections on and off"),
    ("dynamic_dense_fix_last_layer", "true"): _nothing(_ONE_SUM),
    ("dynamic_dense_hidden_round", "true"): Translation("dense_hidden_rounding", "reference"),
    ("dynamic_dense_hidden_round", "false"): Translation("dense_hidden_rounding", "none"),
    ("num_layers_per_block", "1"): _nothing("all layers attend alike"),
}


# Ways to say that something is off, which is true of everything that is not here.
_OFF = frozenset({"null", "", "none", "false", "0", "[]", "{}"})


def translation(name: str, value: Any) -> Translation | None:
    """What a `key=value` of another program is here, or None.

    Args:
      name: what the user wrote.
      value: as config_files or the command line read it, or a Python value.
    """
    if values.is_null(value):
        spelled = "null"
    else:
        spelled = value.lower() if isinstance(value, str) else values.to_yaml(value)
    if found := TRANSLATIONS.get((name, spelled or "null")):
        return found
    families = (one for start, one in _FAMILIES.items() if name.startswith(start))
    reason = UNAVAILABLE.get(name) or next((one for one in families if one.accepts == "any"), None)
    if reason and (reason.accepts == "any" or (reason.accepts == "off" and spelled in _OFF)):
        return _nothing(reason.sentence)
    return None


def absent(name: str, known: tuple[str, ...] = ()) -> Absent | None:
    """What to say about a key of MaxText or another program; None for any other name.

    Args:
      name: what the user wrote.
      known: names close to it among our keys; a near miss of ours is no member of a family.
    """
    if name in UNAVAILABLE:
        return UNAVAILABLE[name]
    if name in REFERENCE_KEYS:
        return Absent(*REFERENCE_KEYS[name])
    if known:
        return None
    return next((reason for prefix, reason in _FAMILIES.items() if name.startswith(prefix)), None)
