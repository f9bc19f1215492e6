"""The golden models of tests/golden as checkpoints of the programs that made them.

Each is stored as its program stores it and read as users read it, by the converter.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.serialization import msgpack_serialize

from MaxText.config.loading import load
from MaxText.conversion.hf_import import FattoribCheckpoint, HFWeights
from MaxText.conversion.maxtext_checkpoint import MaxTextWeights
from MaxText.conversion.weight_source import WeightSource, unflatten
from MaxText.layers.batch import Batch
from tests.conversion.small_folders import muddformer, tokenformer, write
from tests.golden.families.make import weights as draw_weights

GOLDEN = Path(__file__).parents[1] / "golden"
# What a training state holds besides parameters.
MORE = {"step": np.int32(20), "opt_state": {"mu": {"kernel": np.zeros(3, np.float32)}}}
Arrays = dict[str, np.ndarray]

# Conversion refuses NaN, and no gradient is as large.
UNRECORDED = 1e30


class Golden(NamedTuple):
    """A golden model."""

    facts: dict[str, Any]  # its JSON file
    arrays: Arrays  # its NPZ file
    batch: Batch
    parameters: Arrays  # by their names in its program
    gradients: Arrays  # of the loss, by the same names; UNRECORDED where none were recorded
    source: str = "hf"  # the checkpoint's kind in convert.py: hf, maxtext or fattorib
    config_json: Mapping[str, Any] = {}
    # The configuration as it is typed, for checkpoints that hold none.
    arguments: tuple[str, ...] = ()

    @property
    def logits(self) -> np.ndarray:
        """As exact as they were recorded."""
        names = ("logits_f64", "small/logits_exact_embedding", "small/logits", "logits")
        return self.arrays[next(name for name in names if name in self.arrays)]

    @property
    def loss(self) -> np.ndarray:
        return self.arrays["small/loss" if "small/loss" in self.arrays else "loss"]

    def store(self, path: Path, tensors: Arrays) -> Path:
        """Writes a checkpoint of its program."""
        if self.source == "hf":
            return write(path, dict(self.config_json), tensors)
        if self.source == "fattorib":
            path.write_bytes(msgpack_serialize(unflatten(tensors)))
            return path
        items = "state" if any("muddformer" in one for one in self.arguments) else "items"
        save_tree(path / "checkpoints" / "20" / items, {"params": unflatten(tensors)} | MORE)
        return path

    def opened(self, path: Path) -> WeightSource:
        """The converter's view of what `store` wrote."""
        if self.source == "hf":
            return HFWeights(path)
        reader = MaxTextWeights if self.source == "maxtext" else FattoribCheckpoint
        return reader(str(path), load(self.arguments).config)

    def converted(self, path: Path, tensors: Arrays) -> dict[str, Any]:
        """A tree of our parameters from arrays by their names."""
        weights = self.opened(self.store(path, tensors))
        return unflatten(
            {name: jnp.asarray(weights.read(name)) for name in weights.model.parameters}
        )


def below(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, without it."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def save_tree(path: Path, tree: Mapping[str, Any]) -> None:
    """As programs made from MaxText save."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def typed(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys as a command line has them."""
    return tuple(f"{name}={str(value).lower()}" for name, value in keys.items())


def next_tokens(tokens: np.ndarray) -> Batch:
    """Every token's target is the next one; the last has none."""
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -1] = 0
    return Batch(tokens, np.roll(tokens, -1, axis=1), weights)


def _read(family: str, case: str) -> tuple[dict, Arrays]:
    path = GOLDEN / family / case
    with np.load(path.with_suffix(".npz")) as file:
        return json.loads(path.with_suffix(".json").read_text()), dict(file)


def hugging_face(family: str) -> Golden:
    """One of transformers."""
    facts, arrays = _read(family, f"{family}_tiny_a")
    return Golden(
        facts,
        arrays,
        next_tokens(arrays["input_ids"]),
        below(arrays, "param/"),
        below(arrays, "grad/"),
        config_json=facts["hf_config"],
    )


def of_family_vectors(case: str) -> Golden:
    """One of tests/golden/families."""
    facts, arrays = _read("families", case)
    parameters = draw_weights(facts["shapes"], facts["centers"])
    constants = {name: np.asarray(value, np.float32) for name, value in facts["fixed"].items()}
    parameters |= constants
    gradients = below(arrays, "grad/")
    unrecorded = {
        name: np.full_like(parameters[name], UNRECORDED) for name in facts["without_gradient"]
    } | constants
    return Golden(
        facts,
        arrays,
        next_tokens(arrays["input_ids"]),
        parameters,
        gradients | unrecorded,
        config_json=facts["hf_config"],
    )


def of_muddformer(case: str) -> Golden:
    """One of the released programs, or of the JAX one ("prepost")."""
    facts, arrays = _read("muddformer", case)
    parameters, gradients = below(arrays, "param/"), below(arrays, "grad/")
    gradients = {
        name: gradients.get(name, np.full_like(array, UNRECORDED))
        for name, array in parameters.items()
    }
    golden = Golden(facts, arrays, next_tokens(arrays["tokens"]), parameters, gradients)
    source = facts["config"]
    if "prepost" in case:
        heads = dict.fromkeys(("base_num_query_heads", "base_num_kv_heads"), source["n_head"])
        keys = heads | {
            "decoder_block": "muddformer_prepost",
            "base_emb_dim": source["dim"],
            "head_dim": -1,
            "base_mlp_dim": source["mlp_dim"],
            "base_num_decoder_layers": source["n_layer"],
            "vocab_size": source["vocab_size"],
            "max_target_length": facts["length"],
            "normalization_layer_epsilon": source["norm_eps"],
        }
        return golden._replace(source="maxtext", arguments=typed(keys))
    released = muddformer(case.partition("_")[0])[0]
    fields = {name: released[name] for name in ("model_type", "architectures", "auto_map")}
    return golden._replace(config_json=fields | source)


def of_tokenformer(case: str, size: str = "small") -> Golden:
    """One of the JAX program or of the PyTorch one; `size` is small, or large with more slots.

    Only the small ones have gradients.
    """
    facts, arrays = _read("tokenformer", case)
    source = facts["config" if size == "small" else "grown_config"]
    prefix = "params_small/" if size == "small" else "params_large_init/"
    if case == "torch_a":
        batch = Batch(*(arrays[name] for name in ("tokens", "labels", "loss_mask")))
        published = tokenformer()[0]
        sizes = {name: source[name] for name in published if name in source}
        config = published | sizes | {"vocab_size": source["padded_vocab_size"]}
        return Golden(
            facts,
            arrays,
            batch,
            below(arrays, prefix),
            below(arrays, "grads_small/"),
            config_json=config,
        )
    # Keys that mean nothing here, or whose name is another option of convert.py.
    unknown = {
        "param_scan_axis",
        "use_untrainable_positional_embedding",
        "trainable_position_size",
        "dtype",
    }
    if not source["logits_via_embedding"]:
        unknown.add("normalize_embedding_logits")
    keys = {name: value for name, value in source.items() if name not in unknown}
    parts = [arrays[f"batch/{name}"] for name in ("inputs", "targets")]
    parts.append((arrays["batch/targets_segmentation"] != 0).astype(np.float32))
    parts += [arrays[f"batch/inputs_{name}"] for name in ("position", "segmentation")]
    return Golden(
        facts,
        arrays,
        Batch(*parts),
        below(arrays, f"{prefix}params/"),
        below(arrays, "grads_small/params/"),
        "maxtext",
        arguments=typed({"decoder_block": "tokenformer", **keys}),
    )


def of_fattorib(case: str) -> Golden:
    """One of fattorib/transformer."""
    facts, arrays = _read("fattorib", case)
    source, width = facts["config"], facts["config"]["embedding_dim"]
    heads = dict.fromkeys(("base_num_query_heads", "base_num_kv_heads"), source["num_head"])
    keys = heads | {
        "decoder_block": "fattorib",
        "base_emb_dim": width,
        "base_mlp_dim": 4 * width,
        "base_num_decoder_layers": source["N"],
        "head_dim": width // source["num_head"],
        "vocab_size": source["vocab_size"],
        "max_target_length": arrays["tokens"].shape[1],
    }
    if source.get("use_static_sgu"):
        keys |= {
            "head_dim": width // source["num_head"] // 2,
            "position_embedding": "learned",
            "block_arrangement": "sequential",
            "static_sgu": True,
            "static_sgu_kernel": source["sgu_kernel"],
            "head_qk": True,
        }
    return Golden(
        facts,
        arrays,
        next_tokens(arrays["tokens"]),
        below(arrays, "params/"),
        below(arrays, "grads/"),
        "fattorib",
        arguments=typed(keys),
    )
