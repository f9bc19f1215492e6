"""Speed of our train step against a handwritten step, alternating.

    python benchmarks/step_time.py                 both jobs, and the time to the first step
    python benchmarks/step_time.py --jobs small --rounds 15

small: 6 layers of width 384, vocabulary 8192, 16 x 256 tokens. big: GPT-2 small's 12 layers of
width 768, vocabulary 50304, 4 x 512 tokens. Both sides train the same model in float32 with the
same allocator setting; the ratio is the median over rounds of MaxText / by hand, so that drifts of
the machine's speed cancel.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText.runtime import process_start, start_up  # noqa: E402

JOBS = {"small": (6, 384, 6, 8192, 256, 16), "big": (12, 768, 12, 50304, 512, 4)}


def keys_of(size) -> dict:
    """Our configuration of a job."""
    return {
        "decoder_block": "gpt2",
        "base_num_decoder_layers": size.num_layers,
        "base_emb_dim": size.width,
        "base_num_query_heads": size.num_heads,
        "base_num_kv_heads": size.num_heads,
        "head_dim": -1,
        "base_mlp_dim": 4 * size.width,
        "vocab_size": size.vocabulary,
        "max_target_length": size.length,
        "per_device_batch_size": size.batch,
        "dataset_type": "synthetic",
        "steps": 1000,
        "learning_rate": 3e-4,
        "lr_schedule_type": "constant",
        "warmup_steps_fraction": 0.0,
    }


def our_step(size, batch):
    """Returns a function for one MaxText step, and its compile seconds."""
    import jax

    from MaxText.config.loading import configure
    from MaxText.layers.batch import batch_shapes
    from MaxText.layers.model import Model
    from MaxText.parallelism.mesh import ShardingPlan, make_mesh
    from MaxText.training import backend_defaults
    from MaxText.training.optimizer import make_optimizer
    from MaxText.training.schedule import learning_rate_schedule
    from MaxText.training.step import make_initialize, make_train_step

    config = configure(**keys_of(size))
    sharding = ShardingPlan(
        make_mesh(config.mesh, jax.devices()[:1]), config.mesh.logical_axis_rules
    )
    model_config, choices = backend_defaults.resolve_auto(
        config.model, jax.default_backend(), sharding
    )
    for choice in choices:
        print(f"  ours, {choice}")
    model = Model(model_config)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    initialize = make_initialize(model, optimizer)
    abstract_state = sharding.abstract_state(initialize, model.parameters)
    step, seconds = sharding.compile_step(
        make_train_step(model, optimizer, schedule, num_microbatches=1, dropout_seed=0),
        abstract_state,
        sharding.abstract_batch(batch_shapes(size.batch, size.length, with_documents=False)),
    )
    state = sharding.init_state(initialize, abstract_state, seed=0)

    def one_step() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(step(state, batch))
        return float(metrics["loss"])

    return one_step, seconds


def step_by_hand(size, batch, scan: bool):
    """The same for the hand-written step."""
    import jax
    import reference_step

    carried = reference_step.init_state(size, scan=scan)
    began = time.perf_counter()
    step = reference_step.make_step(size, scan=scan)
    step = step.lower(*carried, batch.tokens_BT, batch.targets_BT).compile()
    seconds = time.perf_counter() - began

    def one_step() -> float:
        nonlocal carried
        *carried, loss, _ = jax.block_until_ready(step(*carried, batch.tokens_BT, batch.targets_BT))
        return float(loss)

    return one_step, seconds


def compare(name: str, rounds: int) -> None:
    """Prints the row of one job."""
    import jax.numpy as jnp
    import numpy as np
    import reference_step

    from MaxText.layers.batch import Batch

    size = reference_step.Size(*JOBS[name])
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, size.vocabulary, (size.batch, size.length + 1))
    tokens = jnp.asarray(tokens, jnp.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((size.batch, size.length)))
    print(f"{name}: {size}")
    ours, our_compilation = our_step(size, batch)
    # As measured: unrolled is faster for the small job, scanned for the big one.
    by_hand, hand_compilation = step_by_hand(size, batch, scan=name == "big")

    seconds: dict[str, list[float]] = {"ours": [], "by hand": []}
    for number in range(rounds + 1):
        for side, step in (("ours", ours), ("by hand", by_hand)):
            began = time.perf_counter()
            step()
            if number:  # the first round warms up
                seconds[side].append(time.perf_counter() - began)
    ratios = np.array(seconds["ours"]) / np.array(seconds["by hand"])
    low, high = np.quantile(ratios, [0.25, 0.75])
    for side, compilation in (("ours", our_compilation), ("by hand", hand_compilation)):
        median, least = np.median(seconds[side]), min(seconds[side])
        speed = size.batch * size.length / median
        print(
            f"  {side:8} {median:.3f} s/step (least {least:.3f}), {speed:,.0f} tokens/s, "
            f"{reference_step.flops(size) / median / 1e9:,.0f} GFLOP/s, "
            f"compiled in {compilation:.1f} s"
        )
    least = min(seconds["ours"]) / min(seconds["by hand"])
    print(
        f"  ratio ours / by hand: median {np.median(ratios):.3f}, quartiles {low:.3f} to "
        f"{high:.3f}, of the least {least:.3f} ({rounds} rounds)\n"
    )


def first_step() -> None:
    """Prints the seconds to the first step line, cold and warm."""
    import reference_step

    keys = keys_of(reference_step.Size(*JOBS["small"])) | {"steps": 1, "loss_curve": False}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            arguments = [f"{key}={value}" for key, value in keys.items()]
            arguments += [f"base_output_directory={folder}", f"run_name={cache}"]
            arguments += [f"jax_cache_dir={folder}/cache", "log_config=false"]
            began = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "MaxText/train.py"), *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("completed step: 0"):
                    seconds = time.perf_counter() - began
                    print(
                        f"time to first step, small job, {cache} compilation cache: {seconds:.1f} s"
                    )
            process.wait()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Our train step against one by hand.")
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-first-step", action="store_true")
    options = parser.parse_args()
    process_start.reexec_with_malloc_tuning()
    for line in start_up.choose_platform("auto"):
        print(line)
    if not options.no_first_step:
        first_step()
    for name in options.jobs:
        compare(name, options.rounds)


if __name__ == "__main__":
    main()
