"""fattorib/transformer: its checkpoints to runs, and runs to and from a PyTorch state dict."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from safetensors.numpy import load_file

from MaxText.configuration.loading import load
from MaxText.conversion import request
from MaxText.conversion.run_checkpoint import RunWeights
from MaxText.conversion.weights import model_of, nested
from MaxText.errors import UserError
from MaxText.input_pipeline.batch import Batch
from tests.conversion.running import run
from tests.conversion.small_folders import GOLDEN, same_bits, write

KEYS = {
    "alibi_fused_h4": ["head_dim=16"],
    "sgu_headqk_sequential_h4": [
        "head_dim=8",
        "position_embedding=learned",
        "block_arrangement=sequential",
        "static_sgu=true",
        "static_sgu_kernel=4",
        "head_qk=true",
    ],
}


def golden(case):
    """(keys of ours, parameters as a tree, everything in the file) of a golden model."""
    path = GOLDEN / "fattorib" / case
    theirs = json.loads(path.with_suffix(".json").read_text())["config"]
    with np.load(path.with_suffix(".npz")) as file:
        arrays = dict(file)
    flat = {k.removeprefix("params/"): v for k, v in arrays.items() if k.startswith("params/")}
    width, length = theirs["embedding_dim"], arrays["tokens"].shape[1]
    keys = [
        "decoder_block=fattorib",
        f"base_emb_dim={width}",
        f"base_mlp_dim={4 * width}",
        f"base_num_query_heads={theirs['num_head']}",
        f"base_num_kv_heads={theirs['num_head']}",
        f"base_num_decoder_layers={theirs['N']}",
        f"vocab_size={theirs['vocab_size']}",
        f"max_target_length={length}",
        *KEYS[case],
    ]
    return keys, nested(flat), arrays


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored(folder, name, tree):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(msgpack_serialize(tree))


def logits_of_run(tokens):
    weights = RunWeights("run")
    config = load(["run/config.yml"]).config
    numerics = config.model.numerics.model_copy(update={"matmul_precision": "highest"})
    section = config.model.model_copy(update={"numerics": numerics})
    model = model_of(config.model_copy(update={"model": section}))
    params = nested({name: jnp.asarray(weights.read(name)) for name in model.parameters})
    tokens = jnp.asarray(tokens)
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape))
    return jax.jit(lambda params: model.merge(params)(batch))(params)


@pytest.mark.parametrize("case", KEYS)
def test_a_checkpoint_becomes_a_run(case, here):
    keys, tree, arrays = golden(case)
    # An older step, and the form that a whole training state has.
    stored(here / "params", "params_900", {"params": {"wte": {}}})
    stored(here / "params", "params_1000", {"step": 1000, "params": {"params": tree}})
    said = run(*keys, "from=fattorib:params", "to=run")
    assert "params_1000" in said
    found = logits_of_run(arrays["tokens"])
    np.testing.assert_allclose(found, arrays["logits_f64"], rtol=0, atol=1e-4)


def forward(state, tokens, heads):
    """Logits of a PyTorch state dict with ALiBi and fused residuals, in float64."""
    state = {name: tensor.astype(np.float64) for name, tensor in state.items()}
    length = tokens.shape[1]

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6)
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    distance = np.arange(length)[:, None] - np.arange(length)
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    bias = np.where(distance < 0, -np.inf, -slopes[:, None, None] * distance)
    x = state["wte.weight"][tokens]
    for layer in range(sum(name.endswith("ln1.weight") for name in state)):
        block = f"blocks.{layer}."
        h = norm(x, block + "ln1")
        q, k, v = (
            linear(h, f"{block}attn.{part}").reshape(*tokens.shape, heads, -1).swapaxes(1, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + bias
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).swapaxes(1, 2).reshape(x.shape)
        hidden = linear(h, block + "mlp.fc1")
        cubic = hidden + 0.044715 * hidden**3
        hidden = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * cubic))
        x = x + linear(mixed, block + "attn.fc_resid") + linear(hidden, block + "mlp.fc_resid")
    return norm(x, "norm") @ state["wte.weight"].T


def test_a_run_becomes_a_state_dict_and_comes_back(here):
    keys, tree, arrays = golden("alibi_fused_h4")
    stored(here, "params_1", tree)
    run(*keys, "from=fattorib:params_1", "to=run")
    said = run("from=run", "to=hf:exported")
    assert "FattoribTransformer" in said
    exported = load_file(here / "exported" / "model.safetensors")
    found = forward(exported, arrays["tokens"], heads=4)
    np.testing.assert_allclose(found, arrays["logits_f64"], rtol=0, atol=1e-9)
    config_json = json.loads((here / "exported" / "config.json").read_text())
    sizes = {"embedding_dim": 64, "N": 2, "num_head": 4, "vocab_size": 97, "block_size": 24}
    assert config_json.items() >= {**sizes, "alibi_attn": True, "fused_residuals": True}.items()

    # As its PyTorch program saves: the head, masks and slopes besides, another name of the norm.
    renamed = {name.replace(".ln1.", ".ln."): tensor for name, tensor in exported.items()}
    buffers = {"blocks.0.attn.mask": np.ones((1, 1, 4, 4), np.uint8),
               "blocks.0.attn.slopes": np.ones(4, np.float32)}  # fmt: skip
    head = {"lm_head.weight": exported["wte.weight"]}
    write(here / "theirs", config_json, renamed | buffers | head)
    run("from=hf:theirs", "to=again")
    first, again = RunWeights("run"), RunWeights("again")
    same_bits(
        {name: again.read(name) for name in again.model.parameters},
        {name: first.read(name) for name in first.model.parameters},
    )


def test_sequential_and_learned_positions_come_back(here):
    keys, tree, _ = golden("sgu_headqk_sequential_h4")
    del tree["head_q"], tree["head_k"]
    width = 64
    for block in (tree["TransformerBlock_0"], tree["TransformerBlock_1"]):
        for projection in block["CausalAttention_0"].values():
            projection["kernel"] = np.tile(projection["kernel"], (2, 2))
            projection["bias"] = np.tile(projection["bias"], 2)
            assert projection["kernel"].shape == (width, width)
    stored(here, "params_1", tree)
    left_out = ("static_sgu", "head_qk", "head_dim")
    plain = [key for key in keys if not key.startswith(left_out)]
    run(*plain, "head_dim=16", "from=fattorib:params_1", "to=run")
    run("from=run", "to=hf:exported", "family=fattorib")  # GPT-2's parts are the same
    exported = load_file(here / "exported" / "model.safetensors")
    np.testing.assert_array_equal(exported["wpe.weight"], tree["wpe"]["embedding"])
    block = tree["TransformerBlock_1"]
    np.testing.assert_array_equal(exported["blocks.1.ln2.bias"], block["LayerNorm_1"]["bias"])
    found = exported["blocks.1.attn.query.weight"]
    np.testing.assert_array_equal(found, block["CausalAttention_0"]["query_proj"]["kernel"].T)
    config_json = json.loads((here / "exported" / "config.json").read_text())
    assert config_json["alibi_attn"] is config_json["fused_residuals"] is False


def test_what_has_no_state_dict_is_refused(here):
    keys, tree, _ = golden("sgu_headqk_sequential_h4")
    stored(here, "params_1", tree)
    run(*keys, "from=fattorib:params_1", "to=run")
    with pytest.raises(UserError, match="static_sgu=True, not False"):
        run("from=run", "to=hf:exported", "family=fattorib")
    assert not (here / "exported").exists()


def test_files_that_cannot_be_read(here):
    keys, tree, _ = golden("alibi_fused_h4")
    with pytest.raises(UserError, match="there is no such file"):
        run(*keys, "from=fattorib:missing", "to=run")
    (here / "empty").mkdir()
    with pytest.raises(UserError, match="has no file params_STEP"):
        run(*keys, "from=fattorib:empty", "to=run")
    (here / "text").write_text("hello")
    with pytest.raises(UserError, match=r"of another model .*: it has layers/mlp/wi_0/kernel"):
        run("decoder_block=llama2", "from=fattorib:text", "to=run")
    with pytest.raises(UserError, match="no msgpack file of Flax"):
        run(*keys, "from=fattorib:text", "to=run")
    del tree["LayerNorm_0"]["bias"]
    tree["wte"]["embedding"] = tree["wte"]["embedding"][:5]
    tree["more"] = {"kernel": np.zeros(3, np.float32)}
    stored(here, "params_1", tree)
    with pytest.raises(UserError) as caught:
        run(*keys, "from=fattorib:params_1", "to=run")
    assert "missing     LayerNorm_0/bias: wanted [64]" in str(caught.value)
    assert "other shape wte/embedding: stored [5, 64], wanted [97, 64]" in str(caught.value)
    assert "extra       more/kernel: stored [3]" in str(caught.value)
    with pytest.raises(UserError, match="do not say which model they hold"):
        run("from=fattorib:params_1", "to=run")
    with pytest.raises(UserError, match="this layout is read, not written"):
        request.read(["from=run", "to=fattorib:there"])
    assert not (here / "run").exists()
