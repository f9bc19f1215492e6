"""Checkpoints of MaxText and of programs made from it, TokenFormer's and MUDDFormer's.

Golden ones are compared with their programs in tests/layers/test_golden.py.
"""

import numpy as np
import pytest

from MaxText.config.loading import load
from MaxText.conversion.hf_import import HFWeights
from MaxText.conversion.weight_source import unflatten
from MaxText.errors import UserError
from MaxText.training.backend_defaults import abstract_model
from tests.conversion.golden_models import hugging_face, of_muddformer, of_tokenformer, save_tree
from tests.conversion.running import names, parameters_in_run, run
from tests.conversion.small_folders import same_bits
from tests.growth.growing import by_name

KEYS = (
    "base_emb_dim=16",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=4",
    "base_mlp_dim=24",
    "base_num_decoder_layers=2",
    "vocab_size=40",
    "max_target_length=16",
)
LLAMA_NORM = ("pre_mlp_layer_norm", "post_self_attention_layer_norm")


def drawn(arguments):
    """Random arrays of this project's layout for a configuration."""
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(info.shape, np.float32)
        for name, info in abstract_model(load(arguments).config.model).parameters.items()
    }


def in_their_tree(arrays, *renamed, layers_apart=False, turned=False, query_factor=1.0):
    """Our arrays in MaxText's layout, spelled by hand: its names, the layer second.

    Args:
      renamed: pairs of names of parts, here and in MaxText.
      turned: stores dimensions that rotary pairs next to each other, as MaxText's llama3.1 does.
    """
    tree = {}
    for name, array in arrays.items():
        if "/query/" in name:
            array = array * np.float32(query_factor)
        if turned and ("/query/" in name or "/key/" in name):
            halves = np.split(array, 2, axis=-1)
            array = np.stack(halves, axis=-1).reshape(array.shape)
        for own_name, maxtext_name in renamed:
            name = name.replace(f"layers/{own_name}", f"layers/{maxtext_name}")
        if not name.startswith("layers/"):
            tree[name if name.startswith("token_embedder") else f"decoder/{name}"] = array
        elif layers_apart:
            for layer, part in enumerate(array):
                tree[f"decoder/{name.replace('layers/', f'layers_{layer}/')}"] = part
        else:
            tree[f"decoder/{name}"] = np.swapaxes(array, 0, 1)
    return unflatten(tree)


@pytest.mark.parametrize(
    ("arguments", "place", "nesting", "how", "scaling"),
    [
        # 1/sqrt(4) is exact.
        ((), "checkpoints/7/items", 2, {"query_factor": 0.5}, "weights"),
        # The folder "state" tells MUDDFormer's program, whose attention divides scores.
        ((), "checkpoints/7/state", 1, {"layers_apart": True}, "model"),
        (("query_scaling=model",), "", 1, {}, "model"),
    ],
    ids=["MaxText", "MUDDFormer's baseline", "another program"],
)
def test_llama(arguments, place, nesting, how, scaling, here):
    arrays = drawn(KEYS)
    tree = in_their_tree(arrays, LLAMA_NORM, **how)
    for _ in range(nesting):
        tree = {"params": tree}
    save_tree(here / "source" / place, tree | {"step": np.int32(8)})
    said = run(*KEYS, *arguments, "from=maxtext:source", "to=run")
    assert f"query_scaling={scaling}" in said
    same_bits(by_name(parameters_in_run("run")), arrays)


def test_llama31_pairs_neighbours(here):
    golden = hugging_face("llama31")
    weights = HFWeights(golden.store(here / "hf", golden.parameters))
    arrays = {name: weights.read(name) for name in weights.model.parameters}
    tree = in_their_tree(arrays, LLAMA_NORM, turned=True, query_factor=16**-0.5)
    save_tree(here / "source", {"params": {"params": tree}})
    keys = [
        f"{name}={list(value) if isinstance(value, tuple) else value}".replace("'", "").lower()
        for name, value in weights.keys.items()
    ]
    run(*keys, "from=maxtext:source", "to=run")
    same_bits(by_name(parameters_in_run("run")), arrays)


def test_gpt3(here):
    keys = [key for key in KEYS if key != "base_num_kv_heads=2"]
    keys += ["base_num_kv_heads=4", "decoder_block=gpt3", "normalization_zero_centered=true"]
    arrays = drawn(keys)
    norms = (
        ("pre_self_attention_layer_norm", "pre_self_attention_norm"),
        ("pre_mlp_layer_norm", "mlp/mlp_layer_norm"),
    )
    save_tree(here / "source", {"params": {"params": in_their_tree(arrays, *norms)}})
    assert "query_scaling=model" in run(*keys, "from=maxtext:source", "to=run")
    same_bits(by_name(parameters_in_run("run")), arrays)
    with pytest.raises(UserError, match="normalization_zero_centered=true"):
        run(*keys[:-1], "from=maxtext:source", "to=other")


JAX_A, PREPOST = of_tokenformer("jax_a"), of_muddformer("muddllama_prepost_l4_d32")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["model_name=gemma-2b"], "Gemma"),
        (["model_name=llama3.1-8b", "rope_type=yarn"], "rope_type=yarn"),
        ([*KEYS], "no checkpoint there"),
        ([], "have no model configuration"),
        ([*JAX_A.arguments, "query_scaling=weights"], "query_scaling=weights"),
        ([*JAX_A.arguments, "position_embedding=rotary"], "position_embedding=rotary"),
        ([*PREPOST.arguments, "mudd_postnorm=all"], "q, k, v and r"),
        ([*PREPOST.arguments, "normalization_layer_epsilon=1e-5"], "epsilon=1e-05"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_cannot_be_read(arguments, problem, here):
    named = {argument.partition("=")[0]: argument for argument in arguments}
    with pytest.raises(UserError, match=problem):
        run(*named.values(), "from=maxtext:source", "to=run")
    assert names(here) == []


def test_another_configuration_than_that_of_the_checkpoint(here):
    tree = in_their_tree(drawn(KEYS), LLAMA_NORM)
    save_tree(here / "llama", {"params": {"params": tree}})
    tensors = dict(PREPOST.parameters)
    del tensors["decoder/mudd_prenorm_2/scale"]
    PREPOST.store(here / "muddformer", tensors)
    JAX_A.store(here / "tokenformer", JAX_A.parameters)
    connection = "decoder/layers_0/dynamic_dense_conn1/kernel"
    none = "the checkpoint has none, wanted"
    for name, arguments, wanted in (
        (
            "llama",
            [*(key for key in KEYS if "mlp" not in key), "base_mlp_dim=25", "use_qk_norm=true"],
            {
                "other shape params/params/decoder/layers/mlp/wo/kernel: stored float32[24,2,16], "
                "wanted float32[25,2,16]",
                "missing     params/params/decoder/layers/self_attention/query_norm/scale: "
                f"{none} float32[4,2]",
            },
        ),
        (
            "muddformer",
            [*PREPOST.arguments, "dynamic_dense_hidden_round=none"],
            {
                f"missing     params/decoder/mudd_prenorm_2/scale: {none} float32[32]",
                f"other shape params/{connection}: stored float32[32,64], wanted float32[32,8]",
            },
        ),
        (
            "tokenformer",
            [
                *(key for key in JAX_A.arguments if not key.startswith("slot_num")),
                "slot_num=40",
                "proj_slot_num=24",
            ],
            {
                "other shape params/decoder/layers/self_attention/qkv_key_slot/kernel: stored "
                "float32[32,2,3,24], wanted float32[32,2,3,40]"
            },
        ),
    ):
        with pytest.raises(UserError) as caught:
            run(*arguments, f"from=maxtext:{name}", "to=run")
        lines = [line.strip() for line in str(caught.value).splitlines()]
        assert wanted <= set(lines)
        assert len(lines) == len(set(lines))  # several may share an array of MaxText
        assert not any("proj_key" in line for line in lines)
    assert names(here) == ["llama", "muddformer", "tokenformer"]


def test_weights_that_are_not_finite(here):
    arrays = drawn(KEYS)
    arrays["decoder_norm/scale"] = np.full_like(arrays["decoder_norm/scale"], np.nan)
    save_tree(here / "source", {"params": {"params": in_their_tree(arrays, LLAMA_NORM)}})
    problem = r"source.*: params/params/decoder/decoder_norm/scale has \d+ NaN"
    with pytest.raises(UserError, match=problem):
        run(*KEYS, "from=maxtext:source", "to=run")
    assert not (here / "run").exists()
