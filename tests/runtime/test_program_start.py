"""Programs in the wrong Python, and in locales that are not UTF-8."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from MaxText import installation, program_start
from tests.house.sources import PACKAGE, is_program

PROGRAMS = sorted(path for path in PACKAGE.glob("*.py") if is_program(path))
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


def run(command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        cwd=PACKAGE.parent,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_python_without_the_packages_is_answered_with_one_line(path, monkeypatch):
    # -S leaves out site-packages, -P the folder of the script.
    for command in (["-S", str(path)], ["-S", "-m", f"MaxText.{path.stem}"]):
        done = run([*command, "my_parts.py"])
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith("error: jaxpretrain is not installed in this Python: etils")
        assert sys.executable in line
        assert "bash setup.sh" in line or ".venv/bin/python" in line
        assert (done.returncode, done.stdout) == (2, b"")


def test_the_environment_of_the_clone_is_named_where_there_is_one(tmp_path):
    clone = tmp_path / "clone"
    (clone / "MaxText").mkdir(parents=True)
    for path in [PACKAGE / f"{name}.py" for name in ("__init__", "installation")]:
        (clone / "MaxText" / path.name).write_bytes(path.read_bytes())
    program = "from MaxText import installation; print(installation.problem())"

    def problem():
        done = subprocess.run(
            [sys.executable, "-S", "-c", program], cwd=clone, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    assert problem().endswith(
        "Run bash setup.sh in the clone and use .venv/bin/python, or pip install it here.\n"
    )
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert problem().endswith(f"Use {python}, or source {python.parent}/activate.\n")


def test_an_import_in_the_wrong_python_is_an_import_error(monkeypatch):
    monkeypatch.setattr(installation, "REQUIRED_MODULES", ("no_such_module",))
    with pytest.raises(ImportError, match="no_such_module missing"):
        installation.check()
    monkeypatch.setattr(installation, "OLDEST_PYTHON", (4, 1))
    with pytest.raises(ImportError, match=r"needs Python 4\.1 or newer") as refusal:
        installation.check()
    assert "pip install it here" not in str(refusal.value)


def test_the_required_modules_are_installed_by_the_package():
    distributions = packages_distributions()
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    core = text.partition("dependencies = [")[2].partition("]\n\n")[0].lower().replace("-", "_")
    for name in installation.REQUIRED_MODULES:
        names = [one.lower().replace("-", "_") for one in distributions[name]]
        assert any(f'"{one}' in core for one in names), name


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("prompt=é".encode(), "prompt=é"),
        ("name=Zürich 東京".encode(), "name=Zürich 東京"),
        (b"plain=1", "plain=1"),
    ],
)
def test_arguments_are_utf8_whatever_the_locale(argument, expected):
    program = (
        "import sys; sys.path.insert(0, '.'); from MaxText import program_start\n"
        "program_start.install('__main__')\n"
        "print(ascii(sys.argv[1]), sys.getfilesystemencoding(), ascii(open('/dev/null').encoding))"
    )
    done = run(["-c", program, argument], **ASCII)
    assert done.stdout.decode() == f"{expected!a} utf-8 'utf-8'\n", done.stderr


def test_an_argument_of_another_locale_is_transcoded():
    # What a Latin-1 locale makes of the byte E9, and of the two bytes of UTF-8.
    latin = b"prompt=\xe9".decode("latin-1")
    assert program_start._utf8_argument(latin) == "prompt=é".encode()
    assert program_start._utf8_argument("prompt=\udcc3\udca9") == "prompt=é".encode()
    assert program_start._utf8_argument("prompt=\udce9") == b"prompt=\xe9"


def test_a_program_in_an_ascii_locale_writes_utf8(tmp_path: Path):
    name = "Zürich"
    command = ["MaxText/train.py", "--show-config", f"prompt={name}", "dataset_path=d"]
    done = run(command, **ASCII)
    assert done.returncode == 0, done.stderr
    assert b"Z\\xfcrich" in done.stdout  # the terminal keeps its encoding
    done = run(command, LC_ALL="C.UTF-8")
    assert name in done.stdout.decode()


def test_restarting_happens_once_and_only_if_needed(monkeypatch):
    restarts = []
    monkeypatch.setattr(program_start, "_reexec", lambda *arguments: restarts.append(arguments))
    monkeypatch.setattr(program_start.locale, "getpreferredencoding", lambda _: "ISO-8859-1")
    program_start.reexec_in_utf8()
    ((_, environment),) = restarts
    assert environment["PYTHONUTF8"] == "1"
    monkeypatch.setenv(program_start._UTF8, environment[program_start._UTF8])
    program_start.reexec_in_utf8()  # -E ignores PYTHONUTF8
    assert program_start._UTF8 not in os.environ
    monkeypatch.setattr(program_start.locale, "getpreferredencoding", lambda _: "utf8")
    program_start.reexec_in_utf8()
    assert len(restarts) == 1


def test_strict_settings_of_jax_are_undone_with_a_note(monkeypatch, capsys):
    for name in program_start._JAX_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "raise")
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "strict")
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    program_start.relax_jax_settings()
    assert os.environ["JAX_NUMPY_RANK_PROMOTION"] == "allow"
    assert os.environ["JAX_NUMPY_DTYPE_PROMOTION"] == "standard"
    assert os.environ["JAX_DISABLE_JIT"] == "false"
    assert len(capsys.readouterr().err.splitlines()) == 3
    program_start.relax_jax_settings()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES"])
def test_a_setting_that_jax_refuses_is_one_line(name):
    program = (
        "import sys; sys.path.insert(0, '.'); from MaxText import program_start\n"
        "program_start.install('__main__')\n"
        "import jax"
    )
    done = run(["-c", program], **{name: "nonsense"})
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: jax refuses a JAX_... variable of the environment: ")
    assert done.returncode == 2
    done = run(["-c", program + "; raise ValueError('else')"], JAX_ENABLE_X64="0")
    assert (done.returncode, b"ValueError: else" in done.stderr) == (1, True)
