"""TokenFormer's own programs: folders of the PyTorch one, checkpoints of the JAX one."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

from MaxText.configuration.loading import configure, load
from MaxText.conversion.config_json import find_family, to_config_json
from MaxText.conversion.families.known import FAMILIES
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.settings import family_of, to_keys
from MaxText.conversion.weights import nested
from MaxText.errors import UserError
from MaxText.inference import own_configuration
from MaxText.input_pipeline.batch import Batch
from tests.conversion.running import model_of_run, run
from tests.conversion.small_folders import GOLDEN, random, same_bits, tokenformer, write
from tests.layers.tokenformer_names import with_prefix

PROGRAM = Path(__file__).parents[2] / "MaxText" / "convert.py"
FAMILY = FAMILIES["tokenformer"]


def golden(case):
    """(what is told of a case, its arrays)."""
    path = GOLDEN / "tokenformer" / case
    return json.loads(path.with_suffix(".json").read_text()), dict(
        np.load(path.with_suffix(".npz"))
    )


def published(config):
    """config.json of a golden case, with the fields of the published ones."""
    fields = tokenformer()[0]
    sizes = {name: config[name] for name in fields if name in config}
    return fields | sizes | {"vocab_size": config["padded_vocab_size"]}


def logits(folder, batch):
    """Float32 logits of the run in a folder, by its own config.yml."""
    model, params = model_of_run(folder)
    decoder = model.merge(params)
    return np.asarray(decoder.logits(decoder.hidden(batch)[0]))


def close(ours, theirs):
    """Within 1e-5 of the largest."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


# --- Folders --------------------------------------------------------------------------------------


def test_a_folder_gives_the_reference_logits_and_comes_back(here):
    told, arrays = golden("torch_a")
    tensors = with_prefix(arrays, "params_small/")
    config = published(told["config"])
    write(here / "hf", config, tensors)
    said = run("from=hf:hf", "to=run")
    assert "Reading hf: TokenFormerForCausalLM," in said
    tokens = jnp.asarray(arrays["tokens"])
    close(logits("run", Batch(tokens, tokens, jnp.ones(tokens.shape))), arrays["small/logits"])

    said = run("from=run", "to=hf:out")
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)
    written = json.loads((here / "out" / "config.json").read_text())
    # Besides what was there, constants that the published files leave to the program.
    assert written == config | {"rotary_emb_base": 10_000.0, "layernorm_epsilon": 1e-5}
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert "AutoModelForCausalLM" not in said
    assert "load_parameters_path=hf:out" in said
    # What was written is read again.
    FolderWeights(here / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_slot_count_comes_back_bit_for_bit(dtype, here):
    config, tensors = tokenformer(dtype)
    more = {"pad_token_id": 1, "model_parallel_size": 1}
    write(here / "hf", config | more, tensors)
    run("from=hf:hf", "to=run")
    keys = load(["run/config.yml"]).config.model.pattention
    assert (keys.slot_num, keys.proj_slot_num, keys.ffn_slot_num) == (10, 14, 22)
    run("from=run", "to=hf:out", "family=tokenformer")
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)
    written = json.loads((here / "out" / "config.json").read_text())
    assert written.items() >= (config | more | {"vocab_size": 50_304}).items()
    run("from=run", "to=hf:narrow", "dtype=bfloat16")
    written = json.loads((here / "narrow" / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"


def test_slots_of_the_usual_ratio_follow_one_key(here):
    # So that slot_num=NUMBER grows an imported model everywhere.
    write(here / "hf", *tokenformer(slots=(12, 12, 48), layers=1))
    run("from=hf:hf", "to=run")
    lines = (here / "run" / "config.yml").read_text().splitlines()
    assert "slot_num: 12" in lines
    assert not any(line.startswith(("proj_slot_num", "ffn_slot_num")) for line in lines)
    said = run("grow", "from=run", "to=large", "slot_num=16")
    assert "12 -> 16" in said
    assert "48 -> 64" in said
    # Scores of the grown model are scaled as before, which a folder has no field for.
    for arguments in ((), ("family=tokenformer",)):
        with pytest.raises(UserError) as caught:
            run("from=large", "to=hf:out", *arguments)
        message = str(caught.value)
        assert "its layout has no zoom" in message
        assert "zoom 12 for 16 slots (attention), zoom 48 for 64 slots (feed-forward)" in message
        assert "growth_mode=random" in message
    assert not (here / "out").exists()
    run("grow", "from=run", "to=random", "slot_num=16", "growth_mode=random")
    assert "Wrote out as" in run("from=random", "to=hf:out")


def test_a_zoom_behind_gelu_is_folded_into_the_values(here):
    config, tensors = tokenformer(slots=(12, 9, 40), layers=1)
    write(here / "hf", config | {"norm_activation_type": "gelu_l2_norm"}, tensors)
    run("from=hf:hf", "to=run")
    sizes = ["slot_num=16", "proj_slot_num=9", "ffn_slot_num=160"]
    run("grow", "from=run", "to=large", *sizes)
    said = run("from=large", "to=hf:out")
    told = [line for line in said.splitlines() if "no zoom" in line]
    assert len(told) == 1
    assert told[0].endswith("the function: 0.866 (query, key, value), 0.5 (feed-forward)")
    run("from=hf:out", "to=again")
    section = load(["again/config.yml"]).config.model.pattention
    assert [section.zoom(place, 16) for place in ("qkv", "proj", "ffn")] == [16, 9, 160]
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 500, (2, 8)), jnp.int32)
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape))
    before = logits("run", batch)
    close(logits("large", batch), before)
    close(logits("again", batch), before)
    # What else keeps a model out of the layout is told with its zoom.
    other = own_configuration.load(["load_parameters_path=large", "ffn_bias=true"]).config
    with pytest.raises(UserError, match=r"ffn_zoom_dim=40\.0, not -1\.0\n  ffn_bias=True, not"):
        find_family(other, "tokenformer")


def test_a_file_of_torch(here):
    torch = pytest.importorskip("torch", reason="needs pip install '.[torch]'")
    config, tensors = tokenformer(layers=1)
    write(here / "hf", config, tensors)
    (here / "hf" / "model.safetensors").unlink()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    torch.save(state, here / "hf" / "pytorch_model.bin")
    run("from=hf:hf", "to=run")
    run("from=run", "to=hf:out")
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)


def test_programs_find_the_model_in_the_folder(here):
    write(here / "hf", *tokenformer(slots=(12, 12, 44), layers=1))
    model = own_configuration.load(["load_parameters_path=hf:hf"], "decode.py").config.model
    places = {place: model.pattention.num_slots(place, 16) for place in ("qkv", "proj", "ffn")}
    assert places == {"qkv": 12, "proj": 12, "ffn": 44}
    assert (model.shape.vocab_size, model.position.rotary_pct) == (50_304, 0.25)
    assert not model.pattention.gelu_approximate
    assert model.pattention.score_norm_epsilon == 0
    # train.py takes it from such a folder only: a run's path is weights for the model asked for.
    arguments = ["load_parameters_path=hf:hf", "dataset_type=synthetic"]
    taken = own_configuration.for_training(arguments, "train.py").config.model
    assert (taken.shape, taken.pattention) == (model.shape, model.pattention)
    other = own_configuration.for_training(["load_parameters_path=run", arguments[1]], "train.py")
    assert other.config.model.shape != model.shape


def test_a_model_that_was_trained_here_becomes_a_folder():
    loaded = load(["model_name=tokenformer-150m"]).config
    family = find_family(loaded, "")
    assert family is FAMILY
    written = to_config_json(family, loaded)
    assert "model_type" not in written
    told = {"num_layers": 12, "qkv_slot_num": 768, "proj_slot_num": 768, "ffn_slot_num": 3072}
    told |= {
        "rotary_pct": 0.25,
        "seq_length": 2048,
        "pos_emb": "rotary",
        "norm": "layernorm_nonparam",
    }
    assert written.items() >= told.items()
    again = configure(**to_keys(family, written, "there", {}))
    assert to_config_json(family, again) == written


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decoder_block": "tokenformer"}, "gelu_approximate=True, not False"),
        ({"slot_num": 24, "zoom_dim": 20.0}, "ffn_zoom_dim=80.0, not -1.0"),
        ({"normalize_type": "gelu"}, "normalize_type=gelu"),
        ({"logits_via_embedding": False}, "logits_via_embedding=False, not True"),
        ({"qkv_bias": True}, "qkv_bias=True, not False"),
        ({"qkv_scale_factor": 0.5}, "qkv_scale_factor=0.5, not 1.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_pytorch_program_does_not_have_is_no_folder(keys, message):
    size = {"base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": -1}
    config = configure(**{"decoder_block": "tokenformer_pytorch", **size, **keys})
    with pytest.raises(UserError) as caught:
        find_family(config, "tokenformer")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "layernorm"}, "norm=layernorm: only layernorm_nonparam can be imported"),
        ({"pos_emb": "alibi"}, "pos_emb=alibi: only rotary can be"),
        ({"no_weight_tying": True}, "no_weight_tying=True: only False can be"),
        ({"norm_activation_type": "relu"}, "only l2_norm_gelu or gelu_l2_norm or softmax"),
        ({"qkv_slot_num": None}, "imported:\n  qkv_slot_num is missing$"),
        ({"qkv_slot_num": 0}, "qkv_slot_num=0 is not >= 1"),
        ({"ffn_slot_num": "many"}, "ffn_slot_num: 'many' is not an integer"),
        ({"seq_length": None, "max_position_embeddings": None}, "max_position_embeddings is miss"),
        ({"rotary_pct": 0.2}, "head_dim 8 . rotary_pct 0.2 gives 1,"),
        ({"architectures": ["GPTNeoXForCausalLM"]}, "has no model_type"),
        ({"architectures": "TokenFormerForCausalLM"}, 'Only with .architectures.: ."TokenFormer'),
    ],
)
def test_a_config_json_that_is_not_ours(change, message, tmp_path):
    config, tensors = tokenformer(layers=1)
    with pytest.raises(UserError, match=message):
        FolderWeights(write(tmp_path, config | change, tensors))


def test_a_folder_that_names_its_model_type():
    assert family_of(tokenformer()[0] | {"model_type": "tokenformer"}, "here") is FAMILY
    assert (
        family_of(random("llama")[0] | {"architectures": [FAMILY.architecture]}, "here")
        is (FAMILIES["llama"])
    )


def test_differences_are_listed_and_nothing_is_written(here, users_environment):
    config, tensors = tokenformer(layers=1)
    del tensors["sequential.2.attention.proj.value_param_tokens"]
    tensors["sequential.3.mlp.key_param_tokens"] = tensors["sequential.2.mlp.key_param_tokens"]
    write(here / "hf", config | {"ffn_slot_num": 23}, tensors)
    found = subprocess.run(
        [sys.executable, PROGRAM, "from=hf:hf", "to=run"],
        capture_output=True, text=True, env=users_environment | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    for line in (
        "missing     sequential.2.attention.proj.value_param_tokens: wanted [14, 16]",
        "other shape sequential.2.mlp.value_param_tokens: stored [22, 16], config.json gives [23, ",
        "extra       sequential.3.mlp.key_param_tokens: stored [22, 16], unknown to this model",
    ):
        assert line in found.stderr
    assert [path.name for path in here.iterdir()] == ["hf"]


def test_nothing_to_compare_with(here):
    write(here / "hf", *tokenformer(layers=1))
    with pytest.raises(UserError, match="which has no TokenFormerForCausalLM"):
        run("from=hf:hf", "to=run", "--verify")
    run("from=hf:hf", "to=run")
    with pytest.raises(UserError, match="which has no TokenFormerForCausalLM"):
        run("from=run", "to=hf:out", "--verify")
    assert sorted(path.name for path in here.iterdir()) == ["hf", "run"]


# --- Checkpoints of the JAX program ---------------------------------------------------------------


def save(folder, arrays):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(nested(arrays)))


def keys_of(config):
    """Their configuration as it is typed here."""
    unknown = {"param_scan_axis", "use_untrainable_positional_embedding", "trainable_position_size"}
    unknown.add("dtype")  # here that of an export
    if not config["logits_via_embedding"]:
        unknown.add("normalize_embedding_logits")
    typed = {name: value for name, value in config.items() if name not in unknown}
    values = [f"{name}={str(value).lower()}" for name, value in typed.items()]
    return ["decoder_block=tokenformer", *values]


def written_out(arrays):
    """Layers of their own instead of axis 1."""
    found = {}
    for name, array in arrays.items():
        if "/layers/" in name:
            for layer, part in enumerate(np.moveaxis(array, 1, 0)):
                found[name.replace("/layers/", f"/layers_{layer}/")] = part
        else:
            found[name] = array
    return found


@pytest.mark.parametrize("case", ["jax_a", "jax_b"])
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "written out"])
def test_a_jax_checkpoint_gives_the_reference_logits(case, scanned, here):
    told, arrays = golden(case)
    theirs = with_prefix(arrays, "params_small/")
    theirs = {f"params/{k}": v for k, v in (theirs if scanned else written_out(theirs)).items()}
    save(here / "theirs" / "checkpoints" / "20" / "items", theirs | {"step": np.int32(20)})
    said = run(*keys_of(told["config"]), "from=maxtext:theirs", "to=run")
    assert "query_scaling=model" in said
    parts = (arrays["batch/inputs"], arrays["batch/targets"])
    places = (arrays["batch/inputs_position"], arrays["batch/inputs_segmentation"])
    batch = Batch(*map(jnp.asarray, (*parts, np.ones(parts[0].shape), *places)))
    exact = arrays.get("small/logits_exact_embedding", arrays["small/logits"])
    close(logits("run", batch), exact)


def test_a_jax_checkpoint_of_another_size(here):
    told, arrays = golden("jax_a")
    theirs = {f"params/{k}": v for k, v in with_prefix(arrays, "params_small/").items()}
    save(here / "theirs", theirs)
    keys = keys_of(told["config"])
    with pytest.raises(UserError) as caught:
        run(*keys, "slot_num=40", "proj_slot_num=24", "from=maxtext:theirs", "to=run")
    lines = str(caught.value).splitlines()
    keys_line = "other shape params/params/decoder/layers/self_attention/qkv_key_slot/kernel"
    assert f"  {keys_line}: stored float32[32,2,3,24], wanted [32, 2, 3, 40]" in lines
    assert sum("qkv_key_slot" in line for line in lines) == 1  # that three arrays share
    assert not any("proj_" in line for line in lines)
    for more, message in {
        "query_scaling=weights": "queries from slots have no weights",
        "position_embedding=rotary": "has no rotary positions",
    }.items():
        with pytest.raises(UserError, match=message):
            run(*keys, more, "from=maxtext:theirs", "to=run")
