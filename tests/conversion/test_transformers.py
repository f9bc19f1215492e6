"""Against transformers itself: what it writes is read, and what is written it computes with."""

import json

import pytest

from MaxText.conversion.hf_export import verify
from MaxText.conversion.hf_import import HFWeights
from MaxText.errors import UserError
from tests.conversion.running import run
from tests.conversion.test_tables import SCALINGS

torch = pytest.importorskip("torch", reason="needs pip install '.[torch]'")
transformers = pytest.importorskip("transformers", reason="needs pip install '.[torch]'")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS = {
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 40,
        "vocab_size": 96,
        "initializer_range": 0.3,
    },
    # Windows of 5 in every other layer, and 64 tokens are compared.
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 96,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 5,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    },
    "mixtral": SIZES
    | {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "sliding_window": 7,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-6,
    },
    "gpt_neox": SIZES | {"rotary_pct": 0.5, "use_parallel_residual": False},
    "llama": SIZES
    | {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 5e5,
    },
    "mistral": SIZES | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9},
    "qwen2": SIZES | {"num_key_value_heads": 1},
    "gemma": SIZES | {"num_key_value_heads": 1, "head_dim": 24, "pad_token_id": None},
    "qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
}


EMBEDDING = "model.embed_tokens.weight"


def saved(model_type, folder, dtype="float32", changes=None, **how):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(MODELS[model_type] | (changes or {})))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, **how)
    return model


def verified(source, target, *more):
    """Converts; the logits are those of transformers."""
    said = run(f"from={source}", f"to={target}", "--verify", *more)
    assert "Verified: logits differ by at most" in said


@pytest.mark.parametrize("model_type", MODELS)
def test_both_ways_agree(model_type, tmp_path):
    dtype = {"mistral": "bfloat16", "gpt2": "float16"}.get(model_type, "float32")
    original = saved(model_type, tmp_path / "hf", dtype, max_shard_size="20KB")
    verified(f"hf:{tmp_path / 'hf'}", tmp_path / "run")
    verified(tmp_path / "run", f"hf:{tmp_path / 'again'}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert loaded.dtype == getattr(torch, dtype)
    wanted = original.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("model_type", "scaling"),
    [
        *[("llama", kind) for kind in SCALINGS],
        ("gpt_neox", "llama3"),
        ("mistral", "linear"),
        ("qwen2", "yarn"),
        ("qwen3", "yarn"),
        ("gemma", "llama3"),
    ],
)
def test_changed_rotary_frequencies_agree(model_type, scaling, tmp_path):
    changes = {"rope_scaling": {"rope_type": scaling} | SCALINGS[scaling]}
    saved(model_type, tmp_path / "hf", changes=changes)
    verified(f"hf:{tmp_path / 'hf'}", tmp_path / "run")
    verified(tmp_path / "run", f"hf:{tmp_path / 'again'}")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "again").rope_parameters
    wanted = transformers.AutoConfig.from_pretrained(tmp_path / "hf").rope_parameters
    assert found == wanted
    # What is compared tells one kind from another.
    config_json = tmp_path / "hf" / "config.json"
    config = json.loads(config_json.read_text())
    config["rope_parameters"]["factor"] = 1.5
    weights = HFWeights(tmp_path / "hf")
    config_json.write_text(json.dumps(config))
    with pytest.raises(UserError, match="here gives different results in transformers"):
        verify(weights, tmp_path / "hf", "here", print)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_that_rounds_is_verified(dtype, tmp_path):
    saved("qwen3", tmp_path / "hf")
    run(f"from=hf:{tmp_path / 'hf'}", f"to={tmp_path / 'run'}")
    verified(tmp_path / "run", f"hf:{tmp_path / 'out'}", f"dtype={dtype}")


def test_the_older_format_of_torch(tmp_path):
    model = saved("qwen2", tmp_path / "hf", "bfloat16")
    (tmp_path / "hf" / "model.safetensors").unlink()
    file = tmp_path / "hf" / "pytorch_model.bin"
    torch.save(model.state_dict(), file)
    verified(f"hf:{tmp_path / 'hf'}", tmp_path / "run")
    # Parameters instead of their numbers, in the format before torch 1.6.
    torch.save(dict(model.named_parameters()), file, _use_new_zipfile_serialization=False)
    verified(f"hf:{tmp_path / 'hf'}", tmp_path / "older")


class _Unsafe:
    """Runs a program when it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read by torch"),
        (lambda path: path.write_bytes(b"hello world"), "cannot be read by torch|is corrupted"),
        (lambda path: torch.save({"a": _Unsafe()}, path), "can run arbitrary code"),
        (lambda path: torch.save([1], path), "is not a dict of tensors"),
        (
            lambda path: torch.save({EMBEDDING: torch.zeros(96, 32).to_sparse()}, path),
            f"other kind  {EMBEDDING}: stored sparse_coo",
        ),
    ],
    ids=["empty", "text", "unsafe", "list", "sparse"],
)
def test_torch_files_that_cannot_be_used(make, message, tmp_path, capsys):
    saved("qwen2", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    make(tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(UserError, match=message):
        run(f"from=hf:{tmp_path / 'hf'}", f"to={tmp_path / 'run'}")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "run").exists()
