"""Downstream tasks: files, numbers by brute force, and the evaluations of a run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from MaxText.config.problems import ConfigurationError
from MaxText.errors import UserError
from MaxText.evaluation.downstream import (
    DownstreamTasks,
    Question,
    open_downstream_tasks,
    read_questions,
)
from MaxText.evaluation.scorers import Scorer
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import ByteTokenizer
from MaxText.monitoring.json_lines import stream_rows
from tests.evaluation.small_trained import full_log_probabilities, tiny_trained
from tests.programs import run
from tests.small_models import tiny_config

EOS, NUM_IDS = 256, 259
HOOK = """
from MaxText.run.hooks import hook


@hook(every=2)
def seen(info):
    print("seen:", info.metrics["update_ratio/layer_0"] > 0)
"""
QUESTIONS = [
    Question("tin is", ("a cat", "tin"), 1),
    Question("so", (" be", "it is", "é"), 0),  # its own white space; two bytes in a letter
    Question("", ("yes", "no no"), 1),  # no query: after the beginning-of-text id
]


@pytest.fixture(scope="module")
def tokenizer():
    return ModelTokenizer(ByteTokenizer(), (), (EOS,), Path("byte"))


@pytest.fixture(scope="module")
def trained():
    return tiny_trained(vocab_size=NUM_IDS)


def write(folder, name, rows):
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_numbers_are_those_of_the_model(trained, tokenizer):
    lines = []
    tasks = DownstreamTasks({"tin": QUESTIONS}, Scorer(trained), tokenizer)
    batches = []
    row = tasks.score(trained.params, lines.append, lambda: batches.append(1))

    def log_p(question, choice):
        space = "" if not question.query or choice.startswith(" ") else " "
        text = [tokenizer.prefix_token_id(), *question.query.encode(), *(space + choice).encode()]
        ids = text if not question.query else text[1:]
        scored = len((space + choice).encode())
        table = full_log_probabilities(trained, ids[:-1])
        return table[np.arange(len(ids) - 1), ids[1:]][-scored:].sum()

    right, right_per_byte, bits = [], [], []
    for question in QUESTIONS:
        sums = [log_p(question, choice) for choice in question.choices]
        num_bytes = [len(choice.strip().encode()) for choice in question.choices]
        per_byte = [x / size for x, size in zip(sums, num_bytes, strict=True)]
        right.append(np.argmax(sums) == question.gold)
        right_per_byte.append(np.argmax(per_byte) == question.gold)
        bits.append(-per_byte[question.gold] / math.log(2))
    assert row == {
        "eval/tasks/tin/accuracy": pytest.approx(np.mean(right)),
        "eval/tasks/tin/accuracy_per_byte": pytest.approx(np.mean(right_per_byte)),
        "eval/tasks/tin/bits_per_byte": pytest.approx(np.mean(bits), rel=1e-4),
    }
    (line,) = lines
    assert line.startswith("  tin: accuracy=")
    assert line.endswith("questions=3")
    assert batches  # the watchdog hears of progress
    # The weights are those of the call, not of the start.
    other = tiny_trained(vocab_size=NUM_IDS, scale=1.0).params
    changed = tasks.score(other, lines.append, lambda: None)
    assert changed["eval/tasks/tin/bits_per_byte"] != row["eval/tasks/tin/bits_per_byte"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"choices": ["a", "b"], "gold": 0}, 'has no text in field "query"'),
        ({"query": "q", "choices": ["a"], "gold": 0}, "needs two or more texts"),
        ({"query": "q", "choices": ["a", " "], "gold": 0}, "needs two or more texts"),
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, "from 0"),
        ({"query": "q", "choices": ["a", "b"], "gold": "1"}, '{"query": "The sky is"'),
    ],
)
def test_a_line_that_is_no_question(tmp_path, row, words):
    good = {"query": "q", "choices": ["a", "b"], "gold": 1}
    path = write(tmp_path, "t.jsonl", [good, row])
    with pytest.raises(UserError, match=r"downstream_task_files=.*t.jsonl:2") as refusal:
        read_questions([path])
    assert words in str(refusal.value)


def test_files_that_are_refused(tmp_path):
    rows = [{"query": "q", "choices": ["a", "b"], "gold": 1}]
    (tmp_path / "other").mkdir()
    paths = [write(tmp_path, "a b.jsonl", rows), write(tmp_path / "other", "a_b.jsonl", rows)]
    assert read_questions(paths[:1]) == {"a_b": [Question("q", ("a", "b"), 1)]}
    with pytest.raises(UserError, match=r"two files of the name a_b.*Rename .*other/a_b.jsonl"):
        read_questions(paths)
    with pytest.raises(UserError, match=r"none.jsonl cannot be read"):
        read_questions([str(tmp_path / "none.jsonl")])
    with pytest.raises(UserError, match=r"not JSON Lines"):
        read_questions([write(tmp_path, "a.csv", rows)])
    config = tiny_config()
    arguments = {"config": config, "model": None, "sharding": None, "tokenizer_folder": None}
    assert open_downstream_tasks({}, **arguments) is None
    with pytest.raises(UserError, match="needs a tokenizer, and the data set has none"):
        open_downstream_tasks({"a": QUESTIONS}, **arguments)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"mlm_training": True}, "need a causal model"),
        ({"ici_pipeline_parallelism": 3}, "the stages of a pipeline"),
    ],
)
def test_models_that_cannot_score(keys, words):
    with pytest.raises(ConfigurationError, match=words):
        tiny_config(downstream_task_files=["a.jsonl"], eval_interval=5, **keys)


def test_a_run_reports_them_at_each_evaluation(tmp_path, users_environment):
    rows = [
        {"query": "import", "choices": ["sys", "qqqq"], "gold": 0},
        {"query": "def main(", "choices": ["):", "zz"], "gold": 0},
    ]
    path = write(tmp_path, "code.jsonl", rows)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(4):
        (corpus / f"{number}.txt").write_text("import sys\n\n\ndef main():\n    return sys\n" * 40)
    arguments = (
        f"prepare_source={corpus} dataset_path={tmp_path / 'data'} validation_fraction=0.3 "
        f"base_output_directory={tmp_path} run_name=r steps=4 eval_interval=2 eval_steps=1 "
        f"downstream_task_files=[{path}] tokenizer_vocab_size=300 vocab_size=300 base_emb_dim=16 "
        "base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 base_mlp_dim=32 "
        "base_num_decoder_layers=1 max_target_length=32 per_device_batch_size=2 hardware=cpu "
        "enable_checkpointing=false enable_tensorboard=false loss_curve=false sample_tokens=0 "
        f"log_layer_metrics=true import_modules=[{tmp_path / 'seen.py'}] hooks=[seen]"
    )
    (tmp_path / "seen.py").write_text(HOOK)
    done = run("train.py", arguments.split(), tmp_path, users_environment)
    assert done.returncode == 0, done.stderr
    # The numbers of layers reach hooks and records, and do not disturb the end of the run.
    assert "seen: True" in done.stdout
    assert done.stdout.count("  code: accuracy=") == 2
    rows = [*stream_rows(tmp_path / "r" / "events.jsonl")]
    steps = [row for row in rows if row["event"] == "step"]
    assert all(row["learning/attention_entropy/layer_0"] > 0 for row in steps)
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [1, 3]
    for event in evaluations:
        assert event["eval/tasks/code/bits_per_byte"] > 0
        assert 0 <= event["eval/tasks/code/accuracy"] <= 1
        assert event["eval/avg_loss"] > 0
    # A bad file is refused before anything slow.
    Path(path).write_text("{}\n")
    done = run("train.py", arguments.split(), tmp_path, users_environment)
    assert done.returncode == 2
    assert "code.jsonl:1" in done.stderr
