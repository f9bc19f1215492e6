"""What the suite keeps to itself: its home, its cache, and the private names that it replaces."""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import configuration

from tests import conftest
from tests.house.sources import parsed, python_files, shown

MAX_PRIVATE_NAMES = 11  # one of them is of vLLM
REPLACING = ("setattr", "setitem", "delattr", "delitem", "patch", "patch.object", "patch.dict")


@pytest.mark.parametrize("has_cache", [True, False])
def test_nothing_is_written_to_the_users_home(has_cache, tmp_path, monkeypatch):
    others = ("XDG_CACHE_HOME", "HF_HUB_CACHE", "WANDB_DIR", "MPLCONFIGDIR")
    users = dict.fromkeys(("HOME", *others), "/home/u")
    monkeypatch.setattr(os, "environ", users | {"PATH": "/bin"})
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    homes, ends = [], []
    monkeypatch.setattr(configuration, "set_hypothesis_home_dir", homes.append)
    config = SimpleNamespace(add_cleanup=ends.append)
    if has_cache:
        config.cache = SimpleNamespace(mkdir=lambda name: tmp_path / name)
    conftest.pytest_configure(config)
    home = Path(os.environ["HOME"])
    assert os.environ == {"HOME": str(home), "PATH": "/bin"}
    assert homes == [home / "hypothesis"]
    if has_cache:
        assert (home, ends) == (tmp_path / "home", [])
    else:
        assert home.is_dir()
        conftest.pytest_configure(SimpleNamespace(workerinput={}))
        assert (os.environ["HOME"], homes[1:]) == (str(home), homes[:1])
        ends[0]()
        assert not home.exists()


def replaced(tree: ast.AST) -> Iterator[ast.AST]:
    """What a test's module assigns to, or hands to a function that replaces it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(REPLACING):
            yield from node.args[:2]
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (part for part in parts if not ast.unparse(part).startswith("self."))


def is_private(node: ast.AST) -> bool:
    """Whether it is an attribute's name, or a text with a name, such as a._b."""
    if isinstance(node, ast.Constant):
        names = str(node.value).split(".")[-1:]
    else:
        names = [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    return any(name.startswith("_") and not name.startswith("__") for name in names)


def test_few_private_names_are_replaced():
    found = [
        f"{shown(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in python_files("tests")
        for node in replaced(parsed(path))
        if is_private(node)
    ]
    assert len(found) <= MAX_PRIVATE_NAMES, "\n".join(found)
