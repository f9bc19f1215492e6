"""Converts weights: python MaxText/convert.py from=hf:FOLDER to=RUN."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.conversion.request import GROW, ConvertOptions, parse_arguments

USAGE = """
usage: convert.py [grow] [CONFIG.yml] from=SOURCE to=TARGET [--verify] [key=value ...]

Converts weights between this program, Hugging Face and MaxText. Model families:
docs/reference/model_families.md.

  python MaxText/convert.py from=hf:models/gpt2 to=maxtext_output/gpt2       a folder to a run
  python MaxText/convert.py from=maxtext_output/first to=hf:exported         a run to a folder
  python MaxText/convert.py model_name=llama2-7b from=maxtext:gs://bucket/run to=maxtext_output/l2
  python MaxText/convert.py from=maxtext_output/first export=stablehlo to=forward.stablehlo
  python MaxText/convert.py grow from=maxtext_output/small to=maxtext_output/large slot_num=2140

Keys are those of train.py. grow makes a larger model of the same kind (docs/how-to/
train_and_grow_tokenformer.md): growth.mode=..., slot_num=..., base_num_decoder_layers=...
"""


def main() -> None:
    """Exit codes: 0 done, 2 user error or unfit weights, 130 Ctrl-C."""
    arguments = sys.argv[1:] or ["--help"]
    arguments_of_options = [argument for argument in arguments if argument != GROW]
    command_line.answer_questions("convert.py", arguments_of_options, USAGE, ConvertOptions)
    with command_line.exit_on_user_error("Interrupted; nothing was written."):
        request = parse_arguments(arguments)
        if request.grow:
            from MaxText.run.grow import grow as convert
        else:
            from MaxText.conversion.convert import convert
        convert(request, print)


if __name__ == "__main__":
    sys.exit(main())
