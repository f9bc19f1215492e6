"""Commands of the README and the documentation: accepted, and run with small sizes."""

import gzip
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from MaxText.config.loading import load
from MaxText.config.program_options import read_options
from MaxText.conversion import request
from MaxText.conversion.families import FAMILIES
from MaxText.cost.plan_args import PlanOptions
from MaxText.experiments import compare_args
from MaxText.experiments.arena import arena_args
from tests import programs
from tests.house.sources import REPOSITORY, main_of, shown
from tests.input_pipeline.token_store import token_files

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.parent.name != "generated"]  # by docs/conf.py
# A fence after <!-- run: WORDS --> or <!-- not run: REASON -->. Words are further arguments, of all
# its programs of MaxText/ or of the one named before them, SIZES by name, and JAX_...= of the
# environment. OLD=>NEW replaces text.
FENCE = re.compile(
    r"(?:<!-- (not run|run):(.*?) ?-->\n+)?^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
COMMAND = re.compile(
    r"^(?:bash setup\.sh && )?(?:\S*python3? )MaxText/(\w+\.py)( .*)?$", re.MULTILINE
)
ANY_COMMAND = re.compile(
    r"^ *(?:\$ +)?(?:[\w./]*python3? |bash |source \S+/|pip |maxtext-).*$", re.MULTILINE
)
FOLLOWED = [page for page in PAGES if re.match("README|docs/(tutorials|how-to)/", shown(page))]

# Arguments by name; a marker may use the names.
SIZES = {
    "short": "steps=2 eval_interval=-1 eval_steps=1 sample_tokens=0 base_num_decoder_layers=1",
    "tiny": "steps=2 eval_interval=-1 eval_steps=1 sample_tokens=0 base_num_decoder_layers=1 "
    "base_emb_dim=64 base_num_query_heads=2 base_num_kv_heads=2 head_dim=32 base_mlp_dim=128 "
    "vocab_size=512 max_target_length=64 per_device_batch_size=2 prepare_source=",
}


class Command(NamedTuple):
    program: str
    arguments: list[str]  # as printed
    small: list[str] | None  # as run; None if it is not
    reason: str | None  # why it is not run; None without a marker
    environment: dict[str, str]


def commands(path: Path) -> list[Command]:
    """The commands of a page."""
    found = []
    for marker, text, fence in FENCE.findall(path.read_text(encoding="utf-8")):
        words = shlex.split(text) if marker == "run" else []
        replaced = [word.split("=>") for word in words if "=>" in word]
        environment = dict(word.split("=") for word in words if word.startswith("JAX_"))
        for program, printed in COMMAND.findall(fence.replace("\\\n", " ")):
            shown = printed
            for old, new in replaced:
                shown = shown.replace(old, new)
            small = shlex.split(shown, comments=True) + _added(program, words)
            arguments = shlex.split(printed, comments=True)
            reason = text.strip() if marker == "not run" else None
            if marker != "run":
                small = None
            found.append(Command(program, arguments, small, reason, environment))
    return found


def _added(program: str, words: list[str]) -> list[str]:
    added, target = [], program
    for word in words:
        if word.endswith(".py"):
            target = word
        elif "=>" not in word and not word.startswith("JAX_") and target == program:
            added += SIZES.get(word, word).split()
    return added


WITH_COMMANDS = {shown(path): commands(path) for path in PAGES}
WITH_COMMANDS = {name: found for name, found in WITH_COMMANDS.items() if found}


def of_program(program: str, name: str) -> Callable:
    return main_of(program).__globals__[name]


def accept(program: str, arguments: list[str]) -> None:
    """Raises unless the program would take the arguments."""
    match program:
        case "plan.py":
            load(read_options(PlanOptions, arguments).configuration, program)
        case "arena.py":
            arena_args.parse_args(arguments)
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
            load(read_options(options, arguments).configuration, program)
        case "train.py" if arguments[0] == "--from-maxtext":
            pass  # it reads a file of the user's
        case "check_part.py":
            assert (REPOSITORY / arguments[0]).is_file()
        case "coord_check.py":
            parsed = read_options(of_program(program, "CoordinateOptions"), arguments)
            parsed.check()
            load(parsed.configuration, program)
        case _:
            load(arguments, program)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_are_accepted(page, capsys):
    for command in WITH_COMMANDS[page]:
        accept(command.program, command.arguments)
    assert " is called " not in capsys.readouterr().err  # no old names


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_are_in_fences(page):
    assert not ANY_COMMAND.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", FOLLOWED, ids=shown)
def test_commands_are_run_or_say_why_not(page):
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    assert not [fence for marker, _, fence in fences if not marker]


def test_families_are_listed_in_order():
    page = REPOSITORY / "docs" / "reference" / "model_families.md"
    table = page.read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[1:] == list(FAMILIES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, compilation_cache):
    """A clone with a corpus, the run of the quickstart, and GPT-2 as a run and for Hugging Face."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("configs", "docs", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "docs" / "how-to", folder / "corpus")
    shutil.copytree(folder / "corpus", folder / "domain")
    (folder / "prompts.jsonl").write_text('{"prompt": "A run"}\n')
    (folder / "lambada_test.jsonl").write_text('{"text": "A run is a run"}\n')
    (folder / "wiki.test.raw").write_text(" = A run = \n A run . \n")
    with gzip.open(folder / "rows.jsonl.gz", "wt") as rows:
        rows.write('{"content": "A run is a run."}\n' * 100)
    ids = token_files.documents(0, [500] * 20, 512)
    (folder / "pile_tfrecords").mkdir()
    token_files.write_tfrecord(folder / "pile_tfrecords" / "train.tfrecord", ids)
    token_files.write_megatron(folder / "pile_text_document", ids)
    token_files.write_tar(folder / "shards-0000.tar", ids)
    environment = {**os.environ, "M_JAX_CACHE_DIR": str(compilation_cache)}
    gpt2 = [
        "model_name=gpt2-124m",
        "dataset_path=data/corpus",
        "run_name=first",
        *SIZES["tiny"].split(),
    ]
    for program, *arguments in (
        [
            "prepare_data.py",
            "prepare_source=corpus/",
            "dataset_path=data/corpus",
            "tokenizer_vocab_size=512",
        ],
        ["train.py", "configs/quickstart.yml", *SIZES["short"].split()],
        ["train.py", *gpt2],
        [
            "train.py",
            "examples/moving_average.yml",
            *SIZES["short"].split(),
            "base_num_decoder_layers=4",
        ],
        ["convert.py", "from=maxtext_output/first", "to=hf:models/gpt2"],
        [
            "prepare_data.py",
            "prepare_source=domain/",
            "dataset_path=data/domain",
            "tokenizer_path=maxtext_output/quickstart/tokenizer",
        ],
    ):
        run(folder, program, arguments, environment)
    return folder


@pytest.fixture
def clone(trained, tmp_path):
    """A copy of it, for the outputs of one page."""
    return shutil.copytree(trained, tmp_path / "clone", symlinks=True)


def run(folder: Path, program: str, arguments: list[str], environment: dict[str, str]) -> None:
    less = LESS_TEXT if any(word.endswith(".yml") for word in arguments) else {}
    ended = programs.run(program, arguments, folder, environment | less)
    assert ended.returncode == 0, (program, arguments, ended.stderr[-2000:])


# Instead of the 31 MB of configs/quickstart.yml, which first_pretraining_run.md prepares.
LESS_TEXT = {"M_PREPARE_SOURCE": "docs", "M_VALIDATION_FRACTION": "0.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page, found in WITH_COMMANDS.items()
        if any(command.small is not None for command in found)
    ],
)
def test_commands_run(page, clone, users_environment):
    for command in WITH_COMMANDS[page]:
        if command.small is not None:
            environment = users_environment | command.environment
            run(clone, command.program, command.small, environment)
