"""Text -> token records: python MaxText/prepare_data.py prepare_source=... dataset_path=..."""

import sys
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText.configuration import command_line
from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.preparing import prepare

USAGE = """
Turns text into a prepared data set: token records, the tokenizer and a manifest.

  python MaxText/prepare_data.py prepare_source=corpus/ dataset_path=data/corpus
  python MaxText/prepare_data.py prepare_source=rows.jsonl.gz text_field=content \\
      tokenizer_path=gpt2 dataset_path=data/rows
  python MaxText/prepare_data.py prepare_source=python_stdlib dataset_path=data/stdlib
"""


def main() -> None:
    """Prepares what the command line asks for; exit code 2 for mistakes in it."""
    config = command_line.parse("prepare_data.py", sys.argv[1:], USAGE).config
    try:
        prepare(config.preparation, config.data.dataset_path)
    except UserError as error:
        command_line.fail(error)


if __name__ == "__main__":
    main()
