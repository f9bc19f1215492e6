"""Whole conversions: folders to runs and back, and to programs."""

import json
import os
import stat
import threading

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from MaxText.checkpointing import checkpoint_files
from MaxText.config.loading import load, load_config
from MaxText.conversion.hf_checkpoint import resolve_hf_path
from MaxText.conversion.hf_import import HFWeights
from MaxText.conversion.open_weights import open_pretrained
from MaxText.conversion.weight_source import LazyCheckpointReader, RunWeights
from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.hugging_face import train_tokenizer
from tests.conversion.golden_models import hugging_face
from tests.conversion.random_runs import write_random_run
from tests.conversion.running import model_in_run, names, parameters_in_run, run
from tests.conversion.small_folders import muddformer, random, same_bits, tokenformer, write
from tests.growth.growing import logits_of
from tests.programs import ended, started
from tests.small_models import random_batch


def test_an_import_is_verified_when_it_is_read(here):
    config, tensors = random("llama")
    write(here / "hf", config, tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    write(here / "other", config, tensors)
    run("from=hf:hf", "to=a")
    run("from=hf:other", "to=b")
    stored = checkpoint_files.resolve_checkpoint("a", "test")
    assert stored.metadata.checksums.keys() == LazyCheckpointReader(stored.items).leaves.keys()
    path = stored.folder / "metadata" / "metadata"
    path.write_bytes((here / "b/checkpoints/0/metadata/metadata").read_bytes())
    weights = RunWeights("a")
    abstract = weights.model.abstract
    given = open_pretrained("a", "load_parameters_path", abstract, {}, lambda line: None)
    for read in (lambda: weights.read("decoder_norm/scale"), given.read):
        with pytest.raises(UserError, match="params/decoder_norm/scale: "):
            read()


# The program next to such a folder knows these words alone.
OLDER = {
    "dense_type": "qkvm",
    "auto_map": {"AutoModelForCausalLM": "somewhere/else--modeling_muddformer.MUDDFormer"},
    "use_layer_cache": True,
}


@pytest.mark.parametrize(
    ("made", "dtype", "others", "most", "fields"),
    [
        ([random, "qwen3"], "bfloat16", [], "bfloat16", {"attention_dropout": 0.25}),
        ([random, "qwen3"], "float16", ["float32", "bfloat16"], "float32", {"eos_token_id": 7}),
        ([muddformer, "muddformer"], "bfloat16", ["float16"], "bfloat16", OLDER),
        ([tokenformer], "float16", [], "float16", {"pad_token_id": 1}),
    ],
    ids=["qwen3-bfloat16", "qwen3-mixed", "muddformer-mixed", "tokenformer-float16"],
)
def test_formats_come_back_bit_for_bit(made, dtype, others, most, fields, here):
    make, *which = made
    config, tensors = make(*which, dtype)
    _, exact = make(*which, "float32")
    for place, kind in enumerate(others):
        for name in list(tensors)[place::3]:
            tensors[name] = exact[name].astype(kind)
    write(here / "hf", config | fields, tensors)
    said = run("from=hf:hf", "to=run")
    assert ("float16" in (dtype, *others)) == ("\nfloat16 becomes float32" in said)
    said = run("from=run", "to=hf:out", "max_shard_size=1KB")
    assert ("modeling_muddformer.py" in said) == (make is muddformer)
    weights = HFWeights(resolve_hf_path("hf:out", "from"))
    assert len(names(here / "out")) > 4
    same_bits({name: weights.files.read(name) for name in weights.files.found}, tensors)
    # What no table decides is kept.
    dtype_name = "dtype" if weights.family.in_transformers else "torch_dtype"
    assert weights.config_json.items() >= (fields | {dtype_name: most}).items()
    if "eos_token_id" in fields:
        generation = json.loads((here / "out" / "generation_config.json").read_text())
        assert generation["eos_token_id"] == 7


def test_another_format_on_export(here):
    config, tensors = random("qwen3")
    tensors["model.norm.weight"][0] = 70_000
    write(here / "hf", config, tensors)
    run("from=hf:hf", "to=run")
    with pytest.raises(UserError, match=r"model\.norm\.weight has 70000, .* 65504"):
        run("from=run", "to=hf:out", "dtype=float16")
    assert names(here) == ["hf", "run"]
    run("from=run", "to=hf:out", "dtype=bfloat16")
    found = load_file(here / "out" / "model.safetensors")
    assert {tensor.dtype.name for tensor in found.values()} == {"bfloat16"}
    assert json.loads((here / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_tokenizer_is_copied(here):
    config, tensors = random("llama")
    config["vocab_size"] = 300
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.ones((300, 16), np.float32)
    write(here / "hf", config, tensors)
    train_tokenizer(["some text to learn from"], 260, "a test").save(here / "hf")
    run("from=hf:hf", "to=run")
    assert (here / "run" / "tokenizer" / "tokenizer.json").is_file()
    run("from=run", "to=hf:out")
    text = (here / "hf" / "tokenizer.json").read_text()
    assert (here / "out" / "tokenizer.json").read_text() == text
    settings = json.loads((here / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # <|endoftext|>, the first id of a trained tokenizer.
    assert json.loads((here / "out" / "config.json").read_text())["eos_token_id"] == 0
    run("from=run", "to=hf:other", "tokenizer=hf")
    assert (here / "other" / "tokenizer.json").read_text() == text
    for folder, problem in {"run": "tokenizer=run", "a" * 300: r"tokenizer\.json"}.items():
        with pytest.raises(UserError, match=problem):
            run("from=run", "to=hf:third", f"tokenizer={folder}")


@pytest.mark.parametrize("has_post_processor", [False, True])
def test_texts_of_an_exported_tokenizer_begin_as_in_training(has_post_processor, here):
    write_random_run(here / "run", "llama2", add_bos=True)
    path = here / "run" / "tokenizer" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    ids = tokenizer.encode("The cat").ids
    if has_post_processor:
        tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        tokenizer.save(str(path))
    run("from=run", "to=hf:out")
    exported = tokenizers.Tokenizer.from_file(str(here / "out" / "tokenizer.json"))
    assert exported.encode("The cat").ids == [0, *ids]
    assert exported.encode("The cat", add_special_tokens=False).ids == ids
    # An import keeps it, and another export adds nothing.
    text = (here / "out" / "tokenizer.json").read_text()
    run("from=hf:out", "to=again")
    run("from=again", "to=hf:third")
    assert (here / "third" / "tokenizer.json").read_text() == text


@pytest.mark.parametrize(
    ("first", "error"), [(True, KeyboardInterrupt()), (False, UserError("the disk is gone"))]
)
def test_failures_leave_nothing(first, error, here, monkeypatch):
    write(here / "hf", *random("llama"))
    read, calls = HFWeights.read, []

    def broken(self, param_name):
        calls.append(param_name)
        if first or len(calls) == 4:
            raise error
        return read(self, param_name)

    monkeypatch.setattr(HFWeights, "read", broken)
    before = set(threading.enumerate())
    with pytest.raises(type(error)):
        run("from=hf:hf", "to=run")
    assert names(here) == ["hf"]
    assert len(calls) == (1 if first else 4)
    # The end of the program waits for threads other than daemons.
    new = [one for one in threading.enumerate() if one not in before and not one.daemon]
    for one in new:
        one.join(10)
    assert not [one.name for one in new if one.is_alive()]


@pytest.mark.parametrize(
    ("taken", "arguments", "problem"),
    [
        (None, [f"to={'a' * 300}"], "File name too long"),
        ("mine/text", ["to=mine"], "to=mine"),
        ("forward/text", ["export=stablehlo", "to=forward", "length=8"], "forward"),
        (None, ["export=stablehlo", "to=forward", "length=33"], "max_target_length=32"),
    ],
)
def test_targets_that_cannot_be_written(taken, arguments, problem, here):
    write(here / "hf", *random("llama"))
    if taken:
        (here / taken).parent.mkdir(exist_ok=True)
        (here / taken).write_text("mine")
    before = names(here)
    with pytest.raises(UserError, match=problem):
        run("from=hf:hf", *arguments)
    assert names(here) == before
    assert not taken or (here / taken).read_text() == "mine"


def test_an_empty_folder_is_filled(here):
    write(here / "hf", *random("llama"))
    (here / "run").mkdir()
    run("from=hf:hf", "to=run", "max_target_length=16")
    assert names(here / "run") == ["checkpoints", "config.yml"]
    assert load(["run/config.yml"]).config.model.shape.max_target_length == 16
    assert load_config("run/config.yml") == load(["run/config.yml"]).config


def test_slots_of_the_usual_ratio_follow_one_key(here):
    # So that slot_num=NUMBER grows an imported model everywhere.
    slots = {"qkv_slot_num": 12, "proj_slot_num": 12, "ffn_slot_num": 48}
    write(here / "hf", *tokenformer(**slots))
    run("from=hf:hf", "to=run")
    lines = (here / "run" / "config.yml").read_text().splitlines()
    assert "slot_num: 12" in lines
    assert not any(line.startswith(("proj_slot_num", "ffn_slot_num")) for line in lines)
    said = run("grow", "from=run", "to=large", "slot_num=16")
    assert "12 -> 16" in said
    assert "48 -> 64" in said
    # Scores of the grown model are scaled as before, which a folder has no field for.
    for arguments in ((), ("family=tokenformer",)):
        with pytest.raises(UserError, match=r"zoom_dims\.ffn=48\.0, not -1\.0"):
            run("from=large", "to=hf:out", *arguments)
    assert not (here / "out").exists()
    run("grow", "from=run", "to=random", "slot_num=16", "growth.mode=random")
    assert "Wrote out as" in run("from=random", "to=hf:out")


def test_a_zoom_behind_gelu_is_folded_into_the_values(here):
    slots = {"qkv_slot_num": 12, "proj_slot_num": 9, "ffn_slot_num": 40}
    write(here / "hf", *tokenformer(norm_activation_type="gelu_l2_norm", **slots))
    run("from=hf:hf", "to=run")
    run("grow", "from=run", "to=large", "slot_num=16", "proj_slot_num=9", "ffn_slot_num=160")
    said = run("from=large", "to=hf:out")
    assert "0.866 (query, key, value), 0.5 (feed-forward)" in said
    run("from=hf:out", "to=again")
    section = load(["again/config.yml"]).config.model.pattention
    assert [section.zoom(place, 16) for place in ("qkv", "proj", "ffn")] == [16, 9, 160]
    batch = random_batch(load(["run/config.yml"]).config, 2)
    logits = {
        name: logits_of(model_in_run(name), parameters_in_run(name), batch)
        for name in ("run", "large", "again")
    }
    near = {"rtol": 0, "atol": 1e-5 * np.abs(logits["run"]).max()}
    np.testing.assert_allclose(logits["large"], logits["run"], **near)
    np.testing.assert_allclose(logits["again"], logits["run"], **near)


def test_a_family_that_transformers_does_not_have_cannot_be_verified(here):
    write(here / "hf", *tokenformer())
    run("from=hf:hf", "to=run")
    for arguments in (("from=hf:hf", "to=b"), ("from=run", "to=hf:b")):
        with pytest.raises(UserError, match="TokenFormerForCausalLM"):
            run(*arguments, "--verify")
    assert names(here) == ["hf", "run"]


def test_an_exported_program_runs_without_this_package(here):
    golden = hugging_face("gptneox")
    golden.store(here / "hf", golden.parameters)
    tokens, logits = (golden.arrays[name] for name in ("input_ids", "logits"))
    run("from=hf:hf", "export=stablehlo", "to=out/forward.stablehlo", f"length={tokens.shape[1]}")
    assert names(here / "out") == ["forward.stablehlo"]
    np.savez(here / "golden.npz", tokens=tokens, logits=logits)
    program = """
import os, sys, numpy as np, jax, jax.export
os.chdir(sys.argv[1])
arrays = np.load("../golden.npz")
tokens = arrays["tokens"]
forward = jax.export.deserialize(bytearray(open("forward.stablehlo", "rb").read()))
logits = forward.call(tokens)
np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=5e-5)
assert "MaxText" not in sys.modules
"""
    cpu = {"JAX_PLATFORMS": "cpu"}
    with started(program, str(here / "out"), environment=cpu, options=["-I"]) as process:
        assert ended(process) == (0, "")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_follow_the_umask(umask, here):
    config, tensors = random("qwen3")
    tensors["model.embed_tokens.weight"] = np.ones((300, 16), np.float32)
    write(here / "hf", config | {"vocab_size": 300}, tensors)
    train_tokenizer(["some text to learn from"], 260, "a test").save(here / "hf")
    before = os.umask(umask)
    try:
        run("from=hf:hf", "to=run")
        run("from=run", "to=hf:one")
        run("from=run", "to=hf:several", "max_shard_size=2K")
        run("from=run", "to=program.bin", "export=stablehlo")
    finally:
        os.umask(before)
    written = [here / "program.bin"]
    for folder in ("run", "one", "several"):
        written += [here / folder, *(here / folder).rglob("*")]
    assert len(list((here / "several").glob("*.safetensors"))) > 2
    for path in written:
        whole = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == whole & ~umask, path


def not_finite(weights, name):
    """Stands in for HFWeights.read: NaN in the output projection of each MLP."""
    value = np.nan if name == "layers/mlp/wo/kernel" else 1
    return np.full(weights.model.parameters[name].shape, value, np.float32)


def test_a_run_with_weights_that_are_not_finite(here, monkeypatch):
    write(here / "hf", *random("qwen3"))
    with monkeypatch.context() as patch:
        patch.setattr(HFWeights, "read", not_finite)
        run("from=hf:hf", "to=run")
    for target in ("to=hf:out", "to=program.bin export=stablehlo"):
        problem = r"run/checkpoints/0.*layers/mlp/wo/kernel has 768 NaN and 0 infinite of 768"
        with pytest.raises(UserError, match=problem):
            run("from=run", *target.split())
    assert names(here) == ["hf", "run"]
