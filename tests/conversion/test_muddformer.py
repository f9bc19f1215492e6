"""MUDDFormer's own programs: folders of the PyTorch one, checkpoints of the JAX one."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers
from safetensors.numpy import load_file

from MaxText.configuration.loading import configure, load
from MaxText.conversion.config_json import find_family, our_values, to_config_json
from MaxText.conversion.exporting import FolderExport
from MaxText.conversion.families.known import FAMILIES
from MaxText.conversion.hugging_face_folder import find_folder
from MaxText.conversion.importing import FolderWeights
from MaxText.conversion.run_checkpoint import RunWeights
from MaxText.conversion.settings import family_of, to_keys
from MaxText.conversion.tensor_map import TensorMap
from MaxText.conversion.weights import model_of, nested
from MaxText.errors import UserError
from MaxText.generation.decoding import decode
from MaxText.inference import own_configuration
from MaxText.input_pipeline.batch import Batch
from tests.conversion.running import model_of_run, names, run
from tests.conversion.small_folders import GOLDEN, muddformer, same_bits, write
from tests.programs import run as start
from tests.small_models import some_quick

RELEASED = ("muddformer", "muddpythia")
CASES = {"muddformer": "muddformer_l4_d32", "muddpythia": "muddpythia_l3_d48"}


def golden(case):
    """(what is told of a case, its arrays)."""
    path = GOLDEN / "muddformer" / case
    with np.load(path.with_suffix(".npz")) as file:
        return json.loads(path.with_suffix(".json").read_text()), dict(file)


def parameters_of(arrays):
    """Parameters of a golden case by their names."""
    return {
        name.removeprefix("param/"): value
        for name, value in arrays.items()
        if name.startswith("param/")
    }


def released(model_type):
    """(config.json, tensors, arrays, tolerance) of a golden case, as a released folder has them."""
    told, arrays = golden(CASES[model_type])
    names = ("model_type", "architectures", "auto_map")
    fields = {name: muddformer(model_type)[0][name] for name in names}
    tolerance = {name: told["suggested_tolerance"][name] for name in ("atol", "rtol")}
    return fields | told["config"], parameters_of(arrays), arrays, tolerance


def logits(folder, tokens):
    """Float32 logits of the run in a folder, by its own config.yml."""
    model, params = model_of_run(folder)

    @jax.jit
    def forward(params, tokens):
        decoder = model.merge(params)
        return decoder.logits(decoder.hidden(Batch(tokens, tokens, jnp.ones(tokens.shape)))[0])

    return np.asarray(forward(params, jnp.asarray(tokens)))


# --- Folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", RELEASED)
def test_a_folder_gives_the_reference_logits_and_comes_back(model_type, here):
    config, tensors, arrays, tolerance = released(model_type)
    write(here / "hf", config, tensors)
    said = run("from=hf:hf", "to=run")
    architecture = config["architectures"][0]
    assert f"Reading hf: {architecture}," in said
    np.testing.assert_allclose(logits("run", arrays["tokens"]), arrays["logits"], **tolerance)
    # Another format of the table would be seen.
    assert np.abs(arrays["logits"] - arrays["logits_unrounded_rope"]).max() > tolerance["atol"]

    said = run("from=run", "to=hf:out")
    assert f"as {architecture}: config.json, model.safetensors" in said
    files = (
        f"configuration_{model_type}.py and modeling_{model_type}.py of Caiyun-AI/{architecture}"
    )
    assert files in said
    assert names(here / "out") == ["config.json", "model.safetensors"]
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)
    written = json.loads((here / "out" / "config.json").read_text())
    assert written.items() >= config.items()
    sizes = {"n_local_heads": config["n_head"], "head_dim": config["dim"] // config["n_head"]}
    assert written.items() >= sizes.items()


@pytest.mark.parametrize("model_type", RELEASED)
def test_every_format_comes_back_bit_for_bit_in_several_files(model_type, here):
    config, tensors = muddformer(model_type, "bfloat16")
    for number, name in enumerate(tensors):
        if number % 3 == 0:
            tensors[name] = tensors[name].astype(np.float16)
    write(here / "hf", config | {"eos_token_id": 0, "use_layer_cache": True}, tensors)
    said = run("from=hf:hf", "to=run")
    assert "float16 becomes float32" in said
    said = run("from=run", "to=hf:out", "max_shard_size=20KB")
    assert "files of tensors and their index" in said
    weights = FolderWeights(find_folder("hf:out", "from"))
    same_bits({name: weights.files.read(name) for name in weights.files.found}, tensors)
    assert weights.config_json["use_layer_cache"] is True
    assert weights.config_json["eos_token_id"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", RELEASED)
def test_sixteen_layers_come_back_bit_for_bit(model_type, dtype, tmp_path):
    # After 15 layers four ways of 16 states are 64 wide, and the reference makes that 128.
    config, tensors = muddformer(model_type, dtype, layers=16)
    assert tensors["dynamic_dense.14.w1.weight"].shape == (128, 16)
    weights = FolderWeights(write(tmp_path, config, tensors))
    export = FolderExport(weights, FAMILIES[model_type], "")
    (tmp_path / "out").mkdir()
    files = export.write(tmp_path / "out", 10**9)
    same_bits(load_file(tmp_path / "out" / files[0]), tensors)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("muddformer", {"expand_last": False, "round64": False, "use_qk_norm": False}),
        ("muddpythia", {"use_parallel_residual": False, "use_linear_bias": False}),
        ("muddpythia", {"round64": False, "rotary_pct": 0.5, "rope_base": 500000}),
    ],
)
def test_other_choices_of_config_json(model_type, changes, tmp_path):
    config, tensors = muddformer(model_type, **changes)
    weights = FolderWeights(write(tmp_path, config, tensors))
    written = FolderExport(weights, FAMILIES[model_type], "").config_json(config, {})
    assert written.items() >= config.items()
    again = configure(**to_keys(FAMILIES[model_type], written, "there", {}))
    assert our_values(again) == our_values(weights.config)


def test_keys_of_the_released_models():
    config, _ = muddformer("muddformer")
    del config["intermediate_size"]
    sizes = {"dim": 2560, "n_head": 32, "n_layer": 32, "n_local_heads": -1}
    config = {k: v for k, v in config.items() if k != "head_dim"} | sizes
    keys = to_keys(FAMILIES["muddformer"], config, "here", {})
    wanted = {"decoder_block": "muddformer", "rope_table_dtype": "bfloat16", "head_dim": 80,
              "base_mlp_dim": 6912, "base_num_kv_heads": 32, "dense_last_expand": 4,
              "dense_hidden_rounding": "reference", "dense_first_norms": "one"}  # fmt: skip
    assert keys.items() >= wanted.items()
    keys = to_keys(FAMILIES["muddpythia"], muddformer("muddpythia")[0], "here", {})
    wanted = {"decoder_block": "muddpythia", "rope_table_dtype": "float16", "rotary_pct": 0.25,
              "block_arrangement": "parallel", "ffn_bias": True}  # fmt: skip
    assert keys.items() >= wanted.items()


def test_tensors_of_a_released_model():
    # MUDDPythia-1.4B.
    config = muddformer("muddpythia")[0] | {"vocab_size": 50_432, "block_size": 2048, "n_layer": 24}
    config |= {"n_head": 16, "dim": 2048, "intermediate_size": 8192, "n_local_heads": -1}
    del config["head_dim"]
    family = FAMILIES["muddpythia"]
    tensors = TensorMap(family, model_of(configure(**to_keys(family, config, "", {})))).tensors
    assert len({tensor.name for tensor in tensors}) == 600
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) == 1_419_950_149
    widths = [t.shape[0] for t in tensors if t.row.theirs == "dynamic_dense.{layer}.w1.weight"]
    assert widths == [64] * 14 + [128] * 10


def test_a_file_of_torch(here):
    torch = pytest.importorskip("torch", reason="needs pip install '.[torch]'")
    config, tensors = muddformer("muddformer", "float16")
    write(here / "hf", config, tensors)
    (here / "hf" / "model.safetensors").unlink()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    # As it is after a text was generated.
    state["layers.0.attention.kv_cache.k_cache"] = torch.zeros(2, 2)
    torch.save(state, here / "hf" / "pytorch_model.bin")
    run("from=hf:hf", "to=run")
    run("from=run", "to=hf:out")
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)


def test_caches_in_a_file_are_no_weights(tmp_path):
    config, tensors = muddformer("muddformer")
    ends = ("layers.0.attention.kv_cache.k_cache", "layer_cache.layer_cache")
    caches = {name: np.zeros((4, 1, 1, 16), np.float32) for name in ends}
    assert FolderWeights(write(tmp_path, config, tensors | caches)).map.tensors


def test_an_older_spelling_is_kept(here):
    # The program that lies beside such a folder knows this word alone.
    config, tensors = muddformer("muddpythia", dense_type="qkvm")
    hub = {"AutoModelForCausalLM": "somewhere/else--modeling_muddpythia.MUDDPythia"}
    write(here / "hf", config | {"auto_map": hub}, tensors)
    run("from=hf:hf", "to=run")
    run("from=run", "to=hf:out")
    written = json.loads((here / "out" / "config.json").read_text())
    assert (written["dense_type"], written["auto_map"]) == ("qkvm", hub)


def test_a_model_that_was_trained_with_another_table(here):
    config, tensors = muddformer("muddformer")
    write(here / "hf", config, tensors)
    run("from=hf:hf", "to=run", "rope_table_dtype=float32")
    with pytest.raises(UserError, match=r"rope_table_dtype=float32, not bfloat16 .* in front"):
        run("from=run", "to=hf:out")
    assert names(here) == ["hf", "run"]
    run("run/config.yml", "rope_table_dtype=bfloat16", "from=run", "to=hf:out")
    same_bits(load_file(here / "out" / "model.safetensors"), tensors)


@pytest.mark.parametrize("model_type", some_quick(RELEASED, 2))
def test_decode_goes_on_as_the_reference(model_type, here):
    config, tensors, arrays, _ = released(model_type)
    write(here / "hf", config, tensors)
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(here / "hf" / "tokenizer.json"))
    folder = "hf:hf"
    if model_type == "muddpythia":
        run("from=hf:hf", "to=run")
        run("from=run", "to=hf:out")
        # The tokenizer travels.
        assert "tokenizer.json" in names(here / "out")
        folder = "run"
    reference = arrays["greedy_tokens"]
    given = reference.shape[1] - 6
    prompts = [{"prompt": " ".join(f"w{token}" for token in row[:given])} for row in reference]
    (here / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    arguments = ["prompt_file=prompts.jsonl", "decode_output=texts.jsonl", "max_new_tokens=6",
                 "decode_ignore_end=true", "decode_sampling_strategy=greedy", "dtype=float32",
                 "jax_cache_dir="]  # fmt: skip
    decode(own_configuration.load([f"load_parameters_path={folder}", *arguments]), lambda _: None)
    rows = map(json.loads, (here / "texts.jsonl").read_text().splitlines())
    found = {row["index"]: row["tokens"] for row in rows}
    assert [found[index] for index in sorted(found)] == reference[:, given:].tolist()


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("muddformer", {"dense_type": "qkr"}, "dense_type=qkr: only qkvr or qkvm can be imported. "
         "Their program computes sums of all four ways"),
        ("muddformer", {"dense": False}, "dense=False: only True can be imported. Without sums"),
        ("muddformer", {"dynamic_dense": False}, "dynamic_dense=False: only True can be"),
        ("muddformer", {"sepln": False}, "sepln=False: only True can be imported. Queries, keys"),
        ("muddformer", {"tie_word_embeddings": True}, "tie_word_embeddings=True: only False"),
        ("muddformer", {"n_local_heads": 1}, "n_local_heads=1 contradicts the other keys, which "
         "give 2"),
        ("muddformer", {"head_dim": 4}, "head_dim=4 contradicts the other keys, which give 8"),
        ("muddformer", {"n_local_heads": 1, "head_dim": 4}, "give 2\n  head_dim=4 contradicts"),
        ("muddformer", {"dim": "wide"}, "dim: 'wide' is not an integer"),
        ("muddformer", {"dim": None}, "(muddformer) cannot be imported:\n  dim is missing"),
        ("muddformer", {"n_layer": 1}, "dynamic_mlp_dim=true moves width between layers, and there "
         "is only one"),
        ("muddformer", {"intermediate_size": 64}, "half of intermediate_size (64), the width of "
         "the first layer, is rounded to 0"),
        ("muddpythia", {"intermediate_size": None}, "intermediate_size is missing"),
        ("muddpythia", {"window_size": 256}, "window_size=256: only null can be imported. Every"),
        ("muddpythia", {"window_type": "LG"}, "window_type=LG: only null can be imported."),
        ("muddpythia", {"rotary_pct": 0.1}, "rotary_pct"),
    ],
)  # fmt: skip
def test_a_config_json_that_cannot_be_imported(model_type, change, message, tmp_path):
    config, tensors = muddformer(model_type)
    with pytest.raises(UserError) as caught:
        FolderWeights(write(tmp_path, config | change, tensors))
    assert message in str(caught.value)


def test_a_folder_is_known_by_its_class():
    config = muddformer("muddpythia")[0]
    for name in (None, "MUDDPythia", "mudd"):
        assert family_of(config | {"model_type": name}, "here") is FAMILIES["muddpythia"]
    with pytest.raises(UserError, match="model_type=mudd cannot be converted"):
        family_of({"model_type": "mudd"}, "here")
    with pytest.raises(UserError, match=r'"architectures": .* or \["MUDDFormer"\] or'):
        family_of({}, "here")


def test_differences_are_listed_and_nothing_is_left(here, users_environment):
    config, tensors = muddformer("muddformer")
    del tensors["layers.1.attention_norms.2.weight"], tensors["dense_bs.1"]
    tensors["layers.2.attention_norm.weight"] = tensors["norm.weight"]
    tensors["layers.2.feed_forward.w1.weight"] = np.zeros((256, 16), np.float32)
    tensors["dynamic_dense.0.w2.weight"] = np.zeros((8, 8), np.float32)
    write(here / "hf", config | {"expand_last": False}, tensors)
    done = start("convert.py", ["from=hf:hf", "to=run"], here, users_environment)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for line in (
        "missing     layers.1.attention_norms.2.weight: wanted [16]",
        "missing     dense_bs.1: wanted [4, 3]",
        "other shape layers.2.feed_forward.w1.weight: stored [256, 16], config.json gives [384, 16",
        "other shape dynamic_dense.0.w2.weight: stored [8, 8], config.json gives [8, 64]",
        "extra       layers.2.attention_norm.weight: stored [16], unknown to this model",
        "Check that config.json and the tensors belong together.",
    ):
        assert line in done.stderr
    assert names(here) == ["hf"]


def test_the_tensors_of_the_other_family(tmp_path):
    config = muddformer("muddformer")[0]
    with pytest.raises(UserError) as caught:
        FolderWeights(write(tmp_path, config, muddformer("muddpythia")[1]))
    message = str(caught.value)
    assert "missing     layers.0.feed_forward.w3.weight: wanted [128, 16]" in message
    assert "extra       layers.0.attention.wk.bias: stored [16], unknown to this" in message


SIZE: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": -1,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 3,
}


@pytest.mark.parametrize(
    ("block", "keys", "messages"),
    [
        ("muddformer", {"dense_first_norms": "each"}, ["dense_first_norms=each, not one (",
         "dense_first_norms=one before training"]),
        ("muddformer", {"rope_table_dtype": "float32"}, ["rope_table_dtype=float32, not bfloat16"]),
        ("muddformer", {"dense_ways": ("q", "k", "r")}, ["dense_ways=['q', 'k', 'r'], not ['q', "]),
        ("muddformer", {"dense_sources": "window"}, ["dense_sources=window, not all"]),
        ("muddformer", {"dense_activation": "gelu"}, ["dense_activation=gelu, not gelu_erf"]),
        ("muddformer", {"dense_last_expand": 2}, ["dense_last_expand=2"]),
        ("muddformer", {"dense_hidden_rounding": "ceil"}, ["dense_hidden_rounding=ceil"]),
        ("muddformer", {"mlp_dim_multiple": 64}, ["mlp_dim_multiple=64, not 128"]),
        ("muddformer", {"base_num_kv_heads": 1}, ["base_num_kv_heads=1, not 2"]),
        ("muddformer", {"head_dim": 4}, ["head_dim=4, not 8"]),
        ("muddformer", {"qkv_bias": True}, ["qkv_bias=True, not False"]),
        ("muddpythia", {"qkv_bias": False}, ["qkv_bias=False, not True"]),
        ("muddformer_prepost", {}, ["mudd_prenorm=True, not False (", "no PyTorch layout"]),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value), "norms"),
)  # fmt: skip
def test_what_the_pytorch_program_does_not_have_is_no_folder(block, keys, messages):
    table = {"muddformer": "bfloat16", "muddpythia": "float16"}.get(block, "bfloat16")
    config = configure(**{"decoder_block": block, "rope_table_dtype": table, **SIZE, **keys})
    with pytest.raises(UserError) as caught:
        find_family(config, block.removesuffix("_prepost"))
    for message in messages:
        assert message in str(caught.value)
    # The nearest family is told first, with all that differs.
    with pytest.raises(UserError) as caught:
        find_family(config, "")
    first, *differences, others = str(caught.value).splitlines()
    assert f"The nearest is {block.removesuffix('_prepost')}, but for:" in first
    assert any(line.startswith(f"  {messages[0]}") for line in differences)
    assert len(others.split(", ")) == len(FAMILIES) - 1


def test_a_model_that_was_trained_here_becomes_a_folder():
    for block, table in {"muddformer": "bfloat16", "muddpythia": "float16"}.items():
        config = configure(decoder_block=block, rope_table_dtype=table, vocab_size=64, **SIZE)
        family = find_family(config, "")
        assert family is FAMILIES[block]
        written = to_config_json(family, config)
        wanted = muddformer(block)[0]
        told = ("model_type", "architectures", "auto_map", "dense", "dense_type", "sepln",
                "round64", "head_dim", "expand_last", "n_local_heads",
                "intermediate_size")  # fmt: skip
        assert {name: written[name] for name in told} == {name: wanted[name] for name in told}
        again = configure(**to_keys(family, written, "there", {}))
        assert to_config_json(family, again) == written


def test_nothing_to_compare_with(here):
    write(here / "hf", *muddformer("muddformer"))
    with pytest.raises(UserError, match="which has no MUDDFormer"):
        run("from=hf:hf", "to=run", "--verify")
    assert names(here) == ["hf"]


# --- Checkpoints of the JAX program ---------------------------------------------------------------


def save(folder, arrays):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(nested(arrays)))


def jax_case():
    """(arrays, keys as they are typed here) of the golden model with norms before and after."""
    told, arrays = golden("muddllama_prepost_l4_d32")
    theirs = told["config"]
    keys = {
        "decoder_block": "muddformer_prepost",
        "base_emb_dim": theirs["dim"],
        "base_num_query_heads": theirs["n_head"],
        "base_num_kv_heads": theirs["n_head"],
        "head_dim": -1,
        "base_mlp_dim": theirs["mlp_dim"],
        "base_num_decoder_layers": theirs["n_layer"],
        "vocab_size": theirs["vocab_size"],
        "normalization_layer_epsilon": theirs["norm_eps"],
        "max_target_length": told["length"],
    }
    tolerance = {name: told["suggested_tolerance"][name] for name in ("atol", "rtol")}
    return arrays, [f"{name}={value}" for name, value in keys.items()], tolerance


@pytest.mark.parametrize("nesting", some_quick([1, 2], 2))
def test_a_jax_checkpoint_gives_the_reference_logits(nesting, here):
    arrays, keys, tolerance = jax_case()
    theirs = {"params/" * nesting + k: v for k, v in parameters_of(arrays).items()}
    moments = {f"opt_state/mu/{name}": value for name, value in theirs.items()}
    save(here / "theirs" / "checkpoints" / "13500" / "state",
         theirs | moments | {"step": np.int32(13501)})  # fmt: skip
    said = run(*keys, "from=maxtext:theirs", "to=run")
    assert "query_scaling=model" in said
    np.testing.assert_allclose(logits("run", arrays["tokens"]), arrays["logits"], **tolerance)
    assert "rope_table_dtype" not in (here / "run" / "config.yml").read_text()


def test_a_jax_checkpoint_with_another_configuration(here):
    arrays, keys, _ = jax_case()
    theirs = {f"params/{k}": v for k, v in parameters_of(arrays).items()}
    del (
        theirs["params/decoder/mudd_prenorm_2/scale"],
        theirs["params/decoder/mudd_postnorm_0/scale"],
    )
    save(here / "theirs", theirs)
    with pytest.raises(UserError) as caught:
        run(*keys, "dense_hidden_rounding=none", "from=maxtext:theirs", "to=run")
    message = str(caught.value)
    for line in (
        "missing     params/decoder/mudd_prenorm_2/scale: wanted [32]",
        "missing     params/decoder/mudd_postnorm_0/scale: wanted [32]",
        "other shape params/decoder/layers_0/dynamic_dense_conn1/kernel: stored float32[32,64], "
        "wanted [32, 8]",
    ):
        assert line in message
    with pytest.raises(UserError, match="sums for q, k, v and r, in this order"):
        run(*keys, "mudd_postnorm=all", "from=maxtext:theirs", "to=run")
    keys[keys.index("normalization_layer_epsilon=1e-06")] = "normalization_layer_epsilon=1e-5"
    with pytest.raises(UserError, match="epsilon=1e-05: norms of sums have 1e-6 in MUDDFormer"):
        run(*keys, "from=maxtext:theirs", "to=run")
    assert names(here) == ["theirs"]


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "written out"])
def test_its_baseline(scanned, here):
    keys = ["decoder_block=llama2", *(f"{name}={value}" for name, value in SIZE.items()),
            "vocab_size=40", "max_target_length=16"]  # fmt: skip
    model = model_of(load(keys).config)
    generator = np.random.default_rng(0)
    ours = {
        name: generator.standard_normal(info.shape, np.float32)
        for name, info in model.parameters.items()
    }
    theirs = {}
    for name, array in ours.items():
        name = name.replace("pre_mlp_layer_norm", "post_self_attention_layer_norm")
        if not name.startswith("layers/"):
            theirs[name if "embedder" in name else f"decoder/{name}"] = array
        elif scanned:
            theirs[f"decoder/{name}"] = np.swapaxes(array, 0, 1)
        else:
            for layer, part in enumerate(array):
                theirs[f"decoder/{name.replace('layers/', f'layers_{layer}/')}"] = part
    save(
        here / "theirs" / "checkpoints" / "500" / "state",
        {f"params/{k}": v for k, v in theirs.items()},
    )
    # Its attention divides scores, and its folder tells it from MaxText's llama2.
    assert "query_scaling=model" in run(*keys, "from=maxtext:theirs", "to=run")
    weights = RunWeights("run")
    for name, array in ours.items():
        np.testing.assert_array_equal(weights.read(name), array, err_msg=name)
