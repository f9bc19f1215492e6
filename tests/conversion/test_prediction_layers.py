"""Layers of multi-token prediction in published folders: names, shapes, there and back."""

import json
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from MaxText.config.schema import flatten
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_export import write_folder
from MaxText.conversion.hf_import import HFWeights, TensorMap, open_hf_weights
from MaxText.errors import UserError
from MaxText.layers.assembly.model import Model
from tests.conversion.golden_models import of_family_vectors
from tests.conversion.small_folders import random, same_bits, write

ONE = {"mtp_num_layers": 1}
# Names of the norms of embedding and hidden state, of the projection, and of the final norm.
BEHIND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
# case of tests/golden/families -> its layers, up to one of full attention
PUBLISHED = {"deepseek_v3": 2, "glm4_moe": 2, "qwen3_next": 2, "qwen3_5_moe_text": 2}


class Names(NamedTuple):
    """Where tensors are: of the last layer, of the block of the further token, and of the rest."""

    last: str
    block: str
    prefix: str
    norms_and_projection: tuple[str, ...]
    copies: dict[str, str]


def names_of(case):
    last = f"model.layers.{PUBLISHED[case] - 1}."
    if case.startswith("qwen"):
        return Names(last, "mtp.layers.0.", "mtp.", BESIDE, {})
    behind = f"model.layers.{PUBLISHED[case]}."
    return Names(last, behind, behind, BEHIND, COPIES)


def published(case):
    """(config.json, tensors of the model, tensors of its layer for further tokens)."""
    golden = of_family_vectors(case)
    like, block, prefix, names, copies = names_of(case)
    draw = np.random.default_rng(0).normal
    config = dict(golden.config_json)
    num_layers = PUBLISHED[case]
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:num_layers]
    tensors = {
        name: tensor
        for name, tensor in golden.parameters.items()
        if not name.startswith(f"model.layers.{num_layers}.")
    }
    layer = {
        block + name.removeprefix(like): tensor[::-1]
        for name, tensor in tensors.items()
        if name.startswith(like)
    }
    width = config["hidden_size"]
    *norms, projection = (*names[:2], names[3], names[2])
    layer |= {f"{prefix}{name}.weight": draw(size=width).astype("f") for name in norms}
    layer[f"{prefix}{projection}.weight"] = draw(size=(width, 2 * width)).astype("f")
    layer |= {
        f"{prefix}{name}.weight": tensors[f"{repeated}.weight"] for name, repeated in copies.items()
    }
    return config, tensors, layer


@pytest.mark.parametrize("case", PUBLISHED)
def test_there_and_back(case, tmp_path):
    config, tensors, layer = published(case)
    like, block, prefix, names, copies = names_of(case)
    folder = write(tmp_path / "published", config, tensors | layer)
    # A run without the objective names them, and reads the rest.
    alone = HFWeights(folder)
    assert not any(name.startswith("objective/") for name in alone.model.parameters)
    assert f"not read: {prefix.split('.')[0]}" in alone.notes[0]
    assert f"({len(layer)} tensors)" in alone.notes[0]
    # One with it reads them: the projection's inputs are the embedding and the hidden state.
    weights = HFWeights(folder, ONE)
    assert weights.notes == []
    depth = "objective/depths/0"
    embedding, hidden = np.random.default_rng(1).normal(size=(2, config["hidden_size"]))
    expected = layer[f"{prefix}{names[2]}.weight"] @ np.concatenate([embedding, hidden])
    kernel = weights.read(f"{depth}/projection/kernel")
    found = np.einsum("id,ide->e", np.stack([embedding, hidden]), kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    norms = zip(
        ("embedding_norm", "hidden_norm", "final_norm"), (*names[:2], names[3]), strict=True
    )
    for ours, theirs in norms:
        stored = weights.read(f"{depth}/{ours}/scale")
        np.testing.assert_array_equal(stored, layer[f"{prefix}{theirs}.weight"])
    # Its block is read as the layer that it is like.
    swapped = {
        **tensors,
        **{
            like + name.removeprefix(block): tensor
            for name, tensor in layer.items()
            if like + name.removeprefix(block) in tensors
        },
    }
    in_its_place = HFWeights(write(tmp_path / "swapped", config, swapped))
    for name in weights.model.parameters:
        if name.startswith(f"{depth}/block/"):
            stored, row = in_its_place.model.stored(
                config["num_hidden_layers"] - 1, name.removeprefix(f"{depth}/block/")
            )
            array = in_its_place.read(stored)
            np.testing.assert_array_equal(weights.read(name), array if row is None else array[row])
    # Written, they are the same files.
    back = tmp_path / "back"
    back.mkdir()
    write_folder(back, weights, weights.family, {"config": weights.config_json})
    same_bits(load_file(back / "model.safetensors"), tensors | layer)
    written = json.loads((back / "config.json").read_text())
    assert 1 in (written.get("num_nextn_predict_layers"), written.get("mtp_num_hidden_layers"))
    # A run that asks for more than there is draws its own.
    for count, is_read in ((1, True), (2, False)):
        flat = flatten(weights.config) | {"mtp_num_layers": count}
        opened, _ = open_hf_weights(str(folder), "load_parameters_path", flat)
        assert any(name.startswith(depth) for name in opened.model.parameters) == is_read
        assert any("they are drawn" in note for note in opened.notes) != is_read
    for name in copies:
        other = {f"{prefix}{name}.weight": layer[f"{prefix}{name}.weight"] + 1}
        changed = write(tmp_path / name, config, tensors | layer | other)
        with pytest.raises(UserError, match=f"{name}.* differs from"):
            HFWeights(changed, ONE)


def test_a_format_without_such_layers(tmp_path):
    folder = write(tmp_path / "llama", *random("llama"))
    with pytest.raises(UserError, match="format llama has no multi-token prediction"):
        HFWeights(folder, ONE)
    # An export leaves the weights out that only training reads.
    model = HFWeights(folder).model
    further = Model(model.config.with_values(ONE))
    left_out = TensorMap(FAMILIES["llama"], further).left_out
    assert left_out == further.parameters.keys() - model.parameters.keys() != set()
