"""LAMBADA and WikiText: files, rules of text, and numbers that are known beforehand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from MaxText.config.loading import load_config
from MaxText.errors import UserError
from MaxText.evaluation import tasks
from MaxText.evaluation.scorers import Scorer
from MaxText.evaluation.scores import TaskScore, task_table
from MaxText.evaluation.tasks import Passage
from MaxText.inference.model_tokenizer import ModelTokenizer, encode_pair
from MaxText.input_pipeline.tokenization.load_tokenizer import ByteTokenizer
from MaxText.monitoring.step_line import perplexity
from tests.evaluation.small_trained import full_log_probabilities, tiny_trained

EOS, BOS, NUM_IDS = 256, 257, 259
WINDOW = 16
PAGES = (
    " = Tin = \n \n Tin is a metal ; it melts at 231 @.@ 9 ° C . \n \n"
    " = = Uses = = \n \n It was ( and is ) sold in 1 @,@ 000 kg lots . \n \n"
    " = The sea = \n \n He said \" no \" to John 's dogs ' well @-@ known home . \n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return ModelTokenizer(ByteTokenizer(), (), (EOS,), Path("byte"))


@pytest.fixture(scope="module")
def trained():
    return tiny_trained(vocab_size=NUM_IDS)


def following(trained, ids, count):
    """log p of each of the last `count` ids after all before it."""
    log_p = full_log_probabilities(trained, list(ids[:-1]))
    return log_p[np.arange(len(ids) - 1), list(ids[1:])][-count:]


def test_passages_of_both_kinds_of_file(tmp_path):
    passages = ["the cat sat on the mat", "a  b", "to be or\nnot to be"]
    rows = tmp_path / "lambada.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    mat, be = Passage("the cat sat on the", " mat"), Passage("to be or\nnot to", " be")
    assert tasks.read_passages(str(rows)) == [mat, Passage("a ", " b"), be]
    plain = tmp_path / "lambada.txt"
    plain.write_text("the cat sat on the mat\n\na b \n")
    assert tasks.read_passages(str(plain)) == [mat, Passage("a", " b")]


def test_lambada_by_brute_force(trained, tokenizer):
    passages = [Passage("abc def", " gh"), Passage("it is so very long a text", " end")]
    metrics, counts = tasks.score_lambada(passages, Scorer(trained), tokenizer)
    # All of the window is read: 16 ids before the last.
    sums = [
        following(trained, (a + b).encode()[-(WINDOW + 1) :], len(b)).sum() for a, b in passages
    ]
    assert metrics["perplexity"] == pytest.approx(math.exp(-np.mean(sums)), rel=1e-4)
    assert counts == {"passages": 2, "tokens": 3 + 4}


def test_accuracy_counts_whole_words(trained, tokenizer, monkeypatch):
    right = [True, False, True, True]
    scorer = Scorer(trained)
    scores = [SimpleNamespace(log_probability=0.0, is_greedy=greedy) for greedy in right]
    monkeypatch.setattr(scorer, "score_continuations", lambda *_: scores)
    metrics, _ = tasks.score_lambada([Passage("a", " b")] * 4, scorer, tokenizer)
    assert metrics["accuracy"] == 0.75
    assert metrics["accuracy_standard_error"] == pytest.approx(0.25)


def test_pages_begin_at_their_titles(tmp_path):
    file = tmp_path / "wiki.test.raw"
    file.write_text(" \n" + PAGES, encoding="utf-8")
    pages = tasks.read_pages(str(file))
    assert "\n".join(pages) == PAGES
    assert [page.split("\n")[0] for page in pages] == [" = Tin = ", " = The sea = "]
    assert "Uses" in pages[0]
    rows = tmp_path / "wiki.jsonl"
    rows.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    assert tasks.read_pages(str(rows)) == pages


def test_titles():
    titles = [" = Robert Boulter = ", "= A = B ="]
    other_lines = [
        " = = Career = = ",
        " = = = 2000 to 2005 = = = ",
        " = ",
        " = = ",
        "= x = =",
        "a = b = ",
        "= 5",
        "",
    ]
    for line in titles + other_lines:
        assert len(tasks.split_pages(f"text\n{line}\nmore")) == 1 + (line in titles), line


def test_text_as_people_write_it():
    assert [tasks.detokenized(page) for page in tasks.split_pages(PAGES)] == [
        " = Tin =\n\nTin is a metal; it melts at 231.9°C.\n\n"
        "== Uses ==\n\nIt was (and is) sold in 1,000 kg lots.\n",
        " = The sea =\n\nHe said \"no\" to John's dogs' well-known home.\n",
    ]


def test_wikitext_by_brute_force(trained, tokenizer):
    pages = [" = Tin = \n \n Tin is a metal . \n", " = A 1 @.@ 5 ° sea = \n \n It is wet . \n"]
    metrics, counts = tasks.score_wikitext(pages, Scorer(trained), tokenizer)
    loss = 0.0
    for page in pages:
        ids = list(tasks.detokenized(page).encode())
        # Two windows: the first begins after the id that begins a text, the last is moved left.
        assert 2 * WINDOW > len(ids) > WINDOW
        loss -= following(trained, [BOS, *ids[:WINDOW]], WINDOW).sum()
        loss -= following(trained, ids[-(WINDOW + 1) :], len(ids) - WINDOW).sum()
    num_bytes = len("".join(pages).encode())
    num_words = sum(1 + len(page.split()) + 1 for page in pages)
    num_tokens = sum(len(tasks.detokenized(page).encode()) for page in pages)
    assert num_tokens < num_bytes
    assert counts == {"pages": 2, "words": num_words, "bytes": num_bytes, "tokens": num_tokens}
    expected = {
        "word_perplexity": math.exp(loss / num_words),
        "byte_perplexity": math.exp(loss / num_bytes),
        "bits_per_byte": loss / num_bytes / math.log(2),
    }
    assert metrics == pytest.approx(expected, rel=1e-4)


WIKI_LETTERS = st.sampled_from([*"ab sN1@-,.:;!?()[]{}\"'=°\n", " 's ", " @-@ ", "= = ", " N "])


@pytest.fixture(scope="module")
def harness_rules():
    return pytest.importorskip(
        "lm_eval.tasks.wikitext.preprocess_wikitext", reason="needs pip install '.[lm-eval]'"
    )


@given(page=st.lists(WIKI_LETTERS, max_size=60).map("".join))
def test_the_rules_of_the_harness(harness_rules, page):
    assert tasks.detokenized(page) == harness_rules.wikitext_detokenizer({"page": page})
    _, page_words = harness_rules.process_results({"page": page}, (0.0,))["word_perplexity"]
    assert tasks.count_words(page) == page_words


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("lambada", "a.jsonl", b'{"text": "a b"}\n{"text": "word"}\n', ":2 has fewer than two"),
        ("lambada", "a.jsonl", b'{"text": ""}\n', r"a\.jsonl:1 has fewer than two words \(''\)"),
        ("lambada", "a.jsonl", b'{"text": "a b"}\n{"txt": "a"}', ':2 has no .* "text"; .*txt'),
        ("lambada", "a.jsonl", b"[1]\n", ':1 has no text in field "text"; its fields: none'),
        ("lambada", "a.txt", b"\n \n", "is empty"),
        ("lambada", "a.txt", b"two words\nword\n", ":2 has fewer than two"),
        ("wikitext", "a.raw", None, "cannot be read: No such file"),
        ("wikitext", "a.raw", b" \n \n", "is empty"),
        ("wikitext", "a.jsonl", b'{"page": "x"}\n{"page": " "}', ':2 has an empty "page"'),
        ("wikitext", "a.jsonl", b'{"text": "x"}', ':1 has no text in field "page"; .*: text'),
    ],
)
def test_files_that_cannot_be_used(task, name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    keys = {"eval_tasks": [task], f"task_files.{task}": str(tmp_path / name)}
    with pytest.raises(UserError, match=rf"task_files\.{task}=.*{message}"):
        tasks.read_tasks(load_config(dataset_type="synthetic", **keys))


def encode(text):
    """A tokenizer whose words take the space before them, in texts that begin with an id."""
    return [99, *(ord(letter) for letter in text.replace(" x", "X"))]


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("ab", " x", ([99, 97, 98], [ord("X")])),
        ("ab ", "x", ([99, 97, 98], [ord("X")])),
        ("", "x", ([99], [ord("x")])),
        ("  ", "x", ([99], [32, ord("X")])),
    ],
)
def test_spaces_belong_to_the_word_after_them(context, continuation, expected):
    assert encode_pair(encode, context, continuation, prefix_id=99) == expected
    without = encode_pair(lambda text: encode(text)[1:], context, continuation, prefix_id=99)
    assert without == ([i for i in expected[0] if i != 99] or [99], expected[1])


def test_the_first_id_is_what_the_settings_say(tmp_path):
    plain = ByteTokenizer()
    plain.save(tmp_path)

    def prefix_token_id(prefix, eos_ids):
        return ModelTokenizer(plain, prefix, eos_ids, tmp_path).prefix_token_id()

    assert prefix_token_id((), (EOS,)) == BOS
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"tokenizer_type": "byte", "bos_token": null}')
    assert (prefix_token_id((), (EOS,)), prefix_token_id((BOS,), (EOS,))) == (EOS, BOS)
    plain.entry = plain.entry.model_copy(update={"bos_id": None, "eos_id": None})
    assert prefix_token_id((), (7,)) == 7
    with pytest.raises(UserError, match="neither a bos nor an eos token"):
        prefix_token_id((), ())


def test_tasks_are_run_and_shown(trained, tokenizer, tmp_path):
    (tmp_path / "l.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    (tmp_path / "w.raw").write_text(PAGES, encoding="utf-8")
    config = load_config(
        dataset_type="synthetic",
        eval_tasks=["lambada", "wikitext"],
        task_files={"lambada": str(tmp_path / "l.jsonl"), "wikitext": str(tmp_path / "w.raw")},
    )
    shown = []
    scores = tasks.run_tasks(tasks.read_tasks(config), trained, tokenizer, config, shown.append)
    assert [score.task for score in scores] == ["lambada", "wikitext"]
    text = "\n".join(shown)
    for name in ("perplexity", "word perplexity", "bits per byte", "2 passages", "2 pages"):
        assert name in text
    stored = json.loads(json.dumps([score._asdict() for score in scores]))
    assert stored[1]["metrics"] == scores[1].metrics
    assert stored[0]["path"] == str(tmp_path / "l.jsonl")


def test_numbers_too_large_to_write_are_infinite():
    assert perplexity(1000.0) == math.inf
    assert "inf" in task_table([TaskScore("lambada", "f", {"perplexity": math.inf}, {}, 1.0)])
