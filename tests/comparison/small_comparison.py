"""Small configurations, and a stand-in for train.py that writes the record of a run."""

from pathlib import Path

from MaxText.comparison import comparing
from MaxText.comparison.request import read

A = """
dataset_type: synthetic
decoder_block: gpt2
steps: 4
base_emb_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 2
head_dim: 16
base_mlp_dim: 64
base_num_decoder_layers: 2
vocab_size: 64
max_target_length: 16
per_device_batch_size: 4
learning_rate: 1.0e-2
eval_steps: 2
enable_checkpointing: false
enable_tensorboard: false
loss_curve: false
log_config: false
hardware: cpu
"""
B = """
base_config: a.yml
decoder_block: llama2
"""
# A chain of two stages, whose model changes in nothing.
C = """
base_config: a.yml
stages:
  - {steps: 3}
  - {steps: 2, learning_rate: 2.0e-2}
"""

# Takes the place of train.py. The loss is 4, less half a nat for llama2, less a tenth for a stage
# that begins from another one, plus a tenth per seed; a learning rate above 1 diverges; steps last
# 0.1 s, with a gated MLP 0.2 s. A file of the name "fail" or "stop" in the working folder makes it
# fail or wait to be interrupted.
STAND_IN = """
import json, pathlib, sys, time, yaml

config = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
folder = pathlib.Path(config["base_output_directory"]) / config["run_name"]
print("training", folder, flush=True)
if pathlib.Path("fail").exists():
    print("error: it fails", file=sys.stderr)
    sys.exit(2)
gated = len(config["mlp_activations"]) > 1
seconds = 0.2 if gated else 0.1
tokens = int(config["per_device_batch_size"]) * config["max_target_length"]
diverges = config["learning_rate"] > 1
parent = config["load_parameters_path"]
if parent:
    assert (pathlib.Path(parent) / "events.jsonl").exists(), "no stage before"
lineage = [{"run_name": parent, "tokens": 1e6, "flops": 1e6}] if parent else []
with (folder / "events.jsonl").open("a") as file:
    def write(event, phase, seconds, **facts):
        row = {"time": time.time(), "event": event, "phase": phase, "attempt": 0,
               "seconds": seconds, **facts}
        file.write(json.dumps(row) + "\\n")
        file.flush()
    write("start", "start_up", 1.0, step=0, run_name=config["run_name"],
          num_steps=config["steps"], num_parameters=1000, lineage=lineage)
    for step in range(config["steps"]):
        facts = {"learning/loss": 5.0, "learning/lm_loss": 5.0}
        write("step", "train", seconds, step=step, updates=1,
              **{"progress/tokens": tokens * (step + 1), "progress/flops": 10.0 * (step + 1)},
              **facts)
        if pathlib.Path("stop").exists():
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                write("stop", "finish", 0.0, step=step, reason="interrupted")
                sys.exit(130)
        if diverges:
            break
    loss = 4.0 - 0.5 * gated - 0.1 * bool(parent) + 0.1 * config["data_shuffle_seed"]
    if config["eval_interval"] > 0 and not diverges:
        write("evaluation", "evaluation", 0.1, step=step, **{"eval/avg_loss": loss})
    write("stop", "finish", 0.0, step=step, reason="diverged" if diverges else "completed")
sys.exit(int(diverges))
"""


def write_configs(folder: Path) -> None:
    """Writes a.yml, b.yml and c.yml, which has stages."""
    (folder / "a.yml").write_text(A, encoding="utf-8")
    (folder / "b.yml").write_text(B, encoding="utf-8")
    (folder / "c.yml").write_text(C, encoding="utf-8")


def compare(*arguments: str) -> list[str]:
    """What compare.py shows; its folder is out/."""
    lines: list[str] = []
    request, problems = read([*arguments, "output=out"])
    comparing.compare(request, problems, ["compare.py", *arguments], lines.append)
    return lines
