"""Folders that cannot be used, and what is said of them."""

import importlib.util
import itertools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_checkpoint import TensorFiles, is_hf_checkpoint, resolve_hf_path
from MaxText.conversion.hf_export import write_safetensors
from MaxText.conversion.hf_import import HFWeights
from MaxText.conversion.tokenizer_copy import check_ids
from MaxText.errors import UserError
from tests.conversion.running import run
from tests.conversion.small_folders import muddformer, of_family, random, same_bits, write


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model", *random("llama"))


def sharded(folder, tensors):
    specs = {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in tensors.items()}
    folder.mkdir()
    return write_safetensors(folder, specs, tensors.items(), 2000)


def test_shards_are_what_the_library_reads(tmp_path):
    _, tensors = random("qwen2", "bfloat16")
    names = sharded(tmp_path / "model", tensors)
    assert len(names) > 3
    found = {}
    for name in names:
        found |= load_file(tmp_path / "model" / name)
    same_bits(found, tensors)
    files = TensorFiles(tmp_path / "model")
    same_bits({name: files.read(name) for name in files.found}, tensors)


def test_a_missing_shard_is_named(tmp_path):
    names = sharded(tmp_path / "model", random("qwen2")[1])
    (tmp_path / "model" / names[0]).unlink()
    with pytest.raises(UserError, match=rf"{names[0]} cannot be read: No such file"):
        TensorFiles(tmp_path / "model")


def test_an_index_with_paths(folder):
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    for file, problem in {
        "../outside.safetensors": r"\.\./outside",
        str(outside): str(outside),
        "x" * 300 + ".safetensors": "File name too long",
    }.items():
        index = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match=problem):
            TensorFiles(folder)


def test_missing_extra_and_misshapen_tensors_in_one_table(tmp_path):
    # qwen3 has no buffers to skip, llama has.
    for name in ("llama", "qwen3"):
        config, tensors = random(name)
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((41, 16), np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(16, np.int32)
        with pytest.raises(UserError) as caught:
            HFWeights(write(tmp_path / name, config, tensors))
        for problem in (
            "missing     model.norm.weight: the checkpoint has none, wanted float32[16]",
            "extra       model.layers.7.mlp.up_proj.weight: stored float32[24,16]",
            "other shape model.embed_tokens.weight: stored float32[41,16], wanted float32[40,16]",
            "other kind  model.layers.0.input_layernorm.weight: stored I32[16], wanted float32[16]",
        ):
            assert problem in str(caught.value)


def test_impossible_combinations(tmp_path):
    config, tensors = random("llama")
    folder = write(tmp_path, config | {"num_key_value_heads": 3}, tensors)
    with pytest.raises(UserError, match=r"(?s)config\.json .*base_num_query_heads=4 .*=3"):
        HFWeights(folder)


def test_a_tied_head_is_read_as_by_transformers(tmp_path):
    config, tensors = random("qwen3")
    table = tensors["model.embed_tokens.weight"]
    copied = HFWeights(write(tmp_path / "copy", config, tensors | {"lm_head.weight": table}))
    assert "logits_dense/kernel" not in copied.model.parameters
    assert copied.notes == []
    # Both are kept if they differ.
    different = HFWeights(write(tmp_path / "other", config, tensors | {"lm_head.weight": -table}))
    assert not different.config.model.head.logits_via_embedding
    np.testing.assert_array_equal(different.read("token_embedder/embedding"), table)
    np.testing.assert_array_equal(different.read("logits_dense/kernel"), -table.T)
    assert "tie_word_embeddings=true, but lm_head.weight differs" in different.notes[0]
    run(f"from=hf:{tmp_path / 'other'}", f"to={tmp_path / 'run'}")
    run(f"from={tmp_path / 'run'}", f"to=hf:{tmp_path / 'again'}")
    exported = json.loads((tmp_path / "again" / "config.json").read_text())
    assert exported["tie_word_embeddings"] is False
    # The one that is there serves for both.
    alone = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    head = HFWeights(write(tmp_path / "head", config, alone | {"lm_head.weight": table}))
    np.testing.assert_array_equal(head.read("token_embedder/embedding"), table)


def test_a_head_of_a_family_that_always_ties_it(tmp_path):
    config, tensors = of_family("tokenformer")
    family = FAMILIES["tokenformer"]
    table = next(tensor for tensor in tensors.values() if tensor.shape == (40, 16))
    with pytest.raises(UserError, match=rf"extra .*{family.head}|no head of their own"):
        HFWeights(write(tmp_path, config, tensors | {family.head: -table}))


EMBEDDING = "model.embed_tokens.weight"


def read_embedding(folder):
    weights = HFWeights(folder)
    return float(weights.read("token_embedder/embedding")[0, 0])


def write_variants(folder):
    """Writes the same model several times; returns its files by their first weight."""
    config, tensors = random("llama")
    write(folder, config, tensors)
    (folder / "model.safetensors").unlink()

    def save(name, value):
        changed = tensors[EMBEDDING].copy()
        changed[0, 0] = value
        save_file(tensors | {EMBEDDING: changed}, folder / name)

    def save_index(name, file_names):
        weight_map = dict(zip(tensors, itertools.cycle(file_names), strict=False))
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / name).write_text(text)

    return save, save_index


def test_a_folder_with_several_forms_is_read_as_by_transformers(tmp_path):
    # The order of transformers.modeling_utils._get_resolved_checkpoint_files.
    save, save_index = write_variants(tmp_path)
    save("a.safetensors", 1)
    save("b.safetensors", 2)
    save_index("model.safetensors.index.json", ["b.safetensors", "a.safetensors"])
    assert read_embedding(tmp_path) == 2  # in both shards: the last by name
    (tmp_path / "pytorch_model.bin").write_text("not read")
    save("model.fp16.safetensors", 4)
    assert read_embedding(tmp_path) == 2
    save("model.safetensors", 5)
    assert read_embedding(tmp_path) == 5  # one file comes before an index
    # An index that nobody reads may be stale.
    save_index("model.safetensors.index.json", ["gone.safetensors"])
    (tmp_path / "pytorch_model.bin.index.json").write_text("not read")
    assert read_embedding(tmp_path) == 5
    # config.json can name the file.
    config = json.loads((tmp_path / "config.json").read_text())
    for named, value in (("a.safetensors", 1), ("other.safetensors.index.json", 2)):
        save_index("other.safetensors.index.json", ["a.safetensors", "b.safetensors"])
        text = json.dumps(config | {"transformers_weights": named})
        (tmp_path / "config.json").write_text(text)
        assert read_embedding(tmp_path) == value
    for named, problem in (("../a.safetensors", "outside its folder"), ("a.bin", "neither")):
        text = json.dumps(config | {"transformers_weights": named})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=problem):
            HFWeights(tmp_path)


def test_forms_that_are_not_read_are_named(tmp_path):
    save, _ = write_variants(tmp_path)
    save("model.fp16.safetensors", 1)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=r"It has model\.fp16\.safetensors, model\.gguf, which"):
        HFWeights(tmp_path)
    save("shard-00000-model-00001-of-00002.safetensors", 1)
    with pytest.raises(UserError, match="distributed checkpoint"):
        HFWeights(tmp_path)
    save("model.safetensors", 1)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="merge_and_unload"):
        HFWeights(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="merge_and_unload"):
        resolve_hf_path(str(tmp_path), "from")


def test_two_descriptions_of_rotary_positions(tmp_path):
    config, tensors = random("llama")
    config |= {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
    }
    position = HFWeights(write(tmp_path, config, tensors)).config.model.position
    assert (position.rope_type, position.rope_max_timescale) == ("linear", 7.0)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "tokenformer", "muddpythia"])
@pytest.mark.parametrize(
    ("wrap", "removed"),
    [
        (lambda name: f"_orig_mod.{name}", "_orig_mod."),
        (lambda name: f"module.{name}", "module."),
        (lambda name: f"module._orig_mod.{name}", "_orig_mod., module."),
        (lambda name: f"_orig_mod.module.{name}", "_orig_mod., module."),
        (lambda name: f"_fsdp_wrapped_module.{name}", "_fsdp_wrapped_module."),
        (
            lambda name: re.sub(r"\.(\d+)\.", r".\1._checkpoint_wrapped_module._orig_mod.", name),
            "_checkpoint_wrapped_module., _orig_mod.",
        ),
        (lambda name: f"model.{name}", "model."),  # of a Lightning module
        (lambda name: f"module.policy.net.{name}", "module., policy.net."),
    ],
)
def test_names_of_wrapper_modules_are_removed(model_type, wrap, removed, tmp_path):
    config, tensors = of_family(model_type)
    plain = HFWeights(write(tmp_path / "plain", config, tensors))
    assert plain.notes == []
    wrapped = {wrap(name): tensor for name, tensor in tensors.items()}
    weights = HFWeights(write(tmp_path / "wrapped", config, wrapped))
    assert f"removed {removed} from the tensor names" in weights.notes[0]
    for name in plain.model.parameters:
        np.testing.assert_array_equal(weights.read(name), plain.read(name))


def test_wrapped_and_plain_tensors_in_one_file(tmp_path):
    config, tensors = random("llama")
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(UserError, match=r"have both _orig_mod\.(\S+) and \1, the same tensor"):
        HFWeights(write(tmp_path / "two", config, tensors | wrapped))
    with_prefix = {f"model.{name}": tensor for name, tensor in tensors.items()}
    folder = write(tmp_path / "loss", config, with_prefix | {"loss.weight": np.zeros(3, "f4")})
    with pytest.raises(UserError, match=r"extra       loss\.weight: stored") as caught:
        HFWeights(folder)
    assert "missing" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("value", "told"), [(np.nan, "1 NaN and 0"), (-np.inf, "0 NaN and 1")])
def test_weights_that_are_not_finite_are_refused(dtype, value, told, tmp_path):
    config, tensors = random("qwen2", dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1] = value
    folder = write(tmp_path / "hf", config, tensors)
    problem = rf"model\.safetensors: {name} has {told} infinite of 384 weights"
    for source in (f"from=hf:{folder}", f"from={folder}"):
        with pytest.raises(UserError, match=problem):
            run(source, f"to={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_paths_that_are_no_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve_hf_path("hf:model", "from") == resolve_hf_path("model", "from")
    assert is_hf_checkpoint("model")
    assert is_hf_checkpoint("hf:anything")
    assert not is_hf_checkpoint(".")
    (tmp_path / "empty").mkdir()
    for path, message in {
        "hf:someone/model": "hf download someone/model",
        "hf:": "hf:",
        "hf:./model2": "model2",
        "hf:a/b/c": "a/b/c",
        "hf:~unknown_user/a": "unknown_user",
        "hf:empty": r"config\.json",
    }.items():
        with pytest.raises(UserError, match=message):
            resolve_hf_path(path, "from")


def test_folders_without_weights_or_configuration(folder):
    has_torch = importlib.util.find_spec("torch") is not None
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin" if has_torch else "torch"):
        HFWeights(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors .*pytorch_model\.bin"):
        HFWeights(folder)
    for text in ("", "[]", "{", "\x00"):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json .*(JSON|is empty)"):
            HFWeights(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "added_tokens.json"])
def test_a_tokenizer_with_more_ids_than_rows(name, tmp_path):
    content = vocabulary = {"a": 0, "b": 40}
    if name == "tokenizer.json":
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
        content = {"version": "1.0", "model": model}
    (tmp_path / name).write_text(json.dumps(content))
    check_ids(tmp_path, 41)
    with pytest.raises(UserError, match=f"{name} .*ids up to 40, .*vocab_size=40"):
        check_ids(tmp_path, 40)


def test_permissions(folder, monkeypatch):
    def refuse(path, *arguments):
        raise PermissionError(13, "Permission denied")

    # As for a user without the right; nothing is refused to the one who may do everything.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        problem = rf"{folder}/config\.json .*: Permission denied"
        with pytest.raises(UserError, match=problem):
            is_hf_checkpoint(str(folder))
        for path in (str(folder), f"hf:{folder}"):
            with pytest.raises(UserError, match=problem):
                resolve_hf_path(path, "from")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"model\.safetensors .*: Permission denied"):
        TensorFiles(folder)


def test_a_file_of_torch(tmp_path):
    torch = pytest.importorskip("torch", reason="needs pip install '.[torch]'")
    config, tensors = muddformer("muddformer", "float16")
    folder = write(tmp_path / "hf", config, tensors)
    (folder / "model.safetensors").unlink()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    # As it is after a text was generated.
    state["layers.0.attention.kv_cache.k_cache"] = torch.zeros(2, 2)
    torch.save(state, folder / "pytorch_model.bin")
    run(f"from=hf:{folder}", f"to={tmp_path / 'run'}")
    run(f"from={tmp_path / 'run'}", f"to=hf:{tmp_path / 'out'}")
    same_bits(load_file(tmp_path / "out" / "model.safetensors"), tensors)
