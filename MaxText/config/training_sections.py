"""Keys of the run, from batches to evaluation and generated text."""

from typing import Annotated, Literal

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    NamedSection,
    Natural,
    NonNegative,
    OtherThan,
    Positive,
    Section,
    Share,
    key,
)
from MaxText.config.part_sections import OptimizerParts
from MaxText.config.registry import Name


class RunConfig(Section):
    """Name, folder and length of the run."""

    run_name: str = key("")
    """Run folder under base_output_directory; the same name resumes. Empty: $JOBSET_NAME, else
    model_name or config name with date and time. May be a full path: /folder/run or
    gs://bucket/run."""
    base_output_directory: str = key("")
    """Root of all outputs, a folder or gs://. Empty: ./maxtext_output."""
    model_name: str = key("default", "Preset of configs/models/, applied over the config file.")
    import_modules: tuple[str, ...] = key(())
    """Modules, or paths of .py files, that register parts of your own. Imported before anything
    else is read (docs/tutorials/add_an_architecture.md)."""
    hooks: tuple[str, ...] = key(())
    """Functions of import_modules that training calls every n steps
    (docs/how-to/add_a_hook.md)."""
    steps: CountOrAuto = key(150_001, unit="steps")
    """Training steps; -1 is learning_rate_schedule_steps."""
    hardware: Literal["auto", "cpu", "gpu", "tpu"] = key("auto")
    """Device type; auto takes the best that jax finds."""
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
    """Batch size: per_device_batch_size x devices x accumulation steps, or global_batch_size."""

    global_batch_size: Natural = key(0, unit="sequences")
    """Sequences per step on any number of devices, in as few microbatches as
    per_device_batch_size, then the most per device, allows. eval_steps counts batches of as many,
    too, unless eval_per_device_batch_size is set. 0: per_device_batch_size x devices x
    gradient_accumulation_steps."""
    per_device_batch_size: Positive = key(12.0, unit="sequences")
    """Sequences per device and microbatch; may be a fraction."""
    gradient_accumulation_steps: Count = key(1, only_if={"global_batch_size": [0]})
    """Microbatches per step, accumulated inside one compiled step."""
    enable_rampup_batch_size: bool = key(False)
    """Ramp up the batch size from per_device_batch_size_start to per_device_batch_size."""
    per_device_batch_size_start: Positive = key(4.0, unit="sequences", only_if=_RAMPS)
    """Initial batch size of the ramp-up."""
    per_device_batch_size_increment: Positive = key(2.0, unit="sequences", only_if=_RAMPS)
    """Batch size increment per stage of the ramp-up."""
    global_rampup_samples: Count = key(500, unit="sequences", only_if=_RAMPS)
    """Sequences of the whole ramp-up, divided evenly between its stages."""
    sequence_length_stages: tuple[tuple[int, int], ...] = key(())
    """Pairs [first step, length] of shorter sequences at the start, for example
    [[0,256],[400,512],[800,1024]]; sequences are split, so that every step has the same number of
    tokens. Empty: max_target_length throughout."""


_DECAYING = {"lr_schedule_type": ["cosine", "linear", "polynomial", "wsd"]}


_ADAFACTOR = {"opt_type": "adafactor"}


class AdafactorConfig(NamedSection):
    """Settings of Adafactor (Shazeer and Stern 2018)."""

    ONLY_IF = _ADAFACTOR

    decay_exponent: Positive = key(0.8, "Step t keeps 1 - t^-exponent of the second moment.")
    epsilon_gradient: NonNegative = key(1e-30)
    """Added to squared gradients (GPT-Neo: ada_epsilon1)."""
    epsilon_parameter: NonNegative = key(1e-3)
    """Minimum parameter scale for the relative learning rate (GPT-Neo: ada_epsilon2)."""
    clipping_threshold: Positive = key(1.0, "Maximum root mean square of a parameter's update.")
    min_dim_size_to_factor: Count = key(128)
    """Arrays whose second largest dimension is smaller keep the full second moment."""
    momentum: Fraction = key(0.0, "Decay rate of momentum; 0 keeps none (GPT-Neo: beta1).")


_SOAP = {"opt_type": "soap"}


class SoapConfig(NamedSection):
    """Settings of SOAP (Vyas et al. 2025); its moments have adam_b1, adam_b2 and adam_eps."""

    ONLY_IF = _SOAP

    beta: Fraction = key(0.95, "Decay rate of the statistics whose eigenvectors are the basis.")
    frequency: Count = key(10, "Steps between updates of the basis.", unit="steps")
    max_side: Count = key(10_000)
    """Sides of a matrix that are longer keep their own basis (max_precond_dim)."""


_AVERAGING = {"parameter_average.type": ["ema", "mean"]}


class ParameterAverageConfig(NamedSection):
    """Average of the parameters over the last steps, kept, saved and evaluated beside them."""

    type: Literal["none", "ema", "mean"] = key("none")
    """ema: exponential moving average. mean: of all steps since start_step. It needs memory for
    another copy of the parameters in float32."""
    start_step: Natural = key(0, unit="steps", only_if=_AVERAGING)
    """First averaged step; until then, the average is the parameters."""
    horizon: Count = key(100, unit="steps", only_if={"parameter_average.type": "ema"})
    """Steps that an ema looks back: each has the weight 1 / horizon, the first ones that of a
    mean."""


_MUON = ["muon", "normuon", "muonh"]
_SCALED_MUON = {"opt_type": ["muon", "normuon"]}
_ADAM = ["adamw", "muon", "normuon", "muonh", "adamh", "soap"]
_FIRST_MOMENT = {"opt_type": [*_ADAM, "lion"]}


class OptimizerConfig(Section):
    """Optimizer (docs/reference/optimizers.md)."""

    opt_type: Annotated[str, Name("optimizer")] = key("adamw")
    """Optimizer, by the name of a registered part."""
    adam_b1: Fraction = key(0.9, only_if=_FIRST_MOMENT)
    """Decay rate of the first moment."""
    adam_b2: Fraction = key(0.95, only_if=_FIRST_MOMENT)
    """Decay rate of the second moment."""
    adam_eps: NonNegative = key(1e-8, only_if={"opt_type": _ADAM})
    """Epsilon added outside the square root."""
    adam_eps_root: NonNegative = key(0.0, only_if={"opt_type": _ADAM})
    """Epsilon added inside the square root."""
    adam_bias_correction: bool = key(True, only_if={"opt_type": "adamw"})
    """Correct the bias of both moments (Kingma and Ba 2015, section 3). GPT-Neo's Adam does not."""
    adam_weight_decay: NonNegative = key(0.1)
    """Decoupled weight decay, multiplied by the learning rate."""
    adamw_mask: tuple[str, ...] = key(())
    """Regular expressions of parameter names without weight decay; empty decays all."""
    weight_decay_overrides: tuple[tuple[str, float], ...] = key(())
    """Pairs [name regex, decay] that override adam_weight_decay; the first match wins."""
    cautious_weight_decay: bool = key(False)
    """Decay only elements that the update moves toward 0 (Chen et al. 2025)."""
    learning_rate_overrides: tuple[tuple[str, float], ...] = key(())
    """Pairs [name regex, multiplier] of the learning rate; the first match wins."""
    trainable_parameters_mask: tuple[str, ...] = key(())
    """Regular expressions of parameter names to train; empty trains all."""
    mu_dtype: Literal["", "float32", "bfloat16"] = key("", only_if=_FIRST_MOMENT)
    """Dtype of the first moment; empty is weight_dtype."""
    nu_dtype: Literal["", "float32", "bfloat16"] = key("", only_if={"opt_type": _ADAM})
    """Dtype of the second moment; empty is weight_dtype. bfloat16 is rounded stochastically: to
    the nearest, a moment would never change by less than 1/256 of it."""
    stochastic_rounding: bool = key(False, only_if={"weight_dtype": "bfloat16"})
    """Round updated weights stochastically, so that updates smaller than their last digit count on
    average."""
    muon_beta: Fraction = key(0.95, "Momentum of Muon.", only_if={"opt_type": _MUON})
    muon_coefficients: Literal["standard", "polar_express"] = key(
        "standard", only_if={"opt_type": _MUON}
    )
    """Coefficients of the five Newton-Schulz iterations: Jordan's, or those of Amsel et al. 2025,
    which come closer to orthogonal matrices at the same cost."""
    muon_scale: Literal["consistent_rms", "original", "spectral"] = key(
        "consistent_rms", only_if=_SCALED_MUON
    )
    """Factor of an orthogonal update [in, out]: muon_consistent_rms sqrt(max(in, out)), sqrt(max(1,
    out/in)) (Jordan et al. 2024), or sqrt(out/in)."""
    muon_consistent_rms: Positive | None = key(0.2, only_if=_SCALED_MUON)
    """Root mean square of updates with muon_scale=consistent_rms; 0.2 is that of AdamW's. null, the
    default of MaxText, is muon_scale=original."""
    muon_use_all_to_all: bool = key(True, only_if={"opt_type": _MUON})
    """Orthogonalize whole matrices, each on one device, where the mesh divides the layers. Does not
    change the result."""
    normuon_beta2: Fraction = key(0.95, only_if={"opt_type": "normuon"})
    """Decay rate of the mean square of each output's updates."""
    momentum: Fraction = key(0.9, "Momentum of SGD.", only_if={"opt_type": "sgd"})
    nesterov: bool = key(True, "Use Nesterov momentum.", only_if={"opt_type": ["sgd", *_MUON]})
    adafactor: AdafactorConfig = AdafactorConfig()
    soap: SoapConfig = SoapConfig()
    optax_name: str = key("", only_if={"opt_type": "optax"})
    """Rule of optax or optax.contrib, scale_by_<name>: adopt, ademamix, lion, adan, radam, ..."""
    optax_options: tuple[tuple[str, float | bool | str], ...] = key(
        (), only_if={"opt_type": "optax"}
    )
    """Pairs [argument, value] of that function, for example [[b1,0.9],[b2,0.999]]."""
    gradient_clipping_threshold: NonNegative = key(1.0, "Gradient clipping threshold; 0 disables.")
    gradient_clipping_type: Literal["global_norm", "value"] = key("global_norm")
    """Clip by the global norm or each element by value."""
    parameter_average: ParameterAverageConfig = ParameterAverageConfig()
    parts: OptimizerParts = OptimizerParts()


class LearningRateDecayConfig(NamedSection):
    """Form of the decay."""

    ONLY_IF = _DECAYING

    power: Positive = key(1.0, only_if={"lr_schedule_type": "polynomial"})
    """Exponent of the polynomial decay, (1 - fraction done)^power."""
    multiplies_warmup: bool = key(False)
    """Start the decay at step 0 and multiply it by the warm-up (GPT-Neo). Otherwise the decay
    starts after warm-up."""
    after: Literal["zero", "final"] = key("zero")
    """Learning rate after learning_rate_schedule_steps: 0 as in MaxText, or the final one (GPT-Neo
    after lr_decay_end, fattorib/transformer)."""


class ScheduleConfig(Section):
    """Learning rate schedule."""

    learning_rate: NonNegative = key(3e-5)
    """Peak learning rate; 0 leaves every parameter as it is, with a warning."""
    lr_schedule_type: Literal["cosine", "linear", "polynomial", "wsd", "constant"] = key("cosine")
    """Learning rate schedule after warm-up; wsd is warm-up, stable, decay."""
    learning_rate_schedule_steps: CountOrAuto = key(-1, unit="steps")
    """Length of the schedule; -1 is `steps`."""
    warmup_steps_fraction: Share = key(0.1, only_if={"warmup_steps": -1})
    """Fraction of the schedule spent on warm-up."""
    warmup_steps: int = key(-1, unit="steps", ge=-1)
    """Warm-up steps; -1 uses warmup_steps_fraction."""
    learning_rate_final_fraction: Share = key(0.1, only_if=_DECAYING)
    """Final learning rate as a fraction of the peak."""
    learning_rate_decay: LearningRateDecayConfig = LearningRateDecayConfig()
    wsd_decay_steps_fraction: Share = key(0.1, only_if={"lr_schedule_type": "wsd"})
    """Fraction of the schedule spent on decay."""
    weight_decay_schedule_type: Literal["constant", "linear", "cosine"] = key("constant")
    """Factor of the weight decay: 1, or from 1 at step 0 to weight_decay_final_fraction at
    learning_rate_schedule_steps. Decay is multiplied by the learning rate as well."""
    weight_decay_final_fraction: Share = key(
        0.0, only_if={"weight_decay_schedule_type": ["linear", "cosine"]}
    )
    """Final weight decay as a fraction of the initial one."""

    @property
    def num_warmup_steps(self) -> int:
        """Steps of the warm-up, from warmup_steps or else the fraction of the schedule."""
        if self.warmup_steps != -1:
            return self.warmup_steps
        return int(self.learning_rate_schedule_steps * self.warmup_steps_fraction)


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
    ("latent", ("fsdp", "fsdp_transpose", "context", "expert")),
    ("latent", ("fsdp",)),
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

    auto_layout: bool = key(False)
    """Give the sizes of the mesh to other axes where that trains faster, by plan.py's estimate: a
    mesh of 4 x 2 devices stays one, split over other dimensions. Microbatches and remat_policy
    change only if nothing fits otherwise. GPT-Neo's --auto_layout."""
    auto_layout_and_mesh_shape: bool = key(False)
    """As auto_layout, but choose the sizes of the mesh, too. GPT-Neo's
    --auto_layout_and_mesh_shape."""
    allow_split_physical_axes: bool = key(True)
    """Split an axis of the TPU network over several mesh axes if no mesh keeps all of them whole.
    false rejects such sizes."""
    ici_data_parallelism: CountOrAuto = key(1, "Copies of the model inside a slice. -1 fills.")
    ici_pipeline_parallelism: Count = key(1)
    """Stages of a pipeline, inside a slice, over which layers are split."""
    ici_fsdp_parallelism: CountOrAuto = key(-1)
    """Devices of a slice over which weights and batch are split. -1 fills."""
    ici_fsdp_transpose_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which the batch and the other dimension of MLP weights are split. -1
    fills."""
    ici_context_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which sequences, and weights like fsdp, are split. -1 fills."""
    ici_expert_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which experts, and the batch outside of them, are split. -1 fills."""
    ici_tensor_parallelism: CountOrAuto = key(1)
    """Devices of a slice over which heads, MLP and slots are split. -1 fills."""
    dcn_data_parallelism: CountOrAuto = key(-1, "Copies of the model across slices. -1 fills.")
    dcn_pipeline_parallelism: Count = key(1, "As ici_pipeline_parallelism, across slices.")
    dcn_fsdp_parallelism: CountOrAuto = key(1, "As ici_fsdp_parallelism, across slices. -1 fills.")
    dcn_fsdp_transpose_parallelism: CountOrAuto = key(1)
    """As ici_fsdp_transpose_parallelism, across slices. -1 fills."""
    dcn_context_parallelism: CountOrAuto = key(1)
    """As ici_context_parallelism, across slices. -1 fills."""
    dcn_expert_parallelism: CountOrAuto = key(1)
    """As ici_expert_parallelism, across slices. -1 fills."""
    dcn_tensor_parallelism: CountOrAuto = key(1)
    """As ici_tensor_parallelism, across slices. -1 fills."""
    shard_optimizer_over_data: bool = key(False)
    """Also shard optimizer state over data parallelism (ici_data_parallelism), so that each device
    keeps and updates a shard (ZeRO-1). Does not change the result."""
    optimizer_memory_host_offload: bool = key(False)
    """Keep optimizer state in host memory, and on the device only during the update. Does not
    change the result."""
    logical_axis_rules: tuple[tuple[str, tuple[str, ...]], ...] = key(LOGICAL_AXIS_RULES)
    """Pairs [logical name, mesh axes]. Given names replace the base rules of those names."""
    override_logical_axis_rules: bool = key(False)
    """Drop the base rules instead of merging with them."""
    sharding_tolerance: Share = key(0.02)
    """Maximum fraction of parameters that may be replicated on every device."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages on all slices together."""
        return self.ici_pipeline_parallelism * self.dcn_pipeline_parallelism


GrowthMode = Literal["function_preserving", "random", "zero"]
_GROWS = {"load_parameters_path": OtherThan(("",))}


class GrowthConfig(NamedSection):
    """Growth of load_parameters_path. A grown run resumes without it."""

    mode: GrowthMode = key("function_preserving", only_if=_GROWS)
    """Initial values of new slots. function_preserving: zero keys, fresh values, and the scale of
    the stored slots. random: as in a fresh model. zero: all zero."""
    opt_state: Literal["zeroed", "reused", "warmed"] = key("zeroed", only_if=_GROWS)
    """Optimizer state when parameters grow. zeroed: all zero. reused: the stored moments, zero for
    new slots. warmed: as reused, with second moments of new slots at the mean of the stored
    slots."""
    existing_slots_lr_scale: float | None = key(None, ge=0)
    """Learning rate multiplier of stored slots; 0 freezes them. null: 1, or the value that the run,
    or that of load_full_state_path, was trained with."""
    data: Literal["restart", "continue"] = key("restart", only_if=_GROWS)
    """Restart the data, or continue at the position of the smaller model."""
    stored_slot_num: CountOrAuto = key(-1, only_if=_GROWS)
    """Expected number of slots of the stored model, which is read from the checkpoint; -1: no
    check."""
    allow_truncation: bool = key(False, only_if=_GROWS)
    """Allow a model with fewer slots or layers, and drop the rest."""


class CheckpointStorageConfig(NamedSection):
    """Orbax's format of checkpoints, and its requests to storage."""

    ONLY_IF = "enable_checkpointing"

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

    enable_checkpointing: bool = key(True, "Save and restore checkpoints.")
    async_checkpointing: bool = key(True, "Save in the background.", only_if="enable_checkpointing")
    checkpoint_period: Count = key(10_000, unit="steps", only_if="enable_checkpointing")
    """Steps between saves: 100 saves after steps 100, 200 and so on."""
    save_checkpoint_on_start: bool = key(True, only_if="enable_checkpointing")
    """Save after the first step (step 0)."""
    save_checkpoint_on_completion: bool = key(True, only_if="enable_checkpointing")
    """Save after the last step."""
    max_to_keep: int | None = key(None, ge=1, only_if="enable_checkpointing")
    """Newest checkpoints to keep; null keeps all. The newest healthy checkpoint and the next that
    can become healthy are kept as well."""
    keep_period: int | None = key(None, unit="steps", ge=1, only_if="enable_checkpointing")
    """Checkpoints at multiples of this step are never deleted."""
    load_parameters_path: str = key("")
    """Start from these parameters only: a run, a step folder, its items/, or hf:FOLDER (Hugging
    Face). Those of a model with fewer slots or layers grow
    (docs/how-to/train_and_grow_tokenformer.md)."""
    load_parameter_average: bool = key(False)
    """Take the average of the parameters (parameter_average) from a checkpoint in place of the
    parameters: of load_parameters_path, or what eval.py and decode.py read."""
    load_full_state_path: str = key("")
    """Start from the parameters, optimizer state and step of another run."""
    growth: GrowthConfig = GrowthConfig()
    checkpoint_storage: CheckpointStorageConfig = CheckpointStorageConfig()


class EvaluationConfig(Section):
    """Loss on held-out data."""

    eval_interval: int = key(-1, unit="steps", ge=-1)
    """Steps between evaluations: 100 evaluates after steps 99, 199 and so on, and after the last
    step; -1 disables."""
    eval_steps: CountOrAuto = key(-1, unit="batches")
    """Batches per evaluation; -1 is the whole split."""
    eval_half: Literal["all", "first", "second"] = key("all")
    """Sequences of the evaluation split to use: all, or one half, in their order. arena.py judges
    candidates on the first half, and its final keeper on the second."""
    eval_per_device_batch_size: NonNegative = key(0.0, unit="sequences")
    """Sequences per device; 0 is per_device_batch_size."""
    downstream_task_files: tuple[str, ...] = key((), only_if={"eval_interval": OtherThan((-1,))})
    """Multiple-choice questions that train.py scores at each evaluation, with accuracy and bits per
    byte of the right choice: .jsonl with the fields query, choices, and gold
    (docs/how-to/evaluate.md)."""
    target_eval_loss: NonNegative = key(0.0, only_if={"eval_interval": OtherThan((-1,))})
    """Stop when the evaluation loss is below this; 0 disables."""


class WandbConfig(NamedSection):
    """The run in Weights & Biases."""

    ONLY_IF = "enable_wandb"

    project: str = key("maxtext", "W&B project of the run.")
    entity: str = key("", "W&B user or team. Empty: $WANDB_ENTITY, else the account's default.")
    mode: Literal["online", "offline", "disabled"] = key("online")
    """offline keeps everything in <run>/wandb for a later `wandb sync`; disabled logs nothing.
    $WANDB_MODE is not read."""


class TrackioConfig(NamedSection):
    """The run in Trackio."""

    ONLY_IF = "enable_trackio"

    project: str = key("maxtext", "Trackio project of the run.")
    folder: str = key("")
    """Folder of the database. Empty: base_output_directory/trackio. `TRACKIO_DIR=FOLDER trackio
    show` opens the dashboard."""
    space_id: str = key("")
    """Space of Hugging Face (user/name) that gets the metrics instead. Empty: nothing leaves the
    machine. $TRACKIO_SPACE_ID is not read."""


class MlflowConfig(NamedSection):
    """The run in MLflow."""

    ONLY_IF = "enable_mlflow"

    experiment: str = key("maxtext", "MLflow experiment of the run.")
    tracking_uri: str = key("")
    """Tracking server or database. Empty: sqlite, base_output_directory/mlflow.db, and nothing
    leaves the machine. $MLFLOW_TRACKING_URI is not read. `mlflow ui --backend-store-uri URI` opens
    the dashboard."""


_PROFILING = {"profiler": "xplane"}


class ProfilerWindowConfig(NamedSection):
    """Profiled steps."""

    ONLY_IF = _PROFILING

    skip: Natural = key(1, "Steps before the profile starts.")
    steps: Count = key(5, "Steps in the profile.")


class MonitoringConfig(Section):
    """Logs, metrics and profiles."""

    step_log_period: Count = key(1, unit="steps")
    """Steps between `completed step` lines and metric rows. Steps with a checkpoint are logged
    too."""
    step_line: Literal["auto", "full", "compact"] = key("auto")
    """Format of the step line. full: MaxText's `completed step: ...`, which scripts parse. compact:
    half as long, with the total of steps. auto: compact on a terminal, else full."""
    log_period: Count = key(100, "Steps between flushes of TensorBoard and metrics.", unit="steps")
    log_layer_metrics: bool = key(False)
    """Also log numbers of each layer: norms of its gradients, parameters and updates, and their
    ratio; entropy and largest logit of its attention, of 16 queries of each sequence; the metrics
    of its experts and of your own parts. Costs less than 2 % of a step of a large model."""
    enable_tensorboard: bool = key(True, "Write TensorBoard events.")
    enable_wandb: bool = key(False, "Log to Weights & Biases; needs `pip install '.[wandb]'`.")
    wandb: WandbConfig = WandbConfig()
    enable_trackio: bool = key(False, "Log to Trackio; needs `pip install '.[trackio]'`.")
    trackio: TrackioConfig = TrackioConfig()
    enable_mlflow: bool = key(False, "Log to MLflow; needs `pip install '.[mlflow]'`.")
    mlflow: MlflowConfig = MlflowConfig()
    metrics_file: str = key("")
    """File for metric rows (JSON lines). Empty: metrics.jsonl in the run. Runs may share a local
    file; a repeated step then appears twice."""
    loss_curve: bool = key(True, "Draw loss_curve.png in the run folder at the end.")
    profiler: Literal["", "xplane"] = key("", "Record a profile of some steps for TensorBoard.")
    profiler_window: ProfilerWindowConfig = ProfilerWindowConfig()


_SKIPPING = {"skip_step_on_spikes": True}


class RollbackConfig(NamedSection):
    """Triggers and limits of rollbacks to the last healthy state."""

    ONLY_IF = _SKIPPING

    after_skips: Natural = key(16)
    """Skipped steps within the last skip_step_interval that trigger a rollback, excluding the data
    since the first of them; 0 disables."""
    on_rise: NonNegative = key(0.25)
    """Roll back when the median loss of the last skip_step_interval accepted steps is this fraction
    of its minimum (or of 1 nat, if that is more) above it; 0 disables."""
    margin: Natural = key(8, unit="updates")
    """Steps before the first suspicious one whose data are excluded as well."""
    snapshot_period: Natural = key(0, unit="updates")
    """Steps between snapshots of the state in host memory, used by rollbacks; 0 rolls back to the
    last healthy checkpoint."""
    maximum: Natural = key(3, "Maximum rollbacks; the next one stops the run with exit code 1.")


class GuardConfig(Section):
    """Fault handling: skipped steps, rollbacks, aborts."""

    skip_step_on_spikes: bool = key(True)
    """Skip an update whose loss, gradient norm or update norm is not finite or far above those of
    previous steps. The step counts and its data are consumed; parameters and optimizer state are
    unchanged."""
    skip_step_interval: int = key(128, unit="updates", ge=8, only_if=_SKIPPING)
    """Window, in accepted steps, for the median and deviation used by the spike guard."""
    skip_step_scaling_factor: Positive = key(6.0, only_if=_SKIPPING)
    """Deviations above the median at which a step is skipped. A deviation is 1.4826 times the
    median absolute deviation. It is at least 3 % of the median loss (or of 1 nat, if that is more)
    or half the median norm."""
    rollback: RollbackConfig = RollbackConfig()
    healthy_after_steps: Natural = key(10, unit="updates")
    """Consecutive accepted steps after a checkpoint that make it healthy. Rollbacks restore the
    newest healthy checkpoint, which is never deleted."""
    abort_on_nan_loss: bool = key(True)
    """Exit with code 1 when a logged loss is not finite and its step was not skipped."""
    heartbeat_timeout: NonNegative = key(600.0, unit="seconds")
    """Seconds without progress, in this process or another one of the run, after which it prints
    the stack of every thread and exits with code 76; 0 waits forever. Starting, compiling and
    finishing have six times as long."""


Strategy = Literal["composite", "greedy", "weighted", "nucleus", "topk"]
_STRATEGY = "decode_sampling_strategy"
_FILTERED = {"decode_sampling_temperature": OtherThan((0,))}
_TOP_K = _FILTERED | {_STRATEGY: ["composite", "topk"]}
_NUCLEUS = _FILTERED | {_STRATEGY: ["composite", "nucleus"]}
_COMPOSITE = _FILTERED | {_STRATEGY: ["composite"]}
_DRAWN = {_STRATEGY: ["composite", "weighted", "nucleus", "topk"]}


class DecodeFiltersConfig(NamedSection):
    """Further filters of the next token."""

    ONLY_IF = _COMPOSITE

    min_p: Share = key(0.0)
    """Keep tokens with at least this fraction of the highest probability; 0 disables."""
    typical_p: float = key(1.0, gt=0, le=1)
    """Keep the tokens of most typical surprisal whose probabilities sum to p; 1 disables."""
    eta: Fraction = key(0.0, "Keep tokens above min(eta, sqrt(eta) exp(-entropy)); 0 disables.")
    entmax_alpha: float = key(1.0, ge=1, le=2)
    """Use alpha-entmax instead of softmax; 1 is softmax, 2 is sparsemax."""


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
    decode_sampling_top_k: Natural = key(0, only_if=_TOP_K)
    """Keep the k most likely tokens; 0 disables."""
    decode_sampling_nucleus_p: float = key(1.0, gt=0, le=1, only_if=_NUCLEUS)
    """Keep the most likely tokens whose probabilities sum to p (top-p); 1 disables."""
    decode_filters: DecodeFiltersConfig = DecodeFiltersConfig()
    repetition_penalty: float = key(1.0, gt=0, le=1e6)
    """Divide positive logits of tokens already in the text by this, and multiply negative ones."""
    decode_stop_strings: tuple[str, ...] = key((), "Stop strings; they are not part of the output.")
    decode_ignore_eos: bool = key(False, "Continue after the tokenizer's end-of-text token.")
    decode_stream: bool = key(True, "Stream the text of a single prompt.")
    decode_output_path: str = key("")
    """Output file for completions (JSON lines): text, tokens, log-probabilities. Empty: none."""
    autoregressive_decode_assert: str = key("")
    """Expected text; any other ends with exit code 1. For tests."""


class TaskFilesConfig(NamedSection):
    """Files of the tasks."""

    lambada: str = key("")
    """LAMBADA: JSON lines with the field text, or text with one passage per line."""
    wikitext: str = key("", "WikiText: wiki.test.raw, or JSON lines with the field page.")


class HarnessConfig(NamedSection):
    """The lm-evaluation-harness; needs `pip install '.[lm-eval]'`."""

    tasks: tuple[str, ...] = key((), "Tasks to run.")
    task_path: str = key("", "Folder of additional task files (YAML).")
    num_fewshot: int = key(-1, "Few-shot examples per question; -1 is the task's default.", ge=-1)


class ScoringConfig(Section):
    """Evaluation by eval.py, in addition to the keys of evaluation."""

    eval_stride: CountOrAuto = key(-1, unit="tokens")
    """Targets per window that earlier windows have not scored; the rest is context. -1:
    non-overlapping windows, as in train.py."""
    eval_output: str = key("")
    """Output file for results (JSON). Empty: eval/<step>.json in the run, or the terminal only."""
    eval_tasks: tuple[Literal["lambada", "wikitext"], ...] = key(())
    """Tasks to score, read from task_files."""
    task_files: TaskFilesConfig = TaskFilesConfig()
    harness: HarnessConfig = HarnessConfig()
