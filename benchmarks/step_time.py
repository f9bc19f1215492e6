"""Speed of the train step on CPU against others, in turn.

    python benchmarks/step_time.py                   both jobs, against the one by hand
    python benchmarks/step_time.py --maxtext PYTHON --torch PYTHON --nanogpt FOLDER    train.py
    python benchmarks/step_time.py --maxtext PYTHON --keys remat_policy=minimal scan_layers=false

small: 6 layers of width 384, vocabulary 8192, 16 x 256 tokens. big: GPT-2 small's 12 layers of
width 768, vocabulary 50304, 4 x 512 tokens. All train in float32. The other step is written by
hand, or whole runs alternate: of train.py, of MaxText 0.2.5 in the environment of compiled.py
(--keys are for it alone), and of torch_steps.py. Ratios are own / other.
"""

import argparse
import os
import pathlib
import re
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
        "base_mlp_dim": 4 * size.width,
        "head_dim": 64,
        "base_num_query_heads": size.num_heads,
        "base_num_kv_heads": size.num_heads,
        "vocab_size": size.vocabulary,
        "max_target_length": size.length,
        "per_device_batch_size": size.batch,
        "learning_rate": 3e-4,
        "dataset_type": "synthetic",
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
        speed = reference_step.flops(size) / median / 1e9
        print(
            f"  {side:8} {median:.3f} s/step (least {min(seconds[side]):.3f}), "
            f"{speed:,.0f} GFLOP/s, compiled in {compilation:.1f} s"
        )
    print(f"  ratio: {train_steps.ratio_words(seconds['MaxText'] / seconds['by hand'])}\n")


MAXTEXT = """hardware=cpu skip_jax_distributed_system=true dtype=float32 weight_dtype=float32
    attention=dot_product decoder_block=gpt3 mlp_activations=['gelu'] logits_via_embedding=true"""
FIND = "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"
STEP = re.compile(r"completed step: \d+, seconds: ([\d.]+)")


def programs(name: str, options: argparse.Namespace, folder: str) -> dict[str, list[str]]:
    """Returns each program's command to train a job."""
    import reference_step

    keys = keys_of(reference_step.Size(*JOBS[name])) | {
        "steps": 8,
        "enable_checkpointing": False,
        "run_name": "x",
        "base_output_directory": folder,
    }
    own_keys = [f"{key}={value}" for key, value in keys.items()]
    sides = {"own": [sys.executable, str(ROOT / "MaxText/train.py"), "log_period=1", *own_keys]}
    if options.maxtext:
        find = [options.maxtext, "-c", FIND]
        package_folder = subprocess.run(
            find, capture_output=True, text=True, check=True
        ).stdout.strip()
        program = [options.maxtext, "-m", "maxtext.trainers.pre_train.train"]
        shared = [
            key for key in own_keys if not key.startswith(("lr_", "warmup_", "decoder_block"))
        ]
        program += [f"{package_folder}/configs/base.yml", *MAXTEXT.split(), *shared, *options.keys]
        sides["MaxText 0.2.5"] = program
    if options.torch:
        script = [options.torch, str(ROOT / "benchmarks/torch_steps.py"), *map(str, JOBS[name])]
        sides["transformers"] = script
        if options.nanogpt:
            sides["nanoGPT"] = [*script, "--nanogpt", options.nanogpt]
    return sides


def median_of_run(command: list[str]) -> float:
    """Returns the median seconds of a step of a run, without the first two."""
    import numpy as np

    run = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seconds = [float(text) for text in STEP.findall(run.stdout)][2:]
    if not seconds:
        sys.exit(run.stdout)
    return float(np.median(seconds))


def compare_runs(name: str, options: argparse.Namespace, folder: str) -> None:
    """Prints seconds of whole runs of all programs."""
    import numpy as np
    import train_steps

    sides = programs(name, options, folder)
    runs = [[median_of_run(side) for side in sides.values()] for _ in range(options.rounds)]
    own_times, *other_times = np.array(runs).T
    print(f"{name}: own {own_times.round(3)} s/step")
    for side, seconds in zip(list(sides)[1:], other_times, strict=True):
        print(f"  {side} {seconds.round(3)}, ratio: {train_steps.ratio_words(own_times / seconds)}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="The train step against others.")
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--maxtext", help="Python of an environment with MaxText 0.2.5")
    parser.add_argument("--keys", nargs="*", default=[], help="of MaxText alone")
    parser.add_argument("--torch", help="Python of an environment with torch and transformers")
    parser.add_argument("--nanogpt", help="folder of nanoGPT's model.py, to be run with --torch")
    options = parser.parse_args()
    if options.maxtext or options.torch:
        with tempfile.TemporaryDirectory() as folder:
            for name in options.jobs:
                compare_runs(name, options, folder)
        return
    program_start.reexec_with_malloc_tuning()
    print(*start_up.choose_platform("auto"), sep="\n")
    for name in options.jobs:
        compare(name, options.rounds)


if __name__ == "__main__":
    main()
