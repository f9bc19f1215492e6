"""Compiled prefill and decode steps of text generation.

Prompts are padded to a power of two. Decode states hold a power-of-two `capacity` of tokens, which
grows on demand, and are donated to the next step.

B sequences, T tokens of the longest prompt, V vocab_size, D emb_dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.inference.sampling import SamplingParams, sample
from MaxText.layers.assembly.decoder import Decoder, States
from MaxText.layers.assembly.model import Model
from MaxText.layers.kv_cache import capacity_of, resize
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import ShardingPlan

SMALLEST_PROMPT = 16
SMALLEST_CAPACITY = 64


class DecodeState(NamedTuple):
    """Sequences in progress."""

    cache: States
    tokens_B: jax.Array  # newest tokens, not yet read by a decode step
    lengths_B: jax.Array  # including the newest token
    keys_B: jax.Array
    num_drawn_B: jax.Array  # folded into the key of the next draw
    generated_BV: jax.Array | None  # bool, ids in each sequence; None without a repetition penalty


class StepOutput(NamedTuple):
    """New tokens and their log-probabilities in nats."""

    tokens_B: jax.Array
    log_probabilities_B: jax.Array


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

        A step is several times faster with `params` from Model.unstack_params. Ids from `num_ids`
        (tokenizer vocabulary size) on are never sampled.
        """
        self.window = model.config.shape.max_target_length  # of a sequence
        self.batch_divisor = sharding.num_batch_parts  # batch sizes are multiples
        self._model = model
        self._params = params
        self._sampling = sampling
        self._num_ids = num_ids
        # Sampled tokens are replicated, so that every host can read them.
        outputs = {"out_shardings": (None, sharding.replicated)}
        self._prefill_step = sharding.jit(self._prefill, static_argnums=6, **outputs)
        self._decode_step = sharding.jit(self._decode, donate_argnums=1, **outputs)
        self._grow = sharding.jit(
            lambda state, size: state._replace(cache=resize(state.cache, size)),
            static_argnums=1,
        )

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],  # 1 to `window` ids each
        names: Sequence[tuple[int, int]],  # of prompts
        num_drawn: Sequence[int],  # trailing tokens of each prompt that were drawn earlier
        *,
        seed: int,
        room: int,  # expected final length; affects speed only
    ) -> tuple[DecodeState, StepOutput]:
        """Prefills prompts (a multiple of batch_divisor); draws a token for each.

        Draws depend only on the seed, the name and the tokens.
        """
        lengths = [len(prompt) for prompt in prompts]
        if not all(1 <= length <= self.window for length in lengths):
            raise ValueError(f"prompts of {lengths} ids; each must have 1 to {self.window}")
        padded = min(next_power_of_two(max(lengths), SMALLEST_PROMPT), self.window)
        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        capacity = max(padded, self._capacity(room))
        # NumPy arrays, the same on all hosts, become replicated arrays.
        return self._prefill_step(
            self._params,
            tokens,
            np.asarray(lengths, np.int32),
            np.asarray(names, np.uint32),
            np.asarray(num_drawn, np.uint32),
            np.uint32(seed),
            capacity,
        )

    def step(self, state: DecodeState) -> tuple[DecodeState, StepOutput]:
        """Decodes one token per sequence. Donates `state`.

        Call `ensure_cache_capacity` first, and keep unfinished sequences shorter than `window`.
        """
        return self._decode_step(self._params, state)

    def ensure_cache_capacity(self, state: DecodeState, length: int) -> DecodeState:
        """Grows to `length` tokens, at least fourfold, for few programs."""
        capacity = capacity_of(state.cache)
        if capacity is None or length <= capacity:
            return state
        return self._grow(state, self._capacity(max(length, 4 * capacity)))

    def _capacity(self, length: int) -> int:
        return min(next_power_of_two(length, SMALLEST_CAPACITY), self.window)

    def _prefill(
        self,
        params: Params,
        tokens_BT: jax.Array,
        lengths_B: jax.Array,
        names_B2: jax.Array,
        num_drawn_B: jax.Array,
        seed: jax.Array,
        capacity: int,
    ) -> tuple[DecodeState, StepOutput]:
        decoder = self._model.merge(params)
        h_BTD, cache = decoder.prefill(tokens_BT, lengths_B, capacity)
        last_B1D = jnp.take_along_axis(h_BTD, (lengths_B - 1)[:, None, None], axis=1)
        key = jax.random.key(seed)
        fold = jax.random.fold_in
        keys_B = jax.vmap(lambda name: fold(fold(key, name[0]), name[1]))(names_B2)
        generated_BV = None
        if self._sampling.repetition_penalty != 1:
            rows_B1 = jnp.arange(len(tokens_BT))[:, None]
            real_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
            none_BV = jnp.zeros((len(tokens_BT), self._model.config.shape.vocab_size), bool)
            generated_BV = none_BV.at[rows_B1, tokens_BT].max(real_BT)
        state = DecodeState(
            cache,
            tokens_B=lengths_B,  # a placeholder, replaced in _draw
            lengths_B=lengths_B,
            keys_B=keys_B,
            num_drawn_B=num_drawn_B,
            generated_BV=generated_BV,
        )
        return self._draw(decoder, last_B1D, state)

    def _decode(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepOutput]:
        decoder = self._model.merge(params)
        tokens_BT = state.tokens_B[:, None]
        positions_BT = state.lengths_B[:, None] - 1
        h_B1D, cache = decoder.decode_step(tokens_BT, positions_BT, state.cache)
        return self._draw(decoder, h_B1D, state._replace(cache=cache))

    def _draw(
        self, decoder: Decoder, h_B1D: jax.Array, state: DecodeState
    ) -> tuple[DecodeState, StepOutput]:
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


def next_power_of_two(number: int, least: int) -> int:
    """Returns the smallest power of two >= max(number, least)."""
    return max(least, 1 << (number - 1).bit_length())
