"""Tokenizes text to a prepared dataset or to records."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.input_pipeline.prepare.first_run import train_arguments
from MaxText.input_pipeline.prepare.prepare import prepare
from MaxText.input_pipeline.token_store.manifest import describe

USAGE = """
Turns text into a prepared data set (token records, the tokenizer and a manifest), or into records
for other programs. Run the same command again to resume.

  python MaxText/prepare_data.py prepare_source=corpus/ dataset_path=data/corpus
  python MaxText/prepare_data.py prepare_source=rows.jsonl.gz text_field=content \\
      tokenizer_path=gpt2 dataset_path=data/rows
  python MaxText/prepare_data.py prepare_source=python_stdlib dataset_path=data/stdlib
  python MaxText/prepare_data.py 'prepare_source=pile/{00..29}.jsonl.zst' prepare_num_workers=16 \\
      tokenizer_path=tokenizer.json dataset_path=data/pile
  python MaxText/prepare_data.py prepare_source=openwebtext.tar.xz tokenizer_path=gpt2 \\
      prepare_output_format=tfrecord dataset_path=data/openwebtext_records

More kinds of text, records and Apache Beam: docs/how-to/prepare_data.md.
"""


def main() -> None:
    """Exit codes: 0 done, 2 user error, 130 Ctrl-C."""
    config = command_line.parse("prepare_data.py", sys.argv[1:], USAGE).config
    with command_line.exit_on_user_error("Interrupted. Run the same command to resume."):
        data = config.data
        preparation = config.preparation
        path = data.dataset_path
        max_bad_records = data.bad_records.maximum
        manifest = prepare(
            preparation, path, cache_dir=data.local_cache_dir, max_bad_records=max_bad_records
        )
        if not preparation.exports_text:
            print(describe(manifest))
            if preparation.prepare_output_format == "bin":
                train = command_line.program_command("train")
                arguments = train_arguments(manifest, path)
                if arguments:
                    print(f"Train on it:\n  {train} {' '.join(arguments)}")


if __name__ == "__main__":
    sys.exit(main())
