"""Train steps of the presets, compiled for slices on which they should fit; needs libtpu, no TPU.

    python benchmarks/presets.py                 all presets of SLICES
    python benchmarks/presets.py qwen3 gemma3    those whose names begin so

Prints a row for each: the peak memory of a device in MiB, or the error. Each device has one
sequence, as long as the preset says, with full remat. A compilation takes half a minute of CPU time
whatever the depth, because layers are scanned. That is at JAX_OPTIMIZATION_LEVEL=O0, which changes
the peak by 0 to 1 % of that of default optimization (O2), and takes a fifth of the time.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Preset -> a slice on which its parameters, Adam's moments and activations should fit, in float32.
# docs/reference/compiled_figures.md says which of them were compiled.
SLICES = {
    "qwen3-0.6b": "v6e-8",
    "qwen3-1.7b": "v6e-8",
    "qwen3-4b": "v6e-8",
    "qwen3-8b": "v5p-8",
    "qwen3-14b": "v5p-16",
    "qwen3-32b": "v5p-64",
    "olmo2-1b": "v6e-8",
    "olmo2-7b": "v5p-8",
    "olmo3-7b": "v5p-8",
    "olmo3-32b": "v5p-64",
    "gemma2-2b": "v6e-8",
    "gemma2-9b": "v5p-16",
    "gemma2-27b": "v5p-64",
    "gemma3-270m": "v6e-8",
    "gemma3-1b": "v6e-8",
    "gemma3-4b": "v5p-8",
    "gemma3-12b": "v5p-16",
    "gemma3-27b": "v5p-64",
    "gemma4-31b": "v5p-64",
    "smollm3-3b": "v6e-8",
    "llama2-13b": "v5p-16",
    "llama2-70b": "v5p-128",
    "llama3.1-70b": "v5p-128",
    "llama3.1-405b": "v5p-512",
    "mistral-7b": "v5p-8",
    "mixtral-8x7b": "v5p-64",
    "granite3.3-2b": "v6e-8",
    "granite3.3-8b": "v5p-8",
    "phi-4": "v5p-16",
    "qwen2.5-0.5b": "v6e-8",
    "qwen2.5-1.5b": "v6e-8",
    "qwen2.5-3b": "v6e-8",
    "qwen2.5-7b": "v5p-8",
    "qwen2.5-14b": "v5p-16",
    "gpt3-52k": "v6e-1",
    "gpt3-6b": "v5p-8",
    "gpt3-22b": "v5p-32",
    "gpt3-175b": "v5p-256",
    "qwen3-next-80b-a3b": "v5p-64",
    "qwen3-next-180m": "v6e-8",
    "qwen3.5-9b": "v5p-16",
    "qwen3.5-35b-a3b": "v5p-64",
    "qwen3.5-397b-a17b": "v5p-512",
    "deepseek2-16b": "v5p-16",
    "deepseek2-236b": "v5p-256",
    "deepseek3-671b": "v5p-512",
    "deepseek3-240m": "v6e-8",
    "kimi-k2-1t": "v5p-1024",
    "kimi-linear-48b-a3b": "v5p-64",
    "kimi-linear-240m": "v6e-8",
    "gpt-oss-20b": "v5p-32",
    "gpt-oss-120b": "v5p-128",
    "glm-4.5-air": "v5p-128",
    "mamba2-130m": "v6e-8",
    "mamba2-370m": "v6e-8",
    "mamba2-780m": "v6e-8",
    "mamba2-1.3b": "v6e-8",
    "mamba2-2.7b": "v6e-8",
    "granite4.0-h-micro": "v6e-8",
    "granite4.0-h-tiny": "v5p-8",
    "granite4.0-h-small": "v5p-64",
    "nemotron-h-8b": "v5p-8",
    "nemotron-h-170m": "v6e-8",
    "nemotron3-nano-30b": "v5p-64",
    "falcon-h1-0.5b": "v6e-8",
}
# Preset -> further keys. With FSDP alone, DeepSeek-V3's step has 191 GiB of temporaries per chip,
# four times what plan.py says: layers of 11B parameters are gathered whole.
FURTHER_KEYS = {
    "deepseek3-671b": ["ici_expert_parallelism=32"],
    "kimi-k2-1t": ["ici_expert_parallelism=32"],
}


def arguments(name: str) -> list[str]:
    """Returns the arguments of train_compile.py for a preset."""
    return [
        f"model_name={name}",
        f"compile_topology={SLICES[name]}",
        "dataset_type=grain",
        "per_device_batch_size=1",
        "remat_policy=full",
        "enable_checkpointing=false",
        "steps=10",
        *FURTHER_KEYS.get(name, []),
    ]


def main() -> int:
    """Returns 1 if a step does not compile or does not fit."""
    beginnings = tuple(sys.argv[1:])
    failed = 0
    for name, machine in SLICES.items():
        if beginnings and not name.startswith(beginnings):
            continue
        program = ROOT / "MaxText" / "train_compile.py"
        process = subprocess.run(
            [sys.executable, program, *arguments(name)],
            env={"JAX_OPTIMIZATION_LEVEL": "O0", **os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = process.stdout.splitlines()
        peak = next((line for line in lines if line.startswith("peak")), "")  # in MiB
        print(f"{name:<20}{machine:<10}{peak or process.stderr.strip()}", flush=True)
        failed += process.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
