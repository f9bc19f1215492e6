"""What may import what, and that no module of ours hides somebody else's."""

import subprocess
import sys
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.packaging_files import PROJECT
from tests.house.sources import PACKAGE, REPOSITORY, imported_modules, python_files, shown

# Often installed beside us; whether they are in this environment must not matter.
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
    ours = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    others = OFTEN_INSTALLED | set(sys.stdlib_module_names) | set(packages_distributions())
    assert not ours & others


def test_the_configuration_is_checked_without_jax():
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in (PACKAGE / "configuration").glob("*.py")
        if path.stem != "__init__"
    ]
    program = "\n".join(
        [
            f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})",
            *(f"import {module}" for module in modules),
            "MaxText.configuration.loading.configure('quickstart.yml')",
            "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_imports_and_declared_dependencies_agree():
    distributions = packages_distributions()
    imported: dict[str, set[str]] = {}
    for path in python_files("MaxText"):
        for module in imported_modules(path):
            top = module.partition(".")[0]
            if top != "MaxText" and top not in sys.stdlib_module_names:
                imported.setdefault(top, set()).add(shown(path))
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
