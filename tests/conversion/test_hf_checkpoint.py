"""Folders that cannot be used, and what is said of them."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from MaxText.conversion.hf_checkpoint import TensorFiles, is_hf_checkpoint, resolve_hf_path
from MaxText.conversion.hf_export import write_safetensors
from MaxText.conversion.hf_import import HFWeights
from MaxText.conversion.tokenizer_copy import check_ids
from MaxText.errors import UserError
from tests.conversion.running import run
from tests.conversion.small_folders import muddformer, random, same_bits, write


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


def test_a_tied_head_that_differs(tmp_path):
    config, tensors = random("qwen3")
    table = tensors["model.embed_tokens.weight"]
    HFWeights(write(tmp_path / "copy", config, tensors | {"lm_head.weight": table}))
    with pytest.raises(UserError, match=r"tie_word_embeddings=true.* lm_head\.weight"):
        HFWeights(write(tmp_path / "other", config, tensors | {"lm_head.weight": table + 1}))


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
