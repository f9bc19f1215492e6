"""Cost of dense connections against a Transformer of the same shape.

    python benchmarks/dense_connections.py                   train steps on this machine, in turn
    python benchmarks/dense_connections.py --shape wide --rounds 15 --keys attention=blocked
    python benchmarks/dense_connections.py --topology v5p-8 --shape 1.4b --layers 4   # compiled

Rows: the Transformer with its layers unrolled and in a scan; dense connections on all four ways
with each form of `dense_aggregation_impl`; and every second sum over every second output (2x2),
recomputed in the backward pass or kept for it. Rows are compared with the Transformer unrolled.

With --topology, steps are compiled for one chip of an absent TPU, or for --chips of them with
weights divided among them (needs libtpu, of the version that `jax[tpu]` names). The figures are the
compiler's own, of one chip. It takes a kernel's bytes from the kernel's own declaration, and counts
the body of a loop once, which makes its figures of a scan too small.
"""

import argparse
import pathlib
import sys
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText import program_start  # noqa: E402
from MaxText.compilation import targets  # noqa: E402
from MaxText.runtime import start_up  # noqa: E402


def _keys(text: str) -> dict[str, Any]:
    import yaml

    return {
        key: yaml.safe_load(value) for key, _, value in (x.partition("=") for x in text.split())
    }


SHAPE = (
    "decoder_block=llama2 base_num_decoder_layers={} base_emb_dim={} base_num_query_heads={} "
    "base_num_kv_heads={} head_dim={} base_mlp_dim={} vocab_size={} max_target_length={} "
    "per_device_batch_size={} attention=autoselected remat_policy=full"
)
SHAPES = {
    "small": SHAPE.format(6, 256, 4, 4, 64, 704, 2048, 256, 8),
    "wide": SHAPE.format(12, 512, 8, 8, 64, 1408, 2048, 256, 4),
    "1.4b": SHAPE.format(24, 2048, 16, 16, 128, 5504, 50432, 2048, 8),
}
UNROLLED = "dense_conn=true scan_layers=false "
SPARSE = UNROLLED + "dense_sparsity=dilated dense_selection.dilation=2 dense_period=2 "
ROWS = {
    "Transformer": "dense_conn=false scan_layers=false",
    "Transformer, scan": "dense_conn=false scan_layers=true",
    "sum": UNROLLED + "dense_aggregation_impl=sum",
    "kernel": UNROLLED + "dense_aggregation_impl=kernel",
    "2x2": SPARSE,
    "2x2, kept": SPARSE + "dense_saved_aggregates=100",
}


class Row(NamedTuple):
    """Figures of one row's step."""

    step: Any
    estimate: float  # seconds of a step, by the compiler; 0 where it says nothing
    num_bytes: float
    temporaries: int


def compiled(keys: dict[str, Any], devices) -> Row:
    """Compiles a row's step for `devices`."""
    import train_steps

    from MaxText.compilation.compiled_steps import memory_stats

    step = train_steps.compiled_step(keys, devices)
    costs = step.program.cost_analysis()
    memory = memory_stats(step.program)
    estimate = costs.get("optimal_seconds", 0.0)
    return Row(step, estimate, costs["bytes accessed"], memory["temporaries"])


def show(rows: dict[str, Row], times: dict[str, Any]) -> None:
    """Prints the table, with ratios to the first row, a Transformer."""
    import numpy as np

    first, plain = next(iter(rows.items()))
    table = "{:<18}{:>10.4}{:>10.3}{:>10.4}{:>10.3}{:>16.3}{:>15.3}"
    heads = ("step s", "ratio", "GB", "extra", "temporaries GB", "compile CPU s")
    print("{:<18}{:>10}{:>10}{:>10}{:>10}{:>16}{:>15}".format("", *heads))
    for name, row in rows.items():
        second = row.estimate
        ratio = row.estimate / (plain.estimate or 1.0)
        if times:
            second = np.median(times[name])
            ratio = np.median(times[name] / times[first])
        extra = row.num_bytes - plain.num_bytes
        compilation = row.step.cpu_seconds
        sizes = (row.num_bytes / 1e9, extra / 1e9, row.temporaries / 1e9)
        print(table.format(name, float(second), float(ratio), *sizes, compilation))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Cost of dense connections.")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--layers", type=int, help="number of layers in place of the shape's")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keys", nargs="*", default=[], help="KEY=VALUE, of all rows")
    parser.add_argument("--topology", help="of a TPU to compile for, as v5p-8")
    parser.add_argument("--chips", type=int, default=1, help="of the topology, for fsdp")
    options = parser.parse_args()
    program_start.reexec_with_malloc_tuning()
    target = targets.find_target(options.topology) if options.topology else None
    if target:
        targets.prepare_environment(target)
    else:
        print(*start_up.choose_platform("auto"), sep="\n")
    import jax
    import train_steps

    devices = targets.devices(target)[: options.chips] if target else jax.devices()[:1]
    keys = _keys(" ".join([SHAPES[options.shape], *options.keys]))
    keys["base_num_decoder_layers"] = options.layers or keys["base_num_decoder_layers"]
    # Interpreted on CPU, the kernel shows nothing.
    on_cpu = devices[0].platform == "cpu"
    names = options.rows or [name for name in ROWS if name != "kernel" or not on_cpu]
    print(f"{len(devices)} x {devices[0].device_kind}, {keys}")
    rows = {}
    for name in dict.fromkeys(["Transformer", *names]):
        print(f"  {name}", flush=True)
        rows[name] = compiled(keys | _keys(ROWS[name]), devices)
    steps = {name: row.step.one_step for name, row in rows.items()}
    show(rows, {} if options.topology else train_steps.interleaved_seconds(steps, options.rounds))


if __name__ == "__main__":
    main()
