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
from MaxText.configuration.loading import configure, load
from MaxText.configuration.saved import entry_lines
from MaxText.configuration.schema import Config

RESOLVED = Path(__file__).parent / "resolved"
PRESETS = config_files.preset_names(config_files.MODELS)
BUNDLES = config_files.preset_names(config_files.DECODER_BLOCKS)

_RUN = (
    "base_output_directory=gs://BUCKET dataset_type=grain grain_train_files=DIR/train* "
    "tokenizer_path=EleutherAI/gpt-neox-20b grain_worker_count=8 eval_interval=10000 "
    "grain_eval_files=DIR/validation* enable_checkpointing=True per_device_batch_size=32 "
    "eval_per_device_batch_size=32 logits_via_embedding=True normalize_embedding_logits=True "
    "init_weights_seed=42"
)
# As TokenFormer's README gives them; the one that grows a model is tested with growth.
PUBLISHED_COMMANDS = {
    "TokenFormer 124M": (
        "MaxText/configs/tokenformer.yml run_name=tokenformer124_steps600k steps=600000 "
        f"checkpoint_period=10000 slot_num=576 drop_path=0 {_RUN}"
    ),
    "Transformer 124M": (
        "MaxText/configs/gpt2.yml run_name=transformer124_steps600k steps=600000 "
        f"checkpoint_period=2000 {_RUN}"
    ),
}


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


def test_tokenformer_yml():
    config = configure("tokenformer.yml", run_name="r")
    check("tokenformer", config)
    tied = {"logits_via_embedding": True, "normalize_embedding_logits": True}
    for slot_num, parameters in ((576, 123_569_664), (2140, 354_190_848)):
        assert count(configure("tokenformer.yml", slot_num=slot_num, **tied)) == parameters


def test_base_v2_yml():
    config = configure("base_v2.yml", run_name="r")
    check("base_v2", config)
    assert config.model == configure(model_name="MUDDLlama2Medium").model


@pytest.mark.parametrize("line", PUBLISHED_COMMANDS.values(), ids=PUBLISHED_COMMANDS)
def test_published_commands_of_tokenformer(line):
    loaded = load(line.split(), "MaxText/train.py")
    assert loaded.config.model.head.normalize_embedding_logits
    assert loaded.config.model.dropout.rate("path") == 0


def test_nothing_recorded_is_stale():
    known = {*PRESETS, *(f"decoder_block_{name}" for name in BUNDLES)}
    known |= {"gpt2", "tokenformer", "base_v2"}
    assert {path.stem for path in RESOLVED.glob("*.yml")} == known


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_as_config_file_gives_the_same_model(name):
    assert configure(f"configs/models/{name}.yml").model == configure(model_name=name).model


def count(config: Config) -> int:
    """Parameters, by arithmetic on the configuration alone."""
    model, size = config.model, config.model.shape.dimensions
    norm = 2 if model.block.normalization_type == "layer_norm" else 1
    q, kv = size.num_query_heads * size.head_dim, size.num_kv_heads * size.head_dim
    if model.attention.attention_projections == "pattention":
        # Each of the three has keys as wide as the model and values as wide as its heads.
        n = model.pattention.num_slots("qkv", size.emb_dim)
        layer = n * (3 * size.emb_dim + q + 2 * kv)
        layer += model.pattention.num_slots("proj", size.emb_dim) * (q + size.emb_dim)
    else:
        layer = size.emb_dim * (2 * q + 2 * kv)
        layer += (q + 2 * kv) * model.attention.qkv_bias
        layer += size.emb_dim * model.attention.proj_bias
    layer += 2 * size.head_dim * model.attention.use_qk_norm
    block = model.block
    shared = block.block_arrangement == "parallel" and block.parallel_residual_shared_norm
    norms = 1 if shared else 2
    layer += norms * norm * size.emb_dim * block.block_norm_parametric
    tables = size.vocab_size * (1 if model.head.logits_via_embedding else 2)
    if model.position.position_embedding == "learned":
        rows = model.position.trainable_position_size
        tables += size.max_target_length if rows == -1 else rows
    whole = size.num_layers * layer + size.emb_dim * (tables + norm)
    return whole + feed_forwards(config) + connections(config, norm)


def feed_forwards(config: Config) -> int:
    """Parameters of the feed-forward parts of all layers."""
    model, size = config.model, config.model.shape.dimensions
    if model.feed_forward.feed_forward_type == "pattention":
        slots = model.pattention.num_slots("ffn", size.emb_dim)
        return size.num_layers * 2 * size.emb_dim * slots
    activations, total = len(model.feed_forward.mlp_activations), 0
    for layer in range(size.num_layers):
        width = size.mlp_dim
        if model.feed_forward.dynamic_mlp_dim:
            multiple = model.feed_forward.mlp_dim_multiple
            width = round(width * (layer / (size.num_layers - 1) + 0.5) / multiple) * multiple
        total += size.emb_dim * (activations + 1) * width
        total += (activations * width + size.emb_dim) * model.feed_forward.ffn_bias
    return total


def connections(config: Config, norm: int) -> int:
    """Parameters of dense connections, norms of queries, keys and values included.

    Args:
      norm: vectors of a norm of a layer.
    """
    dense, size = config.model.dense_connections, config.model.shape.dimensions
    if not dense.dense_conn:
        return 0
    layers_of_three = size.num_layers - (dense.dense_first_norms == "one")
    total = 2 * norm * size.emb_dim * layers_of_three
    total += (size.num_layers + 1) * size.emb_dim * dense.mudd_prenorm
    for depth in range(dense.dense_period, size.num_layers + 1, dense.dense_period):
        last = depth == size.num_layers
        ways = 1 if last else len(dense.dense_ways)
        sources = depth + 1
        if dense.dense_sources == "dilated":
            sources = depth // dense.dense_dilation + 1
        hidden = ways * sources * (dense.dense_last_expand if last else 1) // 64 * 64 + 64
        total += size.emb_dim * hidden + hidden * ways * sources + ways * sources
        normed = {"none": 0, "residual": 1, "all": ways}[dense.mudd_postnorm]
        total += size.emb_dim * (dense.mudd_prenorm + normed)
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_stated_parameter_counts(name):
    first = (config_files.MODELS / f"{name}.yml").read_text().splitlines()[0]
    stated = re.search(r": ([\d,]+) parameters\.$", first)
    assert stated, first
    assert count(configure(model_name=name)) == int(stated[1].replace(",", ""))


@pytest.mark.parametrize("path", sorted(config_files.SHIPPED.rglob("*.yml")), ids=lambda p: p.name)
def test_shipped_files_load_and_open_with_a_comment(path):
    load([str(path)], for_compare=True)
    assert path.read_text(encoding="utf-8").startswith("# ")
