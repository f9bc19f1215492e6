"""Errors of plan.py: memory against a compiler, speed against runs.

    python benchmarks/plan.py speed             published rows, no device needed
    python benchmarks/plan.py memory            compiles each shape; needs libtpu, no TPU
    python benchmarks/plan.py memory gpt2-124m  shapes whose name begins so

A compilation takes two to five minutes of a processor's time.
"""

import argparse
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GB = 1e9

# Name -> chips of v5p:2x2x1 (of v5e:2x2 with adafactor), and keys besides attention=dot_product.
SHAPES = {
    "gpt2-124m, full": (4, "model_name=gpt2-124m per_device_batch_size=8 remat_policy=full "
                        "attention=blocked"),
    "gpt2-124m, minimal": (4, "model_name=gpt2-124m per_device_batch_size=8 remat_policy=minimal"),
    "gpt2-124m, none": (4, "model_name=gpt2-124m per_device_batch_size=8 remat_policy=none"),
    "llama3.2-1b, full": (4, "model_name=llama3.2-1b max_target_length=2048 remat_policy=full "
                          "per_device_batch_size=4 attention=blocked attention_block_size=1024"),
    "tokenformer-354m, full": (1, "model_name=tokenformer-354m per_device_batch_size=4 "
                               "remat_policy=full"),
    "llama2-7b, full": (4, "model_name=llama2-7b max_target_length=2048 per_device_batch_size=4 "
                        "remat_policy=full"),
    "8 experts on 4 chips, full": (
        4, "decoder_block=llama2 base_emb_dim=1024 base_num_query_heads=16 base_num_kv_heads=16 "
        "head_dim=64 base_mlp_dim=2816 base_num_decoder_layers=12 vocab_size=32000 "
        "max_target_length=1024 num_experts=8 num_experts_per_tok=2 capacity_factor=1.25 "
        "eval_capacity_factor=2 ici_expert_parallelism=4 ici_fsdp_parallelism=1 "
        "per_device_batch_size=4 remat_policy=full"),
    "pythia-410m, save_qkv_proj": (4, "model_name=pythia-410m per_device_batch_size=4 "
                                   "remat_policy=save_qkv_proj"),
    "llama2-7b, 2-way tensor, minimal": (
        4, "model_name=llama2-7b max_target_length=2048 per_device_batch_size=2 "
        "remat_policy=minimal ici_tensor_parallelism=2"),
    "gemma-2b, tiled head": (1, "model_name=gemma-2b max_target_length=2048 remat_policy=full "
                             "per_device_batch_size=4 num_vocab_tiling=8"),
    "llama3.2-1b, adafactor": (1, "model_name=llama3.2-1b max_target_length=1024 "
                               "per_device_batch_size=1 remat_policy=full opt_type=adafactor"),
    "llama3.1-8b, 4 microbatches": (
        4, "model_name=llama3.1-8b max_target_length=2048 per_device_batch_size=1 "
        "gradient_accumulation_steps=4 remat_policy=full"),
    "llama2-7b, 2 copies": (
        4, "model_name=llama2-7b max_target_length=2048 per_device_batch_size=1 "
        "remat_policy=save_out_proj ici_data_parallelism=2 ici_fsdp_parallelism=2"),
    "5 unrolled layers, dense connections, kernel": (
        1, "decoder_block=llama2 base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 "
        "head_dim=128 base_mlp_dim=5504 base_num_decoder_layers=5 vocab_size=2048 "
        "max_target_length=2048 per_device_batch_size=8 remat_policy=full scan_layers=false "
        "dense_conn=true dense_aggregation_impl=kernel"),
}  # fmt: skip

_SCALED = (
    "decoder_block=llama2 base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 "
    "base_mlp_dim=7168 base_num_decoder_layers=16 head_dim=128 vocab_size=32000 "
    "max_target_length=2048 global_parameter_scale={} per_device_batch_size={} remat_policy={} "
)
_WIDE = (
    "decoder_block=llama2 head_dim=128 vocab_size=32000 max_target_length=2048 remat_policy=full "
    "num_vocab_tiling=8 base_emb_dim={0} base_mlp_dim={1} base_num_query_heads={2} "
    "base_num_kv_heads={2} base_num_decoder_layers={3} per_device_batch_size={4}"
)
_TENSOR = "ici_tensor_parallelism={}"
_LLAMA_70B = (
    "decoder_block=llama2 base_emb_dim=8192 base_num_query_heads=64 base_num_kv_heads=8 "
    "base_mlp_dim=28672 base_num_decoder_layers=80 head_dim=128 vocab_size=32000 "
)
_TORCHTITAN = "model_name=llama3.1-8b max_target_length=8192 per_device_batch_size=1 remat_policy="
# Name, hardware, keys, and published MFU: recomputed where the publisher counts whole attention
# (configs/gpu/a3: 492 TFLOP/s or 49.7 % are 46.3 %).
# MaxText: configs/tpu/{v5p,v5e,v4}/README.md and the scripts next to them, configs/gpu/a3,
# docs/reference/models/tiering.md (batch and remat policy are not given there: assumed).
# torchtitan: benchmarks/llama3_h100_202412_torchtitan.md, 5,762 and 6,667 tokens/s per GPU.
ROWS = (
    ("MaxText 32B", "v5p-128", _SCALED.format(32, 6, "minimal") + _TENSOR.format(4), 0.7147),
    ("MaxText 64B", "v5p-128", _SCALED.format(64, 3, "minimal") + _TENSOR.format(4), 0.7031),
    ("MaxText 128B", "v5p-256", _SCALED.format(128, 1, "minimal") + _TENSOR.format(8), 0.6868),
    ("MaxText 256B", "v5p-1024", _SCALED.format(256, 1, "minimal") + _TENSOR.format(8), 0.6709),
    ("MaxText 512B", "v5p-1024", _SCALED.format(512, 2, "full") + _TENSOR.format(8), 0.6399),
    ("MaxText 1024B", "v5p-2048", _SCALED.format(1024, 2, "full") + _TENSOR.format(16), 0.5535),
    ("MaxText 1024B", "v5p-4096", _SCALED.format(1024, 2, "full") + _TENSOR.format(16), 0.6480),
    ("MaxText 16B", "v5e-256", _SCALED.format(16, 6, "full"), 0.6110),
    ("MaxText 32B", "v5e-256", _SCALED.format(32, 4, "full"), 0.6686),
    ("MaxText 64B", "v5e-256", _SCALED.format(64, 1, "full"), 0.5990),
    ("MaxText 128B", "v5e-256", _SCALED.format(128, 1, "qkv_proj_offloaded")
        + _TENSOR.format(16), 0.5606),
    ("MaxText 22B", "v4-128", _WIDE.format(6144, 24576, 24, 48, 13), 0.567),
    ("MaxText 52B", "v4-384", _WIDE.format(12288, 49152, 32, 32, 7), 0.560),
    ("MaxText Llama 3.1 8B", "v6e-256", "model_name=llama3.1-8b max_target_length=8192 "
        "per_device_batch_size=3 remat_policy=full", 0.4546),
    ("MaxText Llama 2 70B", "v6e-256", _LLAMA_70B + "max_target_length=4096 "
        "per_device_batch_size=2 remat_policy=full", 0.438),
    ("MaxText Llama 2 70B", "v5p-1024", _LLAMA_70B + "max_target_length=4096 "
        "per_device_batch_size=4 remat_policy=full", 0.654),
    ("MaxText Llama 2 7B", "8xH100", "model_name=llama2-7b max_target_length=4096 "
        "per_device_batch_size=4 remat_policy=minimal_with_context", 0.463),
    ("torchtitan Llama 3.1 8B, eager", "8xH100", _TORCHTITAN + "full", 0.300),
    ("torchtitan Llama 3.1 8B, compiled", "8xH100", _TORCHTITAN + "full", 0.350),
)  # fmt: skip


def configured(keys: str) -> Any:
    """The configuration of keys as they are typed."""
    from MaxText.config.loading import load

    more = ("dataset_type=synthetic", "steps=1000", "sharding_tolerance=1")
    return load([*keys.split(), *more]).config


def speed() -> None:
    """Prints predicted and published MFU."""
    from MaxText.cost.hardware import find_hardware
    from MaxText.cost.job_plan import make_plan

    print("| run | hardware | published MFU | predicted | middle | error of the time |")
    print("|---|---|---|---|---|---|")
    for name, hardware, keys, mfu in ROWS:
        time = make_plan(configured(keys), find_hardware(hardware)).time
        slow, fast, middle = (time.mfu(t) for t in (time.upper, time.lower, time.estimate))
        print(
            f"| {name} | {hardware} | {mfu:.1%} | {slow:.1%} to {fast:.1%} | "
            f"{middle:.1%} | {mfu / middle - 1:+.0%} |",
            flush=True,
        )


def memory(begin: str) -> None:
    """Prints predicted memory and the compiler's."""
    from jax.experimental import topologies

    from MaxText.cost.abstract_step import make_program
    from MaxText.cost.hardware import find_hardware
    from MaxText.cost.lowering import compile_lowered, lower_train_step
    from MaxText.cost.step_memory import estimate_memory
    from MaxText.runtime.compiled_steps import memory_stats

    print("| shape | chips | state GB | compiler | temporaries GB | compiler | total | error |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (chips, keys) in SHAPES.items():
        if not name.startswith(begin):
            continue
        topology = "v5e:2x2" if "adafactor" in name else "v5p:2x2x1"
        target = topologies.get_topology_desc(platform="tpu", topology_name=topology)
        devices = target.devices[:chips]
        config = configured(keys if "attention=" in keys else f"{keys} attention=dot_product")
        hardware = f"v5e-{chips}" if topology.startswith("v5e") else f"v5p-{2 * chips}"
        planned = estimate_memory(make_program(config, find_hardware(hardware)))
        found = memory_stats(compile_lowered(lower_train_step(config, devices))[0])
        given, temporaries = found["arguments"], found["temporaries"]
        print(
            f"| {name} | {chips} | {planned.state / GB:.3f} | {given / GB:.3f} | "
            f"{planned.temporaries / GB:.2f} | {temporaries / GB:.2f} | {planned.total / GB:.2f} | "
            f"{planned.total / (given + temporaries) - 1:+.1%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("begin", nargs="?", default="", help="of the names of shapes")
    options = parser.parse_args()
    speed() if options.what == "speed" else memory(options.begin)


if __name__ == "__main__":
    main()
