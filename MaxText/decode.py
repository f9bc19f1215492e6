"""Generates text: python MaxText/decode.py load_parameters_path=RUN."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__, tune_malloc=True)  # before the slow imports

from MaxText.config import command_line
from MaxText.inference import checkpoint_config
from MaxText.runtime import start_up

USAGE = """Continues prompts with trained weights.

  python MaxText/decode.py load_parameters_path=maxtext_output/quickstart prompt='def main('
  python MaxText/decode.py load_parameters_path=hf:models/gpt2 prompt='I love to' \\
      decode_sampling_temperature=0.8 decode_sampling_top_k=40 decode_seed=1
  python MaxText/decode.py configs/gpt2.yml load_parameters_path=RUN prompt_file=prompts.jsonl \\
      max_new_tokens=64 'decode_stop_strings=["\\n"]' \\
      decode_output_path=texts.jsonl per_device_batch_size=8

Without a config file the weights bring their own configuration and tokenizer. Settings:
docs/how-to/generate_text.md."""


def main() -> None:
    """Exit codes: 0 done, 1 unexpected text, 2 user error, 130 Ctrl-C."""
    loaded = command_line.parse("decode.py", sys.argv[1:], USAGE, load=checkpoint_config.load)
    start_up.choose_platform(loaded.config.run.hardware)
    with command_line.exit_on_user_error("\nInterrupted."):
        from MaxText.inference.decoding import decode

        decode(loaded, command_line.stdout_writer())


if __name__ == "__main__":
    sys.exit(main())
