"""Whole conversions: folders, runs, MaxText's checkpoints, programs."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from MaxText.checkpointing import description, layout
from MaxText.checkpointing.given_parameters import open_parameters
from MaxText.configuration.loading import configure, load
from MaxText.conversion.hugging_face_folder import find_folder
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.run_checkpoint import RunWeights
from MaxText.conversion.stored_arrays import StoredArrays
from MaxText.conversion.weights import model_of, nested
from MaxText.errors import UserError
from MaxText.input_pipeline.batch import Batch
from MaxText.input_pipeline.tokenization.training import train_tokenizer
from tests.conversion.running import names, run
from tests.conversion.small_folders import GOLDEN_FAMILIES, golden, random, same_bits, write
from tests.small_models import some_quick


def logits(config, params, tokens):
    """Float32 logits of a configuration."""
    numerics = config.model.numerics.model_copy(update={"matmul_precision": "highest"})
    section = config.model.model_copy(update={"numerics": numerics})
    model = model_of(config.model_copy(update={"model": section}))
    decoder = model.merge(jax.tree.map(jnp.asarray, params))
    tokens = jnp.asarray(tokens)
    return decoder.logits(decoder.hidden(Batch(tokens, tokens, jnp.ones(tokens.shape)))[0])


@pytest.mark.parametrize("name", some_quick(GOLDEN_FAMILIES, 2))
def test_golden_folder_to_run_and_back(name, here):
    config, tensors, arrays = golden(name)
    write(here / "hf", config, tensors)
    said = run("from=hf:hf", "to=runs/a")
    assert "Peak memory, besides the program: about" in said
    assert names(here / "runs") == ["a"]
    weights = RunWeights("runs/a")
    params = nested({ours: weights.read(ours) for ours in weights.model.parameters})
    # What train.py reads of the run gives the reference's logits.
    found = logits(load(["runs/a/config.yml"]).config, params, arrays["input_ids"])
    np.testing.assert_allclose(found, arrays["logits"], rtol=0, atol=5e-5)

    run("from=runs/a", "to=hf:exported")
    exported = load_file(here / "exported" / "model.safetensors")
    if name == "gptneox":
        exported["lm_head.weight"] = exported.pop("embed_out.weight")
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    same_bits(exported, tensors)


def test_an_import_is_verified_when_it_is_read(here):
    config, tensors = random("llama")
    write(here / "hf", config, tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    write(here / "other", config, tensors)
    run("from=hf:hf", "to=a")
    run("from=hf:other", "to=b")
    stored = layout.find("a", "test")
    assert description.describe(stored).checksums.keys() == StoredArrays(stored.items).leaves.keys()
    path = stored.folder / "metadata" / "metadata"
    path.write_bytes((here / "b/checkpoints/0/metadata/metadata").read_bytes())
    message = "params/decoder_norm/scale: .*"
    with pytest.raises(UserError, match=message):
        RunWeights("a").read("decoder_norm/scale")
    parameters = RunWeights("a").model.parameters
    abstract = nested(
        {name: jax.ShapeDtypeStruct(info.shape, jnp.float32) for name, info in parameters.items()}
    )
    given = open_parameters("a", "load_parameters_path", abstract, {}, lambda line: None)
    with pytest.raises(UserError, match=message):
        given.read()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_format_comes_back_bit_for_bit(dtype, here):
    config, tensors = random("qwen3", dtype)
    write(here / "hf", config | {"eos_token_id": 7, "attention_dropout": 0.25}, tensors)
    run("from=hf:hf", "to=run")
    said = run("from=run", "to=hf:out", "max_shard_size=1KB")
    assert "files of tensors and their index" in said
    weights = FolderWeights(find_folder("hf:out", "from"))
    same_bits({name: weights.files.read(name) for name in weights.files.found}, tensors)
    # What no table decides is kept.
    assert weights.config_json["eos_token_id"] == 7
    assert weights.config_json["attention_dropout"] == 0.25
    assert weights.config_json["torch_dtype"] == dtype
    assert json.loads((here / "out" / "generation_config.json").read_text())["eos_token_id"] == 7


def test_a_mix_of_formats_comes_back_bit_for_bit(here):
    config, tensors = random("qwen3", "float16")
    exact = np.full(tensors["model.norm.weight"].shape, 0.1, np.float32)  # no float16
    tensors |= {"model.norm.weight": exact}
    narrow = tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = narrow.astype(ml_dtypes.bfloat16)
    write(here / "hf", config, tensors)
    said = run("from=hf:hf", "to=run")
    assert "bfloat16 becomes float32" in said
    assert "\nfloat16 becomes float32" in said
    run("from=run", "to=hf:out")
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)


def test_float16_that_is_too_small_for_a_number(here):
    config, tensors = random("qwen3")
    tensors["model.norm.weight"][0] = 70_000
    write(here / "hf", config, tensors)
    run("from=hf:hf", "to=run")
    with pytest.raises(UserError, match=r"model\.norm\.weight has 70000, and float16 ends at"):
        run("from=run", "to=hf:out", "dtype=float16")
    assert names(here) == ["hf", "run"]
    run("from=run", "to=hf:out", "dtype=bfloat16")
    found = load_file(here / "out" / "model.safetensors")
    assert {tensor.dtype.name for tensor in found.values()} == {"bfloat16"}


def test_the_tokenizer_travels(here):
    config, tensors = random("llama")
    config["vocab_size"] = 300
    generator = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = generator.standard_normal((300, 16), np.float32)
    write(here / "hf", config, tensors)
    train_tokenizer(["some text to learn from"], 260, "a test").save(here / "hf")
    run("from=hf:hf", "to=run")
    assert (here / "run" / "tokenizer" / "tokenizer.json").is_file()
    run("from=run", "to=hf:out")
    text = (here / "hf" / "tokenizer.json").read_text()
    assert (here / "out" / "tokenizer.json").read_text() == text
    settings = json.loads((here / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    written = json.loads((here / "out" / "config.json").read_text())
    run("from=run", "to=hf:other", "tokenizer=hf")
    assert (here / "other" / "tokenizer.json").read_text() == text
    with pytest.raises(UserError, match="tokenizer=run is no folder with tokenizer"):
        run("from=run", "to=hf:third", "tokenizer=run")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: File name too long"):
        run("from=run", "to=hf:third", f"tokenizer={'a' * 300}")
    assert written["eos_token_id"] == 0  # <|endoftext|>, the first id of a trained tokenizer


@pytest.mark.parametrize(
    ("first", "error"), [(True, KeyboardInterrupt()), (False, UserError("the disk is gone"))]
)
def test_failures_leave_nothing(first, error, here, monkeypatch):
    write(here / "hf", *random("llama"))
    read, calls = FolderWeights.read, []

    def broken(self, ours):
        calls.append(ours)
        if first or len(calls) == 4:
            raise error
        return read(self, ours)

    monkeypatch.setattr(FolderWeights, "read", broken)
    before = set(threading.enumerate())
    with pytest.raises(type(error)):
        run("from=hf:hf", "to=run")
    assert names(here) == ["hf"]
    assert len(calls) == (1 if first else 4)
    # The end of the program waits for threads that are no daemons.
    new = [one for one in threading.enumerate() if one not in before and not one.daemon]
    for one in new:
        one.join(10)
    assert not [one.name for one in new if one.is_alive()]


def test_a_target_that_cannot_be(here):
    write(here / "hf", *random("llama"))
    with pytest.raises(UserError, match="cannot be used: File name too long"):
        run("from=hf:hf", f"to={'a' * 300}")


def test_a_target_that_exists_is_not_touched(here):
    write(here / "hf", *random("llama"))
    (here / "run").mkdir()
    (here / "run" / "mine").write_text("mine")
    with pytest.raises(UserError, match="to=run exists already"):
        run("from=hf:hf", "to=run")
    assert names(here / "run") == ["mine"]
    (here / "run" / "mine").unlink()
    run("from=hf:hf", "to=run")
    assert names(here / "run") == ["checkpoints", "config.yml"]


def test_a_window_comes_back_with_the_length(here):
    config, tensors = random("mistral")
    write(here / "hf", config | {"sliding_window": 8}, tensors)
    # Longer texts have layers with a window; in shorter ones nothing lies beyond it.
    for length, exported in {32: (8, 32), 8: (8, 32), 4: (8, 4)}.items():
        run("from=hf:hf", f"to=run{length}", f"max_target_length={length}")
        run(f"from=run{length}", f"to=hf:out{length}")
        types = load([f"run{length}/config.yml"]).config.model.attention_kinds
        assert set(types) == {"local" if length > 8 else "global"}
        written = json.loads((here / f"out{length}" / "config.json").read_text())
        assert (written["sliding_window"], written["max_position_embeddings"]) == exported
    # Another configuration sees farther than the window; a Llama has none.
    yml = here / "run8" / "config.yml"
    run(str(yml), "max_target_length=16", "from=run8", "to=hf:longer")
    written = json.loads((here / "longer" / "config.json").read_text())
    assert (written["sliding_window"], written["max_position_embeddings"]) == (None, 16)
    run("from=run8", "to=hf:llama", "family=llama")
    assert "sliding_window" not in json.loads((here / "llama" / "config.json").read_text())


# --- MaxText --------------------------------------------------------------------------------------


def maxtext_tree(weights, *, scanned, query_factor):
    """Our arrays in MaxText's layout, written out by hand: its names, the layer second."""
    tree = {}
    for ours in weights.model.parameters:
        array = weights.read(ours)
        name = ours.replace("pre_mlp_layer_norm", "post_self_attention_layer_norm")
        if "/query/" in ours:
            array = array * np.float32(query_factor)
        if not ours.startswith("layers/"):
            prefix = "" if ours.startswith("token_embedder") else "decoder/"
            tree[prefix + name] = array
        elif scanned:
            tree["decoder/" + name] = np.swapaxes(array, 0, 1)
        else:
            for layer, part in enumerate(array):
                tree[f"decoder/{name.replace('layers/', f'layers_{layer}/')}"] = part
    return nested(tree)


def save_tree(folder, tree):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))


KEYS = ("base_emb_dim=48", "base_num_query_heads=6", "base_num_kv_heads=2", "head_dim=8",
        "base_mlp_dim=80", "base_num_decoder_layers=3", "vocab_size=97",
        "max_target_length=64")  # fmt: skip


@pytest.mark.parametrize(
    ("scanned", "scaling", "items", "nesting"),
    [(True, "weights", "items", 2), (False, "model", "state", 1)],
    ids=["MaxText", "a program made from it"],
)
def test_maxtext_gives_the_reference_logits(scanned, scaling, items, nesting, here):
    config, tensors, arrays = golden("llama")
    weights = FolderWeights(write(here / "hf", config, tensors))
    factor = 8**-0.5 if scaling == "weights" else 1.0
    tree = maxtext_tree(weights, scanned=scanned, query_factor=factor)
    for _ in range(nesting):
        tree = {"params": tree}
    save_tree(here / "theirs" / "checkpoints" / "7" / items, tree | {"step": np.int32(8)})
    said = run(*KEYS, "from=maxtext:theirs", "to=run", f"query_scaling={scaling}")
    assert f"query_scaling={scaling}" in said
    run_weights = RunWeights("run")
    params = nested({ours: run_weights.read(ours) for ours in run_weights.model.parameters})
    found = logits(load(["run/config.yml"]).config, params, arrays["input_ids"])
    np.testing.assert_allclose(found, arrays["logits"], rtol=0, atol=5e-5)


def test_maxtext_of_llama31_pairs_neighbours(here):
    config, tensors, _ = golden("llama31")
    weights = FolderWeights(write(here / "hf", config, tensors))
    tree = maxtext_tree(weights, scanned=True, query_factor=16**-0.5)
    attention = tree["decoder"]["layers"]["self_attention"]
    for name in ("query", "key"):
        halves = attention[name]["kernel"]
        neighbours = np.empty_like(halves)
        neighbours[..., 0::2], neighbours[..., 1::2] = np.split(halves, 2, axis=-1)
        attention[name]["kernel"] = neighbours
    save_tree(here / "theirs", {"params": {"params": tree}})
    keys = [f"{name}={text(value)}" for name, value in weights.keys.items()]
    run(*keys, "from=maxtext:theirs", "to=run")
    run_weights = RunWeights("run")
    for ours in weights.model.parameters:
        np.testing.assert_array_equal(run_weights.read(ours), weights.read(ours), err_msg=ours)


def text(value):
    """A value of a key as it is typed."""
    return str(list(value)).replace("'", "") if isinstance(value, tuple) else str(value).lower()


def test_maxtext_gpt3(here):
    keys = (*KEYS, "base_num_kv_heads=6", "decoder_block=gpt3", "normalization_zero_centered=true")
    config = load([key for key in keys if key != "base_num_kv_heads=2"]).config
    model = model_of(config)
    generator = np.random.default_rng(0)
    ours = {
        name: generator.standard_normal(info.shape, np.float32)
        for name, info in model.parameters.items()
    }
    tree = {}
    for name, array in ours.items():
        name = name.replace(
            "layers/pre_self_attention_layer_norm", "layers/pre_self_attention_norm"
        )
        name = name.replace("layers/pre_mlp_layer_norm", "layers/mlp/mlp_layer_norm")
        if name.startswith("layers/"):
            array = np.swapaxes(array, 0, 1)
        tree[name if name.startswith("token_embedder") else "decoder/" + name] = array
    save_tree(here / "theirs", {"params": {"params": nested(tree)}})
    arguments = [key for key in keys if key != "base_num_kv_heads=2"]
    said = run(*arguments, "from=maxtext:theirs", "to=run")
    assert "query_scaling=model" in said
    weights = RunWeights("run")
    for name, array in ours.items():
        np.testing.assert_array_equal(weights.read(name), array, err_msg=name)
    with pytest.raises(UserError, match="Add normalization_zero_centered=true"):
        run(*arguments[:-1], "from=maxtext:theirs", "to=other")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model_name=gemma-2b"], "Gemma blocks cannot be read"),
        (["model_name=llama3.1-8b", "rope_type=yarn"], "rope_type=yarn: MaxText pairs dimensions"),
    ],
)
def test_maxtext_in_other_forms(keys, message, here):
    with pytest.raises(UserError, match=message):
        run(*keys, "from=maxtext:theirs", "to=run")


def test_maxtext_with_another_configuration(here):
    config, tensors, _ = golden("llama")
    weights = FolderWeights(write(here / "hf", config, tensors))
    tree = maxtext_tree(weights, scanned=True, query_factor=1.0)
    save_tree(here / "theirs", {"params": {"params": tree}})
    with pytest.raises(UserError) as caught:
        run(*KEYS, "base_mlp_dim=81", "use_qk_norm=true", "from=maxtext:theirs", "to=run")
    message = str(caught.value)
    assert "other shape params/params/decoder/layers/mlp/wo/kernel" in message
    assert "missing     params/params/decoder/layers/self_attention/query_norm/scale" in message
    with pytest.raises(UserError, match="no checkpoint there"):
        run(*KEYS, "from=maxtext:nowhere", "to=run")
    with pytest.raises(UserError, match="do not say which model they hold"):
        run("from=maxtext:theirs", "to=run")
    assert names(here) == ["hf", "theirs"]


# --- Programs -------------------------------------------------------------------------------------


def test_an_exported_program_runs_without_this_package(here, users_environment):
    config, tensors, arrays = golden("gptneox")
    write(here / "hf", config, tensors)
    length = arrays["input_ids"].shape[1]
    run("from=hf:hf", "export=stablehlo", "to=out/forward.stablehlo", f"length={length}")
    assert names(here / "out") == ["forward.stablehlo", "forward.stablehlo.README.md"]
    np.savez(here / "golden.npz", tokens=arrays["input_ids"], logits=arrays["logits"])
    readme = (here / "out" / "forward.stablehlo.README.md").read_text()
    lines = [line.strip() for line in readme.splitlines() if line.startswith("    ")]
    program = "\n".join(
        [
            "import sys, numpy as np, jax, jax.export",
            "arrays = np.load('../golden.npz')",
            "tokens = arrays['tokens']",
            *lines,
            "np.testing.assert_allclose(logits, arrays['logits'], rtol=0, atol=5e-5)",
            "assert 'MaxText' not in sys.modules",
        ]
    )
    environment = users_environment | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=here / "out", env=environment, check=True
    )


@pytest.mark.parametrize("taken", ["forward/", "forward.README.md"])
def test_a_program_replaces_nothing(taken, here):
    write(here / "hf", *random("llama"))
    if taken.endswith("/"):
        (here / taken).mkdir()
    else:
        (here / taken).write_text("mine")
    before = names(here)
    with pytest.raises(UserError, match="exists already"):
        run("from=hf:hf", "export=stablehlo", "to=forward", "length=8")
    assert names(here) == before


def test_a_length_above_that_of_the_model(here):
    write(here / "hf", *random("llama"))
    with pytest.raises(UserError, match="length=33 is above max_target_length=32"):
        run("from=hf:hf", "export=stablehlo", "to=forward", "length=33")
    assert names(here) == ["hf"]


def test_keys_can_be_set_on_import(here):
    write(here / "hf", *random("llama"))
    run("from=hf:hf", "to=run", "max_target_length=16")
    assert load(["run/config.yml"]).config.model.shape.max_target_length == 16
    assert configure("run/config.yml") == load(["run/config.yml"]).config
