"""Shipped configurations: they load, resolve to what is recorded, and have the stated sizes.

tests/configuration/resolved/<name>.yml holds the keys in which a preset differs from the schema.
`UPDATE_RESOLVED=1 python -m pytest tests/configuration` writes them anew; read the diff.
"""

import os
import re
from pathlib import Path

import pytest

from MaxText.configuration import config_files
from MaxText.configuration.catalogue import flat
from MaxText.configuration.loading import configure
from MaxText.configuration.saved import entry_lines
from MaxText.configuration.schema import Config

RESOLVED = Path(__file__).parent / "resolved"
PRESETS = config_files.preset_names(config_files.MODELS)
BUNDLES = config_files.preset_names(config_files.DECODER_BLOCKS)


def changed(config: Config) -> str:
    """The YAML lines in which a configuration differs from the schema's defaults."""
    defaults = flat(configure(run_name="r"))
    lines = [
        line
        for name, value in flat(config).items()
        if value != defaults[name]
        for line in entry_lines(name, value)
    ]
    return "\n".join(lines) + "\n"


def check(name: str, config: Config) -> None:
    path = RESOLVED / f"{name}.yml"
    if os.environ.get("UPDATE_RESOLVED"):
        path.write_text(changed(config), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == changed(config)


@pytest.mark.parametrize("name", PRESETS)
def test_model_presets(name):
    check(name, configure(model_name=name, run_name="r"))


@pytest.mark.parametrize("name", BUNDLES)
def test_decoder_blocks(name):
    check(f"decoder_block_{name}", configure(decoder_block=name, run_name="r"))


def test_gpt2_yml():
    config = configure("gpt2.yml", run_name="r")
    check("gpt2", config)
    assert count(config) == 123_689_472 + 50_304 * 768


def test_nothing_recorded_is_stale():
    known = {*PRESETS, *(f"decoder_block_{name}" for name in BUNDLES), "gpt2"}
    assert {path.stem for path in RESOLVED.glob("*.yml")} == known


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_as_config_file_gives_the_same_model(name):
    assert configure(f"configs/models/{name}.yml").model == configure(model_name=name).model


def count(config: Config) -> int:
    """Parameters, by arithmetic on the configuration alone."""
    model, size = config.model, config.model.shape.dimensions
    norm = 2 if model.block.normalization_type == "layer_norm" else 1
    q, kv = size.num_query_heads * size.head_dim, size.num_kv_heads * size.head_dim
    activations = len(model.feed_forward.mlp_activations)
    layer = size.emb_dim * (2 * q + 2 * kv + (activations + 1) * size.mlp_dim + 2 * norm)
    layer += (q + 2 * kv) * model.attention.qkv_bias + size.emb_dim * model.attention.proj_bias
    layer += (activations * size.mlp_dim + size.emb_dim) * model.feed_forward.ffn_bias
    tables = size.vocab_size * (1 if model.head.logits_via_embedding else 2)
    if model.position.position_embedding == "learned":
        rows = model.position.trainable_position_size
        tables += size.max_target_length if rows == -1 else rows
    return size.num_layers * layer + size.emb_dim * (tables + norm)


@pytest.mark.parametrize("name", PRESETS)
def test_stated_parameter_counts(name):
    first = (config_files.MODELS / f"{name}.yml").read_text().splitlines()[0]
    stated = re.search(r": ([\d,]+) parameters\.$", first)
    assert stated, first
    assert count(configure(model_name=name)) == int(stated[1].replace(",", ""))


@pytest.mark.parametrize("path", sorted(config_files.SHIPPED.rglob("*.yml")), ids=lambda p: p.name)
def test_shipped_files_load_and_open_with_a_comment(path):
    configure(path)
    assert path.read_text(encoding="utf-8").startswith("# ")
