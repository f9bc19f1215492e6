"""Hidden tokens, LAMBADA and WikiText of masked models against one forward pass at a time."""

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from MaxText.config.loading import configure
from MaxText.evaluation import lambada, scorer_inputs, tasks, wikitext
from MaxText.evaluation.lambada import Passage
from MaxText.evaluation.scorer_inputs import MaskIds, hide
from MaxText.evaluation.scorers import Scorer
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.input_pipeline.token_store.manifest import TokenizerEntry
from tests.evaluation.small_trained import forward, tiny_trained
from tests.refusals import refused
from tests.small_models import some_quick

VOCAB, WINDOW = 64, 16
MASK, CLS, BOS = VOCAB - 1, VOCAB - 2, VOCAB - 3
NUM_LETTERS = VOCAB - 3
KEYS = {"mlm_training": True, "mlm.mask_id": MASK, "mlm.cls_token_id": CLS}
_FIRST_LETTER = 0x100


def letters(ids):
    """The text of ids: a letter for each."""
    return "".join(chr(_FIRST_LETTER + int(i)) for i in ids)


class Letters:
    """A tokenizer that gives each letter an id and leaves white space out, as WordPiece does."""

    def __init__(self, mask_id=None):
        self.entry = TokenizerEntry(origin="test", sha256="", vocab_size=VOCAB, mask_id=mask_id)

    def encode(self, texts):
        return [
            np.array([ord(letter) - _FIRST_LETTER for letter in text if not letter.isspace()], int)
            for text in texts
        ]


def tokenizer_of(*prefix, mask_id=None):
    tokenizer: object = Letters(mask_id)
    return ModelTokenizer(tokenizer, prefix, (), Path("letters"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained():
    return tiny_trained(**KEYS, base_num_decoder_layers=1)


def slow_log_p(trained, ids, hidden, cls: int | None = CLS):
    """log p [C, V] at the hidden places: one sequence, no padding, float64 on the host."""
    before = [] if cls is None else [cls]
    read = [MASK if place in hidden else i for place, i in enumerate(ids)]
    tokens = np.array([[*before, *read]], np.int32)
    logits = np.asarray(forward(trained.model)(trained.params, tokens)[0], np.float64)
    logits = logits[[len(before) + place for place in hidden]]
    return scipy.special.log_softmax(logits, axis=-1)


def random_ids(count, seed):
    return np.random.default_rng(seed).integers(0, NUM_LETTERS, count)


@pytest.fixture(scope="module")
def local_and_linear():
    """With learned positions."""
    return tiny_trained(
        "gpt_neo", attention_types=[[["linear", "local"], 1]], sliding_window_size=4,
        base_num_decoder_layers=2, **KEYS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "cls"),
    some_quick([("trained", None), ("trained", CLS), ("local_and_linear", CLS)], 3),
)
def test_every_hidden_token_is_that_of_a_plain_forward_pass(model, cls, request):
    trained = request.getfixturevalue(model)
    asked = []
    for seed, (length, hidden) in enumerate([(7, [6]), (7, [0, 3, 6]), (15, [1, 14])]):
        asked += [hide(random_ids(length, seed).astype(np.int32), hidden)] * 2
    scorer = Scorer(trained, MaskIds(MASK, cls))
    assert scorer.window == WINDOW - (cls is not None)
    done = []
    found = scorer.score(asked, lambda *numbers: done.append(numbers))
    assert done[-1] == (6, 6)
    for (ids, hidden, *_), score in zip(asked, found, strict=True):
        log_p = slow_log_p(trained, ids, hidden, cls)
        wanted = log_p[np.arange(len(hidden)), ids[list(hidden)]]
        np.testing.assert_allclose(score.log_probabilities_C, wanted, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(score.is_argmax_C, log_p.argmax(axis=-1) == ids[list(hidden)])


@given(st.integers(0, 40), st.integers(0, 2), st.integers(1, 12))
def test_each_token_is_hidden_once_in_a_window_as_full_as_can_be(count, start, window):
    ids = list(range(100, 100 + count))
    texts = list(scorer_inputs.mask_each_token(ids, start, window))
    assert [int(text.ids[place]) for text in texts for place in text.hidden] == ids[start:]
    for text in texts:
        (place,) = text.hidden
        assert 0 <= place < len(text.ids) == min(window, count)
        left = int(text.ids[0]) - 100
        assert text.ids.tolist() == ids[left : left + len(text.ids)]


def test_a_word_is_uncovered_from_its_beginning():
    texts = list(scorer_inputs.mask_word_left_to_right([5, 6, 7, 8], 1))
    assert [list(text.hidden) for text in texts] == [[1, 2, 3], [2, 3], [3]]
    assert all(text.ids.tolist() == [5, 6, 7, 8] for text in texts)


def masking(**keys):
    return configure(vocab_size=VOCAB, dataset_type="synthetic", mlm_training=True, **keys)


def test_mask_and_cls_are_those_of_the_training():
    for keys, expected in (({}, (40, None)), ({"mlm.mask_id": 3, "mlm.cls_token_id": 0}, (3, 0))):
        assert scorer_inputs.mask_ids(masking(**keys), tokenizer_of(mask_id=40)) == expected


@pytest.mark.parametrize(
    ("keys", "mask_id", "message"),
    [
        ({}, None, r"that of letters has none .*Set mlm.mask_id to the mask id"),
        ({}, VOCAB, rf"mask id is {VOCAB}, but the model has vocab_size={VOCAB}.*mlm.mask_id"),
        ({"mlm.mask_id": 100}, 1, r"mask id is 100.*Set mlm.mask_id"),
        ({"mlm.mask_id": 3, "mlm.cls_token_id": 64}, 1, r"CLS id is 64.*Set mlm.cls_token_id"),
    ],
)
def test_masks_that_cannot_be(keys, mask_id, message):
    refused(message, scorer_inputs.mask_ids, masking(**keys), tokenizer_of(mask_id=mask_id))


def test_cls_begins_a_row_once():
    assert scorer_inputs.strip_cls_prefix(tokenizer_of(CLS, BOS), CLS).prefix == (BOS,)
    assert scorer_inputs.strip_cls_prefix(tokenizer_of(BOS), CLS).prefix == (BOS,)
    assert scorer_inputs.strip_cls_prefix(tokenizer_of(CLS), None).prefix == (CLS,)


def scorer_of(trained):
    return Scorer(trained, MaskIds(MASK, CLS))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            " " + letters(range(16)),
            "task_files.lambada=file: the last word of passage 2, .* has 16 tok",
        ),
        (" \n", "of passage 2, .* has 0 tokens; it must have between 1 and 15"),
    ],
)
def test_words_that_cannot_be_hidden(trained, word, message):
    passages = [Passage(letters([1, 2]), " " + letters([3])), Passage(letters([1, 2]), word)]
    refused(message, lambada.score_masked, passages, "file", scorer_of(trained), tokenizer_of())


def test_wikitext_by_a_plain_loop(trained):
    window = WINDOW - 1
    ids = random_ids(window + 6, 3).tolist()
    pages = [" ".join([letters(ids[:4]), letters(ids[4:])]), letters([9, 8, 7, 6, 5, 4]) + " \n"]
    found = wikitext.score_masked(pages, "file", scorer_of(trained), tokenizer_of(BOS))
    total = 0.0
    for text in (ids, [9, 8, 7, 6, 5, 4]):
        whole = [BOS, *text]
        for place in range(1, len(whole)):
            # The first window is full; what lies behind it is read in the last one.
            left = 0 if place < window else len(whole) - window
            part = whole[left : left + window]
            total += slow_log_p(trained, part, [place - left])[0, whole[place]]
    num_tokens = len(ids) + 6
    words = sum(map(wikitext.count_words, pages))
    assert words == 2 + 2
    assert found.counts == {"pages": 2, "words": words, "tokens": num_tokens}
    sizes = {"word_pseudo_perplexity": words, "token_pseudo_perplexity": num_tokens}
    expected = {name: math.exp(-total / size) for name, size in sizes.items()}
    assert found.metrics == pytest.approx(expected, rel=1e-4)


def test_tasks_are_run_by_the_kind_of_model(trained, tmp_path):
    text = f"{letters(range(6))} {letters([6])}\n"
    (tmp_path / "l.txt").write_text(text, encoding="utf-8")
    (tmp_path / "w.raw").write_text(text, encoding="utf-8")
    config = configure(
        **KEYS, vocab_size=VOCAB, dataset_type="synthetic", eval_tasks=["lambada", "wikitext"],
        lambada_path=str(tmp_path / "l.txt"), wikitext_path=str(tmp_path / "w.raw"),
    )  # fmt: skip
    shown = []
    of_lambada, of_wikitext = tasks.run_tasks(
        tasks.read_tasks(config), trained, tokenizer_of(), config, shown.append
    )
    assert list(of_lambada.metrics) == ["accuracy", "pseudo_perplexity"]
    assert list(of_wikitext.metrics) == ["word_pseudo_perplexity", "token_pseudo_perplexity"]
    assert of_lambada.metrics["pseudo_perplexity"] == pytest.approx(
        math.exp(-slow_log_p(trained, range(7), [6])[0, 6]), rel=1e-4
    )
    assert "word pseudo perplexity" in "\n".join(shown)
