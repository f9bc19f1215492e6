"""Folders of runs as training leaves them, with whatever can happen to a run."""

import dataclasses
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import yaml

from MaxText.monitoring.events import PHASES

TOKENS_PER_UPDATE = 16_384
FLOPS_PER_TOKEN = 6 * 10_300_000


def progress(step: int) -> dict[str, int]:
    tokens = (step + 1) * TOKENS_PER_UPDATE
    return {"progress/tokens": tokens, "progress/flops": tokens * FLOPS_PER_TOKEN}


@dataclasses.dataclass
class RunFiles:
    """Writes the events of a run whose clock is moved by hand."""

    folder: Path
    now: float = 1_790_000_000.0  # Unix seconds
    attempt: int = 0  # of the rows that follow
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    floor: float = 3.1  # loss that training approaches
    seed: int = 0  # of the noise

    def __post_init__(self):
        self.noise = random.Random(self.seed)

    def add(self, kind: str, seconds: float = 0.0, step: int | None = None, **facts) -> None:
        """Adds an event that took `seconds` from now on."""
        self.now += seconds
        row = {"time": round(self.now, 3), "event": kind, "phase": PHASES[kind]}
        row |= {"restart": self.attempt, "step": step, "seconds": seconds}
        self.rows.append(row | facts)

    def start(self, step: int = 0, *, kind: str = "start", num_steps: int = 400, **facts) -> None:
        """Starts, or resumes, and compiles."""
        default_facts = {
            "run_name": self.folder.name,
            "num_steps": num_steps,
            "num_parameters": 10_300_000,
            "num_devices": 4,
            "num_processes": 1,
            "device_kind": "TPU v5 lite",
            "platform": "tpu",
            "jax": "0.10.2",
            "unigram_entropy_nats": 7.31,
            "lineage": [],
            "cost": COST,
            "source": "scratch" if kind == "start" else f"checkpoint of step {step - 1}",
            "tokens_of_run": num_steps * TOKENS_PER_UPDATE,
            "flops_of_run": num_steps * TOKENS_PER_UPDATE * FLOPS_PER_TOKEN,
            "peak_tflops": 197.0,
            "peak_source": "data sheet",
            "data": {
                "train": "wikitext, 120,000,000 tokens",
                "identity": "9f2b77aa01c3",
                "tokenizer": "5c1e00aa42",
                "vocab_size": 8192,
            },
        }
        self.add(kind, 6.0, step, **(default_facts | facts))
        memory = {"arguments": 130e6, "outputs": 126e6, "temporaries": 900e6, "aliased": 126e6}
        memory["peak"] = 1.03e9
        self.add("compile", 9.0, step, compile_seconds=12.0, rows=32, length=512, memory=memory)

    def steps(self, first: int, end: int, *, every: int = 0, nan_at: int = -1, **tags) -> None:
        """Trains; saves and evaluates after each `every` updates."""
        for step in range(first, end):
            loss = self.floor + 5.9 * math.exp(-step / 45) + 60 / (step + 60)
            shown = loss + self.noise.gauss(0, 0.07)
            seconds = 0.5 + abs(self.noise.gauss(0, 0.02))
            rate = 3e-3 * min(step / 40, 0.5 + 0.5 * math.cos(math.pi * step / 400))
            numbers = {
                "learning/loss": None if step == nan_at else shown,
                "learning/lm_loss": None if step == nan_at else shown,
                "learning/grad_norm": 0.4 + 3 * math.exp(-step / 30) * self.noise.random(),
                "learning/current_learning_rate": rate,
                "learning/total_weights": TOKENS_PER_UPDATE,
                "perf/step_time_seconds": seconds,
                "perf/per_device_tokens_per_sec": TOKENS_PER_UPDATE / 4 / seconds,
                "perf/mfu": 0.41 * 0.5 / seconds,
                **progress(step),
            }
            self.add("step", seconds, step, updates=1, data_seconds=0.01, **numbers | tags)
            if every and (step + 1) % every == 0:
                self.add("checkpoint", 0.8, step)
                self.evaluate(step, loss + 0.05)

    def evaluate(self, step: int, loss: float | None) -> None:
        """Evaluates."""
        numbers = {"eval/avg_loss": loss, "eval/total_weights": 65_536, "eval/seconds": 2.5}
        self.add("evaluation", 2.5, step, **numbers, **progress(step))

    def kill_and_resume(self, step: int, *, down: float, **facts) -> None:
        """The process dies here and another goes on at an earlier step `down` seconds later."""
        later_rows = [row for row in self.rows if row["phase"] != "startup"]
        lost = [row for row in later_rows if row["event"] != "compile" and row["step"] >= step]
        seconds: dict[str, float] = {}
        for row in lost:
            seconds[row["phase"]] = seconds.get(row["phase"], 0.0) + row["seconds"]
        updates = sum(row["event"] == "step" for row in lost)
        self.rows = [row for row in self.rows if row not in lost]
        self.now += down
        self.attempt += 1
        self.start(step, kind="resume", lost={"steps": updates, "seconds": seconds}, **facts)

    def write(
        self, *, config: dict[str, Any] | None = None, cut: str = "", old: bool = True
    ) -> Path:
        """Writes the folder, an hour ago if `old`; `cut` begins a row that was not finished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "events.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in self.rows) + cut)
        if config is not None:
            (self.folder / "config.yml").write_text(yaml.safe_dump(config))
        moment = time.time() - (3600 if old else 0)
        os.utime(file, (moment, moment))
        return self.folder


COST = {
    "mfu_rule": "6 operations per parameter of a product and token, and attention (PaLM, app. B).",
    "attention_rule": "Attention counts the full square of scores.",
    "sequence_length": 512,
    "parts": [
        {"name": "token embedding", "parameters": 3_145_728, "flops_per_token": 0},
        {"name": "attention", "parameters": 2_359_296, "flops_per_token": 18_874_368},
        {"name": "feed-forward", "parameters": 4_718_592, "flops_per_token": 28_311_552},
        {"name": "norms", "parameters": 4_992, "flops_per_token": 0},
        {"name": "head", "parameters": 0, "flops_per_token": 18_874_368},
    ],
    "parameters": 10_228_608,
    "flops_per_token": 66_060_288,
    "bytes": {"parameters": 40_914_432, "optimizer": 81_828_864, "gradients": 40_914_432},
    "kv_cache_bytes_per_token": 9_216,
    "kv_cache_bytes": 4_718_592,
}


def completed(folder: Path, **keys) -> Path:
    """A run from start to end, with a sample."""
    run = RunFiles(folder, **keys)
    run.start()
    run.steps(0, 400, every=50)
    run.add("sample", 1.5, 399, text="The river <b>was</b> cold,\nand the & boat </script> left.")
    run.add("stop", 0.2, 399, reason="completed")
    return run.write(config={"run_name": folder.name, "learning_rate": 3e-3, "emb_dim": 384})


def eventful(folder: Path) -> Path:
    """A run that was killed and resumed, skipped, rolled back, and diverged."""
    run = RunFiles(folder, floor=3.4, seed=1)
    run.start()
    run.steps(0, 170, every=50)
    run.kill_and_resume(150, down=300.0)
    run.add("config_change", changes={"learning_rate": ["0.003", "0.002"]})
    run.steps(150, 230, every=50)
    run.add("step_skipped", 0.0, 229, reason="gradient norm 8.1e3 is not usual", count=1)
    run.steps(230, 280, every=50)
    run.add("rollback", 0.0, 279, restored_step=250, reason="loss rose to 9.1")
    run.steps(250, 320, every=50, nan_at=319)
    run.add("stop", 0.2, 319, reason="diverged")
    return run.write(config={"run_name": folder.name, "learning_rate": 2e-3, "emb_dim": 384})
