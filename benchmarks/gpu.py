"""Tokens per second on one GPU, also with PyTorch and fp8.

    python benchmarks/gpu.py OUT.json [gpt2 torch ...]    all or chosen rows, in about 7 minutes

Runs `train.py` once per row on synthetic data and takes the median of the last half of its steps.
The row `torch` trains the same GPT-2 small (torch_steps.py). MFU is relative to the chip's dense
bfloat16 peak.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BATCH = 32
LENGTH = 1024
STEPS = 200
ONE_BILLION = (
    "decoder_block=llama2 base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 "
    "head_dim=128 base_mlp_dim=8192 base_num_decoder_layers=16 vocab_size=32000 "
    "max_target_length=2048 per_device_batch_size=8 remat_policy=minimal "
)
GPT2 = f"model_name=gpt2-124m max_target_length={LENGTH} per_device_batch_size={BATCH} "
ROWS = {
    "gpt2": GPT2 + "remat_policy=none",
    "torch": "",
    "1b flash": ONE_BILLION + "attention=flash",
    "1b fp8": ONE_BILLION + "attention=flash quantization=fp8",
}


def train_run(keys: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "MaxText/train.py",
            *keys.split(),
            f"base_output_directory={folder}",
            "run_name=gpu",
            "dataset_type=synthetic",
            f"steps={STEPS}",
            "dtype=bfloat16",
            "enable_checkpointing=false",
            "warmup_steps_fraction=0.1",
            "log_period=10",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-3000:]}
        lines = (pathlib.Path(folder) / "gpu" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines][STEPS // 2 :]
        median = lambda name: statistics.median(s[name] for s in steps if name in s)  # noqa: E731
        return {
            "tokens_per_s": median("perf/per_device_tokens_per_sec"),
            "mfu": median("perf/mfu"),
            "loss": steps[-1]["learning/loss"],
            "peak_gib": steps[-1].get("perf/memory_peak_gib"),
        }


def torch_gpt2() -> dict:
    keys = f"12 768 12 50257 {LENGTH} {BATCH} --steps {STEPS}"
    command = [sys.executable, str(ROOT / "benchmarks/torch_steps.py"), *keys.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = [float(line.split()[-1]) for line in done.stdout.splitlines() if "seconds:" in line]
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    return {"tokens_per_s": BATCH * LENGTH / statistics.median(seconds[STEPS // 2 :])}


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    names = sys.argv[2:] or list(ROWS)
    results = {}
    for name in names:
        results[name] = torch_gpt2() if name == "torch" else train_run(ROWS[name])
        print(name, results[name], flush=True)
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
