"""Compiled train step against MaxText 0.2.5's, without a TPU.

    python benchmarks/compiled.py OUT.json            all rows
    python benchmarks/compiled.py OUT.json 7b,        rows whose name begins so

The first call makes one environment for both sides (--python, 3.12; --env). Rows in OUT.json are
kept. Time is the compiler's estimate, loops in full, which kernels and collectives lack. Each row
ends with the error of plan.py's memory. A compilation takes two to five minutes of CPU time.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OTHER = "maxtext[tpu]==0.2.5"
GHZ = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75}
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
KEYS = (
    "dataset_type=synthetic enable_checkpointing=false steps=10 dtype=bfloat16 scan_layers=true "
    "attention=flash "
)
_SHAPE = (
    "decoder_block={0} base_emb_dim={1} base_num_query_heads={2} base_num_kv_heads={3} "
    "base_mlp_dim={4} base_num_decoder_layers={5} vocab_size={6} max_target_length={7} "
    "head_dim=128 mlp_activations=['silu','linear'] "
)
MODELS = {
    "1.4b": _SHAPE.format("llama2", 2048, 16, 16, 5504, 24, 50432, 2048),
    "7b": _SHAPE.format("llama2", 4096, 32, 32, 11008, 32, 32000, 4096),
    "13b": _SHAPE.format("llama2", 5120, 40, 40, 20480, 40, 50304, 2048),
    "70b": _SHAPE.format("llama2", 8192, 64, 8, 28672, 80, 32000, 4096),
    "8x7b": _SHAPE.format("llama2", 4096, 32, 8, 14336, 32, 32000, 4096)
    + "num_experts=8 num_experts_per_tok=2 capacity_factor=1.25 ",
    # Presets of the same name on both sides.
    "gemma3-27b": "model_name=gemma3-27b max_target_length=4096 ",
    "olmo3-32b": "model_name=olmo3-32b max_target_length=4096 ",
}
# model, machine, slices, sequences per device, remat policy, other keys
ROWS = (
    ("1.4b", "v5p-8", 1, 8, "full", ""),
    ("1.4b", "v5p-8", 1, 4, "minimal", ""),
    ("1.4b", "v5p-8", 1, 2, "save_qkv_proj", ""),  # not "none": MaxText then remats all, as "full"
    ("1.4b", "v6e-8", 1, 4, "full", ""),
    ("1.4b", "v5e-16", 2, 2, "full", ""),
    ("7b", "v5p-64", 1, 4, "full", ""),
    ("7b", "v5p-64", 1, 2, "minimal", ""),
    ("7b", "v5p-64", 1, 4, "full", "ici_tensor_parallelism=4"),
    ("7b", "v5p-64", 1, 0.125, "full", "ici_context_parallelism=8 max_target_length=32768"),
    ("7b", "v5p-64", 1, 2, "full", "ici_pipeline_parallelism=4 num_pipeline_microbatches=8"),
    ("7b", "v6e-64", 1, 2, "full", ""),
    ("7b", "v5e-64", 2, 1, "full", ""),
    ("13b", "v5e-256", 1, 2, "full", ""),
    ("13b", "v6e-64", 1, 2, "full", ""),
    ("13b", "v5p-64", 1, 2, "full", "ici_tensor_parallelism=2"),
    ("70b", "v5p-256", 1, 2, "full", ""),
    ("70b", "v5p-256", 1, 2, "full", "ici_tensor_parallelism=4"),
    ("70b", "v6e-256", 1, 1, "full", ""),
    ("8x7b", "v5p-64", 1, 2, "full", "ici_expert_parallelism=8"),
    ("8x7b", "v6e-64", 1, 1, "full", "ici_expert_parallelism=8"),
    ("gemma3-27b", "v5p-128", 1, 2, "full", ""),
    ("olmo3-32b", "v5p-128", 1, 2, "full", ""),
)


def name_of(row: tuple) -> str:
    model, machine, slices, rows, policy, further_keys = row
    return ", ".join(
        [model, f"{slices} x {machine}", f"{rows} per device", policy, *further_keys.split()]
    )


def compile_own(keys: list[str], machine: str, slices: int):
    from MaxText.compilation import targets
    from MaxText.compilation.lowering import compile_lowered, lower_train_step
    from MaxText.config import command_line
    from MaxText.cost.abstract_step import make_program
    from MaxText.cost.step_memory import estimate_memory
    from MaxText.hardware.chips import find_hardware

    config = command_line.parse("train_compile.py", keys, "").config
    hardware = find_hardware(machine if slices == 1 else f"{slices}x{machine}")
    planned = estimate_memory(make_program(config, hardware)).total / 1e9
    devices = targets.devices(targets.find_target(machine, slices))
    return compile_lowered(lower_train_step(config, devices))[0], planned


def compile_maxtext(keys: list[str]):
    from maxtext.trainers.pre_train import train_compile  # pyright: ignore

    compiled = []
    compile_step = train_compile.jit_and_compile

    def compile_and_keep(*arguments: Any, **keywords: Any) -> Any:
        compiled.append(compile_step(*arguments, **keywords))
        return compiled[0]

    train_compile.jit_and_compile = compile_and_keep
    base = pathlib.Path(train_compile.__file__).parents[2] / "configs/base.yml"
    maxtext_keys = [
        "run_name=compiled",
        "base_output_directory=/tmp/compiled",
        "sparse_matmul=false",
    ]
    if "num_experts=8" in keys:
        maxtext_keys += ["decoder_block=mixtral", "base_moe_mlp_dim=14336"]
        keys = [key for key in keys if not key.startswith("decoder_block=")]
    train_compile.main(["", str(base), *keys, *maxtext_keys])
    return compiled[0]


def measure(side: str, row: tuple) -> dict:
    """Compiles one side in this process and returns its figures."""
    from MaxText.compilation import targets
    from MaxText.compilation.hlo import HloModule

    model, machine, slices, rows, policy, further_keys = row
    targets.prepare_environment(targets.find_target(machine))
    keys = (
        f"{KEYS}{MODELS[model]}per_device_batch_size={rows} remat_policy={policy} {further_keys} "
    )
    keys += f"compile_topology={machine} compile_topology_num_slices={slices}"
    command_keys = list(
        {key.partition("=")[0]: key for key in keys.split()}.values()
    )  # the last wins
    figures: dict[str, Any] = {}
    if side == "own":
        step, figures["planned_GB"] = compile_own(command_keys, machine, slices)
    else:
        step = compile_maxtext(command_keys)
    program = HloModule(step.as_text() or "")
    figures |= {
        "peak_GB": step.memory_analysis().peak_memory_in_bytes / 1e9,  # pyright: ignore
        "estimated_ms": estimated_ms(program, machine),
        "collectives_GB": {row.kind: row.num_bytes / 1e9 for row in program.collectives()},
    }
    return figures


def estimated_ms(program: Any, machine: str) -> float:
    """Returns the compiler's estimate for an HloModule, loops in full.

    Pallas kernels and collectives have no estimate.
    """
    cycles = 0
    for _, times, instruction in program.executed(in_fusions=False):
        match = CYCLES.search(instruction.arguments)
        if match:
            cycles += times * int(match[1])
    return cycles / GHZ[machine[:3]] / 1e6


def environment(folder: pathlib.Path, python: str) -> str:
    """Returns the Python of the environment, made on the first call."""
    if not (folder / "complete").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        subprocess.run([folder / "bin/pip", "install", "--quiet", OTHER, *needed], check=True)
        (folder / "complete").touch()
    return str(folder / "bin/python")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("start", nargs="?", default="")
    parser.add_argument("--python", default="python3.12")
    parser.add_argument("--env", type=pathlib.Path, default=tempfile.gettempdir() + "/compiled")
    parser.add_argument("--side")  # compiles one row in this process
    args = parser.parse_args()
    chosen = [row for row in ROWS if name_of(row).startswith(args.start)]
    if args.side:
        args.out.write_text(json.dumps(measure(args.side, chosen[0])))
        return
    python = environment(args.env, args.python)
    done = json.loads(args.out.read_text()) if args.out.exists() else {}
    for row in chosen:
        figures = done.setdefault(name_of(row), {})
        for side in ("own", "maxtext"):
            with tempfile.NamedTemporaryFile() as part:
                command = [python, __file__, part.name, name_of(row), "--side", side]
                if side not in figures and not subprocess.run(command, check=False).returncode:
                    figures[side] = json.loads(pathlib.Path(part.name).read_text())
        args.out.write_text(json.dumps(done, indent=1))
        if len(figures) == 2:
            our_figures = figures["own"]
            other = figures["maxtext"]
            peak, ms = (our_figures[key] / other[key] for key in ("peak_GB", "estimated_ms"))
            ratios = f"peak_GB {peak:.3f}, estimated_ms {ms:.3f} of MaxText's"
            error = our_figures["planned_GB"] / our_figures["peak_GB"] - 1
            print(f"{name_of(row)}: {ratios}; plan.py {error:+.0%}", flush=True)


if __name__ == "__main__":
    main()
