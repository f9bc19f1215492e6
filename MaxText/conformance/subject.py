"""The small model that is checked, its inputs, and what its compiled program returns.

B sequences, T tokens, V vocab_size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from MaxText.config.schema import Config
from MaxText.config.training_sections import MeshConfig
from MaxText.cost.jaxpr_operations import count_operations
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.model_objective import read_frozen_params
from MaxText.training.objective import loss_sums, loss_totals
from MaxText.value_types import PyTree

LENGTH = 12


PROMPT = 5


CUT = 5


LENGTHS = np.array([PROMPT, 2])  # of the two prompts


SIZES: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 16,
    "head_dim": 4,
    "base_num_decoder_layers": 2,
    "vocab_size": 32,
    "max_target_length": LENGTH,
    "normalization_layer_epsilon": 1e-5,
    "attention_block_size": 5,
}


TRAINED: dict[str, Any] = {
    "dtype": "float32",
    "attention": "dot_product",
    "scan_layers": True,
    "remat_policy": "none",
    "dataset_type": "synthetic",
    "steps": 10,
    "warmup_steps_fraction": 0.0,
}


class Outputs(NamedTuple):
    """Outputs of a subject's program."""

    losses: list[tuple[Any, Any]]  # (loss, gradients) of both models
    logits: np.ndarray  # of `variants`, [B, T, V]
    decoded: tuple[np.ndarray, ...] | None  # of prompts and subsequent steps; None: cannot decode
    fell: float  # measured loss decrease along the gradient, relative to the predicted one


class Subject:
    """A small model, also with the other scan_layers and full remat."""

    def __init__(self, load_config: Callable[..., Config], *, decodes: bool = True):
        """Compiles nothing yet. `load_config` maps keys to a configuration."""
        self.load_config = load_config
        self.decodes = decodes
        self.config = config = load_config()
        scans = config.model.memory.scan_layers
        model = config.model
        can_scan = model.layer_plan.repeats > 0 and model.scan_unsupported_reason is None
        other = load_config(scan_layers=can_scan and not scans, remat_policy="full")
        self.models = [Model(config.model), Model(other.model)]
        self.batch = random_batch(config, 2)
        # What the objective reads and does not train. On the host, as several meshes use it.
        sharding = make_sharding_plan(MeshConfig(), jax.devices()[:1])
        frozen = read_frozen_params(self.models[0].config, sharding)
        self.frozen = jax.tree.map(np.asarray, frozen)
        # This PRNG implementation compiles fast.
        self.key = jax.random.key(1, impl="unsafe_rbg") if config.model.is_random else None

    @functools.cached_property
    def params(self) -> Params:
        """Random parameters of trained magnitude, also for zero-initialized ones."""
        generator = np.random.default_rng(0)

        def draw(path, leaf):
            """Draws a weight: normal with deviation 0.2, around 1 for norms."""
            scale = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
            return (scale + 0.2 * generator.normal(size=leaf.shape)).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(draw, self.models[0].abstract)

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced program; tracing counts operations without compiling."""
        return jax.jit(self._program).trace(self.models[0].abstract)

    @property
    def operations(self) -> list[int]:
        """Matrix product FLOPs of both losses with their gradients."""
        calls = [equation.params for equation in self.traced.jaxpr.eqns]
        losses = [call["jaxpr"].jaxpr for call in calls if call.get("name") == "loss"]
        return [count_operations(jaxpr).matmul_flops for jaxpr in losses]

    @functools.cached_property
    def outputs(self) -> Outputs:
        """What the compiled program returns for `params`.

        It runs twice: a second time with parameters moved along the gradient, for `Outputs.fell`.
        """
        run = self.traced.lower().compile()
        losses, logits, decoded = jax.tree.map(np.asarray, run(self.params))
        loss, gradients = losses[0]
        slopes = self._without_statistics(gradients)
        square = sum(np.sum(np.square(slope)) for slope in jax.tree.leaves(slopes))
        fall = 0.003  # so small that the loss is linear
        moved = jax.tree.map(lambda x, dx: x - fall / square * dx, self.params, slopes)
        fell = float(loss - run(moved)[0][0][0]) / fall
        return Outputs(losses, logits, decoded, fell)

    def _without_statistics(self, gradients: Params) -> Params:
        """Returns gradients with 0 for weights with an update rule, whose gradient is none."""
        flat = traverse_util.flatten_dict(gradients, sep="/")
        flat |= {
            name: np.zeros(spec.shape, spec.dtype)
            for name, spec in self.models[0].parameters.items()
            if spec.update_rule
        }
        return traverse_util.unflatten_dict(flat, sep="/")

    def loss(self, params: Params, model: Model, batch: Batch) -> jax.Array:
        """Returns the mean loss of a batch in training, which is what training minimizes."""
        sums = loss_sums(
            model.merge(params),
            batch,
            model.config.objective,
            self.key,
            training=True,
            frozen=self.frozen,
        )
        return sums.minimized(loss_totals(model, batch))

    def _program(self, params: Params) -> PyTree:
        """Returns both models' losses with gradients, logits of `variants`, and decoded logits."""

        def loss(params, model):
            return self.loss(params, model, self.batch)

        losses = [
            jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, model)
            for model in self.models
        ]
        logits = model_logits(self.models[0], params, variants())
        tokens_BT = variants().tokens_BT[3:5]
        decoded = decode_logits(self.models[0].merge(params), tokens_BT) if self.decodes else None
        return losses, logits, decoded


def random_batch(config: Config, num_rows: int, seed: int = 0, *, documents: bool = True) -> Batch:
    """Returns random tokens with random loss weights of 0 and 1.

    Args:
      config: Of the run: vocabulary and length.
      num_rows: Number of sequences.
      seed: Of the generator.
      documents: Whether a sequence is two packed documents, cut after a third of it.
    """
    generator = np.random.default_rng(seed)
    length = config.model.shape.max_target_length
    shape = (num_rows, length)
    boundary = length // 3
    tokens = generator.integers(0, config.model.shape.vocab_size, (num_rows, length + 1))
    tokens = tokens.astype(np.int32)
    weights = (generator.random(shape) < 0.7).astype(np.float32)
    positions = segments = None
    if documents:
        indices = np.tile(np.arange(length, dtype=np.int32), (num_rows, 1))
        segments = np.where(indices < boundary, 1, 2).astype(np.int32)
        positions = np.where(indices < boundary, indices, indices - boundary)
    return jax.tree.map(
        jnp.asarray, Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, segments)
    )


def variants() -> Batch:
    """Returns related sequences, [7, LENGTH].

    Two packed documents; one token changed in the first, then in the second; each document alone,
    followed by other tokens; the first followed by two kinds of padding.
    """
    tokens, other_tokens = np.random.default_rng(1).integers(0, 32, (2, LENGTH))
    first = tokens.copy()
    second = tokens.copy()
    padded = tokens.copy()
    first[CUT - 2] ^= 1
    second[CUT + 2] ^= 1
    padded[CUT:] ^= 3
    documents = [np.append(part, other_tokens)[:LENGTH] for part in (tokens[:CUT], tokens[CUT:])]
    sequences = np.stack([tokens, first, second, *documents, tokens, padded]).astype(np.int32)
    indices = np.arange(LENGTH, dtype=np.int32)
    in_second = (indices >= CUT).astype(int)
    segments = np.stack([1 + in_second] * 3 + [np.ones(LENGTH, int)] * 2 + [1 - in_second] * 2)
    positions = np.stack(
        [indices - CUT * in_second] * 3 + [indices] * 2 + [indices - CUT * in_second] * 2
    )
    weights = np.ones(sequences.shape, np.float32)
    return Batch(
        sequences, sequences, weights, positions.astype(np.int32), segments.astype(np.int32)
    )


def model_logits(model: Model, params: Params, batch: Batch) -> jax.Array:
    """Returns the logits of a batch, [B, T, V], without dropping tokens of experts."""
    decoder = model.merge(params)
    h_BTD, _ = decoder.hidden_states(batch, drops_tokens=False)
    return decoder.logits(h_BTD, decoder.head_state(h_BTD, batch))


def decode_logits(decoder: Decoder, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits of prompts, and of the next tokens one by one.

    Args:
      decoder: The model.
      tokens_BT: One sequence for each of LENGTHS, whose beginning is the prompt.

    Returns:
      Logits of the prompts [B, PROMPT, V], and of the tokens after them [B, LENGTH - PROMPT, V].
    """
    lengths_B = jnp.asarray(LENGTHS)
    tokens_BT = jnp.asarray(tokens_BT)
    padded_BT = jnp.where(jnp.arange(PROMPT) < lengths_B[:, None], tokens_BT[:, :PROMPT], 31)
    h_BTD, states = decoder.prefill(padded_BT, lengths_B, capacity=LENGTH)
    prompt = decoder.logits(h_BTD, states[-1])

    def step(states, offset):
        """Decodes one token of each sequence, the one `offset` tokens after its prompt."""
        positions_B1 = (lengths_B + offset)[:, None]
        new_B1 = jnp.take_along_axis(tokens_BT, positions_B1, axis=1)
        h_B1D, states = decoder.decode_step(new_B1, positions_B1, states)
        return states, decoder.logits(h_B1D, states[-1], positions_B1)[:, 0]

    _, steps = jax.lax.scan(step, states, jnp.arange(LENGTH - PROMPT))
    return prompt, jnp.moveaxis(steps, 0, 1)
