"""Commands of the README and the documentation: accepted, and those with sizes really run."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from MaxText.config.loading import load
from MaxText.config.program_options import read_options
from MaxText.conversion import request
from MaxText.cost.plan_args import PlanOptions
from MaxText.experiments import compare_args
from tests import programs
from tests.house.sources import REPOSITORY, main_of
from tests.house.test_language import ANY_RETIRED

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# A fence, and the arguments that make its commands small enough to run: <!-- run: steps=2 -->
FENCE = re.compile(r"(?:<!-- run:(.*?) ?-->\n+)?^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\S*python3? )MaxText/(\w+\.py)( .*)?$", re.MULTILINE)


def commands(path: Path) -> list[tuple[str, list[str], list[str] | None]]:
    """(program, arguments, arguments to run it with or None) of a page."""
    found = []
    for fence in FENCE.finditer(path.read_text(encoding="utf-8").replace("\\\n", " ")):
        small = None if fence[1] is None else shlex.split(fence[1])
        for program, words in COMMAND.findall(fence[2]):
            found.append((program, shlex.split(words, comments=True), small))
    return found


WITH_COMMANDS = {str(path.relative_to(REPOSITORY)): commands(path) for path in PAGES}
WITH_COMMANDS = {name: found for name, found in WITH_COMMANDS.items() if found}


def of_program(program: str, name: str) -> Callable:
    return main_of(program).__globals__[name]


def accept(program: str, arguments: list[str]) -> None:
    """Raises unless the program would take the arguments."""
    match program:
        case "plan.py":
            load(read_options(PlanOptions, arguments)[1].configuration, program)
        case "compare.py":
            asked, problems = compare_args.parse_args(arguments)
            assert not problems
            for path in asked.configs:
                load([path], for_compare=True)
        case "convert.py":
            request.parse_arguments(arguments)
        case "report.py":
            of_program("report.py", "parse")([word for word in arguments if "[" not in word])
        case "launch.py":
            own = arguments[: arguments.index("--")] if "--" in arguments else arguments
            of_program("launch.py", "read_launch")(own)
        case "decode.py" | "eval.py":
            rest = [word for word in arguments if not word.startswith("load_parameters_path=")]
            load([*rest, "dataset_type=synthetic"] if program == "eval.py" else rest)
        case "inspect_data.py":
            options = of_program(program, "InspectOptions")
            arguments = of_program(program, "with_dataset")(arguments)
            load(read_options(options, arguments)[1].configuration, program)
        case "train.py" if arguments[0] == "--from-maxtext":
            pass  # it reads a file of the user's
        case _:
            load(arguments, program)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_are_accepted(page):
    for program, arguments, _ in WITH_COMMANDS[page]:
        accept(program, arguments)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like a fresh clone, for outputs of its own."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "docs", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


# Instead of the 31 MB of configs/quickstart.yml, which first_pretraining_run.md prepares.
LESS_TEXT = {"M_PREPARE_SOURCE": "docs", "M_VALIDATION_FRACTION": "0.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page, found in WITH_COMMANDS.items()
        if any(small is not None for *_, small in found)
    ],
)
def test_commands_run(page, clone, users_environment):
    for program, arguments, small in WITH_COMMANDS[page]:
        if small is not None:
            words = [*arguments, *small]
            ended = programs.run(program, words, clone, users_environment | LESS_TEXT)
            assert ended.returncode == 0, (words, ended.stderr[-2000:])
            if program == "train.py":
                assert not ANY_RETIRED.search(ended.stdout + ended.stderr)
