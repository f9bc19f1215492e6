"""Impossible combinations of keys, besides those of the model."""

import math
import re
from collections.abc import Iterator

from MaxText.config.axis_rules import MESH_AXES, NETWORKS, default_rules, size_key
from MaxText.config.data_sections import SAMPLINGS, mix_part
from MaxText.config.model_rules import undivided
from MaxText.config.model_sections import NO_STAGES, PipelineConfig
from MaxText.config.rule import RULES, rule
from MaxText.config.schema import Config

__all__ = ["RULES", "broken_letters"]

_STAGES = tuple(size_key("stage", network) for network in NETWORKS)
_CONTEXT = tuple(size_key("context", network) for network in NETWORKS)


def broken_letters(config: Config) -> Iterator[str]:
    """Yields messages of rules broken by single letters of layer_pattern."""
    for letter, keys in config.model.block.layer_kinds:
        own = {name.partition(".")[0] for name, _ in keys}
        of_layer = config.model_copy(update={"model": config.model.layer(dict(keys)).config})
        for one in RULES:
            concerns = own.intersection(one.keys) and not (one.finds_unused or one.programs)
            if concerns and (message := one.check(of_layer)):
                yield f"layer_kinds: {letter}: {message}"


# ---- Devices


@rule()
def _whole_set_of_axis_rules(override_logical_axis_rules, logical_axis_rules):
    if not override_logical_axis_rules:
        return None
    given = {name for name, _ in logical_axis_rules}
    names = dict.fromkeys(name for name, _ in default_rules())
    if missing := [name for name in names if name not in given]:
        return (
            "override_logical_axis_rules=true replaces all of logical_axis_rules, and there is no "
            f"rule for {', '.join(missing)}\n"
            "override_logical_axis_rules=false, which keeps the default rules of these names\n"
            "[NAME, []] in logical_axis_rules for each name that no mesh axis splits"
        )


# ---- Batches and lengths


@rule()
def _length(steps, learning_rate_schedule_steps):
    if steps == -1:
        return "steps=-1 and learning_rate_schedule_steps=-1 refer to each other; set one of them"


@rule()
def _schedule(warmup_steps_fraction, warmup_steps, wsd_decay_steps_fraction, config):
    length = config.schedule.learning_rate_schedule_steps
    warmup = config.schedule.num_warmup_steps
    if config.schedule.lr_schedule_type != "wsd" or length == -1:
        return None
    if warmup + int(length * wsd_decay_steps_fraction) > length:
        given = f"{warmup_steps_fraction=:g}" if warmup_steps == -1 else f"{warmup_steps=}"
        return (
            f"{given} and {wsd_decay_steps_fraction=:g} are more than the {length} steps of the "
            "schedule together"
        )


@rule("warmup_steps", finds_unused=True)
def _endless_warmup(steps, learning_rate_schedule_steps, config):
    length = learning_rate_schedule_steps
    warmup = config.schedule.num_warmup_steps
    if 0 < length < warmup and config.schedule.lr_schedule_type != "wsd":
        name = "steps" if steps == length else "learning_rate_schedule_steps"
        return f"{name}={length} ends within the warm-up of {warmup} steps"


@rule()
def _rampup(
    per_device_batch_size, per_device_batch_size_start, per_device_batch_size_increment, config
):
    count = (per_device_batch_size - per_device_batch_size_start) / per_device_batch_size_increment
    is_whole = 1 - 1e-6 <= count < math.inf and abs(count - round(count)) <= 1e-6
    if config.batch.enable_rampup_batch_size and not is_whole:
        return (
            f"{per_device_batch_size_start=:g} plus a number of increments of "
            f"{per_device_batch_size_increment:g} does not make {per_device_batch_size=:g}"
        )


@rule()
def _length_stages(sequence_length_stages, max_target_length, mlm_training):
    steps = [step for step, _ in sequence_length_stages]
    if steps and (steps[0] != 0 or steps != sorted(set(steps))):
        return f"sequence_length_stages: the first steps {steps} must begin with 0 and increase"
    for _, length in sequence_length_stages:
        if length < 1 or max_target_length % length:
            return (
                f"sequence_length_stages: {length} does not divide max_target_length="
                f"{max_target_length}, and each sequence is split into that length"
            )
    if steps and mlm_training:
        return "sequence_length_stages does not work with mlm_training=true: CLS begins a sequence"


@rule(*_CONTEXT)
def _parts_of_sequences(max_target_length, sequence_length_stages, **sizes):
    # What -1 fills is known where the devices are.
    parts = math.prod(max(size, 1) for size in sizes.values())
    names = " * ".join(name for name, size in sizes.items() if size > 1)
    return undivided(names, parts, max_target_length, sequence_length_stages)


@rule(*_CONTEXT, "dropout_rates", "dropout_rate")
def _ring(context_parallel_strategy, model, **keys):
    splits = any(keys[name] not in (0, 1) for name in _CONTEXT)
    if splits and context_parallel_strategy == "ring" and model.dropout.rate("attention"):
        return (
            "context_parallel_strategy=ring recomputes probabilities in the backward pass and does "
            "not support attention dropout\n"
            "context_parallel_strategy=all_gather\ndropout_rates.attention=0"
        )


# ---- Data


@rule()
def _tokenizer_fits(tokenizer_vocab_size, vocab_size, config):
    preparation = config.preparation
    reads_text = config.data.dataset_type != "synthetic" and preparation.prepare_source
    if reads_text and not preparation.tokenizer_path and tokenizer_vocab_size > vocab_size:
        return f"{tokenizer_vocab_size=} is larger than {vocab_size=}"


@rule()
def _one_data_set(grain_train_files, data_mixture_weights, dataset_path):
    for name, other in (("grain_train_files", grain_train_files), ("dataset_path", dataset_path)):
        if data_mixture_weights and other:
            return f"{name} and data_mixture_weights both name what to train on; set one of them"


@rule()
def _cache_is_writable(data_cache_dir):
    if data_cache_dir.startswith(("http://", "https://", "hf://")):
        return f"{data_cache_dir=} is read-only\na local folder, or a bucket (gs://)"


@rule()
def _mixture(data_mixture_weights, num_epoch):
    for part in data_mixture_weights:
        location, stitch, sampling, weight = mix_part(part)
        if sampling not in SAMPLINGS:
            known = ", ".join(SAMPLINGS)
            return (
                f"data_mixture_weights: sampling {sampling!r} of {location} is not one of {known}"
            )
        if stitch < 1:
            return f"data_mixture_weights: {location} has stitch {stitch}, which must be 1 or more"
        if weight <= 0:
            return f"data_mixture_weights: {location} has weight {weight:g}, which must be above 0"
    named = [mix_part(part)[:3] for part in data_mixture_weights]
    if twice := [part[0] for part in named if named.count(part) > 1]:
        return f"data_mixture_weights: {twice[0]} is named twice; give it one weight"
    if len(data_mixture_weights) > 1 and num_epoch != -1:
        return (
            f"{num_epoch=}: a mixture repeats its sources without end, as their lengths "
            "differ\nleave num_epoch=-1 and set steps"
        )


@rule(programs="train compare inspect_data")
def _needs_dataset(dataset_path, grain_train_files, data_mixture_weights, dataset_type):
    if dataset_type == "grain" and not (dataset_path or grain_train_files or data_mixture_weights):
        return (
            "dataset_path: no dataset is set\n"
            "python MaxText/train.py configs/quickstart.yml (a small run, to try the program)\n"
            "dataset_path=FOLDER, which prepare_data.py wrote, or token records as they are\n"
            "grain_train_files=PATTERN, records of text or tokens\n"
            "dataset_type=synthetic (random tokens, to measure speed)"
        )


@rule(programs="train")
def _evaluates_on_something(eval_interval, grain_eval_files, grain_train_files, config):
    if config.data.dataset_type != "grain" or eval_interval == -1:
        return None
    if grain_train_files and not (grain_eval_files or config.data.dataset_path):
        return (
            "eval_interval asks for evaluation, and grain_train_files names no records for it\n"
            "grain_eval_files=PATTERN\neval_interval=-1 (no evaluation)"
        )


@rule()
def _strided(records, prepare_output_format):
    if records.content != "strided":
        return None
    if prepare_output_format != "parquet":
        return (
            f"records.content=strided has labels, which prepare_output_format="
            f"{prepare_output_format} cannot store\nprepare_output_format=parquet"
        )
    for name in ("min_length", "stride"):
        if (number := getattr(records, name)) > records.max_length:
            return (
                f"records.{name}={number} above records.max_length={records.max_length} would "
                "leave tokens out"
            )


@rule()
def _causal(causal, mlm_training):
    if not causal and not mlm_training:
        return (
            "causal=false lets each token attend to the one that it predicts\n"
            "mlm_training=true (predict hidden tokens instead)"
        )
    if causal and mlm_training:
        return "mlm_training=true predicts from both sides, but causal=true masks later tokens"


@rule()
def _masked_shares(mlm, mlm_training):
    if mlm_training and mlm.same_token_prob + mlm.random_token_prob > 1 + 1e-9:
        return f"{mlm.same_token_prob=:g} and {mlm.random_token_prob=:g} are more than 1 together"


# ---- Scores


@rule("eval_steps", "eval_tasks", "harness", programs="eval")
def _something_to_score(dataset_path, grain_eval_files, data_mixture_weights, dataset_type, config):
    if config.scoring.eval_tasks or config.scoring.harness.tasks:
        return None
    if dataset_type == "synthetic":
        if config.evaluation.eval_steps == -1:
            return "dataset_type=synthetic never ends, so eval.py needs eval_steps (batches)"
    elif not (grain_eval_files or dataset_path or data_mixture_weights):
        return (
            "no data or tasks to evaluate on are set\n"
            "load_parameters_path=RUN without config file: what the run was trained on\n"
            "dataset_path=FOLDER, whose eval_split is read\n"
            "grain_eval_files=PATTERN, records of text or tokens\n"
            "eval_tasks=[lambada] task_files.lambada=FILE, or harness.tasks=[...]"
        )


@rule(programs="eval")
def _stride(eval_stride, max_target_length, mlm_training, use_truncation, megatron):
    if eval_stride > max_target_length:
        return (
            f"{eval_stride=} is above {max_target_length=}: the tokens between two windows would "
            f"not be scored\neval_stride={max_target_length} or less"
        )
    if eval_stride == -1:
        return None
    if mlm_training:
        what = "slides a window over the text of a causal model"
        remedy = "mlm_training=false"
    elif use_truncation:
        what = "scores every token"
        remedy = "use_truncation=false"
    elif megatron.order != "stored":
        what = "reads documents in stored order"
        remedy = "megatron.order=stored"
    else:
        return None
    return f"eval_stride {what}, which needs {remedy}\n{remedy}\neval_stride=-1"


@rule("mlm_training", programs="eval")
def _causal_tasks(causal, eval_tasks, harness):
    if not causal and (eval_tasks or harness.tasks):
        return (
            "eval_tasks and harness.tasks need a causal model; masked models are scored on data "
            "sets\neval_tasks=[] harness.tasks=[]"
        )


@rule()
def _task_files(eval_tasks, task_files):
    for task in eval_tasks:
        if not getattr(task_files, task):
            return f"eval_tasks names {task}, and task_files.{task} names no file of it"


# ---- Checkpoints and growth (docs/how-to/train_and_grow_tokenformer.md)


@rule()
def _one_start(load_parameters_path, load_full_state_path):
    if load_parameters_path and load_full_state_path:
        return "load_parameters_path and load_full_state_path exclude each other; set one of them"


@rule()
def _moments(growth, opt_type):
    if growth.opt_state == "warmed" and opt_type not in ("adamw", "muon"):
        return (
            "growth.opt_state=warmed needs Adam's second moments, which opt_type="
            f"{opt_type} does not have\ngrowth.opt_state=reused\ngrowth.opt_state=zeroed"
        )


# ---- Devices


@rule()
def _two_searches_of_a_mesh(auto_layout, auto_layout_and_mesh_shape):
    if auto_layout and auto_layout_and_mesh_shape:
        return (
            "auto_layout=true keeps the sizes of the mesh and auto_layout_and_mesh_shape=true "
            "chooses them: set only one"
        )


def _one_fills(**sizes):
    wildcards = [name for name, size in sizes.items() if size == -1]
    if len(wildcards) > 1:
        things = "devices" if wildcards[0].startswith("ici") else "slices"
        return f"only one of {' and '.join(wildcards)} can be -1 (fill the remaining {things})"


for network in NETWORKS:
    rule(*(size_key(axis, network) for axis in MESH_AXES))(_one_fills)


@rule(*_STAGES, *PipelineConfig.model_fields, "base_num_decoder_layers", "attention_types")
def _stages(config):
    try:
        if config.mesh.num_stages > 1:
            config.model.pipeline_schedule(config.mesh.num_stages)
    except ValueError as error:
        return str(error)


@rule(*_STAGES, programs="decode eval")
def _no_stages(config):
    if config.mesh.num_stages > 1:
        return (
            "inference runs one batch after another, so pipeline stages would wait for each other\n"
            f"{NO_STAGES} ici_fsdp_parallelism=-1"
        )


@rule(*_STAGES, programs="train")
def _stages_and_sample(sample_tokens, config):
    if config.mesh.num_stages > 1 and sample_tokens:
        return (
            "sample_tokens: a mesh with pipeline stages cannot generate text\n"
            "sample_tokens=0, and decode.py after the run"
        )


@rule(programs="train_compile")
def _target_named(compile_topology):
    if not compile_topology:
        return (
            "compile_topology: no target machine is set\n"
            "compile_topology=v5p-8, or another one of docs/how-to/compile_ahead_of_time.md"
        )


# ---- Text


@rule()
def _strategy(decode_sampling_strategy, decode_sampling_top_k, decode_sampling_nucleus_p):
    if decode_sampling_strategy == "topk" and not decode_sampling_top_k:
        return "decode_sampling_strategy=topk needs decode_sampling_top_k, the number of tokens"
    if decode_sampling_strategy == "nucleus" and decode_sampling_nucleus_p == 1:
        return (
            "decode_sampling_strategy=nucleus needs decode_sampling_nucleus_p below 1, the "
            "probability to keep"
        )


@rule("mlm_training", programs="decode")
def _generates(causal):
    if not causal:
        return (
            "causal=false (which mlm_training=true implies): a bidirectional model cannot generate "
            "text token by token"
        )


# ---- The run


@rule(finds_unused=True)
def _profile(profiler, profiler_window, steps):
    if profiler and 0 < steps <= profiler_window.skip:
        return (
            f"the profiler waits {profiler_window.skip} steps (profiler_window.skip), but the run "
            f"has {steps=}"
        )


@rule(finds_unused=True)
def _beam_options(prepare):
    if prepare.beam_options and prepare.runner != "beam":
        return f"prepare.beam_options: has no effect with prepare.runner={prepare.runner}"


@rule()
def _run_name(run_name, base_output_directory):
    if base_output_directory.endswith(":/"):
        return f"run_name={base_output_directory}/{run_name} is a bucket without a folder in it"
    if any(part in ("", ".", "..") for part in run_name.rstrip("/").split("/")):
        return (
            f"run_name={run_name!r} is not the name of a folder\n"
            "a name, or names with / between, below base_output_directory\n"
            "a whole path, /folder/run or gs://bucket/run"
        )


# ---- Patterns of parameters


def _compiles(**keys):
    for name, items in keys.items():
        for item in items:
            pattern = item if isinstance(item, str) else item[0]
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{name}: {pattern!r} is not a valid regular expression: {error}"


def _no_negative_factor(**keys):
    for name, items in keys.items():
        for pattern, number in items:
            if number < 0:
                return f"{name}: {number:g} for {pattern!r} is negative"


for name in ("weight_decay_overrides", "learning_rate_overrides"):
    rule(name)(_compiles)
    rule(name)(_no_negative_factor)
for name in ("adamw_mask", "trainable_parameters_mask", "quantization_rules"):
    rule(name)(_compiles)
