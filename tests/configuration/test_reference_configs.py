"""The configurations of GPT-Neo and fattorib/transformer: sizes, schedules and batches."""

from pathlib import Path

import pytest

from MaxText.configuration import config_files
from MaxText.configuration.loading import configure
from MaxText.configuration.schema import Config
from MaxText.layers.model import Model
from MaxText.training.backend_defaults import resolve

FOLDER = config_files.SHIPPED / "gpt_neo"
FILES = sorted(path for path in FOLDER.glob("*.yml") if path.stem != "common")

# name -> width, layers, heads, length, vocabulary; devices, sequences and steps; learning rate and
# the parameters that its JSON file makes.
THEIRS = {
    "gpt2_small": (768, 12, 6, 1024, 50257, 64, 512, 1_000_000, 6e-4, 124_412_160),
    "gpt3_small_256": (768, 12, 12, 2048, 50304, 256, 256, 572_300, 6e-4, 125_234_688),
    "gpt3_small_local_256": (768, 12, 12, 2048, 50304, 256, 256, 572_300, 6e-4, 125_234_688),
    "gpt3_small_moe_8": (768, 12, 12, 2048, 50304, 8, 256, 572_300, 6e-4, 605_000_448),
    "gpt3_PAR_small_256": (768, 19, 12, 2048, 50304, 256, 256, 572_300, 6e-4, 141_771_264),
    "gpt3_medium_256": (1024, 24, 16, 2048, 50304, 256, 256, 572_300, 3e-4, 355_846_144),
    "gpt3_large_256": (1536, 24, 16, 2048, 50304, 256, 256, 572_300, 2.5e-4, 760_261_632),
    "gpt3_XL_256_Pile": (2048, 24, 32, 2048, 50257, 256, 512, 286_150, 2e-4, 1_315_575_808),
    "GPT3_XL_pretrained": (2048, 24, 16, 2048, 50257, 256, 512, 400_000, 2e-4, 1_315_575_808),
    "gpt3_2-7B_256": (2560, 32, 32, 2048, 50257, 256, 512, 286_150, 1.6e-4, 2_651_307_520),
    "GPT3_2-7B_pretrained": (2560, 32, 20, 2048, 50257, 256, 512, 400_000, 1.6e-4, 2_651_307_520),
    "gpt3_6-7B_256": (4096, 32, 32, 2048, 50257, 256, 1024, 143_075, 1.2e-4, 6_658_011_136),
    "gpt3_13B_256": (5120, 40, 40, 2048, 50257, 256, 1024, 143_075, 1e-4, 12_852_771_840),
    "gpt3_13B_256_Pile": (5120, 40, 40, 2048, 50257, 256, 1024, 286_150, 1e-4, 12_852_771_840),
    "gpt3_local": (512, 6, 8, 256, 32768, 1, 10, 572_300, 3e-4, 52_591_616),
}


def parameters(config: Config) -> int:
    return Model(resolve(config.model, "cpu")[0]).num_parameters


def test_every_file_is_held_against_its_json():
    assert {path.stem for path in FILES} == set(THEIRS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_gpt_neo_configs(path: Path):
    width, layers, heads, length, vocabulary, devices, sequences, steps, rate, size = THEIRS[
        path.stem
    ]
    config = configure(path)
    d, batch, schedule = config.model.shape.dimensions, config.batch, config.schedule
    assert (d.emb_dim, d.num_layers, d.num_query_heads) == (width, layers, heads)
    assert (d.num_kv_heads, d.head_dim * heads, d.mlp_dim) == (heads, width, 4 * width)
    assert (d.max_target_length, d.vocab_size) == (length, vocabulary)
    per_update = batch.per_device_batch_size * devices * batch.gradient_accumulation_steps
    assert per_update == sequences
    assert (config.run.steps, schedule.learning_rate) == (steps, rate)
    assert schedule.num_warmup_steps == 3000
    assert parameters(config) == size
    if path.stem not in ("gpt3_small_moe_8", "gpt3_PAR_small_256", "gpt3_local"):
        per_layer = 12 * width**2 + 10 * width
        assert size == (vocabulary + length + 2) * width + layers * per_layer


def test_what_gpt_neos_layers_are():
    def kinds(name: str) -> list[str]:
        return [kind[0] for kind in configure(FOLDER / f"{name}.yml").model.attention_kinds]

    assert "".join(kinds("gpt3_PAR_small_256")) == "gnn" * 5 + "nnnn"
    assert "".join(kinds("gpt3_13B_256")) == "gl" * 20
    assert "".join(kinds("gpt3_small_local_256")) == "lg" * 6
    assert "".join(kinds("GPT3_2-7B_pretrained")) == "gl" * 16
    experts = configure(FOLDER / "gpt3_small_moe_8.yml").model.mixture_of_experts
    assert [layer for layer in range(12) if experts.stands_in(layer)] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt-neo-125m", 125_198_592),
        ("gpt-neo-1.3b", 1_315_575_808),
        ("gpt-neo-2.7b", 2_651_307_520),
        # Stated there: 81.3, 123.7, 303.4, 587.2, 757.2 and 1097.2 million.
        ("fattorib-smol", 81_260_544),
        ("fattorib-base", 123_671_040),
        ("fattorib-medium", 303_396_864),
        ("fattorib-xl", 757_226_496),
        ("fattorib-large", 587_237_376),
        ("fattorib-xxl", 1_097_204_736),
    ],
)
def test_sizes_of_released_models(name, size):
    assert parameters(configure(model_name=name)) == size


def test_recipe_of_fattorib():
    config = configure("configs/recipes/fattorib.yml")
    assert config.mesh.shard_optimizer_over_data
    assert config.model.position.position_embedding == "alibi"
    assert config.batch.sequence_length_stages == ((0, 128), (6139, 1024))
    assert config.schedule.num_warmup_steps == 2000
