"""Names, manners and imports of the source files; seeded faults that still apply."""

import ast
import re
import sys
from collections import Counter
from importlib.metadata import packages_distributions

from tests.house.sources import (
    PACKAGE,
    REPOSITORY,
    imported_modules,
    is_program,
    lazy_imports,
    parsed,
    python_files,
    shown,
)
from tests.programs import ended, started
from tests.seeded_faults.__main__ import all_faults

FOLDERS = ("MaxText", "tests", "benchmarks")
FILES = [path for folder in FOLDERS for path in python_files(folder)]
ENTRY_SCRIPTS = {path for path in PACKAGE.glob("*.py") if is_program(path)}
TEXT_ENDINGS = {".py", ".md", ".yml", ".yaml", ".toml", ".txt", ".sh"}


def test_names_say_what_is_inside():
    unsaying = {"utils", "util", "common", "helpers", "helper", "misc"}
    paths = [*FILES, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    assert not [shown(path) for path in paths if path.stem in unsaying]


def test_names_of_classes_are_unique():
    names = Counter(
        node.name
        for path in python_files("MaxText")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


def test_every_file_says_what_it_is_for():
    with_code = [path for path in python_files("MaxText") if parsed(path).body]
    assert not [shown(path) for path in with_code if not ast.get_docstring(parsed(path))]


# Functions that exceed the limits of pyproject.toml for arguments or branches.
MAX_LONG_SIGNATURES = 17
MAX_COMPLEX_FUNCTIONS = 2


def test_exceptions_to_the_limits_of_functions_only_fall():
    texts = [
        line
        for folder in ("MaxText", "benchmarks", "examples")
        for path in python_files(folder)
        for line in path.read_text(encoding="utf-8").splitlines()
        if "# noqa:" in line
    ]
    assert sum("PLR09" in text for text in texts) <= MAX_LONG_SIGNATURES
    assert sum("C901" in text for text in texts) <= MAX_COMPLEX_FUNCTIONS


def test_only_programs_print():
    # Everything else reports through what it is given: a logger, an event stream, `log=print`.
    training = PACKAGE / "run" / "training.py"  # the body of the program train.py

    def is_print(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "print"

    calls = [
        f"{shown(path)}:{node.lineno}"
        for path in python_files("MaxText")
        if not is_program(path) and path != training
        for node in ast.walk(parsed(path))
        if is_print(node)
    ]
    assert not calls


_MODE = re.compile(r"[rwxabt+]{1,4}")


def _depends_on_locale(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the locale's encoding."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = ast.unparse(call.func).rpartition(".")[0]
    keywords = {keyword.arg for keyword in call.keywords}
    if name in ("run", "Popen", "check_output"):
        return bool({"text", "universal_newlines"} & keywords)
    if "encoding" in keywords or (name, owner) == ("read_text", ""):  # a function of our own
        return False
    if name in ("open", "fdopen"):
        arguments = [*call.args, *(one.value for one in call.keywords if one.arg == "mode")]
        strings = (ast.literal_eval(one) for one in arguments if isinstance(one, ast.Constant))
        is_binary = any("b" in one for one in strings if _MODE.fullmatch(str(one)))
        return not is_binary and owner not in ("os", "cls", "tarfile", "ts.KvStore")
    return name in ("read_text", "write_text", "TextIOWrapper")


def test_no_file_depends_on_the_encoding_of_the_locale():
    calls = [
        f"{shown(path)}:{node.lineno}"
        for path in python_files("MaxText")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and _depends_on_locale(node)
    ]
    assert not calls


def test_any_python_can_read_what_says_that_it_is_the_wrong_one():
    # RHEL 8 has Python 3.6 and Ubuntu 20.04 has 3.8.
    before = [PACKAGE / name for name in ("__init__.py", "installation.py", "program_start.py")]
    for path in (*ENTRY_SCRIPTS, *before):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 6))
    for path in ENTRY_SCRIPTS:
        imported = [one for one in imported_modules(path) if one.startswith("MaxText")]
        assert imported[:2] == ["MaxText", "MaxText.program_start"], shown(path)
    annotated = [
        node
        for node in ast.walk(parsed(PACKAGE / "installation.py"))
        if isinstance(node, ast.FunctionDef) and (node.returns or node.args.args)
    ]
    assert not annotated


def test_entry_scripts_are_never_imported():
    scripts = {f"MaxText.{path.stem}" for path in ENTRY_SCRIPTS}
    assert "MaxText.train" in scripts
    importing = [shown(path) for path in FILES if scripts.intersection(imported_modules(path))]
    assert not importing


def test_imports_inside_functions_are_listed(told):
    # Each keeps a slow library, such as jax, out of the first second of a program.
    told(
        "\n".join(
            sorted(
                f"{shown(path)}: {name}"
                for path in python_files("MaxText")
                for name in lazy_imports(path)
            )
        )
    )


# Modules that import what jax does not offer publicly: the coordinator's key-value store.
USERS_OF_PRIVATE_JAX = ["MaxText/runtime/peers.py"]


def test_private_modules_of_jax_are_imported_in_listed_places():
    users = [
        shown(path)
        for path in python_files("MaxText")
        if any("_src" in module.split(".") for module in imported_modules(path))
    ]
    assert users == USERS_OF_PRIVATE_JAX


def test_nothing_is_left_for_later():
    # An issue has an owner and a state; a mark in the text has neither.
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    folders = [*FOLDERS, "configs", "docs", ".ci"]
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    paths += REPOSITORY.glob("*")
    found = []
    for path in paths:
        if path.is_file() and path.suffix in TEXT_ENDINGS:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if marks.search(line):
                    found.append(f"{shown(path)}:{number}")
    assert not found


def test_each_fault_applies_and_names_tests_that_exist():
    faults = [fault for of_file in all_faults().values() for fault in of_file]
    names = Counter(fault.name for fault in faults)
    assert [name for name, count in names.items() if count > 1] == []
    for fault in faults:
        text = (REPOSITORY / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, fault.name
        assert fault.new != fault.old, fault.name
        assert fault.tests, fault.name
        for test in fault.tests:
            path, *parts = test.partition("[")[0].split("::")
            source = (REPOSITORY / path).read_text(encoding="utf-8")
            for part in parts:
                assert f"def {part}(" in source or f"class {part}" in source, (fault.name, test)


# Often installed next to this package; whether they are in this environment must not matter.
OFTEN_INSTALLED = {
    "datasets",
    "evaluate",
    "gcsfs",
    "sentencepiece",
    "tensorboard",
    "tensorflow",
    "torch",
    "transformers",
    "wandb",
    "webdataset",
}


def test_no_name_hides_another_module():
    # python MaxText/train.py puts MaxText/ first on the path until its first lines have run, and
    # so do debuggers and notebooks for longer.
    own = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    others = OFTEN_INSTALLED | set(sys.stdlib_module_names) | set(packages_distributions())
    assert not own & others


def test_configuration_and_preparation_do_without_jax():
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in (PACKAGE / "config").glob("*.py")
        if path.stem != "__init__"
    ]
    program = "\n".join(
        [
            "import sys",
            *(f"import {module}" for module in modules),
            "MaxText.config.loading.load_config('quickstart.yml')",
            "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)",
            "import MaxText.input_pipeline.prepare.prepare",
            "assert not {'jax', 'grain', 'flax', 'pyarrow', 'ftfy'} & set(sys.modules)",
        ]
    )
    with started(program, options=["-u"]) as process:
        assert ended(process) == (0, "")


# Package -> the packages and modules that it may import besides itself and the modules of MaxText
# (errors, ...), each below it in the order here. Programs may import everything.
BELOW = {
    "config": "",
    "storage": "",
    "runtime": "config storage",
    "hardware": "config runtime",
    "parallelism": "config",
    "layers": "config parallelism",
    "input_pipeline": "config storage runtime.cores runtime.first_process parallelism.mesh"
    " layers.batch",
    "training": "config parallelism layers",
    "checkpointing": "config storage runtime",
    "monitoring": "config storage runtime",
    "conversion": "config storage monitoring parallelism layers input_pipeline training"
    " checkpointing",
    "growth": "config parallelism layers training checkpointing conversion",
    "cost": "config storage runtime hardware parallelism layers input_pipeline training growth",
}
_LOWER = (
    "config storage runtime parallelism layers input_pipeline training checkpointing conversion"
)
BELOW |= {
    "compilation": f"{_LOWER} hardware growth cost",
    "inference": f"{_LOWER} growth compilation",
    "evaluation": f"{_LOWER} monitoring inference",
    "reports": "config storage monitoring",
    "run": f"{_LOWER} hardware monitoring growth cost compilation inference evaluation reports",
    "conformance": f"{_LOWER} growth cost",
    "launchers": "config storage runtime hardware checkpointing",
    "experiments": f"{_LOWER} hardware monitoring growth cost compilation inference evaluation"
    " reports run conformance launchers",
}


def test_imports_go_down():
    assert {*BELOW} == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for place, (name, below) in enumerate(BELOW.items()):
        below = below.split()
        assert {one.split(".")[0] for one in below} <= {*list(BELOW)[:place]}, name
        for path in (PACKAGE / name).rglob("*.py"):
            for module in imported_modules(path):
                inside = module.removeprefix("MaxText.")
                if inside != module and inside.split(".")[0] in BELOW:
                    allowed = any(f"{inside}.".startswith(f"{one}.") for one in (name, *below))
                    assert allowed, f"{shown(path)} imports {module}"
