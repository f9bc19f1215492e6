"""Combinations of keys that cannot work: one row and one small function each.

A rule is skipped when one of its keys already has a problem of its own. What needs the number of
devices (batch sizes, mesh sizes) is checked where the devices are known.
"""

import math
import operator
import re

from MaxText.configuration.axis_rules import MESH_AXES, NETWORKS, size_key
from MaxText.configuration.context_rules import CONTEXT_RULES
from MaxText.configuration.data_sections import SAMPLINGS, mix_part
from MaxText.configuration.growth_rules import GROWTH_RULES
from MaxText.configuration.model_rules import MODEL_RULES
from MaxText.configuration.model_sections import NO_STAGES, Pipeline
from MaxText.configuration.rule import Rule
from MaxText.configuration.schema import Config


def _not_zero(section: str, name: str, otherwise: str) -> Rule:
    """-1 has a meaning and 1 upwards are counts, which a lower bound alone cannot say."""

    def check(config: Config) -> str | None:
        if getattr(operator.attrgetter(section)(config), name) == 0:
            return f"{name}: 0 is not possible; use 1 or more, or {otherwise}"
        return None

    return Rule((name,), check)


def _compiles(section: str, name: str) -> Rule:
    def check(config: Config) -> str | None:
        for item in getattr(getattr(config, section), name):
            pattern = item if isinstance(item, str) else item[0]
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{name}: {pattern!r} is not a regular expression: {error}"
        return None

    return Rule((name,), check)


def _no_negative_factor(name: str) -> Rule:
    def check(config: Config) -> str | None:
        for pattern, number in getattr(config.optimizer, name):
            if number < 0:
                return f"{name}: {number:g} for {pattern!r} is negative"
        return None

    return Rule((name,), check)


def _tokenizer_fits(config: Config) -> str | None:
    preparation, rows = config.preparation, config.model.shape.vocab_size
    reads_text = config.data.dataset_type != "synthetic" and preparation.prepare_source
    trained = reads_text and not preparation.tokenizer_path
    if trained and preparation.tokenizer_vocab_size > rows:
        return (
            f"tokenizer_vocab_size={preparation.tokenizer_vocab_size} makes ids that "
            f"vocab_size={rows} has no row for"
        )
    return None


def _length(config: Config) -> str | None:
    if config.run.steps == -1:
        return "steps=-1 and learning_rate_schedule_steps=-1 refer to each other; set one of them"
    return None


def _endless_warmup(config: Config) -> str | None:
    schedule = config.schedule
    length, warmup = schedule.learning_rate_schedule_steps, schedule.num_warmup_steps
    if not 0 < length < warmup or schedule.lr_schedule_type == "wsd":
        return None
    name = "steps" if config.run.steps == length else "learning_rate_schedule_steps"
    return f"{name}={length} ends within the warm-up of {warmup} steps"


def _schedule(config: Config) -> str | None:
    schedule = config.schedule
    length, warmup = schedule.learning_rate_schedule_steps, schedule.num_warmup_steps
    decay = schedule.wsd_decay_steps_fraction
    if schedule.lr_schedule_type != "wsd":
        return None
    if schedule.warmup_steps != -1 and warmup + int(length * decay) > length:
        return (
            f"warmup_steps={warmup} and wsd_decay_steps_fraction={decay:g} are more than the "
            f"{length} steps of the schedule together"
        )
    if schedule.warmup_steps == -1 and schedule.warmup_steps_fraction + decay > 1 + 1e-9:
        return (
            f"warmup_steps_fraction={schedule.warmup_steps_fraction:g} and "
            f"wsd_decay_steps_fraction={decay:g} are more than 1 together"
        )
    return None


def _needs_dataset(config: Config) -> str | None:
    data = config.data
    named = data.dataset_path or data.grain_train_files or data.dataset_mix
    if data.dataset_type == "grain" and not named:
        return (
            "dataset_path: no data set is named\n"
            "python MaxText/train.py configs/quickstart.yml (a small run, to try the program)\n"
            "dataset_path=FOLDER, which prepare_data.py wrote, or token records as they are\n"
            "grain_train_files=PATTERN, records of text or tokens\n"
            "dataset_type=synthetic (random tokens, to measure speed)"
        )
    return None


def _something_to_score(config: Config) -> str | None:
    data, scoring = config.data, config.scoring
    if scoring.eval_tasks or scoring.harness_tasks:
        return None
    if data.dataset_type == "synthetic":
        if config.evaluation.eval_steps == -1:
            return "dataset_type=synthetic never ends, so eval.py needs eval_steps (batches)"
        return None
    if not (data.grain_eval_files or data.dataset_path or data.dataset_mix):
        return (
            "nothing to score is named\n"
            "load_parameters_path=RUN without config file: what the run was trained on\n"
            "dataset_path=FOLDER, whose eval_split is read\n"
            "grain_eval_files=PATTERN, records of text or tokens\n"
            "eval_tasks=[lambada] lambada_path=FILE, or harness_tasks=[...]"
        )
    return None


def _stride_fits(config: Config) -> str | None:
    stride, length = config.scoring.eval_stride, config.model.shape.max_target_length
    if stride <= length:
        return None
    return (
        f"eval_stride={stride} is above the window, max_target_length={length}: the tokens between "
        f"two windows would not be scored\neval_stride={length} or less"
    )


def _stride_masked(config: Config) -> str | None:
    if config.scoring.eval_stride == -1 or not config.masking.mlm_training:
        return None
    return (
        "eval_stride moves a window along the text that a causal model goes on with, and "
        "mlm_training=true predicts hidden tokens\neval_stride=-1"
    )


def _stride_truncated(config: Config) -> str | None:
    if config.scoring.eval_stride == -1 or not config.data.use_truncation:
        return None
    return (
        "eval_stride scores every token, and use_truncation=true drops what is longer than a "
        "window\nuse_truncation=false\neval_stride=-1"
    )


def _stride_order(config: Config) -> str | None:
    order = config.data.megatron_order
    if config.scoring.eval_stride == -1 or order == "stored":
        return None
    return (
        f"eval_stride reads documents as they are stored, and megatron_order={order} has samples "
        "of its own\nmegatron_order=stored\neval_stride=-1"
    )


def _task_files(config: Config) -> str | None:
    scoring = config.scoring
    for task in ("lambada", "wikitext"):
        path = getattr(scoring, f"{task}_path")
        if task in scoring.eval_tasks and not path:
            return f"eval_tasks names {task}, and {task}_path names no file of it"
    return None


def _idle_task_files(config: Config) -> str | None:
    scoring = config.scoring
    for task in ("lambada", "wikitext"):
        if getattr(scoring, f"{task}_path") and task not in scoring.eval_tasks:
            return (
                f"{task}_path: has no effect, because eval_tasks does not name {task}\n"
                f"eval_tasks=[{task}]"
            )
    return None


def _harness(config: Config) -> str | None:
    scoring = config.scoring
    if scoring.harness_tasks:
        return None
    for name, default in (("harness_task_path", ""), ("harness_num_fewshot", -1)):
        if getattr(scoring, name) != default:
            return f"{name}: has no effect without harness_tasks\nharness_tasks=[NAME,...]"
    return None


def _one_data_set(config: Config) -> str | None:
    data = config.data
    if data.grain_train_files and data.dataset_mix:
        return "grain_train_files and dataset_mix both name what to train on; set one of them"
    if data.dataset_mix and data.dataset_path:
        return "dataset_path and dataset_mix both name what to train on; set one of them"
    return None


def _mixture(config: Config) -> str | None:
    for part in config.data.dataset_mix:
        location, stitch, sampling, weight = mix_part(part)
        if sampling not in SAMPLINGS:
            return (
                f"dataset_mix: sampling {sampling!r} of {location} is none of "
                f"{', '.join(SAMPLINGS)}"
            )
        if stitch < 1:
            return f"dataset_mix: {location} has stitch {stitch}, which must be 1 or more"
        if weight <= 0:
            return f"dataset_mix: {location} has weight {weight:g}, which must be above 0"
    named = [mix_part(part)[:3] for part in config.data.dataset_mix]
    if twice := [part[0] for part in named if named.count(part) > 1]:
        return f"dataset_mix: {twice[0]} is named twice; give it one weight"
    if len(config.data.dataset_mix) > 1 and config.data.num_epoch != -1:
        return (
            f"num_epoch={config.data.num_epoch}: the sources of a mixture end at different times, "
            "so it repeats them without end\nleave num_epoch=-1 and set steps"
        )
    return None


def _evaluates_on_something(config: Config) -> str | None:
    data = config.data
    if data.dataset_type != "grain" or config.evaluation.eval_interval == -1:
        return None
    if data.grain_train_files and not (data.grain_eval_files or data.dataset_path):
        return (
            "eval_interval asks for evaluation, and grain_train_files names no records for it\n"
            "grain_eval_files=PATTERN\neval_interval=-1 (no evaluation)"
        )
    return None


def _rampup(config: Config) -> str | None:
    batch = config.batch
    if not batch.enable_rampup_batch_size:
        return None
    count = (batch.per_device_batch_size - batch.per_device_batch_size_start) / (
        batch.per_device_batch_size_increment
    )
    if not 1 - 1e-6 <= count < math.inf or abs(count - round(count)) > 1e-6:
        return (
            f"per_device_batch_size_start={batch.per_device_batch_size_start:g} plus a number of "
            f"increments of {batch.per_device_batch_size_increment:g} does not make "
            f"per_device_batch_size={batch.per_device_batch_size:g}"
        )
    return None


def _length_stages(config: Config) -> str | None:
    stages, window = config.batch.sequence_length_stages, config.model.shape.max_target_length
    steps = [step for step, _ in stages]
    if steps and (steps[0] != 0 or steps != sorted(set(steps))):
        return f"sequence_length_stages: the first steps {steps} must begin with 0 and increase"
    for _, length in stages:
        if length < 1 or window % length:
            return (
                f"sequence_length_stages: {length} does not divide max_target_length={window}, and "
                "each window is cut into rows of that length"
            )
    if stages and config.masking.mlm_training:
        return "sequence_length_stages does not work with mlm_training=true: CLS begins a window"
    return None


def _strided(config: Config) -> str | None:
    preparation = config.preparation
    if preparation.prepare_record != "strided":
        return None
    if preparation.prepare_output_format != "parquet":
        return (
            f"prepare_record=strided has labels, which prepare_output_format="
            f"{preparation.prepare_output_format} does not hold\nprepare_output_format=parquet"
        )
    longest = preparation.prep_max_length
    for name in ("prep_min_length", "prep_stride"):
        if getattr(preparation, name) > longest:
            return (
                f"{name}={getattr(preparation, name)} above prep_max_length={longest} would leave "
                "tokens out"
            )
    return None


def _causal(config: Config) -> str | None:
    causal, masked = config.model.attention.causal, config.masking.mlm_training
    if not causal and not masked:
        return (
            "causal=false lets each token see the one it has to predict\n"
            "mlm_training=true (predict hidden tokens instead)"
        )
    if causal and masked:
        return "mlm_training=true predicts from both sides, but causal=true hides one of them"
    return None


def _masked_shares(config: Config) -> str | None:
    masking = config.masking
    total = masking.mlm_same_token_prob + masking.mlm_random_token_prob
    if masking.mlm_training and total > 1 + 1e-9:
        return (
            f"mlm_same_token_prob={masking.mlm_same_token_prob:g} and "
            f"mlm_random_token_prob={masking.mlm_random_token_prob:g} are more than 1 together"
        )
    return None


def _one_start(config: Config) -> str | None:
    if config.checkpoint.load_parameters_path and config.checkpoint.load_full_state_path:
        return "load_parameters_path and load_full_state_path: only one can be the start"
    return None


_STAGES = tuple(size_key("stage", network) for network in NETWORKS)


def _mesh_sizes(network: str) -> Rule:
    names = tuple(size_key(axis, network) for axis in MESH_AXES)

    def check(config: Config) -> str | None:
        sizes = {name: getattr(config.mesh, name) for name in names}
        if zero := [name for name, size in sizes.items() if size == 0]:
            return f"{zero[0]}: 0 is not possible; use 1 or more, or -1 to fill"
        filling = [name for name, size in sizes.items() if size == -1]
        if len(filling) > 1:
            things = "devices" if network == "ici" else "slices"
            return f"only one of {' and '.join(filling)} can be -1 (fill the remaining {things})"
        return None

    return Rule(names, check)


def _stages(config: Config) -> str | None:
    sizes = [getattr(config.model.pipeline, name) for name in Pipeline.model_fields]
    if config.mesh.num_stages == 1 or 0 in sizes:  # 0 has a rule of its own
        return None
    try:
        config.model.pipeline_schedule(config.mesh.num_stages)
    except ValueError as error:
        return str(error)
    return None


def _no_stages(config: Config) -> str | None:
    if config.mesh.num_stages == 1:
        return None
    return (
        "weights are run one batch after another, so that stages of a pipeline would wait for each "
        f"other\n{NO_STAGES} ici_fsdp_parallelism=-1"
    )


def _stages_and_sample(config: Config) -> str | None:
    if config.mesh.num_stages == 1 or not config.decoding.sample_tokens:
        return None
    return (
        "sample_tokens generates text, which a mesh with stages of a pipeline cannot\n"
        "sample_tokens=0, and decode.py after the run"
    )


def _nothing_to_pipeline(config: Config) -> str | None:
    given = config.model.pipeline
    asked = [name for name in Pipeline.model_fields if getattr(given, name) not in (0, -1)]
    if config.mesh.num_stages > 1 or not asked:
        return None
    return f"{asked[0]}: has no effect without stages\nici_pipeline_parallelism=2, or more"


_FILTERS = {
    "decode_sampling_top_k": 0, "decode_sampling_nucleus_p": 1, "decode_sampling_min_p": 0,
    "decode_sampling_typical_p": 1, "decode_sampling_eta": 0, "decode_entmax_alpha": 1,
}  # fmt: skip


def _strategy(config: Config) -> str | None:
    decoding = config.decoding
    strategy = decoding.decode_sampling_strategy
    if strategy == "topk" and not decoding.decode_sampling_top_k:
        return "decode_sampling_strategy=topk needs decode_sampling_top_k, the number of tokens"
    if strategy == "nucleus" and decoding.decode_sampling_nucleus_p == 1:
        return (
            "decode_sampling_strategy=nucleus needs decode_sampling_nucleus_p below 1, the "
            "probability to keep"
        )
    return None


def _nothing_to_filter(config: Config) -> str | None:
    decoding = config.decoding
    if decoding.decode_sampling_strategy == "greedy" or decoding.decode_sampling_temperature:
        return None
    on = [name for name, off in _FILTERS.items() if getattr(decoding, name) != off]
    if on:
        return f"{on[0]} has no effect with decode_sampling_temperature=0, the likeliest token"
    return None


def _stop_strings(config: Config) -> str | None:
    if "" in config.decoding.decode_stop:
        return "decode_stop: an empty string is everywhere; write the strings at which a text ends"
    return None


def _one_text_to_compare(config: Config) -> str | None:
    decoding = config.decoding
    if decoding.autoregressive_decode_assert and (
        decoding.prompt_file or decoding.decode_num_samples > 1
    ):
        return (
            "autoregressive_decode_assert compares one text, but prompt_file or "
            "decode_num_samples asks for several"
        )
    return None


def _generates(config: Config) -> str | None:
    if not config.model.attention.causal:
        return (
            "causal=false (which mlm_training=true means): a model that sees later tokens cannot "
            "generate text token by token"
        )
    return None


def _target_loss(config: Config) -> str | None:
    if config.evaluation.target_eval_loss and config.evaluation.eval_interval == -1:
        return "target_eval_loss can never be seen: eval_interval=-1 evaluates never"
    return None


def _profile(config: Config) -> str | None:
    steps, monitoring = config.run.steps, config.monitoring
    if monitoring.profiler and 0 < steps <= monitoring.skip_first_n_steps_for_profiler:
        return (
            f"the profiler waits {monitoring.skip_first_n_steps_for_profiler} steps, "
            f"but the run has steps={steps}"
        )
    return None


def _target_named(config: Config) -> str | None:
    if config.run.compile_topology:
        return None
    return (
        "which machine to compile for is not named\n"
        "compile_topology=v5p-8, or another one of docs/train_compile.md"
    )


def _run_name(config: Config) -> str | None:
    name = config.run.run_name
    parts = name.rstrip("/").split("/")
    if config.run.base_output_directory.endswith(":/"):
        return (
            f"run_name={config.run.base_output_directory}/{name} is a bucket without a folder in it"
        )
    if any(part in ("", ".", "..") for part in parts):
        return (
            f"run_name={name!r} is not the name of a folder\n"
            "a name, or names with / between, below base_output_directory\n"
            "a whole path, /folder/run or gs://bucket/run"
        )
    return None


RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    Rule(("tokenizer_vocab_size", "vocab_size"), _tokenizer_fits),
    _not_zero("run", "steps", "-1 for learning_rate_schedule_steps"),
    _not_zero("schedule", "learning_rate_schedule_steps", "-1 for steps"),
    Rule(("steps", "learning_rate_schedule_steps"), _length),
    Rule(("warmup_steps_fraction", "warmup_steps", "wsd_decay_steps_fraction"), _schedule),
    Rule(("warmup_steps", "steps", "learning_rate_schedule_steps"), _endless_warmup, is_idle=True),
    Rule(("grain_train_files", "dataset_mix", "dataset_path"), _one_data_set),
    Rule(("dataset_mix", "num_epoch"), _mixture),
    Rule(
        ("eval_interval", "grain_eval_files", "grain_train_files"),
        _evaluates_on_something,
        ("train",),
    ),
    Rule(
        (
            "per_device_batch_size",
            "per_device_batch_size_start",
            "per_device_batch_size_increment",
        ),
        _rampup,
    ),
    Rule(("sequence_length_stages", "max_target_length", "mlm_training"), _length_stages),
    Rule(
        (
            "prepare_record",
            "prepare_output_format",
            "prep_min_length",
            "prep_stride",
            "prep_max_length",
        ),
        _strided,
    ),
    Rule(("causal", "mlm_training"), _causal),
    Rule(("mlm_same_token_prob", "mlm_random_token_prob"), _masked_shares),
    Rule(
        ("dataset_path", "grain_train_files", "dataset_mix", "dataset_type"),
        _needs_dataset,
        ("train", "compare", "inspect_data"),
    ),
    Rule(
        (
            "dataset_path",
            "grain_eval_files",
            "dataset_mix",
            "dataset_type",
            "eval_steps",
            "eval_tasks",
            "harness_tasks",
        ),
        _something_to_score,
        ("eval",),
    ),
    _not_zero("scoring", "eval_stride", "-1 for windows side by side"),
    Rule(("eval_stride", "max_target_length"), _stride_fits, ("eval",)),
    Rule(("eval_stride", "mlm_training"), _stride_masked, ("eval",)),
    Rule(("eval_stride", "use_truncation"), _stride_truncated, ("eval",)),
    Rule(("eval_stride", "megatron_order"), _stride_order, ("eval",)),
    Rule(("eval_tasks", "lambada_path", "wikitext_path"), _task_files),
    Rule(("eval_tasks", "lambada_path", "wikitext_path"), _idle_task_files, is_idle=True),
    Rule(("harness_tasks", "harness_task_path", "harness_num_fewshot"), _harness, is_idle=True),
    _not_zero("data", "num_epoch", "-1 to repeat until `steps`"),
    Rule(("load_parameters_path", "load_full_state_path"), _one_start),
    *GROWTH_RULES,
    *CONTEXT_RULES,
    *(_mesh_sizes(network) for network in NETWORKS),
    *(_not_zero("model.pipeline", name, "-1 to derive it") for name in Pipeline.model_fields),
    Rule((*_STAGES, *Pipeline.model_fields, "base_num_decoder_layers", "attention_types"), _stages),
    Rule(
        (*Pipeline.model_fields, *_STAGES),
        _nothing_to_pipeline,
        ("train", "train_compile"),
        is_idle=True,
    ),
    Rule(_STAGES, _no_stages, ("decode", "eval")),
    Rule(("sample_tokens", *_STAGES), _stages_and_sample, ("train",)),
    _not_zero("evaluation", "eval_steps", "-1 for the whole split"),
    Rule(("target_eval_loss", "eval_interval"), _target_loss, is_idle=True),
    _not_zero("decoding", "max_new_tokens", "-1 for what max_target_length has room for"),
    Rule(
        ("decode_sampling_strategy", "decode_sampling_top_k", "decode_sampling_nucleus_p"),
        _strategy,
    ),
    Rule(
        ("autoregressive_decode_assert", "prompt_file", "decode_num_samples"),
        _one_text_to_compare,
    ),
    Rule(("decode_sampling_temperature", *_FILTERS), _nothing_to_filter, is_idle=True),
    Rule(("decode_stop",), _stop_strings),
    Rule(("causal", "mlm_training"), _generates, ("decode",)),
    Rule(("profiler", "skip_first_n_steps_for_profiler", "steps"), _profile, is_idle=True),
    Rule(("run_name", "base_output_directory"), _run_name),
    _not_zero("run", "compile_topology_num_slices", "-1 for one"),
    Rule(("compile_topology",), _target_named, ("train_compile",)),
    _compiles("optimizer", "adamw_mask"),
    _compiles("optimizer", "weight_decay_overrides"),
    _compiles("optimizer", "learning_rate_overrides"),
    _compiles("optimizer", "trainable_parameters_mask"),
    _no_negative_factor("weight_decay_overrides"),
    _no_negative_factor("learning_rate_overrides"),
)
