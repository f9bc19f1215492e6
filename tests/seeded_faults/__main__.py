"""Counts how many deliberate faults the default suite catches.

    python -m tests.seeded_faults                      # all of them
    python -m tests.seeded_faults training.yml rotary  # those of a file, or with a word in the name

Each fault of the YAML files here replaces one piece of text in a copy of the repository, and the
tests named next to it are run there until one fails. Exits with 1 if a fault was missed, or if too
few of all were caught.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """One entry of a file."""

    name: str  # unique among all
    fault: str
    file: str  # the file it changes, from the root of the repository
    old: str  # text that occurs once in the file
    new: str
    tests: Sequence[str] = ()  # files, or single tests, of the default suite that should fail

    def apply(self, root: pathlib.Path) -> str:
        """Writes the fault into a copy of the repository; returns the text that was there."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: `old` stands {text.count(self.old)} times in {path}")
        path.write_text(text.replace(self.old, self.new))
        return text


def all_faults() -> dict[str, list[Fault]]:
    """The faults by the name of their file."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.yml"))
    return {
        path.name: [Fault(**entry) for entry in yaml.safe_load(path.read_text())] for path in files
    }


def copy_of_repository(folder: pathlib.Path) -> pathlib.Path:
    """Copies what git tracks, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    root = folder / "repository"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def failed(root: pathlib.Path, tests: Sequence[str], cache: pathlib.Path) -> bool:
    """Whether one of the tests fails there."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}", *tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults")
    parser.add_argument("words", nargs="*", help="names of files, or words in names of faults")
    words = parser.parse_args().words
    chosen = [
        fault
        for name, faults in all_faults().items()
        for fault in faults
        if not words or any(word == name or word in fault.name for word in words)
    ]
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of_repository(pathlib.Path(folder))
        for number, fault in enumerate(chosen, 1):
            begun = time.monotonic()
            text = fault.apply(root)
            caught = failed(root, fault.tests, pathlib.Path(folder) / "cache")
            (root / fault.file).write_text(text)
            if not caught:
                missed.append(fault.name)
            print(
                f"[{number}/{len(chosen)}] {'caught' if caught else 'MISSED'} {fault.name} "
                f"({time.monotonic() - begun:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    if missed:
        print("missed:", *missed, sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
