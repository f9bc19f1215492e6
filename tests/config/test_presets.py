"""Shipped configurations: they load, resolve to what is recorded, and are those of their papers.

resolved/<name>.yml holds the keys in which a preset differs from the schema; UPDATE_RESOLVED=1
rewrites them. tests/parallelism/test_preset_shardings.py has the sizes of the presets."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from MaxText.config import config_files
from MaxText.config.loading import load, load_config
from MaxText.config.schema import Config, flatten
from MaxText.config.serialization import entry_lines
from MaxText.layers.assembly.model import Model
from MaxText.training.backend_defaults import resolve_auto

RESOLVED = Path(__file__).parent / "resolved"
PRESETS = config_files.preset_names(config_files.MODELS)
RECIPES = ["gpt2", "tokenformer", "base_v2", "reproductions/fattorib"]
BUNDLES = config_files.preset_names(config_files.DECODER_BLOCKS)
# What is recorded as <name>.yml.
RECORDED = {
    **{name: {"model_name": name} for name in PRESETS},
    **{f"decoder_block_{name}": {"decoder_block": name} for name in BUNDLES},
    **{Path(name).name: {"config_file": f"{name}.yml"} for name in RECIPES},
}

_RUN = (
    "base_output_directory=gs://BUCKET dataset_type=grain grain_train_files=DIR/train* "
    "tokenizer_path=EleutherAI/gpt-neox-20b grain_worker_count=8 eval_interval=10000 "
    "grain_eval_files=DIR/validation* enable_checkpointing=True per_device_batch_size=32 "
    "eval_per_device_batch_size=32 logits_via_embedding=True normalize_embedding_logits=True "
    "init_weights_seed=42"
)
_MUDD = "MaxText/configs/base_v2.yml run_name=gs://bucket/output/ dataset_path=gs://bucket/pile"
# As the READMEs of TokenFormer and MUDDFormer give them, and keys that they lead to.
PUBLISHED_COMMANDS = {
    "MaxText/configs/tokenformer.yml run_name=tokenformer124_steps600k steps=600000 "
    f"checkpoint_period=10000 slot_num=576 drop_path=0 {_RUN}": {"drop_path": 0, "slot_num": 576},
    "MaxText/configs/gpt2.yml run_name=transformer124_steps600k steps=600000 "
    f"checkpoint_period=2000 {_RUN}": {"normalize_embedding_logits": True, "steps": 600_000},
    f"{_MUDD} model_name=MUDDLlama2Medium hardware=tpu": {"run_name": "output", "dense_conn": True},
    f"{_MUDD} model_name=MUDDLlama2Medium hardware=gpu compile_topology_num_slices=1": {},
    f"{_MUDD} model_name=Llama2Medium hardware=gpu compile_topology_num_slices=1": {
        "base_output_directory": "gs://bucket",
        "dense_conn": False,
        "hardware": "gpu",
    },
}


def changed(config: Config) -> str:
    """The YAML lines in which a configuration differs from the schema's defaults."""
    defaults = flatten(load_config(run_name="r"))
    lines = [
        line
        for name, value in flatten(config).items()
        if value != defaults[name]
        for line in entry_lines(name, value)
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded(name):
    path, lines = RESOLVED / f"{name}.yml", changed(load_config(**RECORDED[name], run_name="r"))
    if os.environ.get("UPDATE_RESOLVED"):
        path.write_text(lines, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == lines


def test_nothing_recorded_is_stale():
    assert {path.stem for path in RESOLVED.glob("*.yml")} == RECORDED.keys()


def test_published_commands():
    for line, keys in PUBLISHED_COMMANDS.items():
        found = flatten(load(line.split(), "MaxText/train.py").config)
        assert found | keys == found


def test_commands_in_tables():
    text = (config_files.REPOSITORY / "docs/how-to/train_muddformer.md").read_text(encoding="utf-8")
    in_tables = re.findall(r"^\| .* \| `(model_name=[^`]*)` \|$", text, re.MULTILINE)
    assert len(in_tables) > 7
    for line in in_tables:
        load([*line.split(), "dataset_path=FOLDER"], "MaxText/train.py")


def test_a_muddformer_and_its_baseline_differ_in_their_connections_alone():
    for name in ("405m", "834m", "1.4b", "797m", "1.34b", "2.8b"):
        own, other = (
            flatten(load_config(model_name=f"{kind}-{name}", run_name="r"))
            for kind in ("muddformer", "transformer_pp")
        )
        differing = {key for key, value in own.items() if value != other[key]}
        connections = {key for key in own if key.startswith(("dense_", "dynamic_dense_", "mudd_"))}
        # Only the form of a deep model's bundle names a deviation, which xavier has no use for.
        rest = {"decoder_block", "init_std", "model_name", "dynamic_mlp_dim", "mlp_dim_multiple"}
        assert differing - connections <= rest


def test_the_words_of_the_class_of_muddformer_give_the_preset():
    from_yml = load(
        [
            "Llama2Medium.yml",
            "dense_conn=True",
            "dynamic_dense_type=qkvm",
            "dynamic_dense_act_cls=gelu",
            "dynamic_dense_fix_last_layer=True",
            "dynamic_dense_hidden_round=True",
            "ddw_gen_pattern=q,k,v,m",
            "ddw_gen_chunk_size=None",
            "mudd_prenorm=True",
            "mudd_postnorm=True",
            "dynamic_mlp_dim=True",
            "train_shuffle_buffer_size=None",
            "dataset_type=pile",
            "opt_type=adam_pax",
            "eval_loop_num_batches=162",
            "record_internal_nn_metrics=0",
        ]
    ).config
    preset = load_config(model_name="MUDDLlama2Medium")
    assert from_yml.model.dense_connections == preset.model.dense_connections
    assert from_yml.model.feed_forward == preset.model.feed_forward
    assert from_yml.optimizer == preset.optimizer
    assert not from_yml.data.enable_data_shuffling
    assert from_yml.evaluation.eval_steps == 162


def test_a_preset_as_config_file_gives_the_same_model():
    for name in PRESETS:
        assert load_config(f"configs/models/{name}.yml").model == load_config(model_name=name).model
    assert load_config("base_v2.yml").model == load_config(model_name="MUDDLlama2Medium").model


@pytest.mark.parametrize("path", sorted(config_files.SHIPPED.rglob("*.yml")), ids=lambda p: p.name)
def test_shipped_files_load_and_open_with_a_comment(path):
    load([str(path)], for_compare=True)  # sweeps and stages are checked by tests/experiments
    assert path.read_text(encoding="utf-8").startswith("# ")


GPT_NEO = config_files.SHIPPED / "gpt_neo"

# name -> width, layers, heads, length, vocabulary; devices, sequences and steps; learning rate and
# the parameters that its JSON file makes.
GPT_NEO_CONFIGS = {
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
    return Model(resolve_auto(config.model, "cpu")[0]).num_parameters


@pytest.mark.parametrize("name", sorted({path.stem for path in GPT_NEO.glob("*")} - {"common"}))
def test_gpt_neo_configs(name):
    config = load_config(GPT_NEO / f"{name}.yml")
    d, batch, schedule = config.model.shape.dimensions, config.batch, config.schedule
    width, _, heads, *_, devices, _, _, _, _ = GPT_NEO_CONFIGS[name]
    assert GPT_NEO_CONFIGS[name] == (
        d.emb_dim,
        d.num_layers,
        d.num_query_heads,
        d.max_target_length,
        d.vocab_size,
        devices,
        batch.per_device_batch_size * devices * batch.gradient_accumulation_steps,
        config.run.steps,
        schedule.learning_rate,
        parameters(config),
    )
    assert (d.num_kv_heads, d.head_dim * heads, d.mlp_dim) == (heads, width, 4 * width)
    assert schedule.num_warmup_steps == 3000


def test_what_gpt_neos_layers_are():
    def mixers(name: str) -> str:
        return "".join(mixer[0] for mixer in load_config(GPT_NEO / f"{name}.yml").model.mixers)

    assert mixers("gpt3_PAR_small_256") == "ann" * 5 + "nnnn"
    assert mixers("gpt3_13B_256") == "al" * 20
    assert mixers("gpt3_small_local_256") == "la" * 6
    assert mixers("GPT3_2-7B_pretrained") == "al" * 16
    layers = load_config(GPT_NEO / "gpt3_small_moe_8.yml").model.layers
    experts = [layer.config.mixture_of_experts.num_experts for layer in layers]
    assert [layer for layer in range(12) if experts[layer] > 1] == [2, 4, 6, 8, 10]


def test_sizes_of_recipes():
    tied = {"logits_via_embedding": True, "normalize_embedding_logits": True}
    for slot_num, size in ((576, 123_569_664), (2140, 354_190_848)):
        assert parameters(load_config("tokenformer.yml", slot_num=slot_num, **tied)) == size
    assert parameters(load_config("gpt2.yml")) == 123_689_472 + 50_304 * 768


class Size(NamedTuple):
    """Sizes of a published model, as its config.json has them, and its number of parameters."""

    published: int  # of its safetensors
    width: int
    heads: int
    kv_heads: int
    mlp: int
    layers: int
    head_dim: int
    vocabulary: int
    is_tied: bool = True
    norms: int = 2  # of a layer, as wide as the model
    qk_norms: str = ""  # "head": one scale for all heads; "joint": one for each
    qkv_bias: bool = False

    @property
    def counted(self) -> int:
        """The number of parameters of the sizes."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        attention = self.width * (2 * queries + 2 * keys)
        norms = self.norms * self.width
        norms += {"": 0, "head": 2 * self.head_dim, "joint": queries + keys}[self.qk_norms]
        biases = self.qkv_bias * (queries + 2 * keys)
        layer = attention + 3 * self.width * self.mlp + norms + biases
        tables = self.vocabulary * self.width * (1 if self.is_tied else 2)
        return tables + self.layers * layer + self.width


def qwen3(published, *sizes, is_tied=True):
    return Size(published, *sizes, 128, 151_936, is_tied, qk_norms="head")


def qwen2(published, *sizes, is_tied=True):
    return Size(published, *sizes, is_tied, qkv_bias=True)


def olmo(published, *sizes):
    return Size(published, *sizes, is_tied=False, qk_norms="joint")


def gemma3(published, *sizes):
    return Size(published, *sizes, norms=4, qk_norms="head")


def untied(published, *sizes):
    return Size(published, *sizes, is_tied=False)


# Totals are those of the safetensors on Hugging Face, by its API (`safetensors.total`), but
# Llama 2's without 64 rotary frequencies per layer; Gemma 3's from 4B on without the image encoder
# (416_866_032) and its projection (1152 rows and a norm); those of Qwen3 0.6B and 1.7B without the
# tied table, stored twice; Granite's are of the base models (the instruct models have 49_159 ids).
PUBLISHED = {
    "qwen3-0.6b": qwen3(596_049_920, 1024, 16, 8, 3072, 28),
    "qwen3-1.7b": qwen3(1_720_574_976, 2048, 16, 8, 6144, 28),
    "qwen3-4b": qwen3(4_022_468_096, 2560, 32, 8, 9728, 36),
    "qwen3-8b": qwen3(8_190_735_360, 4096, 32, 8, 12288, 36, is_tied=False),
    "qwen3-14b": qwen3(14_768_307_200, 5120, 40, 8, 17408, 40, is_tied=False),
    "qwen3-32b": qwen3(32_762_123_264, 5120, 64, 8, 25600, 64, is_tied=False),
    "qwen2.5-0.5b": qwen2(494_032_768, 896, 14, 2, 4864, 24, 64, 151_936),
    "qwen2.5-1.5b": qwen2(1_543_714_304, 1536, 12, 2, 8960, 28, 128, 151_936),
    "qwen2.5-3b": qwen2(3_085_938_688, 2048, 16, 2, 11008, 36, 128, 151_936),
    "qwen2.5-7b": qwen2(7_615_616_512, 3584, 28, 4, 18944, 28, 128, 152_064, is_tied=False),
    "qwen2.5-14b": qwen2(14_770_033_664, 5120, 40, 8, 13824, 48, 128, 152_064, is_tied=False),
    "olmo2-1b": olmo(1_484_916_736, 2048, 16, 16, 8192, 16, 128, 100_352),
    "olmo2-7b": olmo(7_298_617_344, 4096, 32, 32, 11008, 32, 128, 100_352),
    "olmo3-7b": olmo(7_298_011_136, 4096, 32, 32, 11008, 32, 128, 100_278),
    "olmo3-32b": olmo(32_233_522_176, 5120, 40, 8, 27648, 64, 128, 100_278),
    "gemma2-2b": Size(2_614_341_888, 2304, 8, 4, 9216, 26, 256, 256_000, norms=4),
    "gemma2-9b": Size(9_241_705_984, 3584, 16, 8, 14336, 42, 256, 256_000, norms=4),
    "gemma2-27b": Size(27_227_128_320, 4608, 32, 16, 36864, 46, 128, 256_000, norms=4),
    "gemma3-270m": gemma3(268_098_176, 640, 4, 1, 2048, 18, 256, 262_144),
    "gemma3-1b": gemma3(999_885_952, 1152, 4, 1, 6912, 26, 256, 262_144),
    "gemma3-4b": gemma3(3_880_263_168, 2560, 8, 4, 10240, 34, 256, 262_208),
    "gemma3-12b": gemma3(11_766_034_176, 3840, 16, 8, 15360, 48, 256, 262_208),
    "gemma3-27b": gemma3(27_009_346_304, 5376, 32, 16, 21504, 62, 128, 262_208),
    "smollm3-3b": Size(3_075_098_624, 2048, 16, 4, 11008, 36, 128, 128_256),
    "llama2-13b": untied(13_015_864_320, 5120, 40, 40, 13824, 40, 128, 32_000),
    "llama2-70b": untied(68_976_648_192, 8192, 64, 8, 28672, 80, 128, 32_000),
    "llama3.1-70b": untied(70_553_706_496, 8192, 64, 8, 28672, 80, 128, 128_256),
    "llama3.1-405b": untied(405_853_388_800, 16384, 128, 8, 53248, 126, 128, 128_256),
    "mistral-7b": untied(7_241_732_096, 4096, 32, 8, 14336, 32, 128, 32_000),
    "granite3.3-2b": Size(2_533_525_504, 2048, 32, 8, 8192, 40, 64, 49_152),
    "granite3.3-8b": Size(8_170_835_968, 4096, 32, 8, 12800, 40, 128, 49_152),
    "phi-4": untied(14_659_507_200, 5120, 40, 10, 17920, 40, 128, 100_352),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_of_the_published_model(name):
    size = PUBLISHED[name]
    assert size.counted == size.published
    assert parameters(load_config(model_name=name)) == size.published


class Latent(NamedTuple):
    """Sizes of latent attention; a query rank of 0 is none."""

    heads: int
    query_rank: int
    rank: int = 512
    plain: int = 128
    rotary: int = 64
    value: int = 128

    def counted(self, width: int) -> int:
        queries = self.heads * (self.plain + self.rotary)
        into_queries = width * queries
        if self.query_rank:
            into_queries = (width + 1 + queries) * self.query_rank
        keys_and_values = width * (self.rank + self.rotary) + self.rank
        keys_and_values += self.rank * self.heads * (self.plain + self.value)
        return into_queries + keys_and_values + self.heads * self.value * width


class Heads(NamedTuple):
    """Sizes of attention with heads, and what of it has further parameters."""

    heads: int
    kv_heads: int
    head_dim: int
    has_norms: bool = False
    num_biases: int = 0  # of queries, keys, values, output: the first ones
    has_sinks: bool = False

    def counted(self, width: int) -> int:
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        biases = sum((queries, keys, keys, width)[: self.num_biases])
        norms = 2 * self.head_dim if self.has_norms else 0
        sinks = self.heads if self.has_sinks else 0
        return 2 * width * (queries + keys) + biases + norms + sinks


class Mixture(NamedTuple):
    """Sizes of a published model with experts, as its config.json has them."""

    width: int
    vocabulary: int
    attention: Latent | Heads
    num_dense: int  # layers
    dense: int  # width of their feed-forward
    num_sparse: int  # layers
    experts: int
    expert: int  # width of one
    shared: int = 0
    has_correction_bias: bool = False
    has_biases: bool = False  # of router and experts

    @property
    def counted(self) -> int:
        """The number of parameters, with a head of its own."""
        layer = self.attention.counted(self.width) + 2 * self.width
        router = self.experts * (self.width + self.has_correction_bias + self.has_biases)
        expert = 3 * self.width * self.expert
        biases = self.experts * (2 * self.expert + self.width) if self.has_biases else 0
        sparse = router + (self.experts + self.shared) * expert + biases
        dense = 3 * self.width * self.dense
        layers = self.num_dense * (layer + dense) + self.num_sparse * (layer + sparse)
        return 2 * self.vocabulary * self.width + layers + self.width


def qwen3_moe(width, heads, kv_heads, layers, experts, expert):
    attention = Heads(heads, kv_heads, 128, has_norms=True)
    return Mixture(width, 151_936, attention, 0, 0, layers, experts, expert)


def gpt_oss(layers, experts):
    attention = Heads(64, 8, 64, num_biases=4, has_sinks=True)
    return Mixture(2880, 201_088, attention, 0, 0, layers, experts, 2880, has_biases=True)


def deepseek_v3(heads, num_dense, vocabulary, experts):
    sizes = (num_dense, 18432, 61 - num_dense, experts, 2048, 1)
    return Mixture(7168, vocabulary, Latent(heads, 1536), *sizes, has_correction_bias=True)


# name -> parameters of the published safetensors, without multi-token prediction; sizes
WITH_EXPERTS = {
    "qwen3-30b-a3b": (30_532_122_624, qwen3_moe(2048, 32, 4, 48, 128, 768)),
    "qwen3-235b-a22b": (235_093_634_560, qwen3_moe(4096, 64, 4, 94, 128, 1536)),
    "qwen3-480b-a35b": (480_154_875_392, qwen3_moe(6144, 96, 8, 62, 160, 2560)),
    "deepseek2-16b": (
        15_706_484_224,
        Mixture(2048, 102_400, Latent(16, 0), 1, 10944, 26, 64, 1408, 2),
    ),
    "deepseek2-236b": (
        235_741_434_880,
        Mixture(5120, 102_400, Latent(128, 1536), 1, 12288, 59, 160, 1536, 2),
    ),
    "deepseek3-671b": (671_026_419_200, deepseek_v3(128, 3, 129_280, 256)),
    "kimi-k2-1t": (1_026_408_232_448, deepseek_v3(64, 1, 163_840, 384)),
    "gpt-oss-20b": (20_914_757_184, gpt_oss(24, 32)),
    "gpt-oss-120b": (116_829_156_672, gpt_oss(36, 128)),
    "glm-4.5-air": (
        106_852_251_264,
        Mixture(
            4096,
            151_552,
            Heads(96, 8, 128, num_biases=3),
            1,
            10944,
            45,
            128,
            1408,
            1,
            has_correction_bias=True,
        ),
    ),
}


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_preset_with_experts_has_the_parameters_of_the_published_model(name):
    published, sizes = WITH_EXPERTS[name]
    assert sizes.counted == published
    assert parameters(load_config(model_name=name)) == published


def test_kimi_linear_has_the_parameters_of_the_published_model():
    """27 layers, of which the first is dense, and every fourth and the last have attention."""
    width, heads, head, experts = 2304, 32, 128, 256
    in_heads = heads * head
    low_rank = width * head + head * in_heads  # of decays, and of gates
    convolutions = 3 * 4 * in_heads
    decays = heads + in_heads  # A_log and dt_bias
    delta = 4 * width * in_heads + 2 * low_rank + width * heads + convolutions + decays + head
    attention = Latent(heads, 0).counted(width)
    sparse = experts * (width + 1) + (experts + 1) * 3 * width * 1024
    norms = (2 * 27 + 1) * width
    tables = 2 * 163_840 * width
    counted = 20 * delta + 7 * attention + 3 * width * 9216 + 26 * sparse + norms + tables
    assert parameters(load_config(model_name="kimi-linear-48b-a3b")) == counted == 49_122_681_728


def test_gpt3_has_biases_and_a_table_of_positions():
    def counted(width, layers, mlp, vocabulary, positions):
        layer = 4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width
        return (vocabulary + positions) * width + layers * layer + 2 * width

    sizes = {
        "gpt3-52k": (16, 1, 64, 1024, 2048),
        "gpt3-6b": (3072, 48, 12288, 32_768, 16_384),
        "gpt3-22b": (6144, 48, 24576, 32_768, 16_384),
        "gpt3-175b": (12288, 96, 49152, 50_304, 16_384),
    }
    for name, of_model in sizes.items():
        assert parameters(load_config(model_name=name)) == counted(*of_model)
