"""fattorib/transformer: its checkpoints to runs, and runs to and from a PyTorch state dict.

The golden ones are compared with the program in tests/layers/test_golden.py.
"""

import json

import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from safetensors.numpy import load_file

from MaxText.conversion.request import parse_arguments
from MaxText.conversion.weight_source import unflatten
from MaxText.errors import UserError
from tests.conversion.golden_models import of_fattorib
from tests.conversion.running import parameters_in_run, run
from tests.conversion.small_folders import same_bits, write
from tests.growth.growing import by_name

ALIBI, SGU = of_fattorib("alibi_fused_h4"), of_fattorib("sgu_headqk_sequential_h4")
# Linear layers of a block: PyTorch -> Flax.
LINEAR = {
    "attn.query": "CausalAttention_0/query_proj",
    "attn.key": "CausalAttention_0/key_proj",
    "attn.value": "CausalAttention_0/value_proj",
    "attn.fc_resid": "CausalAttention_0/residual_out",
    "mlp.fc1": "MLPBlock_0/fc_in",
    "mlp.fc_resid": "MLPBlock_0/fc_residual",
}


def in_pytorch(arrays):
    """The state dict of the same model; weights of PyTorch's layers are (out, in)."""
    norms = {"norm": "LayerNorm_0"}
    state = {"wte.weight": arrays["wte/embedding"]}
    if "wpe/embedding" in arrays:
        state["wpe.weight"] = arrays["wpe/embedding"]
    for layer in range(2):
        flax = f"TransformerBlock_{layer}/"
        for number in (1, 2):
            norms[f"blocks.{layer}.ln{number}"] = f"{flax}LayerNorm_{number - 1}"
        for torch_name, name in LINEAR.items():
            state[f"blocks.{layer}.{torch_name}.weight"] = arrays[f"{flax}{name}/kernel"].T
            state[f"blocks.{layer}.{torch_name}.bias"] = arrays[f"{flax}{name}/bias"]
    for torch_name, name in norms.items():
        if f"{name}/scale" in arrays:
            state[f"{torch_name}.weight"], state[f"{torch_name}.bias"] = (
                arrays[f"{name}/{leaf}"] for leaf in ("scale", "bias")
            )
    return {name: np.ascontiguousarray(array) for name, array in state.items()}


def test_a_run_becomes_a_state_dict_and_comes_back(here):
    (here / "params").mkdir()
    # An older step, and the form that a whole training state has.
    (here / "params" / "params_900").write_bytes(msgpack_serialize({"params": {"wte": {}}}))
    state = {"step": 1000, "params": {"params": unflatten(ALIBI.parameters)}}
    (here / "params" / "params_1000").write_bytes(msgpack_serialize(state))
    assert "params_1000" in run(*ALIBI.arguments, "from=fattorib:params", "to=run")
    assert "FattoribTransformer" in run("from=run", "to=hf:exported")
    exported = load_file(here / "exported" / "model.safetensors")
    same_bits(exported, in_pytorch(ALIBI.parameters))
    config_json = json.loads((here / "exported" / "config.json").read_text())
    sizes = {"embedding_dim": 64, "N": 2, "num_head": 4, "vocab_size": 97, "block_size": 24}
    assert config_json.items() >= {**sizes, "alibi_attn": True, "fused_residuals": True}.items()

    # As its PyTorch program saves: the head, masks and slopes besides, another name of the norm.
    renamed = {name.replace(".ln1.", ".ln."): tensor for name, tensor in exported.items()}
    buffers = {
        "blocks.0.attn.mask": np.ones((1, 1, 4, 4), np.uint8),
        "blocks.0.attn.slopes": np.ones(4, np.float32),
    }
    head = {"lm_head.weight": exported["wte.weight"]}
    write(here / "source", config_json, renamed | buffers | head)
    run("from=hf:source", "to=again")
    same_bits(*(by_name(parameters_in_run(name)) for name in ("again", "run")))


def test_sequential_blocks_and_learned_positions(here):
    # The golden model without what has no place in a state dict.
    tensors = {k: v for k, v in SGU.parameters.items() if not k.startswith("head_")}
    for name, array in tensors.items():
        if "CausalAttention_0" in name:  # half as wide, for the gating unit
            tensors[name] = np.tile(array, (2,) * array.ndim)
    SGU.store(here / "params_1", tensors)
    excluded = ("static_sgu", "head_qk", "head_dim")
    plain = [key for key in SGU.arguments if not key.startswith(excluded)]
    run(*plain, "head_dim=16", "from=fattorib:params_1", "to=run")
    run("from=run", "to=hf:exported", "family=fattorib")  # GPT-2's parts are the same
    same_bits(load_file(here / "exported" / "model.safetensors"), in_pytorch(tensors))
    config_json = json.loads((here / "exported" / "config.json").read_text())
    assert config_json["alibi_attn"] is config_json["fused_residuals"] is False


def test_files_that_cannot_be_read(here):
    (here / "empty").mkdir()
    (here / "text").write_text("hello")
    tensors = dict(ALIBI.parameters)
    del tensors["LayerNorm_0/bias"]
    tensors["wte/embedding"] = tensors["wte/embedding"][:5]
    tensors["more/kernel"] = np.zeros(3, np.float32)
    ALIBI.store(here / "params_1", tensors)
    for arguments, name, problems in (
        (ALIBI.arguments, "missing", ["missing does not exist"]),
        (ALIBI.arguments, "empty", ["params_STEP"]),
        (ALIBI.arguments, "text", ["msgpack"]),
        (["decoder_block=llama2"], "text", ["layers/mlp/wi_0/kernel"]),
        ([], "params_1", ["have no model configuration"]),
        (
            ALIBI.arguments,
            "params_1",
            [
                "missing     LayerNorm_0/bias: ",
                "other shape wte/embedding: stored float32[5,64], wanted float32[97,64]",
                "extra       more/kernel: stored float32[3]",
            ],
        ),
    ):
        with pytest.raises(UserError) as caught:
            run(*arguments, f"from=fattorib:{name}", "to=run")
        for problem in problems:
            assert problem in str(caught.value)
    with pytest.raises(UserError, match="to=fattorib:there"):
        parse_arguments(["from=run", "to=fattorib:there"])
    assert not (here / "run").exists()


def test_weights_that_are_not_finite(here):
    tensors = dict(ALIBI.parameters)
    tensors["wte/embedding"] = np.full_like(tensors["wte/embedding"], np.inf)
    ALIBI.store(here / "params_1", tensors)
    with pytest.raises(UserError, match=r"params_1: wte/embedding has 0 NaN and 6,208 infinite"):
        run(*ALIBI.arguments, "from=fattorib:params_1", "to=run")
    assert not (here / "run").exists()
