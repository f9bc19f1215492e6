"""Stand-ins for the programs of clouds and schedulers.

<program>.calls has a JSON list of arguments per call, <program>.answers one [code, output, errors]
per call to come; with none left a call succeeds and prints nothing."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

_PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__)
calls, answers = here.with_suffix(".calls"), here.with_suffix(".answers")
with calls.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
waiting = answers.read_text().splitlines() if answers.exists() else []
code, output, errors = json.loads(waiting[0]) if waiting else (0, "", "")
answers.write_text("\\n".join(waiting[1:]))
sys.stdout.write(output)
sys.stderr.write(errors)
sys.exit(code)
"""


class StandIn:
    """One program in a folder that is first on PATH."""

    def __init__(self, folder: Path, name: str):
        self._file = folder / name
        self._file.write_text(_PROGRAM)
        self._file.chmod(self._file.stat().st_mode | stat.S_IXUSR)

    def will_answer(self, *answers: tuple[int, str, str]) -> None:
        """What the next calls do: (code, output, errors) each."""
        lines = [json.dumps(answer) for answer in answers]
        self._file.with_suffix(".answers").write_text("\n".join(lines))

    @property
    def calls(self) -> list[list[str]]:
        """Arguments of each call so far."""
        calls = self._file.with_suffix(".calls")
        return [*map(json.loads, calls.read_text().splitlines())] if calls.exists() else []


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a stand-in for the program of a name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda name: StandIn(folder, name)
