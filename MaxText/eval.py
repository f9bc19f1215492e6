"""Scores trained weights: python MaxText/eval.py load_parameters_path=RUN."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__, tune_malloc=True)  # before the slow imports

from MaxText.config import command_line
from MaxText.inference import checkpoint_config
from MaxText.runtime import start_up

USAGE = """Scores trained weights: loss, perplexity and bits per byte of a data set, and tasks.

  python MaxText/eval.py load_parameters_path=maxtext_output/quickstart
  python MaxText/eval.py load_parameters_path=hf:models/gpt2 dataset_path=data/books eval_stride=512
  python MaxText/eval.py configs/gpt2.yml load_parameters_path=RUN eval_output=scores.json \\
      grain_eval_files='a/*.array_record;b/*.parquet'
  python MaxText/eval.py load_parameters_path=RUN eval_tasks=[lambada] \\
      task_files.lambada=lambada.jsonl

Without a config file the weights bring their own configuration, data and tokenizer. Metrics:
docs/reference/metrics.md."""


def main() -> None:
    """Exit codes: 0 done, 2 user error, 130 Ctrl-C."""
    loaded = command_line.parse("eval.py", sys.argv[1:], USAGE, load=checkpoint_config.load)
    start_up.choose_platform(loaded.config.run.hardware)
    with command_line.exit_on_user_error("Interrupted; nothing was written."):
        from MaxText.evaluation.evaluate import evaluate

        write = command_line.stdout_writer()
        evaluate(loaded, lambda line: write(line + "\n"))


if __name__ == "__main__":
    sys.exit(main())
