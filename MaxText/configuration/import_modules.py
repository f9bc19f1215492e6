"""`import_modules`: imports the modules that register a user's own parts.

Code runs only because the user named it, on the command line, in the environment or in a config
file they passed, and never because a checkpoint or a data set names it.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from MaxText.configuration import config_files, registry, values
from MaxText.configuration.layering import Layer, Setting
from MaxText.configuration.problems import Problem

KEY = "import_modules"
# In a checkpoint's metadata: {module: SHA-256 of its source}.
METADATA = "imported_modules"

_hashes: dict[str, str] = {}  # by name as the user wrote it
_files: dict[Path, tuple[str, ModuleType]] = {}  # path -> (SHA-256, module)


def import_named(settings: Sequence[Setting]) -> list[Problem]:
    """Imports what the winning setting of `import_modules` names; modules already there stay.

    Returns:
      One problem for each module that cannot be imported.
    """
    setting = next((one for one in reversed(settings) if one.name == KEY), None)
    if setting is None:
        return []
    try:
        names = values.convert(as_list(setting.value), tuple[str, ...])
    except values.WrongValue:
        return []  # said where all types are checked
    if setting.origin.layer is Layer.SAVED_CONFIG and setting.origin.file is None:
        missing = [name for name in names if name not in _hashes]
        return [_not_named(missing, setting.place)] if missing else []
    beside = setting.origin.file.parent if setting.origin.file else None
    return [problem for name in names if (problem := _import(name, setting.place, beside))]


def as_list(value: Any) -> Any:
    """One module needs no brackets."""
    return [value] if isinstance(value, str) and value and not values.is_null(value) else value


def _not_named(names: Sequence[str], place: str) -> Problem:
    return Problem(
        f"{KEY}: the model has parts of {', '.join(names)}, and code runs only if you name it",
        (place,),
        (("add", f"{KEY}=[{','.join(names)}], if you trust that code"),),
    )


def _import(name: str, place: str, beside: Path | None) -> Problem | None:
    try:
        _hashes[name] = _import_file(name, beside) if name.endswith(".py") else _import_module(name)
    except config_files.FileProblem as error:
        return Problem(f"{KEY}: {error}", (place,))
    except Exception as error:  # a module of the user's can raise anything
        where = _last_line(error)
        what = str(error) if isinstance(error, registry.RegistrationError) else _named(error)
        return Problem(f"{KEY}: {name} cannot be imported: {what}", (place, *where))
    return None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _last_line(error: Exception) -> tuple[str, ...]:
    """The last line outside of this package where an error was raised."""
    if isinstance(error, registry.RegistrationError):
        return ()
    if isinstance(error, SyntaxError) and error.filename:
        return (f"{error.filename}:{error.lineno}",)
    package = str(Path(__file__).resolve().parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((package, "<")) and "importlib" not in frame.filename:
            return (f"{frame.filename}:{frame.lineno}",)
    return ()


def _import_module(name: str) -> str:
    # `python MaxText/train.py` looks for modules beside itself, not in the current folder.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(name)
    finally:
        sys.path.remove(here)
    return _sha256(Path(module.__file__)) if module.__file__ else ""


def _import_file(name: str, beside: Path | None) -> str:
    path = _find(name, beside)
    digest = _sha256(path)
    if path in _files and _files[path][0] == digest:
        return digest
    registry.forget(str(path))
    spec = importlib.util.spec_from_file_location(f"maxtext_parts_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        registry.forget(str(path))
        raise
    _files[path] = (digest, module)
    return digest


def _find(name: str, beside: Path | None) -> Path:
    given = Path(name).expanduser()
    folders = [Path.cwd(), *([beside] if beside else []), config_files.REPOSITORY]
    for folder in folders:
        if (folder / given).is_file():
            return (folder / given).resolve()
    raise config_files.FileProblem(
        Problem(
            f"there is no file {name}, neither in the current folder nor in that of the config file"
        )
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def imported(names: Sequence[str]) -> dict[str, str]:
    """Module, as the user named it -> SHA-256 of its source; for a checkpoint's metadata."""
    return {name: _hashes[name] for name in names if name in _hashes}


def changes(metadata: Mapping[str, Any]) -> list[str]:
    """One warning for each module whose source is another than when a checkpoint was saved."""
    recorded = metadata.get(METADATA) or {}
    return [
        f"warning: {name} has changed since the checkpoint was saved"
        for name, digest in recorded.items()
        if _hashes.get(name, digest) != digest
    ]
