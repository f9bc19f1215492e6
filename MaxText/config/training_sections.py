"""Keys about data, optimisation, devices, checkpoints and what is written."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
    key,
)
from MaxText.config.registry import Name, OptimizerParts


class Run(Section):
    """Name, place and length of the run."""

    run_name: str = key(
        "",
        "Folder of the run under base_output_directory; the same name resumes. Empty: "
        "$JOBSET_NAME, else model_name or config name with date and time. May be a whole path: "
        "/folder/run or gs://bucket/run.",
    )
    base_output_directory: str = key(
        "", "Root of all outputs, a folder or gs://. Empty: ./maxtext_output."
    )
    model_name: str = key("default", "Preset of configs/models/ laid over the config file.")
    import_modules: tuple[str, ...] = key(
        (),
        "Modules, or paths of .py files, that register parts of your own. Imported before anything "
        "else is read (docs/tutorials/add_an_architecture.md).",
    )
    steps: CountOrAuto = key(
        150_001, "Train steps; -1 takes learning_rate_schedule_steps.", unit="steps"
    )
    hardware: Literal["auto", "cpu", "gpu", "tpu"] = key(
        "auto", "Devices to train on; auto takes the best that jax finds."
    )
    jax_cache_dir: str = key(
        "auto",
        "Folder or gs:// for compiled programs, where restarts and other runs find them. auto: "
        "jax_cache in base_output_directory; empty switches it off.",
    )
    compile_topology: str = key(
        "", "Machine for which train_compile.py compiles, such as v5e-16, v5p-8 or h100-8."
    )
    compile_topology_num_slices: CountOrAuto = key(
        -1, "Such machines, joined by the data center's network (TPU); -1 is one."
    )
    compiled_trainstep_file: str = key(
        "",
        "File or gs:// that train_compile.py writes its compiled step to and train.py takes it "
        "from; only one that was signed by the user's key and made for this configuration.",
    )
    log_config: bool = key(False, "Print every resolved key at start; config.yml has them.")
    strict_config: bool = key(
        False, "Refuse keys that have no effect, instead of a warning (model) or note (others)."
    )


class Batch(Section):
    """How many sequences an update sees: per_device_batch_size x devices x accumulation."""

    per_device_batch_size: Positive = key(
        12.0, "Sequences per device and microbatch; may be a fraction.", unit="sequences"
    )
    gradient_accumulation_steps: Count = key(
        1, "Microbatches per update, summed inside one compiled step."
    )
    enable_rampup_batch_size: bool = key(
        False, "Begin with per_device_batch_size_start and grow to per_device_batch_size."
    )
    per_device_batch_size_start: Positive = key(
        4.0, "First batch of the ramp-up.", unit="sequences",
        only_if={"enable_rampup_batch_size": [True]},
    )  # fmt: skip
    per_device_batch_size_increment: Positive = key(
        2.0, "What each stage of the ramp-up adds.", unit="sequences",
        only_if={"enable_rampup_batch_size": [True]},
    )  # fmt: skip
    global_rampup_samples: Count = key(
        500, "Sequences that the whole ramp-up sees, shared evenly by its stages.",
        unit="sequences", only_if={"enable_rampup_batch_size": [True]},
    )  # fmt: skip
    sequence_length_stages: tuple[tuple[int, int], ...] = key(
        (),
        "Pairs [first step, length] of shorter windows to begin with, for example "
        "[[0,256],[400,512],[800,1024]]; rows are cut into more rows, so that an update sees as "
        "many tokens in every stage. Empty: max_target_length throughout.",
    )


_ADAFACTOR: dict[str, Iterable[Any]] = {"opt_type": ["adafactor"]}
_DECAYING: dict[str, Iterable[Any]] = {
    "lr_schedule_type": ["cosine", "linear", "polynomial", "wsd"]
}


class Optimizer(Section):
    """Update rule."""

    opt_type: Annotated[str, Name("optimizer")] = key(
        "adamw", "Update rule, by the name of a registered optimizer."
    )
    adam_b1: Fraction = key(
        0.9, "Decay of the first moment.", only_if={"opt_type": ["adamw", "lion", "muon"]}
    )
    adam_b2: Fraction = key(
        0.95, "Decay of the second moment.", only_if={"opt_type": ["adamw", "lion", "muon"]}
    )
    adam_eps: NonNegative = key(
        1e-8, "Added outside the root.", only_if={"opt_type": ["adamw", "muon"]}
    )
    adam_eps_root: NonNegative = key(
        0.0, "Added inside the root.", only_if={"opt_type": ["adamw", "muon"]}
    )
    adam_bias_correction: bool = key(
        True,
        "Divide both moments by what they lack in the first steps (Kingma and Ba 2015, section "
        "3). GPT-Neo's Adam does not.",
        only_if={"opt_type": ["adamw"]},
    )
    adam_weight_decay: NonNegative = key(0.1, "Decoupled weight decay, times the learning rate.")
    adamw_mask: tuple[str, ...] = key(
        (), "Regular expressions of parameter names without decay; empty decays all."
    )
    weight_decay_overrides: tuple[tuple[str, float], ...] = key(
        (), "Pairs [name regex, decay] that replace adam_weight_decay; the first match counts."
    )
    learning_rate_overrides: tuple[tuple[str, float], ...] = key(
        (), "Pairs [name regex, multiplier] of the learning rate; the first match counts."
    )
    trainable_parameters_mask: tuple[str, ...] = key(
        (), "Train only parameters whose name matches one of these expressions; empty trains all."
    )
    mu_dtype: Literal["", "float32", "bfloat16"] = key(
        "", "Format of the first moment; empty is weight_dtype.",
        only_if={"opt_type": ["adamw", "lion", "muon"]},
    )  # fmt: skip
    muon_beta: Fraction = key(0.95, "Momentum of Muon.", only_if={"opt_type": ["muon"]})
    momentum: Fraction = key(0.9, "Momentum of SGD.", only_if={"opt_type": ["sgd"]})
    nesterov: bool = key(
        True, "Nesterov's form of momentum.", only_if={"opt_type": ["sgd", "muon"]}
    )
    adafactor_decay_exponent: Positive = key(
        0.8, "Step t keeps 1 - t^-exponent of the second moment.", only_if=_ADAFACTOR
    )
    adafactor_epsilon_gradient: NonNegative = key(
        1e-30, "Added to the squares of gradients (GPT-Neo: ada_epsilon1).", only_if=_ADAFACTOR
    )
    adafactor_epsilon_parameter: NonNegative = key(
        1e-3,
        "Least size of a parameter for the relative learning rate (GPT-Neo: ada_epsilon2).",
        only_if=_ADAFACTOR,
    )
    adafactor_clipping_threshold: Positive = key(
        1.0, "Bound on the root mean square of a parameter's update.", only_if=_ADAFACTOR
    )
    adafactor_min_dim_size_to_factor: Count = key(
        128,
        "Arrays whose second largest dimension is smaller keep the whole second moment.",
        only_if=_ADAFACTOR,
    )
    adafactor_momentum: Fraction = key(
        0.0, "Decay of a mean over updates; 0 keeps none (GPT-Neo: beta1).", only_if=_ADAFACTOR
    )
    gradient_clipping_threshold: NonNegative = key(1.0, "Bound on the gradient; 0 is off.")
    gradient_clipping_type: Literal["global_norm", "value"] = key(
        "global_norm", "Whether the bound is on the global norm or on each element."
    )
    parts: OptimizerParts = OptimizerParts()


class Schedule(Section):
    """Learning rate over time: warm-up, body, and what follows learning_rate_schedule_steps."""

    learning_rate: Positive = key(3e-5, "Peak learning rate.")
    lr_schedule_type: Literal["cosine", "linear", "polynomial", "wsd", "constant"] = key(
        "cosine", "Body of the schedule; wsd is warm-up, stable, decay."
    )
    lr_polynomial_power: Positive = key(
        1.0, "The body falls as (1 - share of it that is over)^power.",
        only_if={"lr_schedule_type": ["polynomial"]},
    )  # fmt: skip
    learning_rate_schedule_steps: CountOrAuto = key(
        -1, "Length of the schedule; -1 is `steps`.", unit="steps"
    )
    warmup_steps_fraction: Share = key(
        0.1, "Share of the schedule spent warming up.", only_if={"warmup_steps": [-1]}
    )
    warmup_steps: int = key(
        -1, "Steps spent warming up; -1 takes warmup_steps_fraction.", unit="steps", ge=-1
    )
    warmup_multiplies_schedule: bool = key(
        False,
        "The body counts from step 0 and is multiplied by the warm-up (GPT-Neo). Otherwise it "
        "begins where the warm-up ends.",
        only_if=_DECAYING,
    )
    learning_rate_final_fraction: Share = key(
        0.1, "Last learning rate over the peak.", only_if=_DECAYING
    )
    learning_rate_after_schedule: Literal["zero", "final"] = key(
        "zero",
        "Learning rate after learning_rate_schedule_steps: 0 as in MaxText, or the last one "
        "(GPT-Neo after lr_decay_end, fattorib/transformer).",
        only_if=_DECAYING,
    )
    wsd_decay_steps_fraction: Share = key(
        0.1, "Share of the schedule spent decaying.", only_if={"lr_schedule_type": ["wsd"]}
    )

    @property
    def num_warmup_steps(self) -> int:
        if self.warmup_steps != -1:
            return self.warmup_steps
        return int(self.learning_rate_schedule_steps * self.warmup_steps_fraction)


# Base rules: logical name -> mesh axes. Of an array's dimensions, that of an earlier rule comes
# first to its mesh axes; a later rule of a name is used where axes of the earlier one are taken or
# do not divide the dimension.
LOGICAL_AXIS_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("activation_batch", ("data", "fsdp", "fsdp_transpose", "expert")),
    # The head's rows: over the stages of a pipeline, too, which would all compute the same.
    ("activation_embed_and_logits_batch", ("data", "fsdp", "fsdp_transpose", "expert", "stage")),
    ("activation_stage", ("stage",)),
    ("activation_groups", ("data", "fsdp", "fsdp_transpose")),
    ("activation_exp", ("expert",)),
    ("activation_heads", ("tensor",)),
    ("activation_kv_heads", ("tensor",)),
    ("activation_mlp", ("tensor",)),
    ("activation_slots", ("tensor",)),
    ("activation_vocab", ("tensor",)),
    ("activation_length", ("context",)),
    ("activation_kv_length", ()),
    ("activation_embed", ()),
    ("activation_kv", ()),
    ("exp", ("expert",)),
    ("mlp", ("fsdp_transpose", "tensor")),
    ("mlp", ("tensor",)),
    ("slots", ("fsdp_transpose", "tensor")),
    ("slots", ("tensor",)),
    ("vocab", ("tensor",)),
    ("q_heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    # What no other dimension is split over; sequences and weights share the axis context.
    ("embed", ("fsdp", "fsdp_transpose", "context", "expert")),
    ("embed", ("fsdp", "fsdp_transpose", "context")),
    ("embed", ("fsdp", "context")),
    ("embed", ("fsdp",)),
    ("kv", ()),
    ("norm", ()),
    ("position", ()),
    ("layers", ("stage",)),
)


def _size(default: int, doc: str) -> Any:
    return key(default, f"{doc} -1 fills.")


class Mesh(Section):
    """How devices are arranged and what is split over them.

    Sizes `ici_*` are inside a slice and multiply to its devices; sizes `dcn_*` are across slices
    and multiply to their number. One of each may be -1, which fills (docs/how-to/shard_a_model.md).
    """

    allow_split_physical_axes: bool = key(
        True,
        "Split an axis of the TPU network over several mesh axes where no mesh keeps all of them "
        "whole. false refuses such sizes.",
    )
    ici_data_parallelism: CountOrAuto = _size(1, "Copies of the model inside a slice.")
    ici_pipeline_parallelism: Count = key(
        1, "Stages of a pipeline, inside a slice, over which layers are split."
    )
    ici_fsdp_parallelism: CountOrAuto = _size(
        -1, "Devices of a slice over which weights and batch are split."
    )
    ici_fsdp_transpose_parallelism: CountOrAuto = _size(
        1,
        "Devices of a slice over which the batch and the other dimension of MLP weights are split.",
    )
    ici_context_parallelism: CountOrAuto = _size(
        1, "Devices of a slice over which sequences, and weights like fsdp, are split."
    )
    ici_expert_parallelism: CountOrAuto = _size(
        1, "Devices of a slice over which experts, and the batch outside of them, are split."
    )
    ici_tensor_parallelism: CountOrAuto = _size(
        1, "Devices of a slice over which heads, MLP and slots are split."
    )
    dcn_data_parallelism: CountOrAuto = _size(-1, "Copies of the model across slices.")
    dcn_pipeline_parallelism: Count = key(1, "As ici_pipeline_parallelism, across slices.")
    dcn_fsdp_parallelism: CountOrAuto = _size(1, "As ici_fsdp_parallelism, across slices.")
    dcn_fsdp_transpose_parallelism: CountOrAuto = _size(
        1, "As ici_fsdp_transpose_parallelism, across slices."
    )
    dcn_context_parallelism: CountOrAuto = _size(1, "As ici_context_parallelism, across slices.")
    dcn_expert_parallelism: CountOrAuto = _size(1, "As ici_expert_parallelism, across slices.")
    dcn_tensor_parallelism: CountOrAuto = _size(1, "As ici_tensor_parallelism, across slices.")
    shard_optimizer_over_data: bool = key(
        False,
        "Split moments over the copies of the model (ici_data_parallelism) as well, so that each "
        "device keeps and updates a part (ZeRO-1). The result is the same.",
    )
    optimizer_memory_host_offload: bool = key(
        False,
        "Keep moments in the memory of the host, and on the device only while an update is made. "
        "The result is the same.",
    )
    logical_axis_rules: tuple[tuple[str, tuple[str, ...]], ...] = key(
        LOGICAL_AXIS_RULES,
        "Pairs [logical name, mesh axes]. Names given replace the base rules of those names.",
    )
    override_logical_axis_rules: bool = key(False, "Drop the base rules instead of merging.")
    sharding_tolerance: Share = key(
        0.02, "Share of the parameters that may stay whole on every device."
    )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 1 is none."""
        return self.ici_pipeline_parallelism * self.dcn_pipeline_parallelism


class Checkpoint(Section):
    """What is saved, how often, and what to start from."""

    enable_checkpointing: bool = key(True, "Save and resume.")
    async_checkpointing: bool = key(
        True, "Write in the background.", only_if={"enable_checkpointing": [True]}
    )
    checkpoint_period: Count = key(
        10_000, "Steps between saves.", unit="steps", only_if={"enable_checkpointing": [True]}
    )
    save_checkpoint_on_start: bool = key(
        True, "Save after the first step (step 0).", only_if={"enable_checkpointing": [True]}
    )
    save_checkpoint_on_completion: bool = key(
        True, "Save after the last step.", only_if={"enable_checkpointing": [True]}
    )
    max_to_keep: int | None = key(
        None,
        "Newest checkpoints to keep; null keeps all. The newest that later steps confirmed is kept "
        "as well.",
        ge=1,
        only_if={"enable_checkpointing": [True]},
    )
    keep_period: int | None = key(
        None, "Steps divisible by this are never deleted.", unit="steps", ge=1,
        only_if={"enable_checkpointing": [True]},
    )  # fmt: skip
    load_parameters_path: str = key(
        "",
        "Start from these parameters only: a run, a step folder, its items/, or hf:FOLDER (Hugging "
        "Face). Those of a model with fewer slots or layers grow "
        "(docs/how-to/train_and_grow_tokenformer.md).",
    )
    load_full_state_path: str = key(
        "", "Start from the parameters, optimizer state and step of another run."
    )
    growth_mode: Literal["function_preserving", "random", "zero"] = key(
        "function_preserving",
        "What new slots begin with. function_preserving: keys of zero, fresh values, and the scale "
        "of the stored slots. random: a fresh model's numbers. zero: nothing but zeros.",
    )
    growth_moments: Literal["zeroed", "reused", "warmed"] = key(
        "zeroed",
        "Optimizer moments when parameters grow: all zero; the stored ones, and zero for new "
        "slots; or (warmed) the same with second moments of new slots at the stored slots' mean.",
    )
    growth_old_slots_learning_rate: float | None = key(
        None,
        "Multiplies the learning rate of the slots that were stored; 0 freezes them. null: 1, or "
        "what the run, or that of load_full_state_path, was trained with.",
        ge=0,
    )
    growth_data: Literal["restart", "continue"] = key(
        "restart", "Begin the data anew, or go on where the smaller model stood."
    )
    growth_allow_shrinking: bool = key(
        False, "Let a model with fewer slots or layers drop what finds no place."
    )
    load_parameters_path_slot_number: CountOrAuto = key(
        -1,
        "Slots of the stored model. They are read from the checkpoint; a number given here is only "
        "compared with them; -1: with nothing.",
    )
    load_parameters_zero_init: bool = key(False, "TokenFormer's name for growth_mode=zero.")

    @property
    def mode_of_growth(self) -> Literal["function_preserving", "random", "zero"]:
        """growth_mode, or the value of TokenFormer's own key."""
        return "zero" if self.load_parameters_zero_init else self.growth_mode


class Evaluation(Section):
    """Loss on held-out data."""

    eval_interval: int = key(-1, "Steps between evaluations; -1 is never.", unit="steps", ge=-1)
    eval_steps: CountOrAuto = key(
        -1, "Batches of an evaluation; -1 is the whole split.", unit="batches"
    )
    eval_per_device_batch_size: NonNegative = key(
        0.0, "Sequences per device; 0 takes per_device_batch_size.", unit="sequences"
    )
    target_eval_loss: NonNegative = key(0.0, "Stop when the evaluation loss is below; 0 is never.")


class Monitoring(Section):
    """What is printed and recorded."""

    step_log_period: Count = key(
        1,
        "Steps between `completed step` lines and metric rows. Each checkpoint has one, too.",
        unit="steps",
    )
    step_line: Literal["auto", "full", "compact"] = key(
        "auto",
        "The line of a step. full: MaxText's `completed step: ...`, which scripts read. compact: "
        "half as long, with the total of steps. auto: compact on a terminal, else full.",
    )
    log_period: Count = key(100, "Steps between flushes of TensorBoard and metrics.", unit="steps")
    enable_tensorboard: bool = key(True, "Write TensorBoard events.")
    enable_wandb: bool = key(
        False, "Report to Weights & Biases as well; needs `pip install '.[wandb]'`."
    )
    wandb_project_name: str = key(
        "maxtext", "Project of W&B that the run belongs to.", only_if={"enable_wandb": [True]}
    )
    wandb_entity: str = key(
        "", "User or team of W&B. Empty: $WANDB_ENTITY, else the account's own default.",
        only_if={"enable_wandb": [True]},
    )  # fmt: skip
    wandb_mode: Literal["online", "offline", "disabled"] = key(
        "online",
        "offline keeps everything in <run>/wandb for a later `wandb sync`; disabled reports "
        "nothing. $WANDB_MODE is not read, $M_WANDB_MODE is.",
        only_if={"enable_wandb": [True]},
    )
    metrics_file: str = key(
        "",
        "Where metric rows (JSON lines) go. Empty: metrics.jsonl in the run. A local file may be "
        "shared by runs; a step that is done again then stands there twice.",
    )
    loss_curve: bool = key(True, "Draw loss_curve.png in the run folder at the end.")
    profiler: Literal["", "xplane"] = key("", "Record a trace of some steps for TensorBoard.")
    skip_first_n_steps_for_profiler: Natural = key(
        1, "Steps before the trace starts.", only_if={"profiler": ["xplane"]}
    )
    profiler_steps: Count = key(5, "Steps in the trace.", only_if={"profiler": ["xplane"]})


_SKIPPING: dict[str, Iterable[Any]] = {"skip_step_on_spikes": [True]}


class Guard(Section):
    """What is done when a run goes wrong: skip an update, go back, stop."""

    skip_step_on_spikes: bool = key(
        True,
        "Leave out an update whose loss, gradient or update is not finite or far above those of "
        "the updates before it. The step counts, its data are gone, parameters and moments stay.",
    )
    skip_step_interval: int = key(
        128, "Healthy updates whose median and deviation an update is compared with.",
        unit="updates", ge=8, only_if=_SKIPPING,
    )  # fmt: skip
    skip_step_scaling_factor: Positive = key(
        6.0,
        "Deviations above the median at which an update is left out. A deviation is 1.4826 times "
        "the median distance to the median, which is sigma of normal noise, and at least 3 % of "
        "the median loss (or of 1 nat, if that is more) or half the median norm.",
        only_if=_SKIPPING,
    )
    rewind_after_skips: Natural = key(
        16,
        "Updates left out among the last skip_step_interval after which the run goes back to the "
        "last good state and leaves out the data since the first of them; 0 is never.",
        only_if=_SKIPPING,
    )
    rewind_on_rise: NonNegative = key(
        0.25,
        "The run also goes back when the median loss of the last skip_step_interval healthy "
        "updates lies this share of its lowest value (or of 1 nat, if that is more) above it; 0 is "
        "never.",
        only_if=_SKIPPING,
    )
    rewind_margin: Natural = key(
        8, "Updates before the first suspicious one whose data are left out as well.",
        unit="updates", only_if=_SKIPPING,
    )  # fmt: skip
    rewind_snapshot_period: Natural = key(
        0,
        "Updates between copies of the state in the memory of the host, to go back to; 0 goes "
        "back to the last good checkpoint.",
        unit="updates",
        only_if=_SKIPPING,
    )
    max_rewinds: Natural = key(
        3, "Times that a run goes back; the next time it stops with exit code 1.", only_if=_SKIPPING
    )
    guard_healthy_steps: Natural = key(
        10,
        "Healthy steps in a row after a checkpoint that confirm it. A run that is in trouble goes "
        "back to the last confirmed checkpoint, which is never deleted.",
        unit="updates",
    )
    abort_on_nan_loss: bool = key(
        True, "Exit with code 1 when a logged loss is NaN and its update was not left out."
    )
    abort_on_inf_loss: bool = key(
        True, "Exit with code 1 when a logged loss is infinite and its update was not left out."
    )
    heartbeat_timeout: NonNegative = key(
        600.0,
        "Seconds without any progress, in this process or another one of the run, after which it "
        "prints where every thread stands and exits with code 76; 0 waits for ever. Starting, "
        "compiling and finishing have six times as long.",
        unit="seconds",
    )
