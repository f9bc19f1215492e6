"""Folders that cannot be used, and what is said of them."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from MaxText.conversion.hugging_face_folder import TensorFiles, find_folder, is_folder
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.safetensors_files import Planned, SafetensorsFiles
from MaxText.conversion.tokenizer_copy import check_ids
from MaxText.errors import UserError
from tests.conversion.small_folders import golden, random, same_bits, write


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model", *random("llama"))


def sharded(folder, tensors):
    planned = {name: Planned(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    folder.mkdir()
    with SafetensorsFiles(folder, planned, 2000) as files:
        for name in reversed(tensors):  # in any order
            files.write(name, tensors[name])
        return files.names


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


def test_a_tensor_that_was_planned_must_be_written(tmp_path):
    with (
        pytest.raises(AssertionError, match="never written"),
        SafetensorsFiles(tmp_path, {"a": Planned((2,), np.dtype("float32"))}, 1000),
    ):
        pass


def test_a_missing_shard(tmp_path):
    names = sharded(tmp_path / "model", random("qwen2")[1])
    (tmp_path / "model" / names[1]).unlink()
    with pytest.raises(UserError, match=rf"{names[1]} is missing, which model.safetensors.index"):
        TensorFiles(tmp_path / "model")


def test_a_shard_without_a_tensor_of_the_index(tmp_path):
    names = sharded(tmp_path / "model", random("qwen2")[1])
    save_file({"other": np.zeros(2, np.float32)}, tmp_path / "model" / names[0])
    with pytest.raises(UserError, match="the index says that it holds"):
        TensorFiles(tmp_path / "model")


def test_an_index_that_leads_out_of_its_folder(folder):
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    for file in ("../outside.safetensors", str(outside)):
        index = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match="outside of its folder"):
            FolderWeights(folder)


def test_an_index_with_a_name_that_no_file_can_have(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "x" * 300 + ".safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"/{'x' * 40}\.\.\. cannot be read: File name too long"):
        TensorFiles(folder)


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_file_cut_short(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="is no whole safetensors file"):
        FolderWeights(folder)


def test_missing_extra_and_misshapen_tensors_in_one_table(tmp_path):
    config, tensors = random("llama")
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    tensors["lm_head.weight"] = np.zeros((41, 16), np.float32)
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(24, np.int32)
    with pytest.raises(UserError) as caught:
        FolderWeights(write(tmp_path, config, tensors))
    message = str(caught.value)
    assert "missing     model.norm.weight: wanted [16]" in message
    assert "extra       model.layers.7.mlp.up_proj.weight: stored [24, 16]" in message
    assert "other shape lm_head.weight: stored [41, 16], config.json gives [40, 16]" in message
    assert "other kind  model.layers.0.mlp.up_proj.bias: stored I32" in message


def test_impossible_combinations_are_named_as_in_config_json(tmp_path, monkeypatch):
    config, tensors = random("llama")
    folder = write(tmp_path, config | {"num_key_value_heads": 3}, tensors)
    with pytest.raises(UserError) as caught:
        FolderWeights(folder)
    assert str(caught.value) == (
        f"{folder}: config.json (llama) cannot be imported:\n"
        "  num_attention_heads=4 is not a multiple of num_key_value_heads=3"
    )
    # Keys of the user keep their names.
    with pytest.raises(UserError, match="base_num_query_heads=4 is not a multiple of base_num_kv"):
        FolderWeights(folder, {"base_num_kv_heads": 3})
    monkeypatch.setenv("M_STEPS", "many")
    with pytest.raises(UserError, match="environment variable M_STEPS"):
        FolderWeights(folder)


def test_the_config_of_another_family(tmp_path):
    with pytest.raises(UserError, match="Its tensors are named as gpt2 names them"):
        FolderWeights(write(tmp_path, random("llama")[0], golden("gpt2")[1]))


def test_a_tied_head_that_differs(tmp_path):
    config, tensors = random("qwen3")
    table = tensors["model.embed_tokens.weight"]
    FolderWeights(write(tmp_path / "copy", config, tensors | {"lm_head.weight": table}))
    with pytest.raises(UserError, match=r"tie_word_embeddings=true, but lm_head\.weight differs"):
        FolderWeights(write(tmp_path / "other", config, tensors | {"lm_head.weight": table + 1}))


def test_paths_that_are_no_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert find_folder("hf:model", "from") == find_folder("model", "from")
    assert is_folder("model")
    assert is_folder("hf:anything")
    assert not is_folder(".")
    (tmp_path / "empty").mkdir()
    for path, message in {
        "hf:someone/model": "Nothing is downloaded: run `hf download someone/model`",
        "hf:": "names no folder",
        "hf:./model2": "is no folder",
        "hf:a/b/c": "is no folder",
        "hf:~nobody_here/a": "there is no user nobody_here here",
        "hf:empty": "has no config.json",
    }.items():
        with pytest.raises(UserError, match=message):
            find_folder(path, "from")


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has neither model\.safetensors nor pytorch_model\.bin"):
        FolderWeights(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_config_that_is_none(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json (is not JSON|holds no JSON object)"):
        FolderWeights(folder)


def test_torch_files_need_torch(folder):
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"needs torch: pip install '\.\[torch\]'"):
        FolderWeights(folder)


def test_a_tokenizer_with_more_ids_than_rows(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 40}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    check_ids(tmp_path, 41)
    with pytest.raises(UserError, match="makes ids up to 40, but the model has vocab_size=40"):
        check_ids(tmp_path, 40)


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json"])
def test_an_older_tokenizer_with_more_ids_than_rows(name, tmp_path):
    (tmp_path / name).write_text(json.dumps({"a": 0, "b": 40}))
    check_ids(tmp_path, 41)
    with pytest.raises(UserError, match=rf"{name} makes ids up to 40"):
        check_ids(tmp_path, 40)


def test_a_folder_that_may_not_be_searched(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    # As for a user without the right; nothing is refused to the one who may do everything.
    monkeypatch.setattr(Path, "is_file", refuse)
    message = rf"{folder}/config\.json cannot be read: Permission denied"
    with pytest.raises(UserError, match=message):
        is_folder(str(folder))
    for path in (str(folder), f"hf:{folder}"):
        with pytest.raises(UserError, match=message):
            find_folder(path, "from")


def test_a_file_that_may_not_be_read(folder, monkeypatch):
    def refuse(path, *arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: Permission denied"):
        TensorFiles(folder)
