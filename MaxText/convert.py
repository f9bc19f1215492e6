"""Converts weights from and to other programs: python MaxText/convert.py from=hf:FOLDER to=RUN"""

import sys
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.conversion.request import parse_arguments

USAGE = """
usage: convert.py [grow] [CONFIG.yml] from=SOURCE to=TARGET [--verify] [key=value ...]

Converts weights between this program, Hugging Face and MaxText. Model families:
docs/reference/model_families.md.

  python MaxText/convert.py from=hf:models/gpt2 to=maxtext_output/gpt2       a folder to a run
  python MaxText/convert.py from=maxtext_output/first to=hf:exported         a run to a folder
  python MaxText/convert.py model_name=llama2-7b from=maxtext:gs://bucket/run to=maxtext_output/l2
  python MaxText/convert.py from=maxtext_output/first export=stablehlo to=forward.stablehlo
  python MaxText/convert.py grow from=maxtext_output/small to=maxtext_output/large slot_num=2140

SOURCE: hf:FOLDER or hf:HUB_ID (from the local cache; nothing is downloaded), a run of this program
(its newest checkpoint, or checkpoints/STEP), maxtext:FOLDER, or fattorib:FILE. TARGET:
hf:FOLDER, a run folder, or a file. Keys are those of train.py. Options:

  --verify              run both models on the same tokens and compare logits and loss before
                        the result is kept; needs pip install '.[torch]'
  dtype=FORMAT          format of exported tensors: float32, bfloat16, float16; default: as stored
  family=MODEL_TYPE     export as this family if several match: llama, mistral, ...
  max_shard_size=5GB    split larger exports into several files with an index
  tokenizer=FOLDER      tokenizer to export; default: that of the run's data set
  query_scaling=WHERE   of MaxText checkpoints: weights or model
  grow                  make a larger model of the same kind (docs/how-to/
                        train_and_grow_tokenformer.md): growth_mode=...,
                        slot_num=..., base_num_decoder_layers=...
  length=N              sequence length of export=stablehlo; default: max_target_length
"""


def main() -> int:
    """Exit codes: 0 done, 2 a mistake in the command line or unfit weights, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(USAGE.strip())
        return exit_codes.DONE
    with command_line.exit_on_user_error("Interrupted; nothing was written."):
        asked = parse_arguments(arguments)
        if asked.grow:
            from MaxText.run.growing import grow as convert
        else:
            from MaxText.conversion.convert import convert
        convert(asked, lambda line: print(line, flush=True))
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
