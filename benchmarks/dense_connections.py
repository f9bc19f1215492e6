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
declaration. It counts the body of a loop once, so bytes of a scan are not shown. Ratios of step
time are medians over rounds, so that drifts of the machine's speed cancel.

The count is what sums cannot do without one by one: each reads its sources once forward, once to be
recomputed, once for the gradient of its weights, and reads and writes their gradients once.
`kernel` adds up the gradients of two sums at once, so it may stay below.
"""

import argparse
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText.runtime import process_start, start_up  # noqa: E402

PASSES = 5  # of the count


class Shape(NamedTuple):
    """Sizes of a job."""

    num_layers: int
    width: int
    head_dim: int
    mlp_dim: int
    vocabulary: int
    length: int
    batch: int


SHAPES = {
    "small": Shape(6, 256, 64, 704, 2048, 256, 8),
    "wide": Shape(12, 512, 64, 1408, 2048, 256, 4),
    "405m": Shape(24, 1024, 64, 2816, 50432, 2048, 8),
    "1.4b": Shape(24, 2048, 128, 5504, 50432, 2048, 8),
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


class Compiled(NamedTuple):
    """One row's step.

    Attributes:
      one_step: does a step and waits for it; None where there is no device.
      seconds: to compile it, of all threads of this process, so that other load counts little.
      estimate: seconds of a step, by the compiler; 0 where it says nothing.
      num_bytes: accessed by a step, by the compiler.
      temporaries: bytes that a step needs besides its arguments.
      count: bytes that sums one by one cannot do without.
    """

    one_step: Any
    seconds: float
    estimate: float
    num_bytes: float
    temporaries: int
    count: float


def keys_of(shape: Shape, row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Our configuration of a row."""
    num_heads = shape.width // shape.head_dim
    return {
        "decoder_block": "llama2",
        "base_num_decoder_layers": shape.num_layers,
        "base_emb_dim": shape.width,
        "base_num_query_heads": num_heads,
        "base_num_kv_heads": num_heads,
        "head_dim": shape.head_dim,
        "base_mlp_dim": shape.mlp_dim,
        "vocab_size": shape.vocabulary,
        "max_target_length": shape.length,
        "per_device_batch_size": shape.batch,
        "attention": "autoselected",
        "remat_policy": "full",
        "dataset_type": "synthetic",
        "steps": 1000,
        **options.keys,
        **row,
    }


def compiled(shape: Shape, row: dict[str, Any], options: argparse.Namespace, devices) -> Compiled:
    """Compiles a row's step for `devices`; draws its state if they exist."""
    import jax
    import numpy as np

    from MaxText.config.loading import configure
    from MaxText.layers.batch import Batch, batch_shapes
    from MaxText.layers.model import Model
    from MaxText.parallelism.mesh import ShardingPlan, make_mesh
    from MaxText.runtime.compiled_steps import memory_stats
    from MaxText.training import backend_defaults
    from MaxText.training.optimizer import make_optimizer
    from MaxText.training.schedule import learning_rate_schedule
    from MaxText.training.step import make_initialize, make_train_step

    config = configure(**keys_of(shape, row, options))
    sharding = ShardingPlan(make_mesh(config.mesh, devices), config.mesh.logical_axis_rules)
    model_config, choices = backend_defaults.resolve_auto(
        config.model, devices[0].platform, sharding
    )
    for choice in choices:
        if choice.startswith(("dense_aggregation_impl", "attention")):
            print(f"    {choice}")
    model = Model(model_config)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    initialize = make_initialize(model, optimizer)
    state = sharding.abstract_state(initialize, model.parameters)
    batch = batch_shapes(shape.batch * len(devices), shape.length, with_documents=False)

    began = time.process_time()
    step = sharding.compile_step(
        make_train_step(model, optimizer, schedule, num_microbatches=1, dropout_seed=0),
        state,
        sharding.abstract_batch(batch),
    )[0]
    seconds = time.process_time() - began
    program: Any = step
    costs = dict(program.cost_analysis())
    dense = model_config.dense_connections
    num_reads = sum(
        len(dense.sources(depth))
        for depth in range(1, shape.num_layers + 1)
        if dense.stands_after(depth)
    )
    state_bytes = (
        shape.batch * shape.length * shape.width * np.dtype(model_config.numerics.dtype).itemsize
    )
    one_step: Any = None
    if options.topology is None:
        numbers = np.random.default_rng(0)
        tokens = numbers.integers(0, shape.vocabulary, (shape.batch, shape.length + 1), np.int32)
        weights = np.ones((shape.batch, shape.length), np.float32)
        given = sharding.to_global_batch(Batch(tokens[:, :-1], tokens[:, 1:], weights), shape.batch)
        current = sharding.init_state(initialize, state, seed=0)

        def on_device() -> None:
            nonlocal current
            current, _ = jax.block_until_ready(step(current, given))

        one_step = on_device

    return Compiled(
        one_step,
        seconds,
        costs.get("optimal_seconds", 0.0),
        costs["bytes accessed"],
        memory_stats(program)["temporaries"],
        PASSES * num_reads * state_bytes,
    )


def medians(rows: dict[str, Compiled], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns median step seconds and ratios to the first row, by name."""
    import numpy as np

    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, row in rows.items():
            began = time.perf_counter()
            row.one_step()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    plain = np.array(next(iter(seconds.values())))
    return {
        name: (float(np.median(taken)), float(np.median(np.array(taken) / plain)))
        for name, taken in seconds.items()
    }


def show(rows: dict[str, Compiled], times: dict[str, tuple[float, float]]) -> None:
    """Prints the table, with ratios to the first row, a Transformer."""
    plain = next(iter(rows.values()))
    head = ("", "step s", "ratio", "GB", "extra", "count", "temporaries GB", "compile CPU s")
    table = "{:<18}" + "{:>10}" * 5 + "{:>16}{:>15}"
    print(table.format(*head))
    for name, row in rows.items():
        second, ratio = times.get(name, (row.estimate, row.estimate / (plain.estimate or 1.0)))
        cells = [
            f"{second:.4f}",
            f"{ratio:.3f}",
            f"{row.num_bytes / 1e9:.2f}",
            f"{(row.num_bytes - plain.num_bytes) / 1e9:.2f}",
            f"{row.count / 1e9:.2f}",
            f"{row.temporaries / 1e9:.3f}",
            f"{row.seconds:.1f}",
        ]
        if "scan" in name:
            # The compiler counts the body of a loop once.
            unknown = (2, 3) if times else (0, 1, 2, 3)
            cells = ["" if place in unknown else cell for place, cell in enumerate(cells)]
        print(table.format(name, *cells))


def chips_of(topology: str, number: int) -> list:
    """Chips of an absent TPU."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:number]


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    key, value = text.split("=", 1)
    return key, yaml.safe_load(value)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Cost of dense connections.")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--layers", type=int, help="number of layers in place of the shape's")
    parser.add_argument("--vocabulary", type=int, help="in place of the shape's")
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
    parser.add_argument(
        "--chips", type=int, default=1, help="of the topology, over which fsdp goes"
    )
    options = parser.parse_args()
    options.keys = dict(options.keys)
    process_start.reexec_with_malloc_tuning()
    if options.topology is None:
        for line in start_up.choose_platform("auto"):
            print(line)
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Else libtpu asks the network what machine this is.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    import jax

    if options.topology is None:
        devices = jax.devices()[:1]
    else:
        devices = chips_of(options.topology, options.chips)
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = shape._replace(num_layers=options.layers)
    if options.vocabulary is not None:
        shape = shape._replace(vocabulary=options.vocabulary)
    names = options.rows or [
        # Interpreted there, it shows nothing.
        name for name, row in ROWS.items()
        if not (row.get("dense_aggregation_impl") == "kernel" and devices[0].platform == "cpu")
    ]  # fmt: skip
    names = ["Transformer", *(name for name in names if name != "Transformer")]
    where = f"{len(devices)} x {devices[0].device_kind}"
    print(f"{options.shape}: {shape}, {where}, {options.keys}")
    rows = {}
    for name in names:
        print(f"  {name}", flush=True)
        rows[name] = compiled(shape, ROWS[name], options, devices)
    show(rows, {} if options.topology is not None else medians(rows, options.rounds))


if __name__ == "__main__":
    main()
