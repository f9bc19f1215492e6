"""`import_modules`: imports of modules with a user's own parts.

Code runs only because the user named it on the command line, in the environment or in a config file
they passed, never because a checkpoint or a dataset names it.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.config import config_files, registry, schema, sources, values
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.sources import CheckpointConfig, CollectedSettings, Setting

KEY = "import_modules"

_names: dict[str, str] = {}  # as the user wrote it -> of the module
_hashes: dict[str, str] = {}  # name of a module -> SHA-256 of the source that was executed


def collect(
    arguments: Sequence[str],
    overrides: Mapping[str, Any] = {},
    own: CheckpointConfig | None = None,
    files: Sequence[str] = (),
) -> CollectedSettings:
    """Imports the modules named by the settings, then calls sources.collect.

    Raises ConfigurationError for one that cannot be imported. One that was imported before and has
    not changed stays.
    """
    collected = sources.collect(arguments, overrides, own, files)
    setting = collected.last(KEY)
    if setting is None:
        return collected
    try:
        names = names_in(setting)
    except values.InvalidValueError:
        return collected  # said where all types are checked
    if problems := [problem for name in names if (problem := _import(name, setting.place))]:
        raise ConfigurationError(problems)
    # Environment variables of the new keys count now.
    collected = sources.collect(arguments, overrides, own, files)
    collected.notices += changes({sources.IMPORTED: collected.imported}, "the configuration")
    return collected


def names_in(setting: Setting) -> tuple[str, ...]:
    """Returns the modules in `import_modules`; files from the current folder."""
    next_to = setting.origin.file.parent if setting.origin.file else None
    value = setting.value
    if isinstance(value, str) and value and not values.is_null(value):
        value = [value]
    names = values.convert(value, tuple[str, ...])
    return tuple(_from_here(name, next_to) if name.endswith(".py") else name for name in names)


def _from_here(name: str, next_to: Path | None) -> str:
    given = Path(name).expanduser()
    for folder in [Path.cwd(), *([next_to] if next_to else []), config_files.REPOSITORY]:
        if (folder / given).is_file():
            path = (folder / given).resolve()
            inside = path.is_relative_to(Path.cwd())
            return str(path.relative_to(Path.cwd()) if inside else path)
    return name


def check_named(config_flat: Mapping[str, Any], place: str) -> None:
    """Raises ConfigurationError if a checkpoint's modules are not imported."""
    names = config_flat.get(KEY) or ()
    if missing := [name for name in names if not _found(name, names)]:
        what = f"{KEY}: the model has parts of {', '.join(missing)}"
        add = f"{KEY}=[{','.join(missing)}]: code runs only if you name it"
        raise ConfigurationError([ConfigIssue(what, (place,), (("add", add),))])


def _import(name: str, place: str) -> ConfigIssue | None:
    if name.endswith(".py") and not Path(name).is_file():
        where = "neither in the current folder nor in that of the config file"
        return ConfigIssue(f"{KEY}: there is no file {name}, {where}", (place,))
    before = registry.registrations()
    try:
        _load(name)
    except (Exception, SystemExit) as error:  # a module of the user's can raise anything
        registry.keep_only(before)
        if isinstance(error, registry.RegistrationError):
            return ConfigIssue(f"{KEY}: {name}: {error}", (place,))
        what, *_ = str(error).strip().splitlines() or [""]
        what = f"{type(error).__name__}: {what}" if what else type(error).__name__
        facts = (("raised", _last_line(error)),)
        return ConfigIssue(f"{KEY}: {name} cannot be imported: {what}", (place,), facts)
    return None


def forget(parts: Sequence[registry.Registration]) -> None:
    """Undoes all imports, leaving only these parts registered."""
    registry.keep_only(parts)
    _names.clear()
    _hashes.clear()


def _last_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{config_files.short_path(Path(error.filename))}:{error.lineno}"
    others = (str(Path(__file__).resolve().parents[1]), sys.prefix, sys.base_prefix, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f"{config_files.short_path(Path(frame.filename))}:{frame.lineno}"
    return ""


def _load(name: str) -> None:
    """Imports a module, or executes changed source again."""
    is_new = False
    if name.endswith(".py"):
        path = Path(name).resolve()
        # Other files have the same stem.
        folder = hashlib.sha256(bytes(path.parent)).hexdigest()[:8]
        spec = importlib.util.spec_from_file_location(f"maxtext_parts_{folder}_{path.stem}", path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
    else:
        # `python MaxText/train.py` looks for modules in MaxText/, not in the current folder.
        here = str(Path.cwd())
        sys.path.insert(0, here)
        try:
            importlib.invalidate_caches()
            is_new = name not in sys.modules
            module = importlib.import_module(name)
        finally:
            sys.path.remove(here)
        path = Path(module.__file__ or "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else ""
    if digest and not is_new and _hashes.get(module.__name__) != digest:
        sys.modules[module.__name__] = module  # dataclasses look their module up
        _hashes.pop(module.__name__, None)  # source that fails is executed again next time
        registry.forget(str(path))
        # Never bytecode, which looks current where a file changed twice within a second.
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    schema.all_keys()  # raises RegistrationError for keys of new parts that cannot be added
    _names[name], _hashes[module.__name__] = module.__name__, digest


def imported(names: Sequence[str]) -> dict[str, str]:
    """Returns module, as the user named it -> SHA-256 of its source."""
    return {name: _hashes[_names[name]] for name in names if name in _names}


def changes(metadata: Mapping[str, Any], what: str = "the checkpoint") -> list[str]:
    """Returns a warning for each module changed since `what` was saved."""
    recorded = metadata.get(sources.IMPORTED) or {}
    return [
        f"warning: {name} has changed since {what} was saved"
        for name, digest in recorded.items()
        if digest not in (_found(name, recorded) or [digest])
    ]


def _found(name: str, recorded: Collection[str]) -> list[str]:
    if name in _names:
        return [_hashes[_names[name]]]
    others = {other: module for other, module in _names.items() if other not in recorded}
    return [_hashes[of] for other, of in others.items() if Path(other).name == Path(name).name]
