"""Keys of the run, from batches to evaluation and generated text."""

from typing import Annotated, Literal

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    Natural,
    NonNegative,
    Options,
    OtherThan,
    Positive,
    Section,
    Share,
    key,
    options,
)
from MaxText.config.registry import Name, OptimizerParts


class RunConfig(Section):
    """Name, folder and length of the run."""

    run_name: str = key("")
    """Run folder in base_output_directory; the same name resumes. Empty: $JOBSET_NAME, else
    model_name or config name with date and time. Or a full path: /folder/run, gs://bucket/run."""
    base_output_directory: str = key("", "Output root, folder or gs://. Empty: ./maxtext_output.")
    model_name: str = key("default", "Preset of configs/models/, applied over the config file.")
    import_modules: tuple[str, ...] = key(())
    """Modules, or paths of .py files, that register parts of your own. Imported before anything
    else is read (docs/tutorials/add_an_architecture.md)."""
    steps: CountOrAuto = key(150_001, "Steps; -1 is learning_rate_schedule_steps.", unit="steps")
    hardware: Literal["auto", "cpu", "gpu", "tpu"] = key("auto", "auto: the best that jax finds.")
    jax_cache_dir: str = key("auto")
    """Folder or gs:// for compiled programs, where restarts and other runs find them. auto:
    jax_cache in base_output_directory; empty switches it off."""
    compile_topology: str = key("", "Target of train_compile.py, such as v5e-16, v5p-8 or h100-8.")
    compile_topology_num_slices: CountOrAuto = key(-1)
    """Slices of the compile topology, connected by the data center network (TPU); -1 is one."""
    compiled_trainstep_file: str = key("")
    """File or gs:// to which train_compile.py writes its compiled step and from which train.py
    loads it; accepted only if signed with the user's key and made for this configuration."""
    log_config: bool = key(False, "Print every resolved key at start; config.yml also has them.")
    strict_config: bool = key(False)
    """Reject keys that have no effect, instead of a warning (model) or note (others)."""


_RAMPS = "enable_rampup_batch_size"


class BatchConfig(Section):
    """Batch size: per_device_batch_size x devices x accumulation steps."""

    per_device_batch_size: Positive = key(12.0, unit="sequences")
    """Sequences per device and microbatch; may be a fraction."""
    gradient_accumulation_steps: Count = key(1, "Microbatches accumulated in one compiled step.")
    enable_rampup_batch_size: bool = key(False)
    """Ramp up the batch size from per_device_batch_size_start to per_device_batch_size."""
    per_device_batch_size_start: Positive = key(4.0, unit="sequences", only_if=_RAMPS)
    """Initial batch size of the ramp-up."""
    per_device_batch_size_increment: Positive = key(2.0, unit="sequences", only_if=_RAMPS)
    """Batch size increment per stage of the ramp-up."""
    global_rampup_samples: Count = key(500, unit="sequences", only_if=_RAMPS)
    """Sequences of the whole ramp-up, divided evenly between its stages."""
    sequence_length_stages: tuple[tuple[int, int], ...] = key(())
    """Pairs [first step, length] of shorter sequences at the start: [[0,256],[400,512],[800,1024]];
    sequences are split, with equal tokens in every step. Empty: max_target_length."""


_DECAYING = {"lr_schedule_type": ["cosine", "linear", "polynomial", "wsd"]}


class AdafactorOptions(Options):
    """Settings of Adafactor (Shazeer and Stern 2018)."""

    decay_exponent: Positive = key(0.8, "Step t keeps 1 - t^-exponent of the second moment.")
    epsilon_gradient: NonNegative = key(1e-30, "Added to gradients^2 (GPT-Neo: ada_epsilon1).")
    epsilon_parameter: NonNegative = key(1e-3)
    """Minimum parameter scale for the relative learning rate (GPT-Neo: ada_epsilon2)."""
    clipping_threshold: Positive = key(1.0, "Maximum root mean square of a parameter's update.")
    min_dim_size_to_factor: Count = key(128)
    """Arrays whose second largest dimension is smaller keep the full second moment."""
    momentum: Fraction = key(0.0, "Decay rate of momentum; 0 keeps none (GPT-Neo: beta1).")


_FIRST_MOMENT = {"opt_type": ["adamw", "lion", "muon"]}


class OptimizerConfig(Section):
    """Optimizer."""

    opt_type: Annotated[str, Name("optimizer")] = key("adamw", "Optimizer, a registered part.")
    adam_b1: Fraction = key(0.9, "Decay rate of the first moment.", only_if=_FIRST_MOMENT)
    adam_b2: Fraction = key(0.95, "Decay rate of the second moment.", only_if=_FIRST_MOMENT)
    adam_eps: NonNegative = key(1e-8, only_if={"opt_type": ["adamw", "muon"]})
    """Epsilon added outside the square root."""
    adam_eps_root: NonNegative = key(0.0, only_if={"opt_type": ["adamw", "muon"]})
    """Epsilon added inside the square root."""
    adam_bias_correction: bool = key(True, only_if={"opt_type": "adamw"})
    """Correct the bias of both moments (Kingma and Ba 2015, section 3). GPT-Neo's Adam does not."""
    adam_weight_decay: NonNegative = key(0.1, "Decoupled weight decay, times the learning rate.")
    adamw_mask: tuple[str, ...] = key(())
    """Regular expressions of parameter names without weight decay; empty decays all."""
    weight_decay_overrides: tuple[tuple[str, float], ...] = key(())
    """Pairs [name regex, decay] that override adam_weight_decay; the first match wins."""
    learning_rate_overrides: tuple[tuple[str, float], ...] = key(())
    """Pairs [name regex, multiplier] of the learning rate; the first match wins."""
    trainable_parameters_mask: tuple[str, ...] = key(())
    """Regular expressions of parameter names to train; empty trains all."""
    mu_dtype: Literal["", "float32", "bfloat16"] = key("", only_if=_FIRST_MOMENT)
    """Dtype of the first moment; empty is weight_dtype."""
    muon_beta: Fraction = key(0.95, "Momentum of Muon.", only_if={"opt_type": "muon"})
    momentum: Fraction = key(0.9, "Momentum of SGD.", only_if={"opt_type": "sgd"})
    nesterov: bool = key(True, "Use Nesterov momentum.", only_if={"opt_type": ["sgd", "muon"]})
    adafactor: AdafactorOptions = options(AdafactorOptions, only_if={"opt_type": "adafactor"})
    gradient_clipping_threshold: NonNegative = key(1.0, "Gradient clipping threshold; 0 disables.")
    gradient_clipping_type: Literal["global_norm", "value"] = key("global_norm")
    """Clip by the global norm or each element by value."""
    parts: OptimizerParts = OptimizerParts()


class LearningRateDecay(Options):
    """Form of the decay."""

    power: Positive = key(1.0, only_if={"lr_schedule_type": "polynomial"})
    """Exponent of the polynomial decay, (1 - fraction done)^power."""
    multiplies_warmup: bool = key(False)
    """Decay from step 0 on, times the warm-up (GPT-Neo), instead of decaying after warm-up."""
    after: Literal["zero", "final"] = key("zero")
    """Learning rate after learning_rate_schedule_steps: 0 as in MaxText, or the final one (GPT-Neo
    after lr_decay_end, fattorib/transformer)."""


class ScheduleConfig(Section):
    """Learning rate schedule."""

    learning_rate: Positive = key(3e-5, "Peak learning rate.")
    lr_schedule_type: Literal["cosine", "linear", "polynomial", "wsd", "constant"] = key("cosine")
    """Learning rate schedule after warm-up; wsd is warm-up, stable, decay."""
    learning_rate_schedule_steps: CountOrAuto = key(-1, "Length; -1 is `steps`.", unit="steps")
    warmup_steps_fraction: Share = key(0.1, only_if={"warmup_steps": -1})
    """Fraction of the schedule spent on warm-up."""
    warmup_steps: int = key(-1, "Warm-up steps; -1: warmup_steps_fraction.", unit="steps", ge=-1)
    learning_rate_final_fraction: Share = key(0.1, "Final fraction of the peak.", only_if=_DECAYING)
    learning_rate_decay: LearningRateDecay = options(LearningRateDecay, only_if=_DECAYING)
    wsd_decay_steps_fraction: Share = key(0.1, only_if={"lr_schedule_type": "wsd"})
    """Fraction of the schedule spent on decay."""

    @property
    def num_warmup_steps(self) -> int:
        default = int(self.learning_rate_schedule_steps * self.warmup_steps_fraction)
        return default if self.warmup_steps == -1 else self.warmup_steps


# Base rules: logical name -> mesh axes. Earlier rules assign their mesh axes first; a later rule of
# the same name applies if axes of the earlier one are taken or do not divide the dimension.
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
    # Hidden states between blocks; blocks gather their tokens (Korthikanti et al. 2022, section 4).
    ("activation_norm_length", ("context", "tensor")),
    ("activation_norm_length", ("context",)),
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


class MeshConfig(Section):
    """Device mesh and sharding.

    Sizes `ici_*` are inside a slice and multiply to its devices; sizes `dcn_*` are across slices
    and multiply to their number. One of each may be -1, which fills (docs/how-to/shard_a_model.md).
    """

    allow_split_physical_axes: bool = key(True)
    """Split TPU network axes over mesh axes if no mesh keeps all whole; false rejects that."""
    ici_data_parallelism: CountOrAuto = key(1, "Copies of the model inside a slice. -1 fills.")
    ici_pipeline_parallelism: Count = key(1, "Pipeline stages inside a slice that split layers.")
    ici_fsdp_parallelism: CountOrAuto = key(-1, "Devices that split weights and batch. -1 fills.")
    ici_fsdp_transpose_parallelism: CountOrAuto = key(1)
    """Devices of a slice that split the batch and the other dimension of MLP weights. -1 fills."""
    ici_context_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which sequences, and weights like fsdp, are split. -1 fills."""
    ici_expert_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which experts, and the batch outside of them, are split. -1 fills."""
    ici_tensor_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which heads, MLP and slots are split. -1 fills."""
    dcn_data_parallelism: CountOrAuto = key(-1, "Copies of the model across slices. -1 fills.")
    dcn_pipeline_parallelism: Count = key(1, "As ici_pipeline_parallelism, across slices.")
    dcn_fsdp_parallelism: CountOrAuto = key(1, "As ici_fsdp_parallelism, across slices. -1 fills.")
    dcn_fsdp_transpose_parallelism: CountOrAuto = key(1, "As ici_*, across slices. -1 fills.")
    dcn_context_parallelism: CountOrAuto = key(1, "As ici_*, across slices. -1 fills.")
    dcn_expert_parallelism: CountOrAuto = key(1, "As ici_*, across slices. -1 fills.")
    dcn_tensor_parallelism: CountOrAuto = key(1, "As ici_*, across slices. -1 fills.")
    shard_optimizer_over_data: bool = key(False)
    """Also shard optimizer state over data parallelism (ici_data_parallelism), so that each device
    keeps and updates a shard (ZeRO-1). Does not change the result."""
    optimizer_memory_host_offload: bool = key(False)
    """Keep optimizer state in host memory, except in the update. Does not change the result."""
    logical_axis_rules: tuple[tuple[str, tuple[str, ...]], ...] = key(LOGICAL_AXIS_RULES)
    """Pairs [logical name, mesh axes]. Given names replace the base rules of those names."""
    override_logical_axis_rules: bool = key(False, "Drop the base rules instead of merging.")
    sharding_tolerance: Share = key(0.02, "Maximum fraction of replicated parameters.")

    @property
    def num_stages(self) -> int:
        return self.ici_pipeline_parallelism * self.dcn_pipeline_parallelism


GrowthMode = Literal["function_preserving", "random", "zero"]
_GROWS = {"load_parameters_path": OtherThan(("",))}


class GrowthOptions(Options):
    """Growth of load_parameters_path. A grown run resumes without it."""

    mode: GrowthMode = key("function_preserving", only_if=_GROWS)
    """Initial values of new slots. function_preserving: zero keys, fresh values, and the scale of
    the stored slots. random: as in a fresh model. zero: all zero."""
    opt_state: Literal["zeroed", "reused", "warmed"] = key("zeroed", only_if=_GROWS)
    """Optimizer state of a growth. zeroed: all zero. reused: the stored moments, zero for new
    slots. warmed: as reused, with second moments of new slots at the mean of the stored slots."""
    existing_slots_lr_scale: float | None = key(None, ge=0)
    """Learning rate multiplier of stored slots; 0 freezes them. null: 1, or the value that the run,
    or that of load_full_state_path, was trained with."""
    data: Literal["restart", "continue"] = key("restart", only_if=_GROWS)
    """Restart the data, or continue at the position of the smaller model."""
    stored_slot_num: CountOrAuto = key(-1, only_if=_GROWS)
    """Expected slots of the stored model, which are read from the checkpoint; -1: no check."""
    allow_truncation: bool = key(False, "Allow dropping stored slots or layers.", only_if=_GROWS)


class CheckpointStorage(Options):
    """Orbax's format of checkpoints, and its requests to storage."""

    use_ocdbt: bool = key(True, "Save arrays together (OCDBT), not in a folder each.")
    use_zarr3: bool = key(False, "Save in version 3 of Zarr, not 2; both are restored.")
    target_data_file_size_bytes: int | None = key(None, unit="bytes", ge=0)
    """Size of an OCDBT file; 0 is unlimited, null Orbax's default for the storage."""
    concurrent_gb: Count = key(96, "Data in transfer to or from storage, per process.", unit="GB")
    device_host_concurrent_gb: int | None = key(None, unit="GB", ge=1)
    """Data in transfer from devices, per process; null is unlimited."""
    timeout: Count = key(1200, "Longest time of a save in the background.", unit="seconds")
    single_replica_restore: bool = key(False)
    """Read checkpoints in the first replica (mesh axis data), and broadcast to the others."""


class CheckpointingConfig(Section):
    """Checkpoints: saving, restoring, growing."""

    ONLY_IF = "enable_checkpointing"

    enable_checkpointing: bool = key(True, "Save and restore checkpoints.")
    async_checkpointing: bool = key(True, "Save in the background.")
    checkpoint_period: Count = key(10_000, "Steps between saves.", unit="steps")
    save_checkpoint_on_start: bool = key(True, "Save after the first step (step 0).")
    save_checkpoint_on_completion: bool = key(True, "Save after the last step.")
    max_to_keep: int | None = key(None, ge=1)
    """Newest checkpoints to keep; null keeps all. The newest healthy checkpoint is kept as well."""
    keep_period: int | None = key(None, "Never delete multiples of this step.", unit="steps", ge=1)
    load_parameters_path: str = key("", only_if={})
    """Start from these parameters only: a run, step folder, its items/ or hf:FOLDER (Hugging Face).
    Those with fewer slots or layers grow (docs/how-to/train_and_grow_tokenformer.md)."""
    load_full_state_path: str = key("", only_if={})
    """Start from the parameters, optimizer state and step of another run."""
    growth: GrowthOptions = options(GrowthOptions, only_if={})
    checkpoint_storage: CheckpointStorage = options(CheckpointStorage)


class EvaluationConfig(Section):
    """Loss on held-out data."""

    eval_interval: int = key(-1, "Steps between evaluations; -1 disables.", unit="steps", ge=-1)
    eval_steps: CountOrAuto = key(-1, "Batches per evaluation; -1: whole split.", unit="batches")
    eval_per_device_batch_size: NonNegative = key(0.0, unit="sequences")
    """Sequences per device; 0 is per_device_batch_size."""
    target_eval_loss: NonNegative = key(0.0, only_if={"eval_interval": OtherThan((-1,))})
    """Stop when the evaluation loss is below this; 0 disables."""


class WandbOptions(Options):
    """The run in Weights & Biases."""

    project: str = key("maxtext", "W&B project of the run.")
    entity: str = key("", "W&B user or team. Empty: $WANDB_ENTITY, else the account's default.")
    mode: Literal["online", "offline", "disabled"] = key("online")
    """offline: all in <run>/wandb for `wandb sync`; disabled: nothing. $WANDB_MODE is not read."""


class ProfilerWindow(Options):
    """Profiled steps."""

    skip: Natural = key(1, "Steps before the profile starts.")
    steps: Count = key(5, "Steps in the profile.")


class MonitoringConfig(Section):
    """Logs, metrics and profiles."""

    step_log_period: Count = key(1, unit="steps")
    """Steps between `completed step` lines and metric rows. Steps with a checkpoint have both."""
    step_line: Literal["auto", "full", "compact"] = key("auto")
    """Format of the step line. full: MaxText's `completed step: ...`, which scripts parse. compact:
    half as long, with the total of steps. auto: compact on a terminal, else full."""
    log_period: Count = key(100, "Steps between flushes of TensorBoard and metrics.", unit="steps")
    log_layer_norms: bool = key(False, "Also log norms of each layer's gradients and parameters.")
    enable_tensorboard: bool = key(True, "Write TensorBoard events.")
    enable_wandb: bool = key(False, "Log to Weights & Biases; needs `pip install '.[wandb]'`.")
    wandb: WandbOptions = options(WandbOptions, only_if="enable_wandb")
    metrics_file: str = key("")
    """JSON lines of metrics. Empty: <run>/metrics.jsonl. Shared local files may repeat steps."""
    loss_curve: bool = key(True, "Draw loss_curve.png in the run folder at the end.")
    profiler: Literal["", "xplane"] = key("", "Record a profile of some steps for TensorBoard.")
    profiler_window: ProfilerWindow = options(ProfilerWindow, only_if={"profiler": "xplane"})


_SKIPPING = {"skip_step_on_spikes": True}


class RollbackOptions(Options):
    """Triggers and limits of rollbacks to the last healthy state."""

    after_skips: Natural = key(16)
    """Skipped steps within the last skip_step_interval that trigger a rollback, excluding the data
    since the first of them; 0 disables."""
    on_rise: NonNegative = key(0.25)
    """Roll back when the median loss of the last skip_step_interval accepted steps is this fraction
    of its minimum (or of 1 nat, if that is more) above it; 0 disables."""
    margin: Natural = key(8, "Excluded steps before the first suspicious one.", unit="updates")
    snapshot_period: Natural = key(0, unit="updates")
    """Steps between snapshots in host memory; 0 rolls back to the last healthy checkpoint."""
    maximum: Natural = key(3, "Maximum rollbacks; the next one stops the run with exit code 1.")


class GuardConfig(Section):
    """Fault handling: skipped steps, rollbacks, aborts."""

    skip_step_on_spikes: bool = key(True)
    """Skip an update whose loss, gradient norm or update norm is not finite or far above earlier
    ones. The step counts and its data are consumed; parameters and optimizer state stay."""
    skip_step_interval: int = key(128, unit="updates", ge=8, only_if=_SKIPPING)
    """Window, in accepted steps, for the median and deviation used by the spike guard."""
    skip_step_scaling_factor: Positive = key(6.0, only_if=_SKIPPING)
    """Deviations above the median that skip a step. A deviation is 1.4826 times the median absolute
    deviation, at least 3 % of the median loss (or 1 nat, if more) or half the median norm."""
    rollback: RollbackOptions = options(RollbackOptions, only_if=_SKIPPING)
    healthy_after_steps: Natural = key(10, unit="updates")
    """Healthy steps in a row that confirm a checkpoint. The last is kept and rolled back to."""
    abort_on_nan_loss: bool = key(True)
    """Exit with code 1 when a logged loss is not finite and its step was not skipped."""
    heartbeat_timeout: NonNegative = key(600.0, unit="seconds")
    """Seconds without progress, in any process of the run, until it prints each thread's stack and
    exits with code 76; 0 waits forever. Six times as long to start, compile and finish."""


Strategy = Literal["composite", "greedy", "weighted", "nucleus", "topk"]
_STRATEGY = "decode_sampling_strategy"
_FILTERED = {"decode_sampling_temperature": OtherThan((0,))}
_TOP_K = _FILTERED | {_STRATEGY: ["composite", "topk"]}
_NUCLEUS = _FILTERED | {_STRATEGY: ["composite", "nucleus"]}
_COMPOSITE = _FILTERED | {_STRATEGY: ["composite"]}
_DRAWN = {_STRATEGY: ["composite", "weighted", "nucleus", "topk"]}


class FilterOptions(Options):
    """Further filters of the next token."""

    min_p: Share = key(0.0, "Minimum fraction of the highest probability; 0 disables.")
    typical_p: float = key(1.0, gt=0, le=1)
    """Keep the tokens of most typical surprisal whose probabilities sum to p; 1 disables."""
    eta: Fraction = key(0.0, "Keep tokens above min(eta, sqrt(eta) exp(-entropy)); 0 disables.")
    entmax_alpha: float = key(1.0, "Use alpha-entmax; 1 is softmax, 2 is sparsemax.", ge=1, le=2)


class DecodingConfig(Section):
    """Text generation by decode.py, and by train.py at its end."""

    prompt: str = key("I love to", "Text to continue.")
    prompt_file: str = key("")
    """Prompts instead of prompt: a text file with one per line, or .jsonl with the field prompt."""
    max_new_tokens: CountOrAuto = key(128, unit="tokens")
    """Maximum tokens to generate; -1 generates up to max_target_length, prompt included."""
    sample_tokens: Natural = key(0, "Tokens that train.py generates at the end; 0 disables.")
    decode_num_return_sequences: Count = key(1, "Completions per prompt.")
    decode_seed: int = key(0, "Sampling seed.", ge=0, le=2**32 - 1)
    decode_sampling_strategy: Strategy = key("composite")
    """composite samples with every setting below. greedy takes the most likely token; weighted,
    nucleus and topk use a single setting, as in MaxText."""
    decode_sampling_temperature: float = key(1.0, ge=0, le=1e6, only_if=_DRAWN)
    """Divisor of logits; 0 takes the most likely token."""
    decode_sampling_top_k: Natural = key(0, "Keep the top k tokens; 0 disables.", only_if=_TOP_K)
    decode_sampling_nucleus_p: float = key(1.0, gt=0, le=1, only_if=_NUCLEUS)
    """Keep the most likely tokens whose probabilities sum to p (top-p); 1 disables."""
    decode_filters: FilterOptions = options(FilterOptions, only_if=_COMPOSITE)
    repetition_penalty: float = key(1.0, gt=0, le=1e6)
    """Divide positive logits of tokens already in the text by this, and multiply negative ones."""
    decode_stop_strings: tuple[str, ...] = key((), "Stop strings; they are not part of the output.")
    decode_ignore_eos: bool = key(False, "Continue after the tokenizer's end-of-text token.")
    decode_stream: bool = key(True, "Stream the text of a single prompt.")
    decode_output_path: str = key("")
    """Output file for completions (JSON lines): text, tokens, log-probabilities. Empty: none."""
    autoregressive_decode_assert: str = key("", "Expected text, else exit code 1. For tests.")


class TaskFiles(Options):
    """Files of the tasks."""

    lambada: str = key("", "LAMBADA: JSON lines with field text, or one passage per line of text.")
    wikitext: str = key("", "WikiText: wiki.test.raw, or JSON lines with the field page.")


class HarnessOptions(Options):
    """The lm-evaluation-harness; needs `pip install '.[lm-eval]'`."""

    tasks: tuple[str, ...] = key((), "Tasks to run.")
    task_path: str = key("", "Folder of additional task files (YAML).")
    num_fewshot: int = key(-1, "Few-shot examples per question; -1 is the task's default.", ge=-1)


class ScoringConfig(Section):
    """Evaluation by eval.py, in addition to the keys of evaluation."""

    eval_stride: CountOrAuto = key(-1, unit="tokens")
    """New targets per window; the rest is context. -1: non-overlapping windows, as in train.py."""
    eval_output: str = key("")
    """Output file for results (JSON). Empty: eval/<step>.json in the run, or the terminal only."""
    eval_tasks: tuple[Literal["lambada", "wikitext"], ...] = key((), "Tasks to score (task_files).")
    task_files: TaskFiles = options(TaskFiles)
    harness: HarnessOptions = options(HarnessOptions)
