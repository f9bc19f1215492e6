"""What holds for the files of MaxText/configuration and for the declaration of keys."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from MaxText.configuration import config_files
from MaxText.configuration.catalogue import all_keys, build, flat
from MaxText.configuration.keys import Section
from MaxText.configuration.schema import Config

FOLDER = config_files.REPOSITORY / "MaxText" / "configuration"
FILES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_short_and_named_for_what_they_hold(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600
    assert path.stem not in {"utils", "common", "helpers", "misc"}
    if path.stem != "__init__":
        assert importlib.util.find_spec(path.stem) is None, f"{path.stem} hides another module"


def test_no_module_imports_jax_or_numpy():
    modules = [f"MaxText.configuration.{path.stem}" for path in FILES if path.stem != "__init__"]
    program = (
        f"import sys; sys.path.insert(0, {str(config_files.REPOSITORY)!r})\n"
        + "".join(f"import {module}\n" for module in modules)
        + "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sections_are_frozen_and_refuse_unknown_fields():
    with pytest.raises(ValueError, match="frozen"):
        Config().run.steps = 3
    with pytest.raises(ValueError, match="Extra inputs"):
        Config.model_validate({"run": {"stepz": 3}})

    def sections(section: type[Section]):
        yield section
        for field in section.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield from sections(field.annotation)

    for section in sections(Config):
        assert section.__doc__, section


def test_flat_and_build_are_inverse():
    config = Config()
    assert build(flat(config)) == config
    assert list(flat(config)) == list(all_keys())
