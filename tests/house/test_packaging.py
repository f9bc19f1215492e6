"""Installation: versions that fit each other, and scripts that run."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from MaxText import package_versions
from MaxText.errors import UserError
from tests.house.sources import REPOSITORY, imported_modules, python_files, shown

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def pins() -> list[Requirement]:
    """The lines of constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for, extras included."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def holds_for(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def pinned(python: str) -> dict[str, str]:
    """Version by name for one Python; refuses two pins of one name."""
    versions = {}
    for pin in pins():
        if holds_for(pin, python):
            name = canonicalize_name(pin.name)
            assert name not in versions, f"{name} is pinned twice for Python {python}"
            (specifier,) = pin.specifier
            assert specifier.operator == "==", f"{pin} is not an exact version"
            versions[name] = specifier.version
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_satisfy_the_declared_ranges(python):
    versions = pinned(python)
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name == canonicalize_name(PROJECT["name"]) or not holds_for(requirement, python):
            continue
        if name in versions:
            assert requirement.specifier.contains(versions[name]), (requirement, versions[name])
        else:
            # Beam's own pins contradict these.
            assert name == "apache-beam", f"{name} has no pin"


# A release of these removes functions that are used here: the first one that is refused.
NEXT_RELEASES = {
    "filelock": "5.0",
    "flax": "0.13.0",
    "grain": "0.3.0",
    "huggingface-hub": "3.0",
    "jax": "0.13.0",
    "lm-eval": "0.5.0",
    "numpy": "3.0.0",
    "optax": "0.3.0",
    "orbax-checkpoint": "0.13.0",
    "plotly": "8.0",
    "protobuf": "8.30.0",
    "pydantic": "3.0",
    "qwix": "0.2.0",
    "safetensors": "1.0",
    "tensorflow": "3.0",
    "tokenizers": "1.0",
    "torch": "3.0",
    "transformers": "6.0.0",
}


@pytest.mark.parametrize("name", NEXT_RELEASES)
def test_releases_that_break_are_not_installed(name):
    ranges = [one.specifier for one in requirements() if canonicalize_name(one.name) == name]
    assert ranges
    for specifier in ranges:
        assert not specifier.contains(NEXT_RELEASES[name], prereleases=True)


def test_bounds_at_start_are_those_of_installation():
    for name, (first_broken, _) in package_versions.FIRST_BROKEN.items():
        for requirement in requirements():
            if canonicalize_name(requirement.name) == name:
                assert f"<{first_broken}" in str(requirement.specifier).split(",")


@pytest.mark.parametrize("version", ["0.13.0", "0.13.0rc1", "1.0", "1"])
def test_releases_that_break_are_known(version, monkeypatch):
    versions = {"jax": "0.12.0.1", "orbax-checkpoint": version}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    with pytest.raises(UserError, match=f"orbax-checkpoint {version} is installed"):
        package_versions.check_versions()
    versions["orbax-checkpoint"] = "0.12.99"
    package_versions.check_versions()


@pytest.mark.parametrize("program", ["train.py", "plan.py", "convert.py", "launch.py"])
def test_a_package_that_breaks_is_named_at_start(program, tmp_path):
    # As `pip install --upgrade` of another package leaves it; the first one on the path counts.
    information = tmp_path / "orbax_checkpoint-1.0.0.dist-info"
    information.mkdir()
    text = "Metadata-Version: 2.1\nName: orbax-checkpoint\nVersion: 1.0.0\n"
    (information / "METADATA").write_text(text)
    done = subprocess.run(
        [sys.executable, REPOSITORY / "MaxText" / program, "--help"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: orbax-checkpoint 1.0.0 is installed")
    assert "pip install 'orbax-checkpoint<0.13'" in done.stderr


def test_the_extras_ask_for_the_same_jax():
    ranges = {str(r.specifier) for r in requirements() if canonicalize_name(r.name) == "jax"}
    assert len(ranges) == 1


@pytest.mark.parametrize(
    "name", ["constraints.txt", "requirements_gpu.txt", "requirements_tpu.txt", "pyproject.toml"]
)
def test_no_file_names_a_download_address(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host", text)


def test_the_changelog_begins_with_this_version():
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["DEVICE=abacus"], "DEVICE=abacus is none of cpu, tpu, gpu"),
        (["gpu"], "unknown argument 'gpu'"),
        (["PYTHON=no-such-python"], "needs Python 3.11 or newer; no-such-python: does not run"),
        (["PYTHON=no-such-python"], "sudo apt-get install python3.12"),
    ],
    ids=["device", "argument", "python", "remedy"],
)
def test_setup_refuses_what_it_does_not_know(arguments, message, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("DEVICE", "PYTHON")}
    (tmp_path / "setup.sh").write_bytes((REPOSITORY / "setup.sh").read_bytes())
    done = subprocess.run(
        ["bash", tmp_path / "setup.sh", *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["setup.sh"]


def test_the_main_line_and_the_oldest_generation():
    minor_releases = {python: ".".join(pinned(python)["jax"].split(".")[:2]) for python in PYTHONS}
    assert minor_releases == {"3.11": "0.10", "3.12": "0.12", "3.13": "0.12", "3.14": "0.12"}
    for python in PYTHONS:
        assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def run_setup(tmp_path, versions: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Runs a copy of setup.sh with these Pythons on the PATH, which cannot make an environment."""
    for name, version in versions.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        # Answers the two questions of setup.sh.
        lines = (
            "#!/bin/sh",
            f"case $2 in *python_version*) echo {version} ;; *exit*) ;; *) exit 1 ;; esac",
        )
        program.write_text("\n".join(lines))
        program.chmod(0o755)
    for path in REPOSITORY.glob("*"):
        if path.suffix in (".sh", ".toml", ".txt"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    environment = {k: v for k, v in os.environ.items() if k not in ("DEVICE", "PYTHON")}
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    command = ["bash", tmp_path / "setup.sh", "DEVICE=cpu", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    return done


def test_setup_takes_the_newest_python(tmp_path):
    versions = {"python3.14": "3.14.0", "python3.13": "3.13.5", "python3": "3.12.1"}
    done = run_setup(tmp_path, versions)
    assert done.stdout.startswith("Python 3.14.0, DEVICE=cpu (named)\n"), done.stdout
    assert "jax 0.10" not in done.stdout


def test_setup_says_what_an_old_python_lacks(tmp_path):
    done = run_setup(tmp_path, {"python3.11": "3.11.9"}, "PYTHON=python3.11")
    assert done.stdout.startswith("Python 3.11.9, DEVICE=cpu (named)\n"), done.stdout
    assert "gets jax 0.10, the last one for it, and no newer compilers" in done.stdout
    assert "Python 3.12 to 3.14 get jax 0.12: PYTHON=python3.13 bash setup.sh" in done.stdout


def test_ci_runs_the_commands_of_the_readme():
    # The same two programs, so that what the README promises is what is checked.
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nbash setup.sh && .venv/bin/python -m pytest -n auto\n" in readme
    # The main job is one command, too, which stops where the set-up fails.
    main_job = "bash setup.sh && .venv/bin/python MaxText/train.py configs/quickstart.yml"
    assert f"```bash\n{main_job}\n```" in readme
    assert re.search(r"^bash setup\.sh$", ci, re.MULTILINE)
    assert re.search(r"^\.venv/bin/python -m pytest -n auto$", ci, re.MULTILINE)
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)


def test_imports_and_declared_dependencies_agree():
    distributions = packages_distributions()
    imported: dict[str, set[str]] = {}
    for path in python_files("MaxText"):
        for module in imported_modules(path):
            top = module.partition(".")[0]
            if top not in {"MaxText", "compression", *sys.stdlib_module_names}:  # stdlib from 3.14
                imported.setdefault(top, set()).add(shown(path))
    distributions.setdefault("mlflow", ["mlflow-skinny"])
    names = {
        top: {canonicalize_name(name) for name in distributions.get(top, [top])} for top in imported
    }
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    optional = {
        canonicalize_name(Requirement(line).name)
        for lines in PROJECT["optional-dependencies"].values()
        for line in lines
    }
    undeclared = {top: imported[top] for top in imported if not names[top] & (core | optional)}
    assert not undeclared
    assert not core - set().union(*names.values()), "declared and never imported"
