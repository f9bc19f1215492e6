"""Parameters of TokenFormer's own programs under our names, and in our order of dimensions."""

import numpy as np

Arrays = dict[str, np.ndarray]


def with_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, without it."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def from_jax(theirs: Arrays) -> dict:
    """Our nested parameters from names of the JAX program, below "params/".

    Its layers lie on axis 1, also of biases. Its keys of query, key and value are one array
    [D, L, 3, n].
    """
    attention, mlp = "decoder/layers/self_attention/", "decoder/layers/mlp/"
    ours = {
        "token_embedder": {"embedding": theirs["token_embedder/embedding"]},
        "decoder_norm": {
            name: theirs[f"decoder/decoder_norm/{name}"] for name in ("scale", "bias")
        },
        "layers": {"self_attention": {}, "mlp": {}},
    }
    if "decoder/logits_dense/kernel" in theirs:
        ours["logits_dense"] = {"kernel": theirs["decoder/logits_dense/kernel"]}

    def pair(keys: str, values: str, of_qkv: int | None = None) -> dict:
        found: dict = {"keys": {}, "values": {}}
        for leaf in ("kernel", "bias"):
            if f"{keys}/{leaf}" not in theirs:
                continue
            key = np.moveaxis(theirs[f"{keys}/{leaf}"], 1, 0)
            found["keys"][leaf] = key if of_qkv is None else key[..., of_qkv, :]
            found["values"][leaf] = np.moveaxis(theirs[f"{values}/{leaf}"], 1, 0)
        return found

    for index, name in enumerate(("query", "key", "value")):
        ours["layers"]["self_attention"][name] = pair(
            f"{attention}qkv_key_slot", f"{attention}{name[0]}_value_slot", index
        )
    ours["layers"]["self_attention"]["out"] = pair(
        f"{attention}proj_key_slot", f"{attention}proj_value_slot"
    )
    ours["layers"]["mlp"] = pair(f"{mlp}wi", f"{mlp}wo")
    return ours


def from_pytorch(theirs: Arrays) -> dict:
    """Our nested parameters from names of the PyTorch program, where layer i is sequential.{i+2}.

    Key slots are rows there and columns here; value slots are rows in both.
    """
    blocks = sorted({int(name.split(".")[1]) for name in theirs if "param_tokens" in name})
    norm = f"sequential.{blocks[-1] + 2}.norm."

    def pair(part: str) -> dict:
        names = [f"sequential.{block}.{part}." for block in blocks]
        return {
            "keys": {"kernel": np.stack([theirs[f"{n}key_param_tokens"].T for n in names])},
            "values": {"kernel": np.stack([theirs[f"{n}value_param_tokens"] for n in names])},
        }

    attention = {"query": "query", "key": "key", "value": "value", "out": "proj"}
    return {
        "token_embedder": {"embedding": theirs["sequential.0.word_embeddings.weight"]},
        "layers": {
            "self_attention": {ours: pair(f"attention.{name}") for ours, name in attention.items()},
            "mlp": pair("mlp"),
        },
        "decoder_norm": {"scale": theirs[f"{norm}weight"], "bias": theirs[f"{norm}bias"]},
    }
