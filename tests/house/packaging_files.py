"""pyproject.toml and constraints.txt, parsed."""

import tomllib

from packaging.requirements import Requirement

from tests.house.sources import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> list[Requirement]:
    """The lines of constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, extras included."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]
