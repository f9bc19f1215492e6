"""Compiled prefill and decode steps of text generation.

An `Engine` works in two phases, as most inference engines: `prefill` runs the whole prompts through
the model once and fills the KV cache (or another mixer's decode state), then each `step` reads the
newest token of every sequence and samples the next one. generate.py schedules the calls.

Programs are compiled per shape, so shapes are few: prompts are padded to a power of two, and decode
states hold a power-of-two `capacity` of tokens, which grows on demand. A state is donated to the
next step, so its memory is reused.

B sequences, T tokens of the longest prompt, V vocab_size, D emb_dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.inference.sampling import SamplingParams, sample
from MaxText.layers.assembly.decoder import Decoder, States
from MaxText.layers.assembly.model import Model
from MaxText.layers.kv_cache import capacity_of, resize
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import ShardingPlan

# A NumPy array on the host, which is a jax.Array inside the compiled function.
HostArray = Any

SMALLEST_PROMPT = 16  # tokens; shorter prompts are padded
SMALLEST_CAPACITY = 64  # tokens of a decode state


class DecodeState(NamedTuple):
    """A batch of sequences in progress."""

    cache: States  # decode states of the layers, with the head's last
    tokens_B: jax.Array  # int32, newest tokens, not yet read by a decode step
    lengths_B: jax.Array  # int32, including the newest token
    keys_B: jax.Array  # one random key per sequence
    num_drawn_B: jax.Array  # uint32, sampled tokens so far; folded into the key of the next draw
    generated_BV: jax.Array | None  # bool, ids in each sequence; None without a repetition penalty


class StepOutput(NamedTuple):
    """A new token of each sequence."""

    tokens_B: jax.Array  # int32
    log_probabilities_B: jax.Array  # float32, in nats, under the unmodified softmax


class _PromptBatch(NamedTuple):
    """Arguments of the compiled prefill, see Engine.prefill."""

    tokens_BT: HostArray  # int32, padded on the right
    lengths_B: HostArray  # int32
    draw_ids_B2: HostArray  # uint32
    num_drawn_B: HostArray  # uint32
    seed: HostArray  # uint32


class Engine:
    """Prefills and continues batches of sequences."""

    def __init__(
        self,
        model: Model,
        params: Params,
        sharding: ShardingPlan,
        sampling: SamplingParams,
        *,
        num_ids: int | None = None,
    ):
        """Compiles nothing yet.

        Args:
          model: A causal model.
          params: Its parameters on device. A step is several times faster with those of
            Model.unstack_params.
          sharding: Mesh and shardings for parameters and batches.
          sampling: How tokens are chosen.
          num_ids: Ids from here on are never sampled; the tokenizer's vocabulary size, which may be
            smaller than the (padded) vocabulary of the model. None samples from all.
        """
        self.window = model.config.shape.max_target_length  # of a sequence
        self.batch_divisor = sharding.num_batch_parts  # batch sizes are multiples
        self._model = model
        self._params = params
        self._sampling = sampling
        self._num_ids = num_ids
        # Sampled tokens are replicated, so that every host can read them.
        out_shardings = (None, sharding.replicated)
        self._prefill_step = sharding.jit(
            self._prefill, static_argnums=2, out_shardings=out_shardings
        )
        self._decode_step = sharding.jit(
            self._decode, donate_argnums=1, out_shardings=out_shardings
        )
        self._grow = sharding.jit(
            lambda state, size: state._replace(cache=resize(state.cache, size)),
            static_argnums=1,
        )

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        draw_ids: Sequence[tuple[int, int]],
        num_drawn: Sequence[int],
        *,
        seed: int,
        expected_length: int,
    ) -> tuple[DecodeState, StepOutput]:
        """Prefills a batch of prompts and samples a token for each.

        The random numbers of a sequence depend only on the seed, its draw id and the number of
        tokens drawn, not on its batch.

        Args:
          prompts: 1 to `window` ids each; their number is a multiple of `batch_divisor`.
          draw_ids: Two non-negative numbers per prompt, folded into its random key.
          num_drawn: How many trailing tokens of each prompt were sampled before. Nonzero where a
            sequence continues with a new prefill.
          seed: Seed of all draws.
          expected_length: Expected final length in tokens; affects speed only.

        Raises:
          ValueError: A prompt is empty or longer than the window.
        """
        lengths = [len(prompt) for prompt in prompts]
        if not all(1 <= length <= self.window for length in lengths):
            raise ValueError(f"prompts of {lengths} ids; each must have 1 to {self.window}")
        padded_length = min(next_power_of_two(max(lengths), SMALLEST_PROMPT), self.window)
        tokens = np.zeros((len(prompts), padded_length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        # NumPy arrays, the same on all hosts, become replicated arrays.
        batch = _PromptBatch(
            tokens_BT=tokens,
            lengths_B=np.asarray(lengths, np.int32),
            draw_ids_B2=np.asarray(draw_ids, np.uint32),
            num_drawn_B=np.asarray(num_drawn, np.uint32),
            seed=np.uint32(seed),
        )
        capacity = max(padded_length, self._capacity(expected_length))
        return self._prefill_step(self._params, batch, capacity)

    def step(self, state: DecodeState) -> tuple[DecodeState, StepOutput]:
        """Reads the newest token of each sequence and samples the next one. Donates `state`.

        Call `ensure_cache_capacity` first, and keep unfinished sequences shorter than `window`.
        """
        return self._decode_step(self._params, state)

    def ensure_cache_capacity(self, state: DecodeState, length: int) -> DecodeState:
        """Returns a state with room for `length` tokens per sequence.

        It grows at least fourfold, because each capacity compiles another program. States of a
        fixed size, as of linear attention, are returned unchanged.
        """
        capacity = capacity_of(state.cache)
        if capacity is None or length <= capacity:
            return state
        return self._grow(state, self._capacity(max(length, 4 * capacity)))

    def _capacity(self, length: int) -> int:
        return min(next_power_of_two(length, SMALLEST_CAPACITY), self.window)

    def _prefill(
        self, params: Params, batch: _PromptBatch, capacity: int
    ) -> tuple[DecodeState, StepOutput]:
        """Computes `prefill` under jit; `capacity` is the tokens of the new decode state."""
        tokens_BT = batch.tokens_BT
        lengths_B = batch.lengths_B
        decoder = self._model.merge(params)
        h_BTD, cache = decoder.prefill(tokens_BT, lengths_B, capacity)
        last_B1D = jnp.take_along_axis(h_BTD, (lengths_B - 1)[:, None, None], axis=1)
        key = jax.random.key(batch.seed)
        fold = jax.random.fold_in
        keys_B = jax.vmap(lambda draw_id: fold(fold(key, draw_id[0]), draw_id[1]))(
            batch.draw_ids_B2
        )
        generated_BV = None
        if self._sampling.repetition_penalty != 1:
            rows_B1 = jnp.arange(len(tokens_BT))[:, None]
            is_token_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
            none_BV = jnp.zeros((len(tokens_BT), self._model.config.shape.vocab_size), bool)
            generated_BV = none_BV.at[rows_B1, tokens_BT].max(is_token_BT)
        state = DecodeState(
            cache,
            tokens_B=lengths_B,  # a placeholder, replaced in _draw
            lengths_B=lengths_B,
            keys_B=keys_B,
            num_drawn_B=batch.num_drawn_B,
            generated_BV=generated_BV,
        )
        return self._draw(decoder, last_B1D, state)

    def _decode(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepOutput]:
        """Computes `step` under jit."""
        decoder = self._model.merge(params)
        tokens_BT = state.tokens_B[:, None]
        positions_BT = state.lengths_B[:, None] - 1
        h_B1D, cache = decoder.decode_step(tokens_BT, positions_BT, state.cache)
        return self._draw(decoder, h_B1D, state._replace(cache=cache))

    def _draw(
        self, decoder: Decoder, h_B1D: jax.Array, state: DecodeState
    ) -> tuple[DecodeState, StepOutput]:
        """Samples a token of each sequence and appends it to the state.

        Args:
          decoder: The model with its parameters.
          h_B1D: Final hidden states at the last position of each sequence.
          state: With the cache up to that position, and `tokens_B` outdated.
        """
        head_state = state.cache[-1]
        positions_B1 = state.lengths_B[:, None] - 1
        logits_BV = decoder.logits(h_B1D, head_state, positions_B1)[:, 0]
        keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.num_drawn_B)
        generated_BV = state.generated_BV
        tokens_B, log_probabilities_B = sample(
            logits_BV, keys_B, self._sampling, generated_BV, num_ids=self._num_ids
        )
        if generated_BV is not None:
            generated_BV = generated_BV.at[jnp.arange(len(tokens_B)), tokens_B].set(True)
        state = state._replace(
            tokens_B=tokens_B,
            lengths_B=state.lengths_B + 1,
            num_drawn_B=state.num_drawn_B + 1,
            generated_BV=generated_BV,
        )
        return state, StepOutput(tokens_B, log_probabilities_B)


def next_power_of_two(number: int, minimum: int) -> int:
    """Returns the smallest power of two >= `number`, and at least `minimum` (a power of two)."""
    return max(minimum, 1 << (number - 1).bit_length())
