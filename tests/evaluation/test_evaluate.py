"""eval.py as users type it, on tiny weights of both kinds."""

import json
import os
import shutil

import pyarrow
import pyarrow.parquet
import pytest

from MaxText.checkpointing.checkpoint_files import with_digests
from MaxText.config.data_sections import PreparationConfig
from MaxText.conversion.convert import convert
from MaxText.conversion.request import parse_arguments
from MaxText.errors import UserError
from MaxText.evaluation.evaluate import evaluate, parse_request
from MaxText.inference.checkpoint_config import load
from MaxText.input_pipeline.prepare.prepare import prepare
from tests.house.sources import REPOSITORY
from tests.inference.small_models import llama_folder
from tests.input_pipeline.small_data import contents, quiet
from tests.programs import run as start

TEXTS = ["The first text of the two.", "Grüße, 漢字!\n"]
NUM_BYTES = sum(len(text.encode()) for text in TEXTS)


def prepare_text(root, folder, **keys):
    keys |= {"prepare_source": str(root / "text.jsonl"), "prepare_num_workers": 1}
    prepare(PreparationConfig(validation_fraction=0.0, **keys), str(folder), quiet)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """hf/, run/ imported from it, text.jsonl, and data/ prepared from that with its tokenizer."""
    root = tmp_path_factory.mktemp("weights")
    llama_folder(root / "hf", with_bos=True)
    convert(parse_arguments([f"from=hf:{root / 'hf'}", f"to={root / 'run'}"]), quiet)
    (root / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    prepare_text(root, root / "data", tokenizer_path=str(root / "hf"), add_bos=True)
    return root


def run(root, *arguments, weights="hf", log=quiet):
    typed = [f"load_parameters_path={root / weights}", "jax_cache_dir=", *arguments]
    if not any(argument.startswith("per_device") for argument in arguments):
        typed.append("per_device_batch_size=2")
    return evaluate(load(typed, "eval.py"), log)


def data_of(root, **keys):
    keys = {"dataset_path": str(root / "data"), "eval_split": "train"} | keys
    return [f"{name}={value}" for name, value in keys.items()]


@pytest.mark.parametrize("stride", [-1, 8])
def test_a_folder_of_hugging_face(root, stride):
    lines = []
    files_before = sorted(os.listdir(root / "hf"))
    result = run(root, *data_of(root, eval_stride=stride), log=lines.append)
    full_result = result["data"]["total"]
    # Each document has its bytes, and an end.
    assert (full_result["targets"], full_result["bytes"]) == (NUM_BYTES + 2, NUM_BYTES)
    assert full_result["nats"] == result["data"]["sources"][0]["nats"]
    assert full_result["bits_per_byte"] > 8  # of random weights
    assert (result["data"]["eval_stride"], result["folder"]) == (stride, str(root / "hf"))
    assert result["tokenizer_sha256"] == result["data"]["sources"][0]["tokenizer_sha256"]
    printed = "\n".join(lines)
    assert "warning: " not in printed
    assert f"{full_result['loss']:.4f}" in printed
    assert "windows of 32 tokens, " + ("no overlap" if stride < 0 else "every 8 targets") in printed
    assert sorted(os.listdir(root / "hf")) == files_before


def test_text_is_read_with_the_tokenizer_of_the_weights(root, tmp_path):
    cache = f"data_cache_dir={tmp_path / 'cache'}"
    path = tmp_path / "text.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    ready = run(root, *data_of(root))["data"]["total"]
    for weights in ("hf", "run"):
        result = run(root, f"grain_eval_files={path}", cache, weights=weights)["data"]["total"]
        assert result["nats"] == pytest.approx(ready["nats"], rel=1e-6)
        assert (result["targets"], result["bytes"]) == (ready["targets"], ready["bytes"])


def test_a_run_keeps_its_scores_and_nothing_of_it_changes(root, tmp_path):
    run_folder = shutil.copytree(root / "run", tmp_path / "run")
    shutil.rmtree(run_folder / "eval", ignore_errors=True)
    files_before = contents(run_folder)
    lines = []
    for number in range(2):
        run(root, *data_of(root), "eval_steps=1", weights=run_folder, log=lines.append)
        name = "0.json" if number == 0 else "0-2.json"
        assert lines[-1] == f"written to {run_folder / 'eval' / name}"
    assert any(line.startswith("a part only: 1 batches") for line in lines)
    written = json.loads((run_folder / "eval" / "0.json").read_text())
    assert written["data"]["eval_steps"] == 1
    assert written["data"]["sources"][0]["tokenizer_sha256"]
    assert written["weights"] == f"parameters of {run_folder / 'checkpoints' / '0'}"
    files_after = contents(run_folder)
    assert {name: files_after[name] for name in files_before} == files_before
    assert {name.split("/")[0] for name in files_after.keys() - files_before.keys()} == {"eval"}


def test_the_file_that_is_asked_for(root, tmp_path):
    path = tmp_path / "new" / "scores.json"
    for steps in (1, 2):
        result = run(root, *data_of(root), f"eval_output={path}", f"eval_steps={steps}")
        assert json.loads(path.read_text()) == result
    assert os.listdir(path.parent) == ["scores.json"]


def test_tasks_alone_and_with_data(root, tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text('{"text": "one two three"}\n')
    task = ["eval_tasks=[lambada]", f"task_files.lambada={path}"]
    only_tasks, with_data = run(root, *task), run(root, *task, *data_of(root))
    for result in (only_tasks, with_data):
        assert [score["task"] for score in result["tasks"]] == ["lambada"]
    assert "data" not in only_tasks
    assert with_data["data"]["total"]["targets"] == NUM_BYTES + 2


def test_data_of_another_tokenizer_are_warned_of(root, tmp_path):
    prepare_text(root, tmp_path / "bytes", tokenizer_path="bytes")
    lines = []
    run(root, *data_of(root, dataset_path=tmp_path / "bytes"), log=lines.append)
    assert ["of 257 ids" in line for line in lines if line.startswith("warning: ")] == [True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval_split=test"], "eval_split=test: this split does not exist"),
        (["dataset_path=nowhere"], "dataset_path=nowhere"),
        (["vocab_size=200"], "vocab_size=200"),
        (["tokenizer_path=nowhere.json"], "tokenizer_path=nowhere.json: no such file"),
        (["eval_output=."], "eval_output=. cannot be written"),
        (["eval_output=pyproject.toml/a.json"], "cannot be written"),
        (["harness.tasks=[a]", "harness.task_path=nowhere"], "harness"),
    ],
)
def test_mistakes(root, monkeypatch, arguments, message):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(UserError, match=message):
        run(root, *{key.split("=")[0]: key for key in [*data_of(root), *arguments]}.values())


def test_scores_never_replace_a_file_that_is_scored(root, tmp_path):
    passages = tmp_path / "lambada.txt"
    passages.write_text("one two three\n")
    (tmp_path / "link.json").symlink_to(passages)
    task = ["eval_tasks=[lambada]", f"task_files.lambada={passages}"]
    with pytest.raises(UserError, match=r"is the file of task_files\.lambada"):
        run(root, *task, f"eval_output={tmp_path / 'link.json'}")
    assert passages.read_text() == "one two three\n"


def test_the_program(root, tmp_path, users_environment):
    weights = [f"load_parameters_path=hf:{root / 'hf'}", "per_device_batch_size=2"]
    done = start("eval.py", [*weights, *data_of(root)], tmp_path, users_environment)
    assert done.returncode == 0
    assert "\ntotal " in done.stdout
    assert list(tmp_path.iterdir()) == []
    # Every module that is imported is named on stderr.
    wrong, options = [*weights, *data_of(root, eval_output=".")], ("-X", "importtime")
    done = start("eval.py", wrong, tmp_path, users_environment, options=options)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    (error,) = [line for line in lines if not line.startswith("import time:")]
    assert error.startswith("error: eval_output=. cannot be written: it is a folder, or its folder")
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "MaxText.evaluation.evaluate" in imported
    assert "jax" not in imported


def test_what_is_scored_is_typed_or_comes_with_the_weights(tmp_path):
    folder = tmp_path / "checkpoints" / "0"
    (folder / "items").mkdir(parents=True)
    (folder / "items" / "manifest.ocdbt").write_text("")
    (folder / "metadata").mkdir()
    config = {"dataset_path": "trained_on", "grain_eval_files": "evaluated_on", "eval_steps": 2}
    config |= {"mlm_training": True, "mlm": {"mask_id": 3, "cls_token_id": 4}}
    metadata = with_digests({"config": config}, {}, {})
    (folder / "metadata" / "metadata").write_text(json.dumps(metadata))

    def read(*arguments):
        loaded = load([f"load_parameters_path={tmp_path}", *arguments], "eval.py")
        config, scores_data = parse_request(loaded)
        data, steps = config.data, config.evaluation.eval_steps
        return config.masking, (data.dataset_path, data.grain_eval_files, steps), scores_data

    masking, (_, files, steps), scores_data = read()
    assert scores_data
    assert (files, steps) == ("evaluated_on", -1)
    assert (masking.mlm_training, masking.mlm.mask_id, masking.mlm.cls_token_id) == (True, 3, 4)
    assert read("dataset_path=other", "eval_steps=2")[1] == ("other", "", 2)
    assert read("dataset_type=synthetic", "dataset_path=", "grain_eval_files=")[1][2] == 2
    tasks = "harness.tasks=[a]", "mlm_training=false"
    assert not read(*tasks)[2]
    assert read(*tasks, "eval_split=train")[2]
