"""Impossible combinations of keys, besides those of the model, one small function each."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

from MaxText.config.axis_rules import MESH_AXES, NETWORKS, default_rules, size_key
from MaxText.config.data_sections import SAMPLINGS, mix_part
from MaxText.config.model_rules import undivided_lengths
from MaxText.config.model_sections import NO_STAGES, PipelineConfig
from MaxText.config.probe_section import ProbeKeys
from MaxText.config.problems import ConfigIssue, InvalidCombinationError
from MaxText.config.registry import registration
from MaxText.config.rule import RULES, rule
from MaxText.config.schema import Config
from MaxText.config.training_sections import MeshConfig

__all__ = ["RULES", "broken_letters"]

_STAGES = tuple(size_key("stage", network) for network in NETWORKS)
_CONTEXT = tuple(size_key("context", network) for network in NETWORKS)


def broken_letters(config: Config) -> Iterator[ConfigIssue]:
    """Yields the issues of rules broken by single letters of layer_pattern.

    A letter of layer_kinds gives its layers other values of some keys. The rules about these keys
    are checked with the letter's values in place of the model's.
    """
    for letter, letter_keys in config.model.block.layer_kinds:
        changed_keys = {name.partition(".")[0] for name, _ in letter_keys}
        model = config.model.layer(dict(letter_keys)).config
        letter_config = config.model_copy(update={"model": model})
        for combination in RULES:
            concerns_all = not (combination.finds_unused or combination.programs)
            if not concerns_all or not changed_keys.intersection(combination.keys):
                continue
            if issue := combination.check(letter_config):
                message = f"layer_kinds: {letter}: {issue.message}"
                yield dataclasses.replace(issue, message=message, keys=("layer_kinds",))


# ---- Axis rules


@rule("override_logical_axis_rules", "logical_axis_rules")
def _axis_rules_are_complete(config: Config) -> ConfigIssue | None:
    if not config.mesh.override_logical_axis_rules:
        return None
    ruled_names = {name for name, _ in config.mesh.logical_axis_rules}
    names = dict.fromkeys(name for name, _ in default_rules())
    missing = [name for name in names if name not in ruled_names]
    if not missing:
        return None
    return ConfigIssue(
        message="override_logical_axis_rules=true replaces all of logical_axis_rules, and there is "
        f"no rule for {', '.join(missing)}",
        remedies=(
            "override_logical_axis_rules=false, which keeps the default rules of these names",
            "[NAME, []] in logical_axis_rules for each name that no mesh axis splits",
        ),
        keys=("override_logical_axis_rules", "logical_axis_rules"),
    )


# ---- Steps, batches and lengths


@rule("steps", "learning_rate_schedule_steps")
def _length_is_set(config: Config) -> ConfigIssue | None:
    # -1 of one is the other, so that both are -1 only if both were set to it.
    if config.run.steps != -1:
        return None
    return ConfigIssue(
        message="steps=-1 and learning_rate_schedule_steps=-1 refer to each other; set one of them",
        keys=("steps", "learning_rate_schedule_steps"),
    )


@rule("warmup_steps_fraction", "warmup_steps", "wsd_decay_steps_fraction")
def _wsd_phases_fit(config: Config) -> ConfigIssue | None:
    schedule = config.schedule
    length = schedule.learning_rate_schedule_steps
    decay_fraction = schedule.wsd_decay_steps_fraction
    if schedule.lr_schedule_type != "wsd" or length == -1:
        return None
    if schedule.num_warmup_steps + int(length * decay_fraction) <= length:
        return None
    if schedule.warmup_steps == -1:
        warmup_key = "warmup_steps_fraction"
        warmup = f"warmup_steps_fraction={schedule.warmup_steps_fraction:g}"
    else:
        warmup_key = "warmup_steps"
        warmup = f"warmup_steps={schedule.warmup_steps}"
    return ConfigIssue(
        message=f"{warmup} and wsd_decay_steps_fraction={decay_fraction:g} are more than the "
        f"{length} steps of the schedule together",
        keys=(warmup_key, "wsd_decay_steps_fraction"),
    )


@rule("steps", "learning_rate_schedule_steps", "warmup_steps", finds_unused=True)
def _warmup_ends(config: Config) -> ConfigIssue | None:
    schedule = config.schedule
    length = schedule.learning_rate_schedule_steps
    warmup = schedule.num_warmup_steps
    if not 0 < length < warmup or schedule.lr_schedule_type == "wsd":
        return None
    is_whole_run = config.run.steps == length
    name = "steps" if is_whole_run else "learning_rate_schedule_steps"
    return ConfigIssue(
        message=f"{name}={length} ends within the warm-up of {warmup} steps",
        keys=("steps",) if is_whole_run else ("learning_rate_schedule_steps", "steps"),
    )


@rule("per_device_batch_size", "per_device_batch_size_start", "per_device_batch_size_increment")
def _ramp_reaches_the_batch_size(config: Config) -> ConfigIssue | None:
    batch = config.batch
    start = batch.per_device_batch_size_start
    increment = batch.per_device_batch_size_increment
    num_increments = (batch.per_device_batch_size - start) / increment
    is_finite = 1 - 1e-6 <= num_increments < math.inf
    is_whole = is_finite and abs(num_increments - round(num_increments)) <= 1e-6
    if not batch.enable_rampup_batch_size or is_whole:
        return None
    return ConfigIssue(
        message=f"per_device_batch_size_start={start:g} plus a number of increments of "
        f"{increment:g} does not make per_device_batch_size={batch.per_device_batch_size:g}",
        keys=("per_device_batch_size_start", "per_device_batch_size"),
    )


@rule("global_batch_size", "enable_rampup_batch_size")
def _one_batch_size(config: Config) -> ConfigIssue | None:
    batch = config.batch
    if not (batch.global_batch_size and batch.enable_rampup_batch_size):
        return None
    return ConfigIssue(
        message=f"global_batch_size={batch.global_batch_size} is the batch size of every step, and "
        "enable_rampup_batch_size=true changes it",
        keys=("global_batch_size", "enable_rampup_batch_size"),
    )


@rule("sequence_length_stages", "max_target_length", "mlm_training")
def _length_stages_are_ordered(config: Config) -> ConfigIssue | None:
    stages = config.batch.sequence_length_stages
    max_length = config.model.shape.max_target_length
    steps = [step for step, _ in stages]
    if steps and (steps[0] != 0 or steps != sorted(set(steps))):
        return ConfigIssue(
            message=f"sequence_length_stages: the first steps {steps} must begin with 0 and "
            "increase",
            keys=("sequence_length_stages",),
        )
    for _, length in stages:
        if length < 1 or max_length % length:
            return ConfigIssue(
                message=f"sequence_length_stages: {length} does not divide max_target_length="
                f"{max_length}, and each sequence is split into that length",
                keys=("sequence_length_stages", "max_target_length"),
            )
    if steps and config.masking.mlm_training:
        return ConfigIssue(
            message="sequence_length_stages does not work with mlm_training=true: CLS begins a "
            "sequence",
            keys=("sequence_length_stages", "mlm_training"),
        )
    return None


@rule("max_target_length", "sequence_length_stages", *_CONTEXT)
def _context_axis_divides_sequences(config: Config) -> ConfigIssue | None:
    # What -1 fills is known where the devices are.
    sizes = {name: getattr(config.mesh, name) for name in _CONTEXT}
    splitting = [name for name, size in sizes.items() if size > 1]
    num_chunks = math.prod(max(size, 1) for size in sizes.values())
    return undivided_lengths(" * ".join(splitting), num_chunks, config, splitting)


@rule("context_parallel_strategy", *_CONTEXT, "dropout_rates.attention", "dropout_rate")
def _ring_has_no_dropout(config: Config) -> ConfigIssue | None:
    splits = any(getattr(config.mesh, name) not in (0, 1) for name in _CONTEXT)
    is_ring = config.model.attention.context_parallel_strategy == "ring"
    if not splits or not is_ring or not config.model.dropout.rate("attention"):
        return None
    return ConfigIssue(
        message="context_parallel_strategy=ring recomputes probabilities in the backward pass and "
        "does not support attention dropout",
        remedies=("context_parallel_strategy=all_gather", "dropout_rates.attention=0"),
        keys=("context_parallel_strategy", "dropout_rates.attention"),
    )


@rule("context_parallel_strategy", *_CONTEXT, "mixer", "layer_kinds")
def _ring_computes_the_weights(config: Config) -> ConfigIssue | None:
    splits = any(getattr(config.mesh, name) not in (0, 1) for name in _CONTEXT)
    is_ring = config.model.attention.context_parallel_strategy == "ring"
    if not splits or not is_ring:
        return None
    for name in config.model.mixers:
        mixer = registration("mixer", name).target
        if not hasattr(mixer, "hooks") or "weights" not in mixer.hooks():
            continue
        if mixer.weights_scope != "score":
            return ConfigIssue(
                message=f"context_parallel_strategy=ring has a part of the keys at a time, and "
                f"weights of mixer={name} depend on all scores of a {mixer.weights_scope}",
                remedies=("context_parallel_strategy=all_gather",),
                keys=("context_parallel_strategy", "mixer"),
            )
    return None


# ---- Data


@rule("tokenizer_vocab_size", "vocab_size")
def _tokenizer_fits_the_model(config: Config) -> ConfigIssue | None:
    preparation = config.preparation
    vocab_size = config.model.shape.vocab_size
    reads_text = config.data.dataset_type == "grain" and preparation.prepare_source
    trains_tokenizer = reads_text and not preparation.tokenizer_path
    if not trains_tokenizer or preparation.tokenizer_vocab_size <= vocab_size:
        return None
    return ConfigIssue(
        message=f"tokenizer_vocab_size={preparation.tokenizer_vocab_size} is larger than "
        f"vocab_size={vocab_size}",
        keys=("tokenizer_vocab_size", "vocab_size"),
    )


@rule("grain_train_files", "data_mixture_weights", "dataset_path")
def _data_is_named_once(config: Config) -> ConfigIssue | None:
    if not config.data.data_mixture_weights:
        return None
    for name in ("grain_train_files", "dataset_path"):
        if getattr(config.data, name):
            return ConfigIssue(
                message=f"{name} and data_mixture_weights both name what to train on; set one of "
                "them",
                keys=(name, "data_mixture_weights"),
            )
    return None


@rule("data_cache_dir")
def _cache_is_writable(config: Config) -> ConfigIssue | None:
    folder = config.data.data_cache_dir
    if not folder.startswith(("http://", "https://", "hf://")):
        return None
    return ConfigIssue(
        message=f"data_cache_dir={folder!r} is read-only",
        remedies=("a local folder, or a bucket (gs://)",),
        keys=("data_cache_dir",),
    )


@rule("data_mixture_weights", "num_epoch")
def _mixture_is_sound(config: Config) -> ConfigIssue | None:
    """Parts of a mixture are distinct, weigh something, and are sampled in a known way."""
    data = config.data
    parts = [mix_part(part) for part in data.data_mixture_weights]
    for location, stitch, sampling, weight in parts:
        if sampling not in SAMPLINGS:
            reason = f"sampling {sampling!r} of {location} is not one of {', '.join(SAMPLINGS)}"
        elif stitch < 1:
            reason = f"{location} has stitch {stitch}, which must be 1 or more"
        elif weight <= 0:
            reason = f"{location} has weight {weight:g}, which must be above 0"
        else:
            continue
        return ConfigIssue(
            message=f"data_mixture_weights: {reason}", keys=("data_mixture_weights",)
        )
    sources = [part[:3] for part in parts]  # without weights
    if repeated := [source for source in sources if sources.count(source) > 1]:
        return ConfigIssue(
            message=f"data_mixture_weights: {repeated[0][0]} is named twice; give it one weight",
            keys=("data_mixture_weights",),
        )
    if len(parts) > 1 and data.num_epoch != -1:
        return ConfigIssue(
            message=f"num_epoch={data.num_epoch}: a mixture repeats its sources without end, as "
            "their lengths differ",
            remedies=("leave num_epoch=-1 and set steps",),
            keys=("num_epoch",),
        )
    return None


@rule(
    "dataset_path",
    "grain_train_files",
    "data_mixture_weights",
    "dataset_type",
    programs=("train", "compare", "inspect_data"),
)
def _data_is_named(config: Config) -> ConfigIssue | None:
    data = config.data
    is_named = data.dataset_path or data.grain_train_files or data.data_mixture_weights
    if data.dataset_type != "grain" or is_named:
        return None
    return ConfigIssue(
        message="dataset_path: no dataset is set",
        remedies=(
            "python MaxText/train.py configs/quickstart.yml (a small run, to try the program)",
            "dataset_path=FOLDER, which prepare_data.py wrote, or token records as they are",
            "grain_train_files=PATTERN, records of text or tokens",
            "dataset_type=synthetic (random tokens, to measure speed)",
        ),
        keys=("dataset_path", "grain_train_files", "dataset_type"),
    )


@rule("probe", "probe_size", "probe_test_size", "max_target_length", "vocab_size", "dataset_type")
def _probe_fits(config: Config) -> ConfigIssue | None:
    if config.data.dataset_type != "probe":
        return None
    probe = config.data.parts.named("data_source.probe")
    assert isinstance(probe, ProbeKeys)
    shape = config.model.shape
    size = max(probe.probe_size, probe.probe_test_size)
    if probe.num_tokens > shape.max_target_length:
        return ConfigIssue(
            message=f"probe={probe.probe} of size {size} takes {probe.num_tokens} tokens, and "
            f"max_target_length={shape.max_target_length}",
            remedies=(f"max_target_length={probe.num_tokens}",),
            keys=("probe_size", "probe_test_size", "max_target_length"),
        )
    if probe.num_ids > shape.vocab_size:
        return ConfigIssue(
            message=f"probe={probe.probe} of size {size} needs {probe.num_ids} ids, and "
            f"vocab_size={shape.vocab_size}",
            remedies=(f"vocab_size={probe.num_ids}",),
            keys=("probe", "vocab_size"),
        )
    return None


@rule("eval_interval", "grain_eval_files", "grain_train_files", programs=("train",))
def _evaluation_has_data(config: Config) -> ConfigIssue | None:
    data = config.data
    if data.dataset_type != "grain" or config.evaluation.eval_interval == -1:
        return None
    if not data.grain_train_files or data.grain_eval_files or data.dataset_path:
        return None
    return ConfigIssue(
        message="eval_interval asks for evaluation, and grain_train_files names no records for it",
        remedies=("grain_eval_files=PATTERN", "eval_interval=-1 (no evaluation)"),
        keys=("eval_interval", "grain_train_files", "grain_eval_files"),
    )


@rule(
    "records.content",
    "records.min_length",
    "records.max_length",
    "records.stride",
    "prepare_output_format",
)
def _strided_windows_overlap(config: Config) -> ConfigIssue | None:
    records = config.preparation.records
    output_format = config.preparation.prepare_output_format
    if records.content != "strided":
        return None
    if output_format != "parquet":
        return ConfigIssue(
            message="records.content=strided has labels, which prepare_output_format="
            f"{output_format} cannot store",
            remedies=("prepare_output_format=parquet",),
            keys=("records.content", "prepare_output_format"),
        )
    for name in ("min_length", "stride"):
        length = getattr(records, name)
        if length > records.max_length:
            return ConfigIssue(
                message=f"records.{name}={length} above records.max_length={records.max_length} "
                "would leave tokens out",
                keys=(f"records.{name}", "records.max_length"),
            )
    return None


@rule("causal", "mlm_training")
def _mask_fits_the_objective(config: Config) -> ConfigIssue | None:
    is_causal = config.model.attention.causal
    is_masked = config.masking.mlm_training
    if not is_causal and not is_masked:
        return ConfigIssue(
            message="causal=false lets each token attend to the one that it predicts",
            remedies=("mlm_training=true (predict hidden tokens instead)",),
            keys=("causal", "mlm_training"),
        )
    if is_causal and is_masked:
        return ConfigIssue(
            message="mlm_training=true predicts from both sides, but causal=true masks later "
            "tokens",
            keys=("mlm_training", "causal"),
        )
    return None


@rule("mlm.same_token_prob", "mlm.random_token_prob", "mlm_training")
def _masked_shares_fit(config: Config) -> ConfigIssue | None:
    mlm = config.masking.mlm
    if not config.masking.mlm_training or mlm.same_token_prob + mlm.random_token_prob <= 1 + 1e-9:
        return None
    return ConfigIssue(
        message=f"mlm.same_token_prob={mlm.same_token_prob:g} and mlm.random_token_prob="
        f"{mlm.random_token_prob:g} are more than 1 together",
        keys=("mlm.same_token_prob", "mlm.random_token_prob"),
    )


# ---- Scores


@rule(
    "dataset_path",
    "grain_eval_files",
    "data_mixture_weights",
    "dataset_type",
    "eval_steps",
    "eval_tasks",
    "harness.tasks",
    programs=("eval",),
)
def _something_is_scored(config: Config) -> ConfigIssue | None:
    data = config.data
    if config.scoring.eval_tasks or config.scoring.harness.tasks:
        return None
    if data.dataset_type == "synthetic":
        if config.evaluation.eval_steps != -1:
            return None
        return ConfigIssue(
            message="dataset_type=synthetic never ends, so eval.py needs eval_steps (batches)",
            keys=("dataset_type", "eval_steps"),
        )
    is_named = data.grain_eval_files or data.dataset_path or data.data_mixture_weights
    if data.dataset_type != "grain" or is_named:
        return None
    return ConfigIssue(
        message="no data or tasks to evaluate on are set",
        remedies=(
            "load_parameters_path=RUN without config file: what the run was trained on",
            "dataset_path=FOLDER, whose eval_split is read",
            "grain_eval_files=PATTERN, records of text or tokens",
            "eval_tasks=[lambada] task_files.lambada=FILE, or harness.tasks=[...]",
        ),
        keys=("dataset_path", "grain_eval_files", "eval_tasks", "harness.tasks"),
    )


@rule(
    "eval_stride",
    "max_target_length",
    "mlm_training",
    "use_truncation",
    "megatron.order",
    programs=("eval",),
)
def _stride_scores_each_token(config: Config) -> ConfigIssue | None:
    """Windows of eval overlap, and the data is a text whose every token can be scored."""
    stride = config.scoring.eval_stride
    length = config.model.shape.max_target_length
    if stride > length:
        return ConfigIssue(
            message=f"eval_stride={stride} is above max_target_length={length}: the tokens between "
            "two windows would not be scored",
            remedies=(f"eval_stride={length} or less",),
            keys=("eval_stride", "max_target_length"),
        )
    if stride == -1:
        return None
    if config.masking.mlm_training:
        requirement = "slides a window over the text of a causal model"
        key = "mlm_training"
        remedy = "mlm_training=false"
    elif config.data.use_truncation:
        requirement = "scores every token"
        key = "use_truncation"
        remedy = "use_truncation=false"
    elif config.data.megatron.order != "stored":
        requirement = "reads documents in stored order"
        key = "megatron.order"
        remedy = "megatron.order=stored"
    else:
        return None
    return ConfigIssue(
        message=f"eval_stride {requirement}, which needs {remedy}",
        remedies=(remedy, "eval_stride=-1"),
        keys=("eval_stride", key),
    )


@rule("causal", "eval_tasks", "harness.tasks", "mlm_training", programs=("eval",))
def _tasks_have_a_causal_model(config: Config) -> ConfigIssue | None:
    scoring = config.scoring
    has_tasks = scoring.eval_tasks or scoring.harness.tasks
    if config.model.attention.causal or not has_tasks:
        return None
    return ConfigIssue(
        message="eval_tasks and harness.tasks need a causal model; masked models are scored on "
        "data sets",
        remedies=("eval_tasks=[] harness.tasks=[]",),
        keys=("eval_tasks", "harness.tasks", "causal"),
    )


@rule("downstream_task_files", "causal", "ici_pipeline_parallelism", "dcn_pipeline_parallelism")
def _downstream_tasks_have_a_model(config: Config) -> ConfigIssue | None:
    if not config.evaluation.downstream_task_files:
        return None
    stages = (config.mesh.ici_pipeline_parallelism, config.mesh.dcn_pipeline_parallelism)
    remedy = "downstream_task_files=[]"
    if not config.model.attention.causal:
        return ConfigIssue(
            message="downstream tasks need a causal model, which scores a choice after its query",
            remedies=(remedy,),
            keys=("downstream_task_files", "causal"),
        )
    if any(size not in (1, "auto") for size in stages):
        return ConfigIssue(
            message="downstream tasks have batches of any size, which the stages of a pipeline do "
            "not divide; score the checkpoints with eval.py instead",
            remedies=(remedy,),
            keys=(
                "downstream_task_files",
                "ici_pipeline_parallelism",
                "dcn_pipeline_parallelism",
            ),
        )
    return None


@rule("eval_tasks", "task_files.lambada", "task_files.wikitext")
def _tasks_have_files(config: Config) -> ConfigIssue | None:
    for task in config.scoring.eval_tasks:
        if not getattr(config.scoring.task_files, task):
            return ConfigIssue(
                message=f"eval_tasks names {task}, and task_files.{task} names no file of it",
                keys=("eval_tasks", f"task_files.{task}"),
            )
    return None


# ---- Checkpoints and growth (docs/how-to/train_and_grow_tokenformer.md)


@rule("load_parameters_path", "load_full_state_path")
def _start_is_named_once(config: Config) -> ConfigIssue | None:
    checkpoint = config.checkpoint
    if not checkpoint.load_parameters_path or not checkpoint.load_full_state_path:
        return None
    return ConfigIssue(
        message="load_parameters_path and load_full_state_path exclude each other; set one of them",
        keys=("load_parameters_path", "load_full_state_path"),
    )


@rule("growth.opt_state", "opt_type")
def _warmed_moments_exist(config: Config) -> ConfigIssue | None:
    opt_type = config.optimizer.opt_type
    has_second_moments = opt_type in ("adamw", "muon", "adamh", "muonh")
    if config.checkpoint.growth.opt_state != "warmed" or has_second_moments:
        return None
    return ConfigIssue(
        message="growth.opt_state=warmed needs Adam's second moments, which opt_type="
        f"{opt_type} does not have",
        remedies=("growth.opt_state=reused", "growth.opt_state=zeroed"),
        keys=("growth.opt_state", "opt_type"),
    )


@rule("opt_type", "optax_name")
def _optax_rule_is_named(config: Config) -> ConfigIssue | None:
    if config.optimizer.opt_type != "optax" or config.optimizer.optax_name:
        return None
    return ConfigIssue(
        message="opt_type=optax needs the name of a rule of optax in optax_name",
        remedies=("optax_name=adopt", "optax_name=ademamix"),
        keys=("opt_type", "optax_name"),
    )


@rule("parameter_average.type", "parameter_average.start_step", "steps")
def _average_starts_in_the_run(config: Config) -> ConfigIssue | None:
    average = config.optimizer.parameter_average
    if average.type == "none" or average.start_step < config.run.steps:
        return None
    return ConfigIssue(
        message=f"parameter_average.start_step={average.start_step} is not before the end of the "
        f"run, steps={config.run.steps}, so that nothing would be averaged",
        remedies=(f"parameter_average.start_step={config.run.steps * 9 // 10}",),
        keys=("parameter_average.start_step", "steps"),
    )


# ---- Devices


@rule("auto_layout", "auto_layout_and_mesh_shape")
def _mesh_is_searched_once(config: Config) -> ConfigIssue | None:
    if not config.mesh.auto_layout or not config.mesh.auto_layout_and_mesh_shape:
        return None
    return ConfigIssue(
        message="auto_layout=true keeps the sizes of the mesh and auto_layout_and_mesh_shape=true "
        "chooses them: set only one",
        keys=("auto_layout", "auto_layout_and_mesh_shape"),
    )


def _several_wildcards(mesh: MeshConfig, names: Iterable[str], filled: str) -> ConfigIssue | None:
    """Returns the issue of several mesh axes of size -1, each of which would fill the rest."""
    wildcards = [name for name in names if getattr(mesh, name) == -1]
    if len(wildcards) < 2:
        return None
    return ConfigIssue(
        message=f"only one of {' and '.join(wildcards)} can be -1 (fill the remaining {filled})",
        keys=tuple(wildcards),
    )


_ICI_SIZES = tuple(size_key(axis, "ici") for axis in MESH_AXES)
_DCN_SIZES = tuple(size_key(axis, "dcn") for axis in MESH_AXES)


@rule(*_ICI_SIZES)
def _one_axis_fills_a_slice(config: Config) -> ConfigIssue | None:
    return _several_wildcards(config.mesh, _ICI_SIZES, "devices")


@rule(*_DCN_SIZES)
def _one_axis_fills_all_slices(config: Config) -> ConfigIssue | None:
    return _several_wildcards(config.mesh, _DCN_SIZES, "slices")


@rule(*_STAGES, *PipelineConfig.model_fields, "base_num_decoder_layers", "attention_types")
def _layers_fill_the_stages(config: Config) -> ConfigIssue | None:
    if config.mesh.num_stages == 1:
        return None
    try:
        config.model.pipeline_schedule(config.mesh.num_stages)
    except InvalidCombinationError as error:
        return error.issue
    return None


@rule(*_STAGES, programs=("decode", "eval"))
def _inference_has_no_stages(config: Config) -> ConfigIssue | None:
    if config.mesh.num_stages == 1:
        return None
    return ConfigIssue(
        message="inference runs one batch after another, so pipeline stages would wait for each "
        "other",
        remedies=(f"{NO_STAGES} ici_fsdp_parallelism=-1",),
        keys=_STAGES,
    )


@rule("sample_tokens", *_STAGES, programs=("train",))
def _stages_generate_no_sample(config: Config) -> ConfigIssue | None:
    if config.mesh.num_stages == 1 or not config.decoding.sample_tokens:
        return None
    return ConfigIssue(
        message="sample_tokens: a mesh with pipeline stages cannot generate text",
        remedies=("sample_tokens=0, and decode.py after the run",),
        keys=("sample_tokens",),
    )


@rule("compile_topology", programs=("train_compile",))
def _target_is_named(config: Config) -> ConfigIssue | None:
    if config.run.compile_topology:
        return None
    return ConfigIssue(
        message="compile_topology: no target machine is set",
        remedies=(
            "compile_topology=v5p-8, or another one of docs/how-to/compile_ahead_of_time.md",
        ),
        keys=("compile_topology",),
    )


# ---- Text


@rule("decode_sampling_strategy", "decode_sampling_top_k", "decode_sampling_nucleus_p")
def _strategy_has_its_setting(config: Config) -> ConfigIssue | None:
    decoding = config.decoding
    strategy = decoding.decode_sampling_strategy
    if strategy == "topk" and not decoding.decode_sampling_top_k:
        return ConfigIssue(
            message="decode_sampling_strategy=topk needs decode_sampling_top_k, the number of "
            "tokens",
            keys=("decode_sampling_strategy", "decode_sampling_top_k"),
        )
    if strategy == "nucleus" and decoding.decode_sampling_nucleus_p == 1:
        return ConfigIssue(
            message="decode_sampling_strategy=nucleus needs decode_sampling_nucleus_p below 1, the "
            "probability to keep",
            keys=("decode_sampling_strategy", "decode_sampling_nucleus_p"),
        )
    return None


@rule("causal", "mlm_training", programs=("decode",))
def _causal_models_generate(config: Config) -> ConfigIssue | None:
    if config.model.attention.causal:
        return None
    return ConfigIssue(
        message="causal=false (which mlm_training=true implies): a bidirectional model cannot "
        "generate text token by token",
        keys=("causal", "mlm_training"),
    )


# ---- The run


@rule("profiler", "profiler_window.skip", "steps", finds_unused=True)
def _profile_begins_within_the_run(config: Config) -> ConfigIssue | None:
    steps = config.run.steps
    skipped = config.monitoring.profiler_window.skip
    if not config.monitoring.profiler or not 0 < steps <= skipped:
        return None
    return ConfigIssue(
        message=f"the profiler waits {skipped} steps (profiler_window.skip), but the run has "
        f"steps={steps}",
        keys=("profiler", "steps", "profiler_window.skip"),
    )


@rule("run_name", "base_output_directory")
def _run_name_is_a_folder(config: Config) -> ConfigIssue | None:
    name = config.run.run_name
    root = config.run.base_output_directory
    if root.endswith(":/"):
        return ConfigIssue(
            message=f"run_name={root}/{name} is a bucket without a folder in it",
            keys=("run_name",),
        )
    if all(part not in ("", ".", "..") for part in name.rstrip("/").split("/")):
        return None
    return ConfigIssue(
        message=f"run_name={name!r} is not the name of a folder",
        remedies=(
            "a name, or names with / between, below base_output_directory",
            "a whole path, /folder/run or gs://bucket/run",
        ),
        keys=("run_name", "base_output_directory"),
    )


# ---- Patterns of parameters


def _unreadable_pattern(key: str, patterns: Iterable[str]) -> ConfigIssue | None:
    """Returns the issue of the first pattern of a key that is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return ConfigIssue(
                message=f"{key}: {pattern!r} is not a valid regular expression: {error}",
                keys=(key,),
            )
    return None


def _negative_number(key: str, numbers: Iterable[tuple[str, float]]) -> ConfigIssue | None:
    """Returns the issue of the first pair [pattern, number] of a key with a negative number."""
    for pattern, number in numbers:
        if number < 0:
            return ConfigIssue(
                message=f"{key}: {number:g} for {pattern!r} is negative", keys=(key,)
            )
    return None


@rule("weight_decay_overrides")
def _weight_decay_patterns_compile(config: Config) -> ConfigIssue | None:
    overrides = config.optimizer.weight_decay_overrides
    return _unreadable_pattern("weight_decay_overrides", [pattern for pattern, _ in overrides])


@rule("weight_decay_overrides")
def _weight_decays_are_positive(config: Config) -> ConfigIssue | None:
    return _negative_number("weight_decay_overrides", config.optimizer.weight_decay_overrides)


@rule("learning_rate_overrides")
def _learning_rate_patterns_compile(config: Config) -> ConfigIssue | None:
    overrides = config.optimizer.learning_rate_overrides
    return _unreadable_pattern("learning_rate_overrides", [pattern for pattern, _ in overrides])


@rule("learning_rate_overrides")
def _learning_rates_are_positive(config: Config) -> ConfigIssue | None:
    return _negative_number("learning_rate_overrides", config.optimizer.learning_rate_overrides)


@rule("adamw_mask")
def _decay_mask_compiles(config: Config) -> ConfigIssue | None:
    return _unreadable_pattern("adamw_mask", config.optimizer.adamw_mask)


@rule("trainable_parameters_mask")
def _trainable_mask_compiles(config: Config) -> ConfigIssue | None:
    mask = config.optimizer.trainable_parameters_mask
    return _unreadable_pattern("trainable_parameters_mask", mask)


@rule("quantization_rules")
def _quantization_patterns_compile(config: Config) -> ConfigIssue | None:
    quantization_rules = config.model.numerics.quantization_rules
    return _unreadable_pattern("quantization_rules", [pattern for pattern, _ in quantization_rules])
