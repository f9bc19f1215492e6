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

# Name as the user wrote it -> name of the module.
_names: dict[str, str] = {}
# Name of a module -> SHA-256 of the source that was executed.
_hashes: dict[str, str] = {}


def collect(
    arguments: Sequence[str],
    overrides: Mapping[str, Any] = {},
    recorded: CheckpointConfig | None = None,
    files: Sequence[str] = (),
) -> CollectedSettings:
    """Imports the modules named by the settings, then calls sources.collect.

    A module that was imported before and has not changed is not imported again.

    Args:
      arguments: As of sources.collect.
      overrides: As of sources.collect.
      recorded: As of sources.collect.
      files: As of sources.collect.

    Raises:
      ConfigurationError: modules cannot be imported.
    """
    collected = sources.collect(arguments, overrides, recorded, files)
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
    collected = sources.collect(arguments, overrides, recorded, files)
    collected.notices += changes({sources.IMPORTED: collected.imported}, "the configuration")
    return collected


def names_in(setting: Setting) -> tuple[str, ...]:
    """Returns the modules in `import_modules`; files as paths from the current folder.

    Raises:
      InvalidValueError: the value is no list of names.
    """
    next_to = setting.origin.file.parent if setting.origin.file else None
    value = setting.value
    if isinstance(value, str) and value and not values.is_null(value):
        value = [value]
    names = values.convert(value, tuple[str, ...])
    return tuple(_from_here(name, next_to) if name.endswith(".py") else name for name in names)


def _from_here(name: str, next_to: Path | None) -> str:
    """Returns the path of a file from the current folder, or its name if it is nowhere.

    Args:
      name: As the user wrote it.
      next_to: Folder of the config file that names it, if one does.
    """
    written_path = Path(name).expanduser()
    for folder in (Path.cwd(), next_to, config_files.REPOSITORY):
        if folder is None or not (folder / written_path).is_file():
            continue
        path = (folder / written_path).resolve()
        is_inside = path.is_relative_to(Path.cwd())
        return str(path.relative_to(Path.cwd()) if is_inside else path)
    return name


def check_named(config_flat: Mapping[str, Any], location: str) -> None:
    """Raises ConfigurationError if a checkpoint's modules are not imported.

    Args:
      config_flat: The checkpoint's configuration, by key.
      location: Of the checkpoint, for the message.
    """
    names = config_flat.get(KEY) or ()
    missing = [name for name in names if not _imported_hashes(name, names)]
    if missing:
        remedy = f"{KEY}=[{','.join(missing)}]: code runs only if you name it"
        issue = ConfigIssue(
            message=f"{KEY}: the model has parts of {', '.join(missing)}",
            location=(location,),
            context=(("add", remedy),),
        )
        raise ConfigurationError([issue])


def _import(name: str, location: str) -> ConfigIssue | None:
    """Imports a module; returns the issue of one that cannot be imported, without its parts.

    Args:
      name: A module, or the path of a file that ends in .py.
      location: Where the user named it.
    """
    if name.endswith(".py") and not Path(name).is_file():
        return ConfigIssue(
            message=f"{KEY}: there is no file {name}, neither in the current folder nor in that of "
            "the config file",
            location=(location,),
        )
    earlier_parts = registry.registrations()
    try:
        _load(name)
    except (Exception, SystemExit) as error:  # a module of the user's can raise anything
        registry.keep_only(earlier_parts)
        if isinstance(error, registry.RegistrationError):
            return ConfigIssue(message=f"{KEY}: {name}: {error}", location=(location,))
        first_line, *_ = str(error).strip().splitlines() or [""]
        reason = type(error).__name__ + (f": {first_line}" if first_line else "")
        return ConfigIssue(
            message=f"{KEY}: {name} cannot be imported: {reason}",
            location=(location,),
            context=(("raised", _last_line(error)),),
        )
    return None


def forget(parts: Sequence[registry.Registration]) -> None:
    """Undoes all imports, leaving only these parts registered."""
    registry.keep_only(parts)
    _names.clear()
    _hashes.clear()


def _last_line(error: BaseException) -> str:
    """Returns "file:line" of the last frame of an error in the user's own code, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{config_files.short_path(Path(error.filename))}:{error.lineno}"
    not_the_users = (str(Path(__file__).resolve().parents[1]), sys.prefix, sys.base_prefix, "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_the_users):
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
        current_folder = str(Path.cwd())
        sys.path.insert(0, current_folder)
        try:
            importlib.invalidate_caches()
            is_new = name not in sys.modules
            module = importlib.import_module(name)
        finally:
            sys.path.remove(current_folder)
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


def import_again(names: Sequence[str]) -> None:
    """Imports modules in a reader process, under the names of the run's `import_modules`."""
    for name in names:
        if name not in _names:
            _load(name)


def changes(metadata: Mapping[str, Any], owner: str = "the checkpoint") -> list[str]:
    """Returns a warning for each module that has changed since its hash was recorded.

    Args:
      metadata: With {module: SHA-256 of its source} under sources.IMPORTED.
      owner: What the metadata belong to, for the warnings.
    """
    recorded_hashes = metadata.get(sources.IMPORTED) or {}
    warnings = []
    for name, recorded_hash in recorded_hashes.items():
        hashes = _imported_hashes(name, recorded_hashes)
        if hashes and recorded_hash not in hashes:
            warnings.append(f"warning: {name} has changed since {owner} was saved")
    return warnings


def _imported_hashes(name: str, recorded_names: Collection[str]) -> list[str]:
    """Returns the hashes of the imported modules that may be a recorded one.

    That is the module of the same name, else files of the same file name in other folders.

    Args:
      name: Of the recorded module.
      recorded_names: Of all modules recorded with it, which are none of those files.
    """
    if name in _names:
        return [_hashes[_names[name]]]
    return [
        _hashes[module]
        for imported_name, module in _names.items()
        if imported_name not in recorded_names and Path(imported_name).name == Path(name).name
    ]
