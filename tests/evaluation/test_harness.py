"""lm-evaluation-harness over our models, against our own tasks and against transformers."""

import functools
import importlib
import json
import sys
from pathlib import Path

import pytest

from MaxText.config.loading import load_config
from MaxText.conversion.convert import convert
from MaxText.conversion.request import parse_arguments
from MaxText.errors import UserError
from MaxText.evaluation import tasks
from MaxText.evaluation.scorers import Scorer
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import ByteTokenizer
from tests.conversion.random_runs import write_random_run
from tests.evaluation.small_trained import tiny_trained
from tests.refusals import refused

# Warnings of the harness and of its libraries are not this project's.
pytestmark = pytest.mark.filterwarnings("default")

HINT = "needs pip install '.[lm-eval]'"
TEXT = """the cat sat on a mat while dogs ran over hills and birds sang songs of old towers near
rivers where people wrote letters to friends about apples pears bread and warm evenings in summer"""
WORDS = TEXT.split()
WINDOW = 48


@pytest.fixture(scope="module", autouse=True)
def offline():
    """No test may ask the network, and data sets are written where tests may."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        yield patch


@pytest.fixture(scope="module")
def libraries():
    """(torch, transformers, lm_eval): what answers are compared with."""
    hint = "needs pip install '.[torch,lm-eval]' accelerate"
    pytest.importorskip("accelerate", reason=hint)
    names = ("torch", "transformers", "lm_eval")
    return tuple(pytest.importorskip(name, reason=hint) for name in names)


@pytest.fixture(scope="module")
def tokenizer():
    return ModelTokenizer(ByteTokenizer(), (), (256,), Path("byte"))


@pytest.fixture(scope="module")
def trained():
    return tiny_trained(vocab_size=259, max_target_length=WINDOW)


def sentence(number, length):
    return " ".join(WORDS[(number * 7 + i * (3 + number % 5)) % len(WORDS)] for i in range(length))


def save_tokenizer(transformers, folder, *, bos):
    """A BPE of a few hundred ids, all ASCII; with `bos`, texts begin with <s> as Llama's do."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"] if bos else ["<|endoftext|>"]
    alphabet = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # and space, line end
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([sentence(n, 30) for n in range(20)], trainer)
    named = {"bos_token": special[0], "eos_token": special[-1]}
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(
        folder
    )
    return tokenizer.get_vocab_size()


def save_model(libraries, family, folder):
    """A random model whose greedy text is not one token throughout."""
    torch, transformers, _ = libraries
    vocab_size = save_tokenizer(transformers, folder, bos=family == "llama")
    common = {"vocab_size": vocab_size, "initializer_range": 0.3, "bos_token_id": 0}
    if family == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=WINDOW,
            eos_token_id=1,
            **common,
        )
    else:
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=WINDOW, eos_token_id=0, **common
        )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def task(folder, name, rows, **settings):
    """Writes a task over rows; returns its name."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"task": name, "dataset_path": "json", "test_split": "test"}
    source["dataset_kwargs"] = {"data_files": {"test": str(data)}}
    (folder / f"{name}.yaml").write_text(json.dumps(source | settings))
    return name


def write_tasks(folder, offline):
    """A task of every kind of request, over twelve rows."""
    rows = []
    for number in range(12):
        # None, below the window, beyond it; with white space at the end; with control tokens.
        question = sentence(number, (0, 3, 8, 40)[number % 4])
        question += " " * (question != "" and number % 3 == 1)
        if number in (5, 6):
            question = ("</s> <|endoftext|>", "<s>")[number - 5] + question
        answers = [sentence(number + 20 + i, 1 + i) for i in range(3)]
        row = {"question": question, "answers": answers, "right": number % 3}
        rows.append(row | {"text": sentence(number, 2 + 11 * number), "word": " " + WORDS[number]})

    def asking(kind, question, answer, *metrics, **settings):
        metric_list = [{"metric": name, "higher_is_better": True} for name in metrics]
        task_config = {"output_type": kind, "doc_to_text": question, "doc_to_target": answer}
        return {**task_config, "metric_list": metric_list, "metadata": {"version": 1.0}} | settings

    def generating(**settings):
        generation_task = asking("generate_until", "{{question}} go", "{{word}}", "exact_match")
        generation_task["metric_list"][0]["aggregation"] = "mean"
        return generation_task | {"generation_kwargs": settings}

    tasks = {
        "our_word": asking("loglikelihood", "{{question}}", "{{word}}", "perplexity", "acc"),
        "our_choice": asking(
            "multiple_choice",
            "{{question}}",
            "right",
            "acc",
            "acc_norm",
            doc_to_choice="{{answers}}",
        ),
        "our_rolling": asking(
            "loglikelihood_rolling",
            "",
            "{{text}}",
            "word_perplexity",
            "byte_perplexity",
            "bits_per_byte",
        ),
        "our_generated": generating(until=["s", "th"], max_gen_toks=12, do_sample=False),
        "our_long": generating(until=["\n\n"], max_gen_toks=20, temperature=0.0),
    }
    offline.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    return [task(folder, name, rows, **settings) for name, settings in tasks.items()]


def answers(lm_eval, model, names, folder):
    """(metrics by task, what was answered by task and request)."""
    make = importlib.import_module("lm_eval.tasks").TaskManager
    manager = make(include_path=str(folder), include_defaults=False)
    keys = {"task_manager": manager, "bootstrap_iters": 0}
    outputs = lm_eval.simple_evaluate(model=model, tasks=names, **keys)
    results = [
        (t, n, value)
        for t, task_results in outputs["results"].items()
        for n, value in task_results.items()
    ]
    metrics = {(task, name): value for task, name, value in results if isinstance(value, float)}
    samples = {
        name: [sample["resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for name, rows in outputs["samples"].items()
    }
    return metrics, samples


def flat(responses):
    """Numbers and texts of nested lists, in their order."""
    if isinstance(responses, list | tuple):
        return [value for response in responses for value in flat(response)]
    return [responses]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_answers_are_those_of_transformers(libraries, family, tmp_path, offline):
    lm_eval = libraries[2]
    from lm_eval.models.huggingface import HFLM

    from MaxText.evaluation.harness import MaxTextLM

    save_model(libraries, family, tmp_path / "model")
    names = write_tasks(tmp_path / "tasks", offline)
    reference = HFLM(pretrained=str(tmp_path / "model"), device="cpu", batch_size=1)
    expected = answers(lm_eval, reference, names, tmp_path / "tasks")
    actual = MaxTextLM.open(
        f"load_parameters_path=hf:{tmp_path / 'model'} dtype=float32 per_device_batch_size=3 "
        "hardware=cpu jax_cache_dir=''",
        lambda line: None,
    )
    metrics, samples = answers(lm_eval, actual, names, tmp_path / "tasks")

    assert samples.keys() == expected[1].keys() == set(names)
    compared = 0
    for name in names:
        for mine, expected_value in zip(flat(samples[name]), flat(expected[1][name]), strict=True):
            compared += 1
            if isinstance(expected_value, float):
                assert mine == pytest.approx(expected_value, abs=1e-4, rel=1e-5), name
            else:
                assert mine == expected_value, name
    assert compared >= 12 * (2 + 6 + 1 + 1 + 1)
    assert metrics.keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name
    texts = flat(samples["our_generated"]) + flat(samples["our_long"])
    assert len(set(texts)) > 12  # the comparison of texts compares something


# Contexts with and without text, answers that end a word, and one beyond the window.
PAIRS = [
    ("", "The cat"),
    ("The cat sat on a", " mat"),
    ("songs of old", " towers near rivers"),
    ("dogs ran over hills, and birds sang " * 3, "songs"),
]


@pytest.mark.slow
@pytest.mark.parametrize("add_bos", [False, True])
def test_an_export_is_opened_by_the_harness(libraries, add_bos, tmp_path):
    """HFLM answers from an exported folder as we do from the run."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from MaxText.evaluation.harness import MaxTextLM

    folder = tmp_path / "run"
    write_random_run(folder, "qwen3", add_bos=add_bos, max_target_length=WINDOW)
    lines = []
    convert(parse_arguments([f"from={folder}", f"to=hf:{tmp_path / 'exported'}"]), lines.append)
    assert "tokenizer.json, tokenizer_config.json" in "\n".join(lines)

    reference = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", batch_size=1)
    ours = MaxTextLM.open(
        f"load_parameters_path={folder} dtype=float32 matmul_precision=highest hardware=cpu "
        "jax_cache_dir=''",
        lambda line: None,
    )
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    expected = reference.loglikelihood(requests)
    for actual, reference_answer in zip(ours.loglikelihood(requests), expected, strict=True):
        assert actual[0] == pytest.approx(reference_answer[0], abs=1e-4, rel=1e-5)
        assert actual[1] == reference_answer[1]
    assert len({round(answer[0], 3) for answer in expected}) == len(PAIRS)
    for text in ("The cat sat", "apples, pears"):
        assert ours.tok_encode(text) == reference.tok_encode(text)
        assert reference.tok_encode(text)[0] == 0 or not add_bos


def request(folder, *names):
    keys = {"harness.tasks": list(names), "harness.task_path": str(folder)}
    return load_config(dataset_type="synthetic", **keys)


@pytest.fixture
def run(trained, tokenizer, tmp_path, offline, monkeypatch):
    """Runs tasks of a folder: (results, lines shown)."""
    manager = pytest.importorskip("lm_eval.tasks", reason=HINT)
    # The thousands of tasks of the harness take seconds to list.
    own_tasks_only = functools.partial(manager.TaskManager, include_defaults=False)
    monkeypatch.setattr(manager, "TaskManager", own_tasks_only)
    offline.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(folder, *names):
        shown = []
        config = request(folder, *names)
        return tasks.run_harness(trained, tokenizer, config, shown.append), shown

    return run


LAMBADA = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' '+text.split(' ')[-1]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}


def test_our_lambada_is_the_harness_s(run, trained, tokenizer, tmp_path):
    passages = [sentence(number, 4 + number) for number in range(9)]
    name = task(tmp_path / "tasks", "passages", [{"text": text} for text in passages], **LAMBADA)
    harness_results, shown = run(tmp_path / "tasks", name)
    results = harness_results["results"][name]
    path = str(tmp_path / "tasks" / "passages.jsonl")
    passages = tasks.read_passages(path)
    actual, _ = tasks.score_lambada(passages, Scorer(trained), tokenizer)
    assert results["perplexity,none"] == pytest.approx(actual["perplexity"], rel=1e-6)
    assert results["acc,none"] == actual["accuracy"]
    assert results["acc_stderr,none"] == pytest.approx(actual["accuracy_standard_error"])
    assert results["perplexity_stderr,none"] > 0
    assert harness_results["n-samples"][name]["effective"] == 9
    assert harness_results["harness_version"]
    assert json.loads(json.dumps(harness_results)) == harness_results
    assert any(name in line and "perplexity" in line for line in shown)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"doc_to_text": "{{missing_field.x}}"},
            "(?s)broken cannot be read: UndefinedError.*fix the task file",
        ),
        ({"dataset_kwargs": {"data_files": {"test": "none.jsonl"}}}, "FileNotFoundError"),
        ({"metric_list": [{"metric": "no_such_metric"}]}, "broken cannot be read"),
        ({"no_such_setting": 1}, "broken cannot be read: TypeError.*no_such_setting"),
        ({"doc_to_target": ""}, r"the answer '' has 0 tokens"),
    ],
)
def test_tasks_that_cannot_be_run(run, settings, message, tmp_path):
    name = task(tmp_path / "tasks", "broken", [{"text": "a b"}], **(LAMBADA | settings))
    refused(message, run, tmp_path / "tasks", name)


def test_tasks_that_are_not_there(run, tmp_path):
    folder = tmp_path / "tasks"
    task(folder, "passages", [{"text": "a b"}], **LAMBADA)
    refused(r"=pasages: no such task.*Nearest: passages", run, folder, "pasages")


def test_arguments_of_the_harness(monkeypatch):
    pytest.importorskip("lm_eval", reason=HINT)
    from lm_eval.api.registry import get_model

    from MaxText.evaluation.harness import MaxTextLM

    assert get_model("maxtext") is MaxTextLM
    monkeypatch.setattr(MaxTextLM, "open", staticmethod(lambda arguments: arguments))
    arguments = ["load_parameters_path=hf:models/gpt2", "mesh_axes=[data,fsdp]", "dtype=float32"]
    typed = f"{arguments[0]},{arguments[1]}, {arguments[2]}"
    assert MaxTextLM.create_from_arg_string(typed, {"device": None}) == arguments
    lm = MaxTextLM.create_from_arg_obj({"load_parameters_path": "run", "eval_steps": 3})
    assert lm == ["load_parameters_path=run", "eval_steps=3"]


def test_without_the_harness(monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[lm-eval\]'"):
        tasks.find_tasks(("arc_easy",), "")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "MaxText.evaluation.harness", raising=False)
    with pytest.raises(UserError, match=r"not installed .*pip install '\.\[lm-eval\]'"):
        importlib.import_module("MaxText.evaluation.harness")


def test_a_folder_of_tasks_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"harness.task_path=.*none is not a folder"):
        tasks.find_tasks(("arc_easy",), str(tmp_path / "none"))
