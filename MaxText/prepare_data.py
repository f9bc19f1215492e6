"""Tokenizes text to a prepared dataset or to records."""

import shlex
import sys
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.input_pipeline.prepare.prepare import prepare
from MaxText.input_pipeline.prepare.record_export import TEXT_FORMATS
from MaxText.input_pipeline.token_store.manifest import describe

USAGE = """
Turns text into a prepared data set (token records, the tokenizer and a manifest), or into records
for other programs. Run the same command again to resume.

  python MaxText/prepare_data.py prepare_source=corpus/ dataset_path=data/corpus
  python MaxText/prepare_data.py prepare_source=rows.jsonl.gz text_field=content \\
      tokenizer_path=gpt2 dataset_path=data/rows
  python MaxText/prepare_data.py prepare_source=python_stdlib dataset_path=data/stdlib

More kinds of text, a tokenizer of your own, flat files of ids:
  python MaxText/prepare_data.py 'prepare_source=pile/{00..29}.jsonl.zst' prepare_num_workers=16 \\
      tokenizer_path=tokenizer.json prepare_output_format=bin dataset_path=data/pile

Token records for GPT-Neo, and windows with labels for jax-lm:
  python MaxText/prepare_data.py prepare_source=openwebtext.tar.xz tokenizer_path=gpt2 \\
      prepare_output_format=tfrecord prepare_minimum_tokens=100 prepare_fix_text=true \\
      dataset_path=data/openwebtext_records
  python MaxText/prepare_data.py prepare_source=wikitext/ tokenizer_path=gpt2 \\
      prepare_output_format=parquet records.content=strided dataset_path=data/wikitext_windows

The text itself as records:
  python MaxText/prepare_data.py prepare_source=openwebtext/ \\
      prepare_output_format=text_array_record dataset_path=data/openwebtext_text

With Apache Beam:
  python MaxText/prepare_data.py prepare_source=corpus/ tokenizer_path=gpt2 prepare.runner=beam \\
      prepare.beam_options='--direct_running_mode=multi_processing --direct_num_workers=4' \\
      dataset_path=data/corpus
"""


def main() -> int:
    """Prepares the requested data.

    Exit codes: 0 done, 2 user error, 130 Ctrl-C.
    """
    config = command_line.parse("prepare_data.py", sys.argv[1:], USAGE).config
    with command_line.exit_on_user_error("Interrupted. Run the same command to resume."):
        data = config.data
        preparation, path = config.preparation, data.dataset_path
        manifest = prepare(
            preparation,
            path,
            cache_dir=data.data_cache_dir,
            max_bad_records=data.bad_records.maximum,
        )
        if preparation.prepare_output_format not in TEXT_FORMATS:
            print(describe(manifest))
            if preparation.prepare_output_format in ("array_record", "bin"):
                train = command_line.program_command("train")
                place = shlex.quote(f"dataset_path={path}")
                size = f"vocab_size={manifest.tokenizer.vocab_size}"
                print(f"Train on it:\n  {train} model_name=gpt2-124m {size} {place}")
    return exit_codes.SUCCESS


if __name__ == "__main__":
    sys.exit(main())
