"""Takes the place of train.py: writes the record of a run; as a program or in process.

The loss is 4, half a nat less and steps twice as long with a gated MLP, a tenth less for a later
stage, a tenth more per seed; a learning rate above 1 diverges. Of probes, a gated MLP predicts all
labels, and another MLP a quarter of them and a tenth per seed."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def default_loss(keys: Mapping[str, Any]) -> float:
    """The validation loss of a configuration."""
    is_gated, parent = len(keys["mlp_activations"]) > 1, keys["load_parameters_path"]
    return 4.0 - 0.5 * is_gated - 0.1 * bool(parent) + 0.1 * keys["data_shuffle_seed"]


def train(
    keys: Mapping[str, Any],
    after_step: Callable[[], None] = lambda: None,
    loss_of: Callable[[Mapping[str, Any]], float] = default_loss,
) -> int:
    """Writes events.jsonl of a configuration; KeyboardInterrupt of `after_step` ends the run."""
    folder = Path(keys["base_output_directory"]) / keys["run_name"]
    is_gated, diverges = len(keys["mlp_activations"]) > 1, keys["learning_rate"] > 1
    seconds = 0.2 if is_gated else 0.1
    tokens = int(keys["per_device_batch_size"]) * keys["max_target_length"]
    parent = keys["load_parameters_path"]
    assert not parent or (Path(parent) / "events.jsonl").exists(), "no stage before"
    with (folder / "events.jsonl").open("a") as file:

        def write(event: str, phase: str, seconds: float, **facts: Any) -> None:
            row = {"time": time.time(), "event": event, "phase": phase, "restart": 0}
            file.write(json.dumps(row | {"seconds": seconds} | facts) + "\n")
            file.flush()

        lineage = [{"run_name": parent, "tokens": 1e6, "flops": 1e6}] if parent else []
        write(
            "start",
            "startup",
            1.0,
            step=0,
            run_name=keys["run_name"],
            num_steps=keys["steps"],
            num_parameters=1000,
            lineage=lineage,
        )
        for step in range(keys["steps"]):
            numbers = {
                "progress/tokens": tokens * (step + 1),
                "progress/flops": 10.0 * (step + 1),
                "learning/loss": 5.0,
                "learning/lm_loss": 5.0,
            }
            write("step", "train", seconds, step=step, updates=1, **numbers)
            try:
                after_step()
            except KeyboardInterrupt:
                write("stop", "shutdown", 0.0, step=step, reason="interrupted")
                return 130
            if diverges:
                break
        if keys["eval_interval"] > 0 and not diverges:
            numbers = {"eval/avg_loss": loss_of(keys)}
            if keys["dataset_type"] == "probe":
                accuracy = 1.0 if is_gated else 0.25 + 0.1 * keys["data_shuffle_seed"]
                numbers["eval/masked_accuracy"] = accuracy
            write("evaluation", "evaluation", 0.1, step=step, **numbers)
        write("stop", "shutdown", 0.0, step=step, reason="diverged" if diverges else "completed")
    return int(diverges)


if __name__ == "__main__":
    import yaml

    print("training", sys.argv[1], flush=True)
    if Path("fail").exists():
        sys.exit("error: it fails")

    def wait_if_told() -> None:
        if Path("stop").exists():
            time.sleep(60)

    sys.exit(train(yaml.safe_load(Path(sys.argv[1]).read_text()), wait_if_told))
