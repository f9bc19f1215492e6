"""Text from a model, one token after another.

Legend: T tokens of the window, V vocab_size.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from MaxText.configuration.training_sections import Sampling
from MaxText.input_pipeline.batch import Batch
from MaxText.input_pipeline.tokenization.loading import load_tokenizer
from MaxText.layers.model import Model, Parameters


def sample_tokens(
    model: Model,
    params: Parameters,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float,
    seed: int,
) -> list[int]:
    """Continues `prompt` by `num_tokens` ids.

    Each token is one forward pass over a window of max_target_length, all in one compiled loop;
    past the window the oldest tokens are dropped.

    Args:
      prompt: at least one id. Only the last max_target_length - 1 are read.
      temperature: divides the logits; 0 takes the likeliest id.
    """
    length = model.section.shape.max_target_length
    prompt = list(prompt)[-(length - 1) :]

    def one_token(step, carry, params):
        window_T, filled, generated = carry
        batch = Batch(window_T[None], window_T[None], jnp.zeros((1, length), jnp.float32))
        decoder = model.merge(params)
        h_BTD, _ = decoder.hidden(batch)
        last = jax.lax.dynamic_slice_in_dim(h_BTD, filled - 1, 1, axis=1)
        logits_V = decoder.logits(last)[0, 0]
        if temperature == 0:
            token = jnp.argmax(logits_V)
        else:
            key = jax.random.fold_in(jax.random.key(seed), step)
            token = jax.random.categorical(key, logits_V / temperature)
        token = token.astype(jnp.int32)
        full = filled == length
        window_T = jnp.where(full, jnp.roll(window_T, -1), window_T)
        place = jnp.where(full, length - 1, filled)
        window_T = window_T.at[place].set(token)
        return window_T, jnp.minimum(filled + 1, length), generated.at[step].set(token)

    @jax.jit
    def generate(params, window_T, filled):
        start = (window_T, filled, jnp.zeros(num_tokens, jnp.int32))
        body = functools.partial(one_token, params=params)
        return jax.lax.fori_loop(0, num_tokens, body, start)[2]

    window_T = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.asarray(prompt, jnp.int32))
    return [int(token) for token in generate(params, window_T, jnp.int32(len(prompt)))]


def write_sample(
    model: Model, params: Parameters, section: Sampling, tokenizer_folder: Path, run_folder: Any
) -> str:
    """Continues the configured prompt with the data set's tokenizer; writes sample.txt.

    Returns:
      Prompt and continuation.
    """
    tokenizer = load_tokenizer(tokenizer_folder, num_threads=1)
    prompt = tokenizer.encode([section.prompt])[0].tolist()
    tokens = sample_tokens(
        model,
        params,
        prompt,
        section.sample_tokens,
        temperature=section.decode_sampling_temperature,
        seed=section.decode_seed,
    )
    text = tokenizer.decode([*prompt, *tokens])
    (run_folder / "sample.txt").write_text(text + "\n")
    return text
