"""Errors of plan.py's step times against published runs."""

import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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
    (
        "MaxText 128B",
        "v5e-256",
        _SCALED.format(128, 1, "qkv_proj_offloaded") + _TENSOR.format(16),
        0.5606,
    ),
    ("MaxText 22B", "v4-128", _WIDE.format(6144, 24576, 24, 48, 13), 0.567),
    ("MaxText 52B", "v4-384", _WIDE.format(12288, 49152, 32, 32, 7), 0.560),
    (
        "MaxText Llama 3.1 8B",
        "v6e-256",
        "model_name=llama3.1-8b max_target_length=8192 per_device_batch_size=3 remat_policy=full",
        0.4546,
    ),
    (
        "MaxText Llama 2 70B",
        "v6e-256",
        _LLAMA_70B + "max_target_length=4096 per_device_batch_size=2 remat_policy=full",
        0.438,
    ),
    (
        "MaxText Llama 2 70B",
        "v5p-1024",
        _LLAMA_70B + "max_target_length=4096 per_device_batch_size=4 remat_policy=full",
        0.654,
    ),
    (
        "MaxText Llama 2 7B",
        "8xH100",
        "model_name=llama2-7b max_target_length=4096 "
        "per_device_batch_size=4 remat_policy=minimal_with_context",
        0.463,
    ),
    ("torchtitan Llama 3.1 8B, eager", "8xH100", _TORCHTITAN + "full", 0.300),
    ("torchtitan Llama 3.1 8B, compiled", "8xH100", _TORCHTITAN + "full", 0.350),
)


def configured(keys: str) -> Any:
    """The configuration of keys as they are typed."""
    from MaxText.config.loading import load

    further_keys = ("dataset_type=synthetic", "steps=1000", "sharding_tolerance=1")
    return load([*keys.split(), *further_keys]).config


def main() -> None:
    """Prints predicted and published MFU."""
    from MaxText.cost.job_plan import make_plan
    from MaxText.hardware.chips import find_hardware

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


if __name__ == "__main__":
    main()
