"""The Python API, `import MaxText as mt` (see docs/how-to/use_from_python.md).

  config = mt.load_config("configs/quickstart.yml", steps=100)
  folder = mt.train(config)
  columns = mt.metrics(folder)
  run = mt.load(folder)
  run.generate("def main(")

Functions import jax and what needs it when they are called, so that a mistake in a configuration is
reported first.
"""

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from etils import epath

from MaxText.config.loading import load_config
from MaxText.config.schema import Config
from MaxText.config.values import UntypedValue
from MaxText.errors import UserError
from MaxText.layers.batch import Batch
from MaxText.run.hooks import Hook, StepInfo, hook

if TYPE_CHECKING:
    import jax

    from MaxText.experiments.arena.verdict import Verdict
    from MaxText.inference.model_tokenizer import ModelTokenizer
    from MaxText.inference.trained_model import TrainedModel
    from MaxText.layers.assembly.model import Model
    from MaxText.layers.params import Params

TextOrIds = str | Sequence[int] | Sequence[Sequence[int]] | np.ndarray
"""A text, token ids [T], or sequences of ids of one length [B, T]."""

Callback = Callable[[Mapping[str, Any]], None]
"""Called with each event of a run: a row of events.jsonl."""


def batches(config: Config, split: str = "train") -> Iterator[Batch]:
    """Returns batches of NumPy arrays [B, T], as training reads them.

    A data set that `prepare_source` describes is prepared first.

    Args:
      config: A configuration of `load_config`.
      split: "train" (for as long as the run, in its order) or "eval" (one pass).

    Raises:
      UserError: The data cannot be read, or there is no evaluation data.
    """
    import jax

    from MaxText.cost.auto_layout import choose_layout_for_devices
    from MaxText.input_pipeline.data_sources import prepare_sources
    from MaxText.input_pipeline.loader import open_batches
    from MaxText.input_pipeline.sequences.batch_source import BatchShard
    from MaxText.input_pipeline.sequences.plan_batches import plan_batches, resolve_global_batch
    from MaxText.parallelism import mesh

    if split not in ("train", "eval"):
        raise UserError(f'split={split!r} must be "train" or "eval"')
    prepare_sources(config)
    config = choose_layout_for_devices(config, jax.devices(), lambda line: None)
    sharding = mesh.make_sharding_plan(config.mesh, jax.devices(), config.model.pipeline)
    config = resolve_global_batch(config, sharding)
    sizes = config.batch
    evaluation = config.evaluation
    batch_schedule = plan_batches(config, sharding)
    eval_batch_size = mesh.microbatch_size(sizes, sharding, evaluation.eval_per_device_batch_size)
    training, evaluating = open_batches(
        config,
        batch_schedule,
        eval_batch_size,
        BatchShard(*sharding.batch_slice()),
        log=lambda line: None,
    )
    if split == "train":
        return iter(training)
    if evaluating is None:
        raise UserError("no evaluation data: set eval_interval above 0")
    return iter(evaluating)


def train(
    config: Config,
    callbacks: Sequence[Callback] = (),
    *,
    hooks: Sequence[Hook | Callable[[StepInfo], None]] = (),
) -> epath.Path:
    """Trains as train.py does and returns the run folder.

    Args:
      config: A configuration of `load_config`. The same one again resumes, or finds that the run
        is complete.
      hooks: Called with a `StepInfo` (state, metrics and more) after the steps that each chooses:
        `Hook(function, every=100)`. A plain function is called after every step. An exception ends
        the run as a UserError, after a checkpoint was saved.
      callbacks: Functions to call with each event of the run, in order: a dict with "event"
        ("start", "step", "evaluation", "checkpoint", ..., "stop"), "step", "seconds" and what that
        kind of event has, as in events.jsonl. An exception ends the run.

    Raises:
      UserError: Everything for which train.py exits with code 2.
      RuntimeError: The run diverged.
    """
    from MaxText import exit_codes
    from MaxText.run.training import train as run_training
    from MaxText.runtime.preemption import PreemptionHandler
    from MaxText.storage.paths import parse_path
    from MaxText.storage.run_folder import unlock_run_folder

    try:
        code = run_training(
            config, preemption=PreemptionHandler(), hooks=hooks, callbacks=callbacks
        )
    finally:
        unlock_run_folder()
    folder = parse_path(
        f"{config.run.base_output_directory}/{config.run.run_name}", "base_output_directory"
    )
    if code == exit_codes.DIVERGED:
        raise RuntimeError(f"the run in {folder} diverged; its checkpoints are kept")
    return folder


def arena(
    output: str | epath.PathLike,
    candidates: str | Sequence[str] = (),
    *,
    log: Callable[[str], None] = lambda line: None,
    **options: UntypedValue,
) -> "list[Verdict]":
    """Judges candidates against a baseline as arena.py does, and returns their verdicts.

    A verdict has `verdict` ("keep", "discard", "undecided" or "refused"), `reasons`, `effect_nats`,
    `interval_nats`, `seeds`, `cost` and more (docs/how-to/let_an_agent_search.md).

    Args:
      output: Folder of the session.
      candidates: One candidate or several: "B.yml" or "part.py:Class", with key=value after it.
      log: Gets each line about the progress.
      **options: Settings of a new session: baseline="A.yml", budget="1e15", alpha=0.05 and other
        options of arena.py, and keys of all its runs. Later calls need none.

    Raises:
      UserError: Everything for which arena.py exits with code 2.
    """
    from MaxText.config import values
    from MaxText.experiments.arena.arena_args import parse_args
    from MaxText.experiments.arena.judging import judge

    specs = [candidates] if isinstance(candidates, str) else list(candidates)
    settings = [
        f"{name}={value if isinstance(value, str) else values.to_yaml(value)}"
        for name, value in options.items()
    ]
    arguments = [f"output={output}", *settings, *(f"candidate={spec}" for spec in specs)]
    return judge(parse_args(arguments), log=log, report=lambda verdict: None)


def metrics(run: "epath.PathLike | Run") -> dict[str, np.ndarray]:
    """Returns the metrics of a run as columns, one value per reported step.

    pandas.DataFrame(metrics(run)) makes a table of it. Numbers that a step does not have, such as
    "eval/avg_loss" between evaluations, are NaN.

    Args:
      run: A run folder, or what `load` returned for one.

    Raises:
      UserError: The folder has no metrics.jsonl.
    """
    from MaxText.monitoring.json_lines import read_rows
    from MaxText.storage.paths import parse_path

    path = parse_path(str(run.path if isinstance(run, Run) else run), "run") / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: {path.parent} is not a run folder")
    rows = read_rows(path)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def load(path: epath.PathLike, **keys: UntypedValue) -> "Run":
    """Opens trained weights, with their configuration and tokenizer.

    Args:
      path: A run folder, a checkpoint of one, or "hf:FOLDER" for a Hugging Face folder.
      **keys: Configuration keys to set, such as dtype="float32", or import_modules=["mine.py"] for
        weights with parts of your own.

    Raises:
      UserError: There are no weights, or they do not fit the configuration, or it is called inside
        of a trace without that.
    """
    if not str(path or "").strip():
        raise UserError(
            f"path={path!r} names no weights. Give a run folder, a checkpoint of one, or "
            '"hf:FOLDER" for a Hugging Face folder.'
        )
    from MaxText.config import values
    from MaxText.inference import checkpoint_config
    from MaxText.inference.trained_model import load_model

    arguments = [f"{name}={values.to_yaml(value)}" for name, value in keys.items()]
    loaded = checkpoint_config.load([f"load_parameters_path={path}", *arguments])
    trained = load_model(loaded.config, log=lambda line: None)
    return Run(str(path), trained, loaded.typed("tokenizer_path"))


class _DeviceBatch(NamedTuple):
    """Sequences on the devices.

    `num_sequences` of the batch were given; the others pad it to a size that the devices can share.
    `is_single`: a single sequence [T] was given, so results have no batch dimension.
    """

    batch: Batch
    num_sequences: int
    is_single: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """Trained weights on this machine's devices, as `load` returns them.

    Attributes:
      path: What was loaded, as given to `load`.
      trained: The model with its weights, configuration and shardings.
      tokenizer_is_typed: Whether the user set tokenizer_path, which then counts alone.
    """

    path: str
    trained: "TrainedModel" = dataclasses.field(repr=False)
    tokenizer_is_typed: bool = dataclasses.field(default=False, repr=False)

    @property
    def config(self) -> Config:
        """The configuration of the weights and the keys given to `load`."""
        return self.trained.config

    @property
    def params(self) -> "Params":
        """Nested dict of arrays; identical layers are stacked on axis 0."""
        return self.trained.params

    @functools.cached_property
    def tokenizer(self) -> "ModelTokenizer":
        """The tokenizer of the weights: `encode(text) -> ids` and `decode(ids) -> text`.

        Raises:
          UserError: There is none next to the weights, and none is configured.
        """
        return self.trained.open_tokenizer(typed=self.tokenizer_is_typed)

    def logits(self, text_or_ids: TextOrIds) -> np.ndarray:
        """Returns the float32 logits of the next token at each position.

        Args:
          text_or_ids: A text, token ids [T], or sequences of one length [B, T].

        Returns:
          [T, V] for a text or ids [T]; [B, T, V] for sequences [B, T].
        """
        inputs = self._to_devices(text_or_ids)
        logits = np.asarray(self._logits(self.params, inputs.batch))
        return logits[0] if inputs.is_single else logits[: inputs.num_sequences]

    def _to_devices(self, text_or_ids: TextOrIds) -> _DeviceBatch:
        if isinstance(text_or_ids, str):
            text_or_ids = self.tokenizer.encode(text_or_ids)
        ids = np.asarray(text_or_ids, np.int32)
        if ids.ndim not in (1, 2) or not ids.size:
            raise ValueError(f"ids of shape {ids.shape}; expected [T] or [B, T], not empty")
        num_ids = self.config.model.shape.vocab_size
        if ids.min() < 0 or ids.max() >= num_ids:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}; expected 0 to {num_ids - 1}")
        ids_BT = np.atleast_2d(ids)
        num_sequences = len(ids_BT)
        # Devices that split the batch need equal numbers of sequences.
        multiple = self.trained.sharding.num_batch_parts
        batch_size = math.ceil(num_sequences / multiple) * multiple
        padding_BT = np.repeat(ids_BT[:1], batch_size - num_sequences, axis=0)
        padded_BT = np.concatenate([ids_BT, padding_BT])
        batch = Batch(padded_BT, padded_BT, np.ones(padded_BT.shape, np.float32))
        return _DeviceBatch(
            batch=self.trained.sharding.to_global_batch(batch, batch_size),
            num_sequences=num_sequences,
            is_single=ids.ndim == 1,
        )

    def forward(
        self, text_or_ids: TextOrIds, capture: Sequence[str] = ()
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the logits, and intermediate values by their path in the model.

        Layers are unrolled and attention is computed in one block for it.

        Args:
          text_or_ids: A text, token ids [T], or sequences of one length [B, T].
          capture: Paths of values, with * as in file names. Of every part:
            `layers/*/self_attention/mixer_output` and `layers/*/mlp/feed_forward_output` [B, T, D],
            `layers/*/connections/r` and `layers/*/output` [B, T, D] (the residual stream before and
            after a layer), `token_embedder/output`, `decoder_norm/output` and `head/output`. Of a
            part, what it names with `tag` or `record`: `layers/*/self_attention/probabilities` [B,
            N, T, T], `.../query_proj` [B, T, N, H], `.../context`, `.../out_proj`,
            `layers/3/mlp/mlpwo`.

        Returns:
          Logits as of `logits`, and {path: value}; values have no batch dimension for a single
          sequence.

        Raises:
          ValueError: A path matches nothing; the message lists those of the first layer.
        """
        from MaxText.layers.capture import capturing

        inputs = self._to_devices(text_or_ids)
        model = self._unrolled_model
        paths: list[str] = []
        inner_paths: list[str] = []

        def run(params: "Params", batch: Batch) -> "tuple[jax.Array, dict[str, jax.Array]]":
            with capturing(capture) as captured:
                logits = model.merge(params)(batch)
            paths[:] = captured.paths
            inner_paths[:] = captured.inner_paths
            return logits, captured.values

        logits, values = self.trained.sharding.jit(run)(self.params, inputs.batch)
        for pattern in capture:
            if fnmatch.filter(paths, pattern):
                continue
            inner_matches = fnmatch.filter(inner_paths, pattern)
            if inner_matches:
                raise ValueError(
                    f"capture: {inner_matches[0]} is inside of a loop or another transformation "
                    "(scan, vmap, jit, shard_map), which it cannot leave. Let the part return it "
                    "from there and tag it outside."
                )
            first_layer_paths = [path for path in paths if not re.match(r"layers/(?!0/)", path)]
            raise ValueError(
                f"capture: {pattern!r} matches nothing; available: {', '.join(first_layer_paths)}"
            )
        batch_size = len(logits)

        def unpadded(value: "jax.Array") -> np.ndarray:
            # Values of the whole batch, such as positions [1, T, D], have no rows to choose.
            array = np.asarray(value)
            if array.ndim == 0 or len(array) != batch_size:
                return array
            return array[0] if inputs.is_single else array[: inputs.num_sequences]

        return unpadded(logits), {name: unpadded(value) for name, value in values.items()}

    def loss(self, batches: Iterable[Batch]) -> float:
        """Returns the mean loss over the targets of batches, in nats per token.

        Args:
          batches: For example itertools.islice(mt.batches(config, "eval"), 10).
        """
        from MaxText.evaluation.validation import evaluate

        sharding = self.trained.sharding
        global_batches = (
            sharding.to_global_batch(batch, len(batch.tokens_BT)) for batch in batches
        )
        return evaluate(self._eval_step, self.params, global_batches, step=0).loss

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 64,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> str | list[str]:
        """Continues a prompt, or several in one batch.

        Args:
          prompts: One prompt, or several.
          max_new_tokens: Tokens to generate per prompt, or -1 to fill the window. An end-of-text id
            ends a text earlier.
          temperature: 0 always takes the most likely token.
          seed: The same seed gives the same texts.
          stop: Strings at which a text ends.
          **sampling: top_k, nucleus_p, min_p, typical_p, eta, entmax_alpha, repetition_penalty.

        Returns:
          The new text without its prompt; a list of them for several prompts.
        """
        from MaxText.inference.engine import Engine
        from MaxText.inference.generate import StoppingCriteria, generate
        from MaxText.inference.sampling import SamplingParams

        if max_new_tokens < 1 and max_new_tokens != -1:
            raise ValueError(f"{max_new_tokens=}; expected 1 or more, or -1 to fill the window")
        prompt_list = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompt_list:
            return []
        trained = self.trained
        tokenizer = self.tokenizer
        num_ids = tokenizer.num_sampled_ids(self.config.model.shape.vocab_size)
        sampling_params = SamplingParams(temperature, **sampling)
        engine = Engine(
            trained.model, self.params, trained.sharding, sampling_params, num_ids=num_ids
        )
        texts = [""] * len(prompt_list)
        for index, completion in generate(
            engine,
            [tokenizer.encode(prompt) for prompt in prompt_list],
            StoppingCriteria(max_new_tokens, frozenset(tokenizer.eos_ids), tuple(stop)),
            batch_size=len(prompt_list),
            seed=seed,
            decode=tokenizer.decode,
        ):
            texts[index] = completion.text
        return texts[0] if isinstance(prompts, str) else texts

    @functools.cached_property
    def _logits(self) -> Callable[..., Any]:
        model = self.trained.model
        return self.trained.sharding.jit(lambda params, batch: model.merge(params)(batch))

    @functools.cached_property
    def _unrolled_model(self) -> "Model":
        """The model with unrolled layers, no remat, and attention in one block."""
        from MaxText.layers.assembly.model import Model

        config = self.trained.model.config
        memory = config.memory.model_copy(update={"scan_layers": False, "remat_policy": "none"})
        attention = config.attention.model_copy(update={"attention": "dot_product"})
        return Model(config.model_copy(update={"memory": memory, "attention": attention}))

    @functools.cached_property
    def _eval_step(self) -> Callable[..., Any]:
        from MaxText.evaluation.validation import make_eval_step, with_frozen
        from MaxText.training.model_objective import read_frozen_params

        sharding = self.trained.sharding
        frozen = read_frozen_params(self.trained.model.config, sharding)
        return with_frozen(sharding.jit(make_eval_step(self.trained.model)), frozen)


__all__ = [
    "Config",
    "Hook",
    "Run",
    "StepInfo",
    "UserError",
    "arena",
    "batches",
    "hook",
    "load",
    "load_config",
    "metrics",
    "train",
]
