"""The files that the house rules are about, and how to read and import them."""

import ast
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "MaxText"


def python_files(folder: str) -> list[Path]:
    """All Python files below a folder of the repository."""
    return sorted((REPOSITORY / folder).rglob("*.py"))


def shown(path: Path) -> str:
    """A path as messages name it."""
    return path.relative_to(REPOSITORY).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_program(path: Path) -> bool:
    """Whether the file is meant to be run: it ends in an `if __name__ == "__main__":`."""
    return any(
        isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for node in parsed(path).body
    )


def imported_modules(path: Path) -> Iterator[str]:
    """The full name of every module that a file imports, anywhere in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def lazy_imports(path: Path) -> set[str]:
    """The modules that a file imports inside functions."""
    functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
    inside = [node for function in functions for node in ast.walk(function)]
    found = {node.module for node in inside if isinstance(node, ast.ImportFrom) and node.module}
    return found | {
        alias.name for node in inside if isinstance(node, ast.Import) for alias in node.names
    }


@functools.cache
def main_of(program: str) -> Callable[[], int | None]:
    """The function main of a program, for this process; it reads sys.argv."""
    spec = importlib.util.spec_from_file_location(f"program_{program[:-3]}", PACKAGE / program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def run_main(program: str, arguments: Sequence[str]) -> int:
    """Runs the main of a program in this process; returns its exit code."""
    # The environment says that the allocator is set, so the program does not restart itself.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", [program, *arguments]),
    ):
        try:
            return main_of(program)() or 0
        except SystemExit as stopped:
            return stopped.code or 0
