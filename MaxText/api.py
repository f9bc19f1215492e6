"""Python API, `import MaxText as mt` (see docs/how-to/use_from_python.md)."""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from MaxText.config.loading import load_config
from MaxText.config.schema import Config
from MaxText.errors import UserError
from MaxText.layers.batch import Batch
from MaxText.run.hooks import Hook, StepInfo, hook

Callback = Callable[[Mapping[str, Any]], None]


def batches(config: Config, split: str = "train") -> Iterator[Batch]:
    """Returns batches of NumPy arrays [B, T], as training reads them.

    A data set that `prepare_source` describes is prepared first.

    Args:
      split: "train" (for as long as the run, in its order) or "eval" (one pass).

    Raises:
      UserError: the data cannot be read, or there is no evaluation data.
    """
    import jax

    from MaxText.cost.auto_layout import choose_layout_for_devices
    from MaxText.input_pipeline.data_sources import prepare_sources
    from MaxText.input_pipeline.loader import open_batches
    from MaxText.input_pipeline.sequences.batch_source import BatchShard
    from MaxText.input_pipeline.sequences.plan_batches import plan_batches
    from MaxText.parallelism import mesh

    if split not in ("train", "eval"):
        raise UserError(f'split={split!r} must be "train" or "eval"')
    prepare_sources(config)
    config = choose_layout_for_devices(config, jax.devices(), lambda line: None)
    sharding = mesh.make_sharding_plan(config.mesh, jax.devices(), config.model.pipeline)
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
      config: of `load_config`. The same one again resumes, or finds that the run is complete.
      hooks: called with a `StepInfo` (state, metrics and more) after the steps that each chooses:
        `Hook(function, every=100)`. A plain function is called after every step. An exception ends
        the run as a UserError, after a checkpoint was saved.
      callbacks: called with each event of the run, in order: a dict with "event" ("start", "step",
        "evaluation", "checkpoint", ..., "stop"), "step", "seconds" and what that kind of event has,
        as in events.jsonl. An exception ends the run.

    Raises:
      UserError: everything for which train.py exits with code 2.
      RuntimeError: the run diverged.
    """
    from MaxText import exit_codes
    from MaxText.runtime.preemption import PreemptionHandler
    from MaxText.storage.paths import parse_path
    from MaxText.storage.run_folder import unlock_run_folder
    from MaxText.train import train as run

    try:
        code = run(config, preemption=PreemptionHandler(), hooks=hooks, callbacks=callbacks)
    finally:
        unlock_run_folder()
    folder = parse_path(
        f"{config.run.base_output_directory}/{config.run.run_name}", "base_output_directory"
    )
    if code == exit_codes.DIVERGED:
        raise RuntimeError(f"the run in {folder} diverged; its checkpoints are kept")
    return folder


def metrics(run: "epath.PathLike | Run") -> dict[str, np.ndarray]:
    """Returns the metrics of a run as columns, one value per reported step.

    pandas.DataFrame(metrics(run)) makes a table of it. Numbers that a step does not have, such as
    "eval/avg_loss" between evaluations, are NaN. `run` is a run folder, or what `load` returned for
    one. Raises UserError for a folder without metrics.jsonl.
    """
    from MaxText.metrics.json_lines import read_rows
    from MaxText.storage.paths import parse_path

    path = parse_path(str(run.path if isinstance(run, Run) else run), "run") / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: {path.parent} is not a run folder")
    rows = read_rows(path)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def load(path: epath.PathLike, **keys: Any) -> "Run":
    """Opens trained weights, with their configuration and tokenizer.

    Args:
      path: a run folder, a checkpoint of one, or "hf:FOLDER" for a Hugging Face folder.
      **keys: configuration keys to set, such as dtype="float32".

    Raises:
      UserError: no weights there, or weights that do not fit.
    """
    from MaxText.config import values
    from MaxText.inference import checkpoint_config
    from MaxText.inference.trained_model import load_model

    arguments = [f"{name}={values.to_yaml(value)}" for name, value in keys.items()]
    loaded = checkpoint_config.load([f"load_parameters_path={path}", *arguments])
    trained = load_model(loaded.config, log=lambda line: None)
    return Run(str(path), trained, loaded.typed("tokenizer_path"))


@dataclasses.dataclass(frozen=True)
class Run:
    """Trained weights on this machine's devices. Made by `load`."""

    path: str
    trained: Any = dataclasses.field(repr=False)  # an inference.trained_model.TrainedModel
    tokenizer_is_typed: bool = dataclasses.field(default=False, repr=False)

    @property
    def config(self) -> Config:
        """The configuration of the weights and the keys given to `load`."""
        return self.trained.config

    @property
    def params(self) -> dict[str, Any]:
        """Nested dict of arrays; identical layers are stacked on axis 0."""
        return self.trained.params

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Has `encode(text) -> ids` and `decode(ids) -> text`, or UserError."""
        return self.trained.open_tokenizer(typed=self.tokenizer_is_typed)

    def logits(self, text_or_ids: Any) -> np.ndarray:
        """Returns the float32 logits of the next token at each position.

        They are [T, V] for a text or ids [T], and [B, T, V] for sequences of one length [B, T].
        """
        batch, num_rows, is_single = self._batch_of(text_or_ids)
        logits = np.asarray(self._logits(self.params, batch))
        return logits[0] if is_single else logits[:num_rows]

    def _batch_of(self, text_or_ids: Any) -> tuple[Batch, int, bool]:
        """A batch on the devices, its valid rows, and whether it was one sequence."""
        if isinstance(text_or_ids, str):
            text_or_ids = self.tokenizer.encode(text_or_ids)
        ids = np.asarray(text_or_ids, np.int32)
        if ids.ndim not in (1, 2) or not ids.size:
            raise ValueError(f"ids of shape {ids.shape}; expected [T] or [B, T], not empty")
        num_ids = self.config.model.shape.vocab_size
        if ids.min() < 0 or ids.max() >= num_ids:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}; expected 0 to {num_ids - 1}")
        ids_BT = np.atleast_2d(ids)
        # Devices that split a batch need rows to split.
        multiple = self.trained.sharding.num_batch_parts
        batch_size = -(-len(ids_BT) // multiple) * multiple
        padded = np.concatenate([ids_BT, np.repeat(ids_BT[:1], batch_size - len(ids_BT), axis=0)])
        batch = Batch(padded, padded, np.ones(padded.shape, np.float32))
        return self.trained.sharding.to_global_batch(batch, batch_size), len(ids_BT), ids.ndim == 1

    def forward(
        self, text_or_ids: Any, capture: Sequence[str] = ()
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the logits, and intermediate values by their path in the model.

        Layers are unrolled and attention is computed in one block for it.

        Args:
          text_or_ids: as of `logits`.
          capture: paths, with * as in file names. Of every part:
            `layers/*/self_attention/mixer_output` and `layers/*/mlp/feed_forward_output` [B, T, D],
            `layers/*/connections/r` and `layers/*/output` [B, T, D] (the residual stream before and
            after a layer), `token_embedder/output`, `decoder_norm/output` and `head/output`. Of a
            part, what it names with `tag` or `record`: `layers/*/self_attention/probabilities` [B,
            N, T, T], `.../query_proj` [B, T, N, H], `.../context`, `.../out_proj`,
            `layers/3/mlp/mlpwo`.

        Raises:
          ValueError: a path matches nothing; the message lists those of the first layer.
        """
        from MaxText.layers.capture import capturing

        batch, num_rows, is_single = self._batch_of(text_or_ids)
        model = self._model_to_look_into
        paths: list[str] = []
        inner_paths: list[str] = []

        def run(params: Any, batch: Batch) -> Any:
            with capturing(capture) as captured:
                logits = model.merge(params)(batch)
            paths[:] = captured.paths
            inner_paths[:] = captured.inner_paths
            return logits, captured.values

        logits, values = self.trained.sharding.jit(run)(self.params, batch)
        for pattern in capture:
            if fnmatch.filter(paths, pattern):
                continue
            if inner := fnmatch.filter(inner_paths, pattern):
                raise ValueError(
                    f"capture: {inner[0]} is inside of a loop or another transformation (scan, "
                    "vmap, jit, shard_map), which it cannot leave. Let the part return it from "
                    "there and tag it outside."
                )
            of_layers = [path for path in paths if not re.match(r"layers/(?!0/)", path)]
            raise ValueError(
                f"capture: {pattern!r} matches nothing; available: {', '.join(of_layers)}"
            )
        batch_size = len(logits)

        def unpadded(x: Any) -> np.ndarray:
            # Values of the whole batch, such as positions [1, T, D], have no rows to choose.
            array = np.asarray(x)
            if array.ndim == 0 or len(array) != batch_size:
                return array
            return array[0] if is_single else array[:num_rows]

        return unpadded(logits), {name: unpadded(x) for name, x in values.items()}

    def loss(self, batches: Iterable[Batch]) -> float:
        """Returns the mean loss over the targets of batches, in nats per token.

        `batches` are for example itertools.islice(mt.batches(config, "eval"), 10).
        """
        from MaxText.evaluation.validation import evaluate

        sharding = self.trained.sharding
        placed = (sharding.to_global_batch(batch, len(batch.tokens_BT)) for batch in batches)
        return evaluate(self._eval_step, self.params, placed, step=0).loss

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 64,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> Any:
        """Continues a prompt, or several in one batch.

        Returns the new text without its prompt, or a list of them for several prompts.

        Args:
          max_new_tokens: of each, or -1 to fill the window; an end-of-text id ends it earlier.
          temperature: 0 always takes the most likely token.
          seed: the same seed gives the same texts.
          stop: strings at which a text ends.
          **sampling: top_k, nucleus_p, min_p, typical_p, eta, entmax_alpha, repetition_penalty.
        """
        from MaxText.inference.engine import Engine
        from MaxText.inference.generate import StoppingCriteria, generate
        from MaxText.inference.sampling import SamplingParams

        if max_new_tokens < 1 and max_new_tokens != -1:
            raise ValueError(f"{max_new_tokens=}; expected 1 or more, or -1 to fill the window")
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        if not asked:
            return []
        trained = self.trained
        tokenizer = self.tokenizer
        num_ids = tokenizer.num_sampled_ids(self.config.model.shape.vocab_size)
        choice = SamplingParams(temperature, **sampling)
        engine = Engine(trained.model, self.params, trained.sharding, choice, num_ids=num_ids)
        texts = [""] * len(asked)
        for number, completion in generate(
            engine,
            [tokenizer.encode(prompt) for prompt in asked],
            StoppingCriteria(max_new_tokens, frozenset(tokenizer.eos_ids), tuple(stop)),
            batch_size=len(asked),
            seed=seed,
            decode=tokenizer.decode,
        ):
            texts[number] = completion.text
        return texts[0] if isinstance(prompts, str) else texts

    @functools.cached_property
    def _logits(self) -> Callable[..., Any]:
        model = self.trained.model
        return self.trained.sharding.jit(lambda params, batch: model.merge(params)(batch))

    @functools.cached_property
    def _model_to_look_into(self) -> Any:
        """The model with unrolled layers, no remat, and attention in one block."""
        from MaxText.layers.assembly.model import Model

        config = self.trained.model.config
        memory = config.memory.model_copy(update={"scan_layers": False, "remat_policy": "none"})
        attention = config.attention.model_copy(update={"attention": "dot_product"})
        return Model(config.model_copy(update={"memory": memory, "attention": attention}))

    @functools.cached_property
    def _eval_step(self) -> Callable[..., Any]:
        from MaxText.evaluation.validation import make_eval_step

        return self.trained.sharding.jit(make_eval_step(self.trained.model))


__all__ = [
    "Config",
    "Hook",
    "Run",
    "StepInfo",
    "UserError",
    "batches",
    "hook",
    "load",
    "load_config",
    "metrics",
    "train",
]
