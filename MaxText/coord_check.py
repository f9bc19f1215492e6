"""Checks whether activations and their updates depend on width and depth."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from pydantic import Field

from MaxText.config import command_line
from MaxText.config.keys import Count
from MaxText.config.loading import load
from MaxText.config.problems import ConfigIssue
from MaxText.config.program_options import option, read_options
from MaxText.config.values import UntypedScalar, convert

USAGE = """
Trains a model for a few steps at several widths and depths, and checks that the sizes of
activations, scores, logits and of their changes do not depend on them.

  python MaxText/coord_check.py configs/gpt2.yml parametrization=mup learning_rate=0.01 \\
      weight_init=fan_in
  python MaxText/coord_check.py my_model.yml parametrization=completep widths=64,256,1024 \\
      depths=2,8,32

Sizes are those of the configuration in proportion to the width; the smallest are the base_shape.
Use a learning rate above the tuned one. Exits with 1 unless the interval of each slope of ln rms is
within the tolerance. docs/how-to/transfer_hyperparameters.md says how to read it.
"""


_DEPTHS = (2, 4, 8, 16)


def _sizes(text: str) -> tuple[int, ...]:
    """Parses sizes, ascending: "64,128"."""
    items = text.strip().removeprefix("[").removesuffix("]").split(",")
    sizes = convert([UntypedScalar(item.strip()) for item in items], tuple[Count, ...])
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{text!r} is not two or more numbers, ascending")
    return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateOptions:
    """Options of coord_check.py."""

    widths: tuple[int, ...] = option(
        (64, 128, 256, 512),
        "Widths (emb_dim) of the models; the first is the base.",
        read=_sizes,
        accepts="numbers, ascending",
    )
    depths: tuple[int, ...] = option(
        (),
        "Layers of models of the first width; by default those of the configuration alone, or "
        "2,4,8,16 under a parametrization with a depth rule.",
        read=_sizes,
        accepts="numbers, ascending",
    )
    seeds: Count = option(5, "Seeds of initial weights.", metavar="NUMBER")
    check_steps: Count = option(3, "Steps of each model.", metavar="NUMBER")
    tolerance: Annotated[float, Field(gt=0)] = option(
        0.1, "Largest slope of ln rms on ln size: its 95 % interval has to be within."
    )
    output: Path = option(
        Path("maxtext_output/coord_check"), "Folder of the plots.", read=Path, accepts="a folder"
    )


def main() -> int:
    """Exit codes: 0 no slope, 1 a slope, 2 user error."""
    arguments = sys.argv[1:]
    command_line.answer_questions("coord_check.py", arguments, USAGE, CoordinateOptions)
    with command_line.exit_on_user_error():
        parsed = read_options(CoordinateOptions, arguments)
        options = parsed.options
        if options.seeds * len(options.widths) < 3:
            parsed.problems.append(
                ConfigIssue("two widths and one seed have no interval", remedies=("seeds=2",))
            )
        parsed.check()
        config = load(parsed.configuration).config

        # Once the configuration is accepted, because it imports jax.
        from MaxText.experiments.coordinate_check import CheckPlan, run_check

        plan = CheckPlan(
            widths=options.widths,
            depths=options.depths or (_DEPTHS if config.model.has_depth_rule else ()),
            seeds=range(options.seeds),
            num_steps=options.check_steps,
            tolerance=options.tolerance,
        )
        passes = run_check(config, plan, options.output, print)
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
