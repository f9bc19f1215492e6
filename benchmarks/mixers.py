"""Time and memory of one layer of each mixer beside attention's, without a TPU or GPU.

    python benchmarks/mixers.py OUT.json                     all mixers, 2k to 64k tokens
    python benchmarks/mixers.py OUT.json attention mamba2    these mixers
    python benchmarks/mixers.py OUT.json --table             prints the rows of OUT.json

A row is the difference of two train steps, of two layers and of one, with packed documents, full
remat, bfloat16 and FSDP over the slice. A device has 65,536 tokens, whatever their sequences'
length.

For the TPU, steps are compiled (needs libtpu, of the version that `jax[tpu]` names). Time is the
compiler's estimate, loops in full. It has none for Pallas kernels, whose operations are divided by
the speed that matmuls reach in published runs, and none for collectives. Compilers for GPUs
estimate no time: their rows are plans (`plan.py`). Rows in OUT.json are kept. A compilation takes
half a minute to two minutes of CPU time.
"""

import argparse
import json
import math
import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compiled import estimated_ms  # noqa: E402

TPU = "v5p-8"
GPU = "h100-8"
LENGTHS = (2048, 4096, 16384, 65536)
TOKENS = 65536  # of a device
# The layer of a 1.4B Transformer. Few ids: the head is the same for all, and not measured.
SHAPE = (
    "decoder_block=llama2 base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 "
    "head_dim=128 base_mlp_dim=5504 vocab_size=1024 dtype=bfloat16 remat_policy=full "
    "scan_layers=false attention=autoselected dataset_type=grain enable_checkpointing=false "
    "steps=10"
)
# Heads, and their widths, as wide together as attention's, if a row does not say otherwise.
MIXERS = {
    "none": "mixer=none",
    "attention": "mixer=attention",
    "local_attention": "mixer=local_attention sliding_window_size=1024",
    "latent_attention": "mixer=latent_attention",
    "linear_attention": "mixer=linear_attention",
}


class LayerCost(NamedTuple):
    """Time and memory of a layer's train step on one device."""

    ms: float
    temporary_GB: float  # peak besides weights, optimizer state and batch


def measure(keys: str, machine: str) -> LayerCost:
    """Returns the cost of a whole step, compiled for a TPU, or planned for a GPU."""
    from MaxText.config import command_line
    from MaxText.cost.job_plan import make_plan
    from MaxText.hardware.chips import find_hardware

    config = command_line.parse("train_compile.py", keys.split(), "").config
    hardware = find_hardware(machine)
    if hardware.chip.platform == "gpu":
        plan = make_plan(config, hardware)
        compute_seconds = math.sqrt(math.prod(plan.time.compute_seconds))
        return LayerCost(1e3 * compute_seconds, plan.memory.temporaries / 1e9)
    from MaxText.compilation import targets
    from MaxText.compilation.hlo import HloModule
    from MaxText.compilation.lowering import compile_lowered, lower_train_step
    from MaxText.cost.abstract_step import make_program
    from MaxText.hardware.peak_flops import peak_of

    planned = lower_train_step(config, targets.devices(targets.find_target(machine)))
    step, _ = compile_lowered(planned)
    ms = estimated_ms(HloModule(step.as_text() or ""), machine)
    speed = math.sqrt(math.prod(hardware.chip.efficiency)) * peak_of(hardware).tflops
    ms += kernel_operations(make_program(config, hardware)) / speed / 1e9
    memory = step.memory_analysis()
    return LayerCost(ms, memory.temp_size_in_bytes / 1e9)  # pyright: ignore


def kernel_operations(program) -> float:
    """Returns the FLOPs of the Pallas kernels of a step on one device."""
    from MaxText.cost.step_memory import trace
    from MaxText.cost.step_time import operations
    from MaxText.layers.attention.attention import average_keys_computed
    from MaxText.layers.attention.attention_core import softmax_layers

    config = program.local_model.config
    keys = 0.0
    for mixer, layer in softmax_layers(config):
        keys = average_keys_computed(mixer, layer.config.attention, program.length)

    def total(traced, times: int) -> float:
        number = 0.0
        for node in traced.nodes:
            number += sum(total(body, times * node.times) for body in node.bodies)
            if node.name == "pallas_call":
                number += times * operations(node, keys)
        return number

    return total(trace(program), 1)


def layer_cost(mixer: str, length: int, machine: str) -> LayerCost:
    """Returns what a second layer adds to the time, and the temporaries of a step of one."""
    keys = f"{SHAPE} {MIXERS[mixer]} max_target_length={length} "
    keys += f"per_device_batch_size={TOKENS // length} compile_topology={machine} "
    one, two = (measure(f"{keys} base_num_decoder_layers={n}", machine) for n in (1, 2))
    return LayerCost(two.ms - one.ms, one.temporary_GB)


def print_tables(rows: dict[str, dict[str, list[float]]]) -> None:
    """Prints a table for each machine: ms, and as multiples of attention's layer."""
    for machine in (TPU, GPU):
        print(f"\n| mixer, {machine} |", *(f"{length // 1024}k |" for length in LENGTHS))
        print("|---|" + "---|" * len(LENGTHS))
        for mixer in MIXERS:
            cells = []
            for length in LENGTHS:
                cost = rows.get(f"{mixer}, {machine}", {}).get(str(length))
                attention = rows.get(f"attention, {machine}", {}).get(str(length))
                if cost is None or attention is None:
                    cells.append("")
                    continue
                ms, gigabytes = cost
                ratio = ms / attention[0]
                cells.append(f"{ms:.1f} ms, {ratio:.2f}; {gigabytes:.1f} GB")
            print(f"| `{mixer}` |", " | ".join(cells), "|")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("mixers", nargs="*", choices=[[], *MIXERS], default=[])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--machines", nargs="*", default=(TPU, GPU))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.table:
        print_tables(rows)
        return
    from MaxText.compilation import targets

    targets.prepare_environment(targets.find_target(TPU))
    for length in args.lengths:
        for mixer in args.mixers or MIXERS:
            for machine in args.machines:
                row = rows.setdefault(f"{mixer}, {machine}", {})
                if str(length) not in row:
                    row[str(length)] = layer_cost(mixer, length, machine)
                    args.out.write_text(json.dumps(rows, indent=1))
                    print(mixer, machine, length, row[str(length)], flush=True)


if __name__ == "__main__":
    main()
