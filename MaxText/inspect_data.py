"""Shows statistics or batches of a dataset."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.config.keys import Count, Natural
from MaxText.config.loading import Source
from MaxText.config.program_options import option
from MaxText.config.sources import ARGUMENT, YAML_PATH

USAGE = """
Shows what a data set holds and how training would see it.

  python MaxText/inspect_data.py data/corpus                  ids, document lengths
  python MaxText/inspect_data.py data/corpus step=1000        the batch of a step, as text
  python MaxText/inspect_data.py configs/gpt2.yml dataset_path=data/corpus step=1000
  python MaxText/inspect_data.py 'records/*.tfrecord' tokenizer_path=gpt2 max_target_length=1024

The first word is a config file (.yml), or a data set: whatever dataset_path may be. Keys are those
of train.py and mean the same; train_split=validation inspects the held-out split.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of inspect_data.py."""

    step: Natural | None = option(
        None,
        "Show only the batch of this step (from 0), read exactly as train.py does.",
        metavar="STEP",
    )
    num_devices: Count = option(1, "Devices that share the batch.", metavar="NUMBER")
    sample: Count = option(
        200_000_000,
        "Tokens to read at most; what is more is sampled evenly.",
        metavar="TOKENS",
    )


def with_dataset(arguments: Sequence[str]) -> list[str]:
    """Rewrites a data set as the first argument to dataset_path=."""
    first = arguments[0] if arguments else ""
    is_dataset = first[:1] not in ("", "-") and not ARGUMENT.fullmatch(first)
    if is_dataset and not YAML_PATH.fullmatch(first):
        return [f"dataset_path={first}", *arguments[1:]]
    return list(arguments)


def main() -> None:
    """Exit codes: 0 done, 2 user error or unusable data, 130 Ctrl-C."""
    # A text may hold what the terminal cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    with command_line.exit_on_user_error():
        loaded, parsed = command_line.parse_with_options(
            "inspect_data.py", with_dataset(sys.argv[1:]), USAGE, InspectOptions
        )
        options = parsed.options
        from MaxText.input_pipeline.inspect_dataset import Inspection

        has_model = loaded.origins["vocab_size"].source is not Source.DEFAULT
        inspection = Inspection(loaded.config, options.num_devices, has_model, print)
        if options.step is None:
            inspection.show_statistics(options.sample)
        else:
            inspection.show_batch(options.step)


if __name__ == "__main__":
    sys.exit(main())
