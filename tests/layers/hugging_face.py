"""Hugging Face state dicts as our parameters, for the golden tests.

Legend: D emb_dim, N heads, K key/value heads, H head_dim.
"""

import numpy as np

Arrays = dict[str, np.ndarray]


def nested(flat: Arrays) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *folders, leaf = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = value
    return tree


def _stacked(layers: list[Arrays]) -> Arrays:
    return {f"layers/{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}


def gpt2(weights: Arrays, config: dict) -> dict:
    D, N = config["n_embd"], config["n_head"]
    H = D // N

    def layer(i: int) -> Arrays:
        w = {k.removeprefix(f"transformer.h.{i}."): v for k, v in weights.items()}
        out = {}
        kernels = w["attn.c_attn.weight"].reshape(D, 3, N, H)
        biases = w["attn.c_attn.bias"].reshape(3, N, H)
        for j, name in enumerate(("query", "key", "value")):
            out[f"self_attention/{name}/kernel"] = kernels[:, j]
            out[f"self_attention/{name}/bias"] = biases[j]
        out["self_attention/out/kernel"] = w["attn.c_proj.weight"].reshape(N, H, D)
        out["self_attention/out/bias"] = w["attn.c_proj.bias"]
        for ours, theirs in (("wi", "c_fc"), ("wo", "c_proj")):
            out[f"mlp/{ours}/kernel"] = w[f"mlp.{theirs}.weight"]
            out[f"mlp/{ours}/bias"] = w[f"mlp.{theirs}.bias"]
        for ours, theirs in (("pre_self_attention", "ln_1"), ("pre_mlp", "ln_2")):
            out[f"{ours}_layer_norm/scale"] = w[f"{theirs}.weight"]
            out[f"{ours}_layer_norm/bias"] = w[f"{theirs}.bias"]
        return out

    return nested(
        {
            "token_embedder/embedding": weights["transformer.wte.weight"],
            "position_embedder/embedding": weights["transformer.wpe.weight"],
            "decoder_norm/scale": weights["transformer.ln_f.weight"],
            "decoder_norm/bias": weights["transformer.ln_f.bias"],
            **_stacked([layer(i) for i in range(config["n_layer"])]),
        }
    )


def llama(weights: Arrays, config: dict) -> dict:
    D, N, K, H = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def layer(i: int) -> Arrays:
        w = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items()}
        return {
            "self_attention/query/kernel": w["self_attn.q_proj.weight"].T.reshape(D, N, H),
            "self_attention/key/kernel": w["self_attn.k_proj.weight"].T.reshape(D, K, H),
            "self_attention/value/kernel": w["self_attn.v_proj.weight"].T.reshape(D, K, H),
            "self_attention/out/kernel": w["self_attn.o_proj.weight"].T.reshape(N, H, D),
            "mlp/wi_0/kernel": w["mlp.gate_proj.weight"].T,
            "mlp/wi_1/kernel": w["mlp.up_proj.weight"].T,
            "mlp/wo/kernel": w["mlp.down_proj.weight"].T,
            "pre_self_attention_layer_norm/scale": w["input_layernorm.weight"],
            "pre_mlp_layer_norm/scale": w["post_attention_layernorm.weight"],
        }

    return nested(
        {
            "token_embedder/embedding": weights["model.embed_tokens.weight"],
            "logits_dense/kernel": weights["lm_head.weight"].T,
            "decoder_norm/scale": weights["model.norm.weight"],
            **_stacked([layer(i) for i in range(config["num_hidden_layers"])]),
        }
    )


def gptneox(weights: Arrays, config: dict) -> dict:
    D, N = config["hidden_size"], config["num_attention_heads"]
    H = D // N

    def layer(i: int) -> Arrays:
        w = {k.removeprefix(f"gpt_neox.layers.{i}."): v for k, v in weights.items()}
        out = {}
        # Rows are grouped per head: [head, (q, k, v), head_dim].
        kernels = w["attention.query_key_value.weight"].T.reshape(D, N, 3, H)
        biases = w["attention.query_key_value.bias"].reshape(N, 3, H)
        for j, name in enumerate(("query", "key", "value")):
            out[f"self_attention/{name}/kernel"] = kernels[:, :, j]
            out[f"self_attention/{name}/bias"] = biases[:, j]
        out["self_attention/out/kernel"] = w["attention.dense.weight"].T.reshape(N, H, D)
        out["self_attention/out/bias"] = w["attention.dense.bias"]
        for ours, theirs in (("wi", "dense_h_to_4h"), ("wo", "dense_4h_to_h")):
            out[f"mlp/{ours}/kernel"] = w[f"mlp.{theirs}.weight"].T
            out[f"mlp/{ours}/bias"] = w[f"mlp.{theirs}.bias"]
        for ours, theirs in (
            ("pre_self_attention", "input_layernorm"),
            ("pre_mlp", "post_attention_layernorm"),
        ):
            out[f"{ours}_layer_norm/scale"] = w[f"{theirs}.weight"]
            out[f"{ours}_layer_norm/bias"] = w[f"{theirs}.bias"]
        return out

    return nested(
        {
            "token_embedder/embedding": weights["gpt_neox.embed_in.weight"],
            "logits_dense/kernel": weights["lm_head.weight"].T,
            "decoder_norm/scale": weights["gpt_neox.final_layer_norm.weight"],
            "decoder_norm/bias": weights["gpt_neox.final_layer_norm.bias"],
            **_stacked([layer(i) for i in range(config["num_hidden_layers"])]),
        }
    )
