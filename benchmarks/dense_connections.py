"""Cost of dense connections against a Transformer of the same shape.

    python benchmarks/dense_connections.py                   train steps on this machine, in turn
    python benchmarks/dense_connections.py --shape wide --rounds 15 --keys attention=blocked \
        remat_policy=minimal
    python benchmarks/dense_connections.py --topology v5p:2x2x1 --shape 1.4b --layers 4   # compiled
    python benchmarks/dense_connections.py --topology v5p:2x2x1 --shape 1.4b --layers 4 \
        --rows kernel --keys decoder_block=muddformer use_qk_norm=false

Rows: the Transformer with its layers unrolled and in a scan; dense connections on all four ways
with each form of `dense_aggregation_impl`; and every second sum over every second output (2x2),
recomputed in the backward pass or kept for it. Rows are compared with the Transformer unrolled. The
block is the same everywhere, so that differences are those of the connections.

With --topology steps are compiled for one chip of an absent TPU, or for --chips of
them with weights divided among them (pip install libtpu, of the version that `jax[tpu]` names). The
figures are the compiler's own, of one chip: it takes a kernel's bytes from the kernel's own
declaration. It counts the body of a loop once, which makes its figures of a scan too small. Ratios
of step time are medians over rounds.
"""

import argparse
import os
import pathlib
import sys
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText import program_start  # noqa: E402
from MaxText.runtime import start_up  # noqa: E402


def shape(
    layers: int, width: int, head_dim: int, mlp_dim: int, vocabulary: int, length: int, batch: int
) -> dict[str, Any]:
    """Returns our configuration of a size."""
    return {
        "decoder_block": "llama2",
        "base_num_decoder_layers": layers,
        "base_emb_dim": width,
        "base_num_query_heads": width // head_dim,
        "base_num_kv_heads": width // head_dim,
        "head_dim": head_dim,
        "base_mlp_dim": mlp_dim,
        "vocab_size": vocabulary,
        "max_target_length": length,
        "per_device_batch_size": batch,
        "attention": "autoselected",
        "remat_policy": "full",
    }


SHAPES = {
    "small": shape(6, 256, 64, 704, 2048, 256, 8),
    "wide": shape(12, 512, 64, 1408, 2048, 256, 4),
    "405m": shape(24, 1024, 64, 2816, 50432, 2048, 8),
    "1.4b": shape(24, 2048, 128, 5504, 50432, 2048, 8),
}
UNROLLED = {"dense_conn": True, "scan_layers": False}
SPARSE = {"dense_sparsity": "dilated", "dense_selection.dilation": 2, "dense_period": 2}
ROWS: dict[str, dict[str, Any]] = {
    "Transformer": {"dense_conn": False, "scan_layers": False},
    "Transformer, scan": {"dense_conn": False, "scan_layers": True},
    "sum": UNROLLED | {"dense_aggregation_impl": "sum"},
    "kernel": UNROLLED | {"dense_aggregation_impl": "kernel"},
    "2x2": UNROLLED | SPARSE,
    "2x2, kept": UNROLLED | SPARSE | {"dense_saved_aggregates": 100},
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

    from MaxText.runtime.compiled_steps import memory_stats

    step = train_steps.compiled_step(keys, devices)
    costs, memory = step.program.cost_analysis(), memory_stats(step.program)
    estimate = costs.get("optimal_seconds", 0.0)
    return Row(step, estimate, costs["bytes accessed"], memory["temporaries"])


def show(rows: dict[str, Row], times: dict[str, Any]) -> None:
    """Prints the table, with ratios to the first row, a Transformer."""
    import numpy as np

    first, plain = next(iter(rows.items()))
    table = "{:<18}" + "{:>10}" * 4 + "{:>16}{:>15}"
    print(table.format("", "step s", "ratio", "GB", "extra", "temporaries GB", "compile CPU s"))
    for name, row in rows.items():
        second, ratio = row.estimate, row.estimate / (plain.estimate or 1.0)
        if times:
            second, ratio = np.median(times[name]), np.median(times[name] / times[first])
        print(
            table.format(
                name,
                f"{second:.4f}",
                f"{ratio:.3f}",
                f"{row.num_bytes / 1e9:.2f}",
                f"{(row.num_bytes - plain.num_bytes) / 1e9:.2f}",
                f"{row.temporaries / 1e9:.3f}",
                f"{row.step.cpu_seconds:.1f}",
            )
        )


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    key, value = text.split("=", 1)
    return key, yaml.safe_load(value)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Cost of dense connections.")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--layers", type=int, help="number of layers in place of the shape's")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--keys",
        nargs="*",
        type=_setting,
        default=[],
        metavar="KEY=VALUE",
        help="of the configuration, for all rows (remat_policy=full, else the defaults)",
    )
    parser.add_argument("--topology", help="of a TPU to compile for, as v5p:2x2x1")
    parser.add_argument("--chips", type=int, default=1, help="of the topology, for fsdp")
    options = parser.parse_args()
    program_start.reexec_with_malloc_tuning()
    if options.topology:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Else libtpu asks the network what machine this is.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    else:
        print(*start_up.choose_platform("auto"), sep="\n")
    import jax
    import train_steps
    from jax.experimental import topologies

    devices = jax.devices()[:1]
    if options.topology:
        target = topologies.get_topology_desc(platform="tpu", topology_name=options.topology)
        devices = target.devices[: options.chips]
    keys = SHAPES[options.shape] | dict(options.keys)
    keys["base_num_decoder_layers"] = options.layers or keys["base_num_decoder_layers"]
    names = options.rows or [
        # Interpreted there, it shows nothing.
        name for name, row in ROWS.items()
        if not (row.get("dense_aggregation_impl") == "kernel" and devices[0].platform == "cpu")
    ]  # fmt: skip
    print(f"{len(devices)} x {devices[0].device_kind}, {keys}")
    rows = {}
    for name in dict.fromkeys(["Transformer", *names]):
        print(f"  {name}", flush=True)
        rows[name] = compiled(keys | ROWS[name], devices)
    steps = {name: row.step.one_step for name, row in rows.items()}
    show(rows, {} if options.topology else train_steps.interleaved_seconds(steps, options.rounds))


if __name__ == "__main__":
    main()
