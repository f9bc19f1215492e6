"""Time and memory of one layer of each mixer beside attention's, without a TPU or GPU.

    python benchmarks/mixers.py OUT.json                     all mixers, 2k to 64k tokens
    python benchmarks/mixers.py OUT.json attention kda       these mixers
    python benchmarks/mixers.py OUT.json --table             prints the rows of OUT.json

A row is the gradient of a model of one layer on one chip: forward, recomputed forward and backward
pass, bfloat16, packed documents, without optimizer. The batch has 65,536 tokens whatever the length
of its sequences. With `none` the layer is an MLP alone.

For the TPU, programs are compiled (needs libtpu, of the version that `jax[tpu]` names). Time is the
compiler's estimate, loops in full. It has none for Pallas kernels: their operations are divided by
the speed that matmuls reach in published runs. All else in layers with kernels is the same for all
lengths, and compiled once, at 4k (at 64k, the estimate of an attention layer differs by 0.3 %).
Compilers for GPUs estimate no time at all, so rows of the GPU are plans (`plan.py`): matmuls at the
speed of published runs, or bytes at 80 % of the memory's bandwidth; what compilers fuse is free.
Rows in OUT.json are kept. A compilation takes one to four minutes of CPU time.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compiled import estimated_ms  # noqa: E402

SLICE = "v5p-8"  # the smallest that the compiler knows; programs run on one of its chips
CHIPS = ("v5p-2", "h100-1")
LENGTHS = (2048, 4096, 16384, 65536)
LENGTH_OF_KERNELS = 4096  # at which layers with kernels are compiled
TOKENS = 65536
# The layer of a 1.4B Transformer. Few ids, so that embedding and head cost nothing.
SHAPE = (
    "decoder_block=llama2 base_num_decoder_layers=1 base_emb_dim=2048 base_num_query_heads=16 "
    "base_num_kv_heads=16 head_dim=128 base_mlp_dim=5504 vocab_size=128 dtype=bfloat16 "
    "remat_policy=full attention=autoselected dataset_type=grain steps=10 "
)
MIXERS = {
    "none": "mixer=none",
    "attention": "mixer=attention",
    "local_attention": "mixer=local_attention sliding_window_size=1024",
    "latent_attention": "mixer=latent_attention",
    "linear_attention": "mixer=linear_attention",
    # As wide as attention, and with twice as many heads of values, as in Qwen3-Next.
    "gated_delta_net": "mixer=gated_delta_net linear_num_value_heads=16",
    "gated_delta_net, 32 heads": "mixer=gated_delta_net linear_num_value_heads=32",
    "kda": "mixer=kda linear_num_value_heads=16",
    "mamba2": "mixer=mamba2",  # twice as wide as the model, heads of 64, states of 128
}


class LayerCost(NamedTuple):
    """Cost of a layer's gradient on one chip."""

    ms: float
    temporary_GB: float  # peak besides weights, their gradients and the batch


def measure(mixer: str, length: int, chip: str) -> LayerCost:
    """Returns the cost of a layer, compiled for a TPU or planned for a GPU."""
    from MaxText.cost.abstract_step import make_program
    from MaxText.cost.step_memory import estimate_memory
    from MaxText.cost.step_time import step_time
    from MaxText.hardware.chips import find_hardware
    from MaxText.hardware.peak_flops import peak_of

    hardware = find_hardware(chip)
    program = make_program(configure(mixer, length, chip), hardware)
    if hardware.chip.platform == "gpu":
        memory = estimate_memory(program)
        no_state = dataclasses.replace(memory, parameters=0.0, optimizer=0.0, fetched=0.0)
        seconds = step_time(program, no_state, []).compute_seconds
        return LayerCost(1e3 * math.sqrt(math.prod(seconds)), memory.peak.size / 1e9)
    kernels = kernel_operations(program)
    compiled = compile_layer(mixer, LENGTH_OF_KERNELS if kernels else length, chip)
    speed = math.sqrt(math.prod(hardware.chip.efficiency)) * peak_of(hardware).tflops * 1e9
    return compiled._replace(ms=compiled.ms + kernels / speed)


def configure(mixer: str, length: int, chip: str) -> Any:
    """Returns the configuration of a layer."""
    from MaxText.config import command_line

    keys = f"{SHAPE} {MIXERS[mixer]} max_target_length={length} compile_topology={chip} "
    keys += f"per_device_batch_size={TOKENS // length}"
    return command_line.parse("train_compile.py", keys.split(), "").config


@functools.cache
def compile_layer(mixer: str, length: int, chip: str) -> LayerCost:
    """Returns the compiler's cost of a layer, without the time of kernels."""
    from MaxText.compilation.hlo import HloModule

    compiled = compile_gradient(configure(mixer, length, chip))
    ms = estimated_ms(HloModule(compiled.as_text() or ""), chip)
    return LayerCost(ms, compiled.memory_analysis().temp_size_in_bytes / 1e9)


def compile_gradient(config: Any) -> Any:
    """Returns the gradient of a model's loss, compiled for one chip of SLICE."""
    import jax

    from MaxText.compilation import targets
    from MaxText.layers.assembly.model import Model
    from MaxText.layers.batch import batch_shapes
    from MaxText.parallelism.mesh import make_sharding_plan
    from MaxText.training import backend_defaults
    from MaxText.training.objective import loss_sums, loss_totals

    sharding = make_sharding_plan(config.mesh, targets.devices(targets.find_target(SLICE))[:1])
    model_config, _ = backend_defaults.resolve_auto(config.model, "tpu", sharding)
    model = Model(model_config)
    params = sharding.abstract_state(model.initialize, model.parameters)
    length = model_config.shape.max_target_length
    shapes = batch_shapes(TOKENS // length, length, with_documents=True)

    def gradient(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            sums = loss_sums(model.merge(params), batch, model_config.objective, training=True)
            return sum(sums.means(loss_totals(model, batch)).values())

        return jax.grad(loss)(params)

    shardings = jax.tree.map(lambda x: x.sharding, params)
    jitted = sharding.jit(gradient, out_shardings=shardings)
    return jitted.lower(params, sharding.abstract_batch(shapes)).compile()


def kernel_operations(program: Any) -> float:
    """Returns the FLOPs of the Pallas kernels of a loss and its gradient."""
    from MaxText.cost.step_memory import trace
    from MaxText.cost.step_time import operations
    from MaxText.layers.attention.attention import average_keys_computed
    from MaxText.layers.attention.attention_core import softmax_layers

    keys = 0.0
    for mixer, layer in softmax_layers(program.local_model.config):
        keys = average_keys_computed(mixer, layer.config.attention, program.length)

    def total(traced: Any) -> float:
        number = 0.0
        for node in traced.nodes:
            number += node.times * sum(total(body) for body in node.bodies)
            if node.name == "pallas_call":
                number += operations(node, keys)
        return number

    return total(trace(program))


def print_tables(rows: dict[str, dict[str, list[float]]]) -> None:
    """Prints a table for each chip: ms and GB, and ms as a multiple of attention's."""
    for chip in CHIPS:
        print(f"\n| {chip} |", *(f"{length // 1024}k |" for length in LENGTHS))
        print("|---|" + "---:|" * len(LENGTHS))
        attention = rows.get(f"attention, {chip}", {})
        for mixer in MIXERS:
            costs = rows.get(f"{mixer}, {chip}", {})
            cells = []
            for length in map(str, LENGTHS):
                cell = ""
                if length in costs:
                    ms, gigabytes = costs[length]
                    cell = f"{ms:.1f} ms, {gigabytes:.1f} GB"
                    if length in attention:
                        cell = f"{ms / attention[length][0]:.2f}, {cell}"
                cells.append(cell)
            print(f"| {mixer} |", " | ".join(cells), "|")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("mixers", nargs="*", help=", ".join(MIXERS))
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--chips", nargs="*", default=CHIPS)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.table:
        print_tables(rows)
        return
    from MaxText.compilation import targets

    targets.prepare_environment(targets.find_target(SLICE))
    for length in args.lengths:
        for mixer in args.mixers or MIXERS:
            for chip in args.chips:
                row = rows.setdefault(f"{mixer}, {chip}", {})
                if str(length) not in row:
                    row[str(length)] = measure(mixer, length, chip)
                    args.out.write_text(json.dumps(rows, indent=1))
                    print(mixer, chip, length, row[str(length)], flush=True)


if __name__ == "__main__":
    main()
