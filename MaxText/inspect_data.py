"""Shows what a data set holds, and the batch of any step: python MaxText/inspect_data.py DATASET"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.config.loading import LoadedConfig, Source
from MaxText.errors import UserError

USAGE = """
Shows what a data set holds and how training would see it.

  python MaxText/inspect_data.py data/corpus                  ids, lengths, duplicates
  python MaxText/inspect_data.py data/corpus step=1000        the batch of a step, as text
  python MaxText/inspect_data.py configs/gpt2.yml dataset_path=data/corpus step=1000
  python MaxText/inspect_data.py 'records/*.tfrecord' tokenizer_path=gpt2 max_target_length=1024

The first word is a config file (.yml), or a data set: whatever dataset_path may be. Keys are those
of train.py and mean the same; train_split=validation inspects the held-out split. Besides:

  step=N         only the batch of step N (from 0), read exactly as train.py does
  num_devices=N  devices that share the batch, 1 by default
  sample=N       tokens to read at most, 200000000 by default; what is more is sampled evenly
"""

_CONFIG_FILE = re.compile(r".*\.ya?ml", re.IGNORECASE | re.DOTALL)
_KEY_AND_VALUE = re.compile(r"([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_LEAST = {"step": 0, "num_devices": 1, "sample": 1}


@dataclasses.dataclass
class Options:
    """What the command line says to this program alone.

    Attributes:
      step: whose batch is shown; None for statistics.
      num_devices: devices that share a batch.
      sample: tokens read at most.
    """

    step: int | None = None
    num_devices: int = 1
    sample: int = 200_000_000


def own_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Takes this program's own words out of a command line; the rest is that of train.py.

    Raises:
      UserError: a number is none.
    """
    options = Options()
    rest: list[str] = []
    for index, argument in enumerate(arguments):
        match = _KEY_AND_VALUE.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if name in _LEAST:
            digits = text.replace("_", "")
            if not (digits.isascii() and digits.isdigit()) or int(digits) < _LEAST[name]:
                raise UserError(
                    f"{name}={text} is not a whole number, {_LEAST[name]} or more. "
                    f"Write for example {name}={_LEAST[name]}."
                )
            setattr(options, name, int(digits))
        elif index == 0 and not match and argument[:1] not in ("", "-"):
            is_config = _CONFIG_FILE.fullmatch(argument)
            rest.append(argument if is_config else f"dataset_path={argument}")
        else:
            rest.append(argument)
    return options, rest


def inspect(loaded: LoadedConfig, options: Options) -> None:
    """Prints what was asked for."""
    from MaxText.input_pipeline.inspect_dataset import Inspection

    has_model = loaded.origins["vocab_size"].source is not Source.DEFAULT
    inspection = Inspection(loaded.config, options.num_devices, has_model, print)
    if options.step is None:
        inspection.show_statistics(options.sample)
    else:
        inspection.show_batch(options.step)


def main() -> int:
    """Exit codes: 0 done, 2 a mistake in the command line, or data that cannot be trained on."""
    # A text may hold what the terminal cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    with command_line.exit_on_user_error():
        options, arguments = own_options(sys.argv[1:])
        inspect(command_line.parse("inspect_data.py", arguments, USAGE), options)
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
