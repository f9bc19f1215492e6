"""The Python interface, as docs/how-to/use_from_python.md shows it."""

import importlib
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import MaxText as mt
from MaxText import api
from MaxText.layers.feed_forward.mlp import MLP
from MaxText.layers.part import record, tag
from tests.house.sources import REPOSITORY
from tests.small_models import TINY

KEYS = {name: TINY[name] for name in TINY if name not in ("dataset_type", "scan_layers")} | {
    "vocab_size": 300,
    "tokenizer_vocab_size": 300,
    "tokenizer_type": "byte",
    "jax_cache_dir": "",
    "per_device_batch_size": 2,
    "steps": 4,
    "step_log_period": 1,
    "eval_interval": 2,
    "eval_steps": 2,
    "validation_fraction": 0.2,
    "enable_tensorboard": False,
    "loss_curve": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A configuration, the folder of its run, and the run's events."""
    place = tmp_path_factory.mktemp("api")
    (place / "text").mkdir()
    for number in range(10):
        (place / "text" / f"{number}.txt").write_text(f"text number {number}. " * 20)
    paths = {"prepare_source": place / "text", "dataset_path": place / "data"}
    paths |= {"base_output_directory": place / "out", "data_cache_dir": place / "cache"}
    keys = KEYS | {name: str(path) for name, path in paths.items()}
    config = mt.load_config(**keys, run_name="r")
    events = []
    return config, mt.train(config, callbacks=[events.append]), events


@pytest.fixture(scope="module")
def run(trained):
    return mt.load(trained[1], dtype="float32")


def test_training_reports_every_step_and_resumes_as_complete(trained):
    config, folder, events = trained
    assert [event["step"] for event in events if event["event"] == "step"] == [0, 1, 2, 3]
    assert events[-1]["reason"] == "completed"
    assert mt.train(config) == folder  # the lock of the run folder is free again
    columns = mt.metrics(folder)
    reported = [event["learning/loss"] for event in events if event["event"] == "step"]
    losses = columns["learning/loss"]
    np.testing.assert_array_equal(losses[~np.isnan(losses)], reported)


HOOKS = """
import json

from MaxText.run.hooks import StepInfo, hook


@hook(every=2)
def fragile(info: StepInfo) -> None:
    if not (info.run_folder / "repaired").exists():
        raise RuntimeError("not yet\\nrepaired")
    with (info.run_folder / "hook.jsonl").open("a") as file:
        shape = info.params["token_embedder"]["embedding"].shape
        row = [info.step, info.metrics["loss"], int(info.state.step), shape]
        file.write(json.dumps(row) + "\\n")
"""


def test_hooks_of_a_file_and_from_python_that_fail_and_go_on(trained, tmp_path):
    config, folder, _ = trained
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    keys = {"import_modules": [str(tmp_path / "my_hooks.py")], "hooks": ["fragile"]}
    keys |= {"prepare_source": config.preparation.prepare_source}
    keys |= {"dataset_path": config.data.dataset_path}
    keys |= {"base_output_directory": config.run.base_output_directory}
    hooked = mt.load_config(**KEYS | keys, run_name="hooked")
    steps = []
    hooks = [lambda info: steps.append(info.step), mt.Hook(lambda info: steps.append("every"), 3)]
    with pytest.raises(mt.UserError) as caught:
        mt.train(hooked, hooks=hooks)
    message = r"hook fragile failed after step 1: RuntimeError: not yet \(my_hooks\.py:10\)"
    assert re.fullmatch(message, str(caught.value))
    assert steps == [0]  # those of the key come first
    saved = folder.parent / "hooked"
    assert (saved / "checkpoints" / "1").is_dir()
    (saved / "repaired").touch()
    assert mt.train(hooked, hooks=hooks) == saved
    assert steps == [0, 2, "every", 3, "every"]
    rows = [json.loads(line) for line in (saved / "hook.jsonl").read_text().splitlines()]
    losses = mt.metrics(folder)["learning/loss"]
    (shape,) = {tuple(row[-1]) for row in rows}
    assert [row[:3] for row in rows] == [[3, losses[3], 4]]
    assert shape == (300, 32)
    # Neither a hook nor its failure changes the training or the evaluations.
    for name in ("learning/loss", "eval/avg_loss"):
        np.testing.assert_array_equal(mt.metrics(saved)[name], mt.metrics(folder)[name])
    with pytest.raises(
        mt.UserError, match=r"hooks: no hook is called 'other' \(registered: .*fragile"
    ):
        mt.train(mt.load_config(**KEYS | keys | {"hooks": ["other"]}, run_name="unknown"))
    assert not (folder.parent / "unknown").exists()


def test_names_of_the_package_are_the_functions_of_the_api(trained):
    for program in ("train", "arena"):  # as the arena does, which imports the whole package
        importlib.import_module(f"MaxText.{program}")
    assert mt.__all__ == api.__all__
    for name in mt.__all__:
        assert getattr(mt, name) is getattr(api, name), name


def test_logits_of_text_and_of_ids(run):
    ids = run.tokenizer.encode("text")
    np.testing.assert_array_equal(run.logits("text"), run.logits(ids))
    both = run.logits([ids, ids[::-1]])
    assert both.shape == (2, len(ids), 300)
    np.testing.assert_allclose(both[0], run.logits(ids), atol=1e-5)
    with pytest.raises(ValueError, match=r"\(0,\)"):
        run.logits([])


def test_loss_of_batches_is_that_of_the_last_evaluation(trained, run):
    config, _, events = trained
    reported = [event for event in events if event["event"] == "evaluation"][-1]["eval/avg_loss"]
    batches = itertools.islice(mt.batches(config, "eval"), config.evaluation.eval_steps)
    np.testing.assert_allclose(run.loss(batches), reported, rtol=1e-5)
    assert next(mt.batches(config)).tokens_BT.shape == (2, 16)
    with pytest.raises(mt.UserError, match="split='test'"):
        mt.batches(config, "test")


def test_generated_text_depends_on_its_seed_alone(run):
    first, second = run.generate(["text", "number"], 8, seed=1)
    assert run.generate("text", 8, temperature=0) == run.generate(["text"], 8, temperature=0)[0]
    assert [first, second] == run.generate(["text", "number"], 8, seed=1)


def test_what_cannot_be_computed_is_refused(run):
    for ids in ([-1], [10**6], [[1], [run.config.model.shape.vocab_size]]):
        with pytest.raises(ValueError, match="expected 0 to"):
            run.logits(ids)
    with pytest.raises(ValueError, match="max_new_tokens=0; expected 1 or more"):
        run.generate("text", 0)
    assert run.generate([]) == []


def test_a_folder_that_is_no_run(tmp_path):
    for function in (mt.load, mt.metrics):
        with pytest.raises(mt.UserError, match=str(tmp_path)):
            function(tmp_path)
    with pytest.raises(AttributeError):
        mt.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", ["", " ", None])
def test_a_path_of_nothing_names_the_argument(path):
    with pytest.raises(mt.UserError, match=rf"^path={path!r} names no weights\. Give a run folder"):
        mt.load(path)


def test_weights_in_a_trace(trained):
    """As a distillation loss reads its teacher."""
    total = sum(x.sum() for x in jax.tree.leaves(mt.load(trained[1]).params))

    @jax.jit
    def scaled(x):
        with jax.ensure_compile_time_eval():
            params = mt.load(trained[1]).params
        return x * sum(leaf.sum() for leaf in jax.tree.leaves(params))

    np.testing.assert_allclose(scaled(2.0), 2 * total, rtol=1e-5)
    with pytest.raises(mt.UserError, match=r"inside of a JAX trace.*ensure_compile_time_eval"):
        jax.jit(lambda x: x * mt.load(trained[1]).loss([]))(2.0)


def test_intermediate_values(run):
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    paths = ["layers/*/self_attention/probabilities", "layers/1/mlp/mlpwo", "layers/*/output"]
    logits, values = run.forward(ids, capture=paths)
    np.testing.assert_allclose(logits, run.logits(ids), atol=1e-5)
    shapes = {f"layers/{i}/self_attention/probabilities": (2, 4, 4, 4) for i in range(3)}
    shapes |= {f"layers/{i}/output": (2, 4, 32) for i in range(3)}
    shapes |= {"layers/1/mlp/mlpwo": (2, 4, 32)}
    assert {name: x.shape for name, x in values.items()} == shapes
    probabilities = values["layers/1/self_attention/probabilities"]
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-6)
    assert not np.triu(probabilities, 1).any()
    one, of_one = run.forward(ids[1], capture=["layers/2/output"])
    np.testing.assert_allclose(one, logits[1], atol=1e-5)
    np.testing.assert_allclose(of_one["layers/2/output"], values["layers/2/output"][1], atol=1e-5)
    with pytest.raises(ValueError, match="layers/0/self_attention/query_proj"):
        run.forward(ids, capture=["layers/*/attention/weights"])


def test_values_that_are_not_of_one_sequence_or_cannot_be_captured(run, monkeypatch):
    def mlp(self, x_BTD, context):
        record(jnp.arange(5), "no batch")
        return jax.lax.map(lambda x_TD: tag(2 * x_TD, "inside"), x_BTD), {}

    monkeypatch.setattr(MLP, "__call__", mlp)
    paths = ["layers/0/mlp/no batch", "head/output"]
    logits, values = run.forward([1, 2, 3], capture=paths)
    np.testing.assert_array_equal(values["layers/0/mlp/no batch"], np.arange(5))
    np.testing.assert_array_equal(values["head/output"], logits)
    with pytest.raises(ValueError, match=r"layers/0/mlp/inside is inside of a loop"):
        run.forward([1, 2, 3], capture=["layers/*/mlp/inside"])


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="needs pip install '.[notebook]'")
    nbclient = pytest.importorskip("nbclient", reason="needs pip install '.[notebook]'")
    notebook = nbformat.read(REPOSITORY / "docs" / "probe_a_run.ipynb", as_version=4)
    training = next(cell for cell in notebook.cells if "mt.train" in cell.source)
    assert "steps=60" in training.source
    training.source = training.source.replace("steps=60", "steps=6")
    less = {"prepare_source": REPOSITORY / "docs", "per_device_batch_size": 2, "base_emb_dim": 32}
    for name, value in less.items():
        monkeypatch.setenv(f"M_{name.upper()}", str(value))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
