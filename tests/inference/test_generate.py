"""Completions: the same whatever the batch, ended where they must, going on beyond the window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from MaxText.errors import UserError
from MaxText.inference.engine import Engine
from MaxText.inference.generate import StoppingCriteria, generate
from MaxText.inference.sampling import SamplingParams
from MaxText.layers.assembly.model import Model
from MaxText.parallelism.mesh import make_sharding_plan
from tests.evaluation.small_trained import forward
from tests.small_models import some_quick, tiny_config

WINDOW = 32
PROMPTS = [[5, 6, 7], [9], list(range(1, 21)), [3, 1]]


@pytest.fixture(scope="module")
def small():
    config = tiny_config("llama2", max_target_length=WINDOW, weight_init="normal", init_std=0.5)
    model = Model(config.model)
    params = jax.jit(model.initialize)(jax.random.key(0))
    sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
    engine = functools.cache(lambda choice: Engine(model, params, sharding, choice))
    return model, params, sharding, engine


GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2)


def decode(ids):
    return "".join(chr(40 + i) for i in ids)


def completions(engine, stopping, batch_size=4, prompts=PROMPTS, **options):
    keys = {"batch_size": batch_size, "decode": decode} | options
    by_index = dict(generate(engine, prompts, stopping, **keys))
    return [by_index[number] for number in range(len(prompts))]


def test_greedy_is_the_argmax_of_the_whole_forward_pass(small):
    model, params, _, engine = small
    results = completions(engine(GREEDY), StoppingCriteria(10))
    for prompt, completion in zip(PROMPTS, results, strict=True):
        assert completion.finish_reason == "length"
        ids = prompt + completion.tokens
        logits = forward(model)(params, np.array([ids + [0] * (WINDOW - len(ids))]))
        logits = np.asarray(logits)[0, len(prompt) - 1 : len(ids) - 1]
        assert completion.tokens == logits.argmax(-1).tolist()
        expected = scipy.special.log_softmax(logits, axis=-1).max(-1)
        np.testing.assert_allclose(completion.log_probabilities, expected, atol=1e-4)


@pytest.mark.parametrize("choice", some_quick([GREEDY, DRAWN], 2))
@pytest.mark.parametrize("new_tokens", [8, 3 * WINDOW])
def test_a_completion_does_not_depend_on_its_batch(small, choice, new_tokens):
    engine = small[-1](choice)
    together = completions(engine, StoppingCriteria(new_tokens), batch_size=4, seed=3)
    one_by_one = completions(engine, StoppingCriteria(new_tokens), batch_size=1, seed=3)
    assert [c.tokens for c in together] == [c.tokens for c in one_by_one]


def test_numbers_that_are_not_finite_end_in_a_message(small):
    model, params, sharding, _ = small
    damaged = jax.tree.map(lambda x: x * jnp.nan, params)
    for choice in (GREEDY, DRAWN):
        with pytest.raises(UserError, match="not finite"):
            completions(Engine(model, damaged, sharding, choice), StoppingCriteria(3))


def test_the_seed_and_the_number_of_a_prompt_decide_the_draws(small):
    same, repeated, other = (
        completions(small[-1](DRAWN), StoppingCriteria(8), prompts=[PROMPTS[0]] * 4, seed=seed)
        for seed in (1, 1, 2)
    )
    assert len({tuple(c.tokens) for c in same}) > 1
    assert [c.tokens for c in same] == [c.tokens for c in repeated]
    assert [c.tokens for c in same] != [c.tokens for c in other]


def test_an_end_id_ends_its_row_alone(small):
    engine = small[-1](GREEDY)
    free = completions(engine, StoppingCriteria(12))
    end = free[0].tokens[4]
    ended = completions(engine, StoppingCriteria(12, eos_ids=frozenset({end})))
    for unstopped, stopped in zip(free, ended, strict=True):
        if end in unstopped.tokens:
            assert stopped.finish_reason == "end"
            assert stopped.tokens == unstopped.tokens[: unstopped.tokens.index(end) + 1]
        else:
            assert (stopped.finish_reason, stopped.tokens) == ("length", unstopped.tokens)


def test_a_stop_string_ends_a_text(small):
    engine = small[-1](GREEDY)
    free = completions(engine, StoppingCriteria(12))
    stop = free[0].text[3:5]
    shown = dict.fromkeys(range(4), "")

    def on_text(number, piece):
        shown[number] += piece

    stopped = completions(engine, StoppingCriteria(12, stop_strings=(stop,)), on_text=on_text)
    for number, (unstopped, stopped_completion) in enumerate(zip(free, stopped, strict=True)):
        assert stopped_completion.text == unstopped.text.partition(stop)[0] == shown[number]
        assert stopped_completion.finish_reason == ("stop" if stop in unstopped.text else "length")


def test_beyond_the_window_the_newer_half_goes_on(small):
    model, params, _, engine = small
    (completion,) = completions(engine(GREEDY), StoppingCriteria(WINDOW + 20), prompts=[PROMPTS[0]])
    assert len(completion.tokens) == WINDOW + 20
    ids = PROMPTS[0] + completion.tokens
    # The first token drawn from a full window cannot be read any more: the newer half is.
    half = ids[WINDOW + 1 - WINDOW // 2 : WINDOW + 1]
    logits = forward(model)(params, np.array([half + [0] * (WINDOW - len(half))]))
    assert ids[WINDOW + 1] == logits[0, len(half) - 1].argmax()


@pytest.mark.parametrize(
    ("length", "dropped"), [(WINDOW - 3, 0), (WINDOW, 0), (59, 59 - (WINDOW - 10))]
)
def test_a_prompt_that_fits_is_read_whole_and_of_a_longer_one_the_end(small, length, dropped):
    prompt = list(range(1, length + 1))
    (completion,) = completions(small[-1](GREEDY), StoppingCriteria(10), prompts=[prompt])
    assert (completion.prompt, completion.num_dropped) == (prompt[dropped:], dropped)
    assert len(completion.tokens) == 10


def test_ids_without_a_token_are_never_chosen(small):
    model, params, sharding, _ = small
    engine = Engine(model, params, sharding, SamplingParams(temperature=5.0), num_ids=7)
    results = completions(engine, StoppingCriteria(20))
    assert max(max(c.tokens) for c in results) < 7
    assert jnp.isfinite(jnp.array([c.log_probabilities for c in results])).all()


def test_every_draw_of_every_sequence_has_a_random_number_of_its_own(small):
    """Of a model for which all ids are equally likely: tokens follow from the draws alone."""
    model, params, sharding, _ = small
    engine = Engine(model, jax.tree.map(jnp.zeros_like, params), sharding, SamplingParams())
    draw_ids = [(0, 0), (0, 1), (1, 0), (1, 1)]
    # Beyond the window, where tokens are read again, draws go on.
    results = completions(engine, StoppingCriteria(2 * WINDOW), draw_ids=draw_ids, seed=5)
    tokens = [completion.tokens for completion in results]
    runs = [tuple(row[start : start + 6]) for row in tokens for start in range(len(row) - 5)]
    assert len(set(runs)) == len(runs)
    assert len({token for row in tokens for token in row}) > 50
    # A draw does not depend on the prompt, on other sequences or on how many came before.
    repeated = completions(
        engine, StoppingCriteria(20), prompts=[[7] * 9], draw_ids=draw_ids[2:3], seed=5
    )
    assert repeated[0].tokens == tokens[2][:20]
    other_seed = completions(
        engine, StoppingCriteria(20), prompts=[[7] * 9], draw_ids=draw_ids[2:3], seed=6
    )
    assert sum(x == y for x, y in zip(other_seed[0].tokens, tokens[2], strict=False)) < 5


def test_the_penalty_is_on_the_ids_of_the_prompt_and_of_the_tokens_so_far(small):
    model, params, _, engine = small
    penalty = 3.0
    choice = SamplingParams(temperature=0, repetition_penalty=penalty)
    state, output = engine(choice).prefill(
        PROMPTS, [(0, 0)] * 4, [0] * 4, seed=0, expected_length=WINDOW
    )
    sequences = [
        [*prompt, int(token)] for prompt, token in zip(PROMPTS, output.tokens_B, strict=True)
    ]
    for _ in range(3):
        marked = [set(np.flatnonzero(row)) for row in np.asarray(state.generated_BV)]
        assert marked == [set(ids) for ids in sequences]  # nothing of the padding
        state, output = engine(choice).step(state)
        for ids, token in zip(sequences, output.tokens_B, strict=True):
            ids.append(int(token))
    for prompt, ids in zip(PROMPTS, sequences, strict=True):
        logits = np.asarray(forward(model)(params, np.array([ids + [0] * (WINDOW - len(ids))])))[0]
        for length in range(len(prompt), len(ids)):
            row, seen_ids = logits[length - 1].copy(), sorted({*ids[:length]})
            row[seen_ids] = np.where(
                row[seen_ids] > 0, row[seen_ids] / penalty, row[seen_ids] * penalty
            )
            assert ids[length] == row.argmax()
