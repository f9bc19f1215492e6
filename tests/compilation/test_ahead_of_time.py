"""train_compile.py as a user runs it: on simulated devices, and for absent machines."""

import importlib.util
import json
import re

import pytest

from tests import programs

pytestmark = pytest.mark.slow
SMALL = """
decoder_block: llama2
base_emb_dim: 256
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 128
base_mlp_dim: 512
base_num_decoder_layers: 4
vocab_size: 512
max_target_length: 128
per_device_batch_size: 2
dataset_type: synthetic
scan_layers: true
steps: 3
log_config: false
enable_checkpointing: false
"""


@pytest.fixture
def start(tmp_path, users_environment):
    (tmp_path / "small.yml").write_text(SMALL)

    def start(program, *arguments, **environment):
        # Compiled as users do: what compiles fast is not kept in the cache, and other flags make
        # another step.
        own = {"MAXTEXT_SIGNING_KEY_FILE": str(tmp_path / "key"), "XLA_FLAGS": ""}
        environment = users_environment | own | environment
        return programs.run(program, ["small.yml", *arguments], tmp_path, environment)

    return start


def keys(**sizes):
    return [f"{name}={value}" for name, value in sizes.items()]


def test_train_takes_the_step_and_no_other(start, tmp_path):
    narrow = keys(base_emb_dim=32, head_dim=16, base_mlp_dim=64, vocab_size=64)
    compiled = start(
        "train_compile.py", *narrow, "compile_topology=cpu-2", "compiled_trainstep_file=step.bin"
    )
    assert compiled.returncode == 0, compiled.stderr
    assert "2 x cpu" in compiled.stdout
    assert "all-gather" in compiled.stdout
    assert "saved: step.bin" in compiled.stdout

    def train(run_name, *arguments):
        flags = "--xla_force_host_platform_device_count=2"
        return start(
            "train.py",
            *narrow,
            "hardware=cpu",
            f"run_name={run_name}",
            *arguments,
            XLA_FLAGS=flags,
        )

    plain, taken = train("plain"), train("taken", "compiled_trainstep_file=step.bin")
    assert "compiled" in plain.stdout, plain.stderr
    assert "loaded from compiled_trainstep_file" in taken.stdout
    losses = {}
    for name in ("plain", "taken"):
        lines = (tmp_path / "maxtext_output" / name / "events.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["event"] == "step"]
        losses[name] = [row["learning/loss"] for row in rows]
        since = [row.get("seconds_since_launch") for row in rows]
        assert since[0] > 0
        assert since[1:] == [None, None]
    assert losses["plain"] == losses["taken"]

    other = train("other", "compiled_trainstep_file=step.bin", "adam_b1=0.8")
    assert other.returncode == 2
    assert "configuration, adam_b1: 0.9 in the file, 0.8 in this run" in other.stderr
    assert "Traceback" not in other.stderr


def figure(pattern, text):
    return float(re.search(pattern, text)[1].replace(",", ""))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(("name", "kind"), [("v5e-4", "TPU v5 lite"), ("v5p-8", "TPU v5")])
def test_a_tpu_that_is_not_there(start, tmp_path, name, kind):
    done = start("train_compile.py", f"compile_topology={name}", "compiled_trainstep_file=step.bin")
    assert done.returncode == 0, done.stderr
    assert f"4 x {kind};" in done.stdout
    # 4 layers of 4 D N H + 3 D F weights, and two tables; float32, over 4 devices.
    parameters = 4 * (4 * 256 * 256 + 3 * 256 * 512) + 2 * 256 * 512
    expected = parameters * 4 / 4 / 2**20
    assert figure(r"\nparameters +([\d.,]+) ", done.stdout) == pytest.approx(expected, rel=0.01)
    assert figure(r"\nprogram +([\d.,]+) ", done.stdout) > 0
    # Each layer's 7 matrices are gathered forward and once more backward.
    assert figure(r"all-gather x ([\d,]+)", done.stdout) >= 4 * 7
    assert (tmp_path / "step.bin").stat().st_size > 100_000


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_too_little_memory_of_a_tpu_is_a_message(start):
    wide = keys(base_emb_dim=8192, base_mlp_dim=28672, max_target_length=4096)
    done = start("train_compile.py", "compile_topology=v5e-1", *wide)
    assert done.returncode == 2
    assert done.stderr.startswith("error: v5e-1 ")
    assert "Ran out of memory on HBM" in done.stderr  # some versions of libtpu list no arrays
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="needs jax's CUDA plug-in",
)
@pytest.mark.parametrize("name", ["a100-4", "h200-1"])
def test_a_gpu_that_is_not_there(start, name):
    done = start("train_compile.py", f"compile_topology={name}")
    assert done.returncode == 0, done.stderr
    kind, number = name.split("-")
    assert f"{number} x NVIDIA {kind.upper()}" in done.stdout
    assert figure(r"by formula: ([\d.e-]+) TFLOP", done.stdout) > 0
    assert ("nothing" in done.stdout) == (number == "1")
