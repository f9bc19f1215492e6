"""Against transformers itself: what it writes is read, and what is written it computes with."""

import json

import pytest

from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_config import config_from_hf
from MaxText.conversion.hf_export import verify
from MaxText.conversion.hf_import import HFWeights
from MaxText.errors import UserError
from tests.conversion.running import run
from tests.conversion.test_tables import SCALINGS
from tests.golden.families.make import CASES
from tests.golden.families.make import SIZES as FAMILY_SIZES

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
    return saved_model(model_type, MODELS[model_type] | (changes or {}), folder, dtype, **how)


def saved_model(model_type, fields, folder, dtype="float32", **how):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **fields)
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


@pytest.mark.parametrize("case", CASES)
def test_families_agree_both_ways(case, tmp_path):
    fields = FAMILY_SIZES | CASES[case]
    original = saved_model(case.partition("-")[0], fields, tmp_path / "hf")
    verified(f"hf:{tmp_path / 'hf'}", tmp_path / "run")
    verified(tmp_path / "run", f"hf:{tmp_path / 'again'}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    wanted = original.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


SILENT = {
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
# Without them the classes fail.
NOT_SILENT = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 32},
    "mamba2": {"hidden_size": 4096},  # heads are twice as wide together
}
# Keys of rotary positions change nothing without them, and transformers warns of an old one.
WITHOUT_ROTARY = ("mamba2", "nemotron_h", "kimi_linear")
# In their classes a head's width, and in some the number of key heads, follows from other keys.
FIXED_HEADS = (
    "cohere2",
    "stablelm",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_linear",
    "mamba2",
    "olmo_hybrid",
)
WINDOWS = {
    "sliding_window": 7,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "sliding_window_pattern": 3,
}
BASES = {"rope_theta": 77.0, "rope_local_base_freq": 55.0, "rotary_emb_base": 66.0}
OLD_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 4096}


def read_both(family, config):
    """The keys of a config.json, and those of what transformers makes of it."""
    of_class = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    newer = json.loads(of_class.to_json_string(use_diff=False))
    return [config_from_hf(family, version, "here", {}) for version in (config, newer)]


@pytest.mark.parametrize("model_type", sorted({case.partition("-")[0] for case in CASES}))
def test_silent_and_older_files_mean_what_they_mean_in_transformers(model_type):
    family = FAMILIES[model_type]
    silent = SILENT | {"model_type": model_type} | NOT_SILENT.get(model_type, {})
    scaling = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512}
    yarn = OLD_YARN | {"rope_scaling": OLD_YARN["rope_scaling"] | scaling}
    versions = [silent, silent | {"num_hidden_layers": 2}]
    if model_type != "nemotron_h":  # import refuses its window
        versions.append(silent | WINDOWS)
    if model_type != "ministral3":  # its class fails without llama_4_scaling_beta
        versions.append(silent | BASES)
    if model_type not in ("phi3", "gemma4_text", *WITHOUT_ROTARY):
        versions.append(silent | yarn)
    for config in versions:
        older, newer = read_both(family, config)
        assert older == newer
    # Heads that share the width, or have the same number of keys.
    if model_type not in FIXED_HEADS:
        older, newer = read_both(family, silent | {"num_key_value_heads": 4, "head_dim": 24})
        assert older == newer


@pytest.mark.parametrize(
    ("model_type", "text_type"),
    [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("mistral3", "ministral3")],
)
def test_the_text_part_of_a_multimodal_model(model_type, text_type, tmp_path):
    vision = {
        "model_type": {"gemma3": "siglip_vision_model"}.get(model_type, "pixtral"),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if model_type == "mistral3":
        vision |= {"head_dim": 8}
    text = FAMILY_SIZES | {"model_type": text_type, "head_dim": 8, "sliding_window": 5}
    fields = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    said = run(f"from=hf:{tmp_path / 'hf'}", f"to={tmp_path / 'run'}", "--verify")
    assert "of which only the text model is read. Skipped: multi_modal_projector (" in said
    verified(tmp_path / "run", f"hf:{tmp_path / 'again'}")
    assert HFWeights(tmp_path / "again").config_json["model_type"] == text_type


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
