"""Speed of our train step against a handwritten step, alternating.

    python benchmarks/step_time.py                 both jobs, and the time to the first step
    python benchmarks/step_time.py --jobs small --rounds 15

small: 6 layers of width 384, vocabulary 8192, 16 x 256 tokens. big: GPT-2 small's 12 layers of
width 768, vocabulary 50304, 4 x 512 tokens. Both sides train the same model in float32 with the
same allocator setting; the ratio is MaxText / by hand.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText import program_start  # noqa: E402
from MaxText.runtime import start_up  # noqa: E402

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
        "learning_rate": 3e-4,
        "lr_schedule_type": "constant",
        "warmup_steps_fraction": 0.0,
    }


def step_by_hand(size, scan: bool):
    """Returns a function for one handwritten step, and its compile seconds."""
    import jax
    import reference_step
    import train_steps

    ids = train_steps.random_ids(size.vocabulary, size.batch, size.length)
    batch = jax.device_put((ids[:, :-1], ids[:, 1:]))
    carried = reference_step.init_state(size, scan=scan)
    began = time.perf_counter()
    step = reference_step.make_step(size, scan=scan).lower(*carried, *batch).compile()
    seconds = time.perf_counter() - began

    def one_step() -> None:
        nonlocal carried
        *carried, _, _ = jax.block_until_ready(step(*carried, *batch))

    return one_step, seconds


def compare(name: str, rounds: int) -> None:
    """Prints the row of one job."""
    import jax
    import numpy as np
    import reference_step
    import train_steps

    size = reference_step.Size(*JOBS[name])
    print(f"{name}: {size}")
    compiled = train_steps.compiled_step(keys_of(size), jax.devices()[:1])
    # As measured: unrolled is faster for the small job, scanned for the big one.
    by_hand, hand_compilation = step_by_hand(size, scan=name == "big")
    sides = {"MaxText": compiled.one_step, "by hand": by_hand}
    seconds = train_steps.interleaved_seconds(sides, rounds)
    for side, compilation in (("MaxText", compiled.seconds), ("by hand", hand_compilation)):
        median = np.median(seconds[side])
        print(
            f"  {side:8} {median:.3f} s/step (least {min(seconds[side]):.3f}), "
            f"{size.batch * size.length / median:,.0f} tokens/s, "
            f"{reference_step.flops(size) / median / 1e9:,.0f} GFLOP/s, "
            f"compiled in {compilation:.1f} s"
        )
    print(f"  ratio: {train_steps.ratio_words(seconds['MaxText'] / seconds['by hand'])}\n")


def first_step() -> None:
    """Prints the seconds to the first step line, cold and warm."""
    import reference_step

    keys = keys_of(reference_step.Size(*JOBS["small"]))
    keys |= {"dataset_type": "synthetic", "steps": 1, "loss_curve": False}
    with tempfile.TemporaryDirectory() as folder:
        keys |= {"base_output_directory": folder, "jax_cache_dir": f"{folder}/cache"}
        for cache in ("cold", "warm"):
            command = [sys.executable, "-u", str(ROOT / "MaxText/train.py")]
            command += [f"{key}={value}" for key, value in keys.items()]
            command.append(f"run_name={cache}")
            began = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("completed step: 0"):
                        seconds = time.perf_counter() - began
                        print(f"time to first step, small job, {cache} cache: {seconds:.1f} s")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Our train step against one by hand.")
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-first-step", action="store_true")
    options = parser.parse_args()
    program_start.reexec_with_malloc_tuning()
    print(*start_up.choose_platform("auto"), sep="\n")
    if not options.no_first_step:
        first_step()
    for name in options.jobs:
        compare(name, options.rounds)


if __name__ == "__main__":
    main()
