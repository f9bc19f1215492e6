"""Parameters of MUDDFormer's own programs under our names, and in our order of dimensions."""

import re

import numpy as np

Arrays = dict[str, np.ndarray]
_NORM = "pre_self_attention_layer_norm"


def from_pytorch(theirs: Arrays, num_heads: int) -> Arrays:
    """Our parameters by path from those of the released models; matrices are (out, in) there.

    The sum after layer i is dense_bs.i and dynamic_dense.i, and connections/after/{i + 1} here.
    """
    ours = {}
    ways = {"0": "q", "1": "k", "2": "v"}
    projections = {"wq": "query", "wk": "key", "wv": "value", "wo": "out"}
    gated = any(".feed_forward.w3." in name for name in theirs)
    feed_forward = {"w1": "wi_0", "w3": "wi_1", "w2": "wo"} if gated else {"w1": "wi", "w2": "wo"}
    for name, value in theirs.items():
        *path, leaf = name.split(".")
        kind = {"weight": "scale", "bias": "bias"}.get(leaf)
        if path == ["tok_embeddings"]:
            ours["token_embedder/embedding"] = value
        elif path == ["output"]:
            ours["logits_dense/kernel"] = value.T
        elif path == ["norm"]:
            ours[f"decoder_norm/{kind}"] = value
        elif path == ["dense_bs"]:
            ours[f"connections/after/{int(leaf) + 1}/static"] = value
        elif path[0] == "dynamic_dense":
            _, layer, which = path
            prefix = f"connections/after/{int(layer) + 1}"
            if which == "w1":
                ours[f"{prefix}/wi/kernel"] = value.T
            else:
                shape = theirs[f"dense_bs.{layer}"].shape
                ours[f"{prefix}/wo/kernel"] = value.T.reshape(-1, *shape)
        else:
            _, layer, part, *rest = path
            prefix = f"layers/{layer}/"
            if part == "attention_norm":
                ours[f"{prefix}{_NORM}/{kind}"] = value
            elif part == "attention_norms":
                ours[f"{prefix}{_NORM}_{ways[rest[0]]}/{kind}"] = value
            elif part == "ffn_norm":
                ours[f"{prefix}pre_mlp_layer_norm/{kind}"] = value
            elif part == "feed_forward":
                target = f"{prefix}mlp/{feed_forward[rest[0]]}/"
                ours[target + ("kernel" if value.ndim == 2 else "bias")] = value.T
            elif rest[0] in ("q_norm", "k_norm"):
                which = {"q_norm": "query_norm", "k_norm": "key_norm"}[rest[0]]
                ours[f"{prefix}self_attention/{which}/scale"] = value
            else:
                target = f"{prefix}self_attention/{projections[rest[0]]}/"
                if value.ndim == 1:
                    heads = rest[0] != "wo"
                    ours[target + "bias"] = value.reshape(num_heads, -1) if heads else value
                elif rest[0] == "wo":
                    ours[target + "kernel"] = value.T.reshape(num_heads, -1, len(value))
                else:
                    ours[target + "kernel"] = value.T.reshape(value.shape[1], num_heads, -1)
    return ours


def from_jax(theirs: Arrays) -> Arrays:
    """Our parameters by path from those of the JAX program."""
    ours: Arrays = {}
    renamed = {
        "post_self_attention_layer_norm": "pre_mlp_layer_norm",
    }
    num_layers = 1 + max(int(m[1]) for n in theirs if (m := re.search(r"layers_(\d+)/", n)))
    scales: dict[int, np.ndarray] = {}
    for name, value in theirs.items():
        path = name.removeprefix("decoder/")
        if match := re.fullmatch(r"mudd_prenorm(?:_(\d+))?/scale", path):
            scales[int(match[1]) + 1 if match[1] else 0] = value
        elif match := re.fullmatch(r"mudd_postnorm_(\d+)/scale", path):
            ours[f"connections/after/{int(match[1]) + 1}/post_norms/r/scale"] = value
        elif match := re.fullmatch(r"layers_(\d+)/(.*)", path):
            layer, rest = int(match[1]), match[2]
            after = f"connections/after/{layer + 1}/"
            if rest == "pre_dense_proj1_norm/scale":
                ours[after + "norm/scale"] = value
            elif rest == "dynamic_dense_conn1/kernel":
                ours[after + "wi/kernel"] = value
            elif rest == "dynamic_dense_conn2/kernel":
                ours[after + "wo/kernel"] = value
            elif rest == "dense_proj2.bias":
                ours[after + "static"] = value
            else:
                part, _, inner = rest.partition("/")
                ours[f"layers/{layer}/{renamed.get(part, part)}/{inner}"] = value
        else:
            ours[path] = value
    ours["connections/source_norm/scale"] = np.stack([scales[i] for i in range(num_layers + 1)])
    return ours
