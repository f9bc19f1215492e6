"""YAML files: search, and reading with line numbers.

A file is read into settings, one `key = value` each, that know the line they stand on. Their types
are checked later, when all layers of settings are there (merging.py).
"""

import dataclasses
import enum
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from MaxText.config import schema, values
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches
from MaxText.config.values import UntypedValue

_PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = _PACKAGE.parent
# A wheel holds the configs inside the package, a clone next to it.
SHIPPED = next(
    (folder for folder in (_PACKAGE / "configs", REPOSITORY / "configs") if folder.is_dir()),
    REPOSITORY / "configs",
)
BASE_YML = SHIPPED / "base.yml"
MODELS = SHIPPED / "models"
DECODER_BLOCKS = SHIPPED / "decoder_blocks"

_MAX_BYTES = 1_000_000  # more takes minutes to parse; base.yml has 60,000
_MAX_KEYS = 5_000  # MaxText's base.yml has 800

# Of a preset's name: letters, and the number of a version.
_FAMILY = re.compile(r"[A-Za-z_]+(-(?:neo|like)\b)?([\d.]+(?=-))?")

# Folders that may stand in a path up to its first "configs/" for it to mean the shipped configs.
_BEFORE_CONFIGS = {"..", "MaxText", "maxtext", "src", "configs"}


class Source(enum.Enum):
    """Sources of values, weakest first; DERIVED ones are computed."""

    DEFAULT = "schema default"
    MAXTEXT_DEFAULT = "MaxText's default"  # in a copy of MaxText's base.yml
    DECODER_BLOCK = "decoder_block"
    BASE_CONFIG = "base_config"
    SAVED_CONFIG = "saved config"
    CONFIG_FILE = "config file"
    PRESET = "model_name preset"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"
    ARGUMENT = "argument of load_config()"
    DERIVED = "derived"

    @property
    def rank(self) -> int:
        """The place in the order; a source of higher rank beats one of lower."""
        return list(Source).index(self)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
      source: The layer of settings.
      file: Its YAML file, or None.
      line: Its line in that file, or None.
      raw: The value as it was written.
      note: Environment variable, or what a derived value is derived from.
    """

    source: Source
    file: Path | None = None
    line: int | None = None
    raw: str = ""
    note: str = ""

    @property
    def place(self) -> str:
        """For example "configs/gpt2.yml:12"."""
        if self.file is not None:
            return f"{short_path(self.file)}:{self.line}"
        if self.source is Source.ENVIRONMENT:
            return f"environment variable {self.note}"
        return f"{self.source.value} {self.note}" if self.note else self.source.value


@dataclasses.dataclass(frozen=True)
class Setting:
    """One `key = value` with its origin.

    Attributes:
      name: The key, under its name here.
      value: Before its type is checked: text, lists and dicts of text, or a Python value.
      origin: Where it was set.
      written: The key in the user's spelling.
    """

    name: str
    value: UntypedValue
    origin: Origin
    written: str

    @property
    def place(self) -> str:
        """For example "configs/gpt2.yml:12, steps: 5", for messages."""
        raw = textwrap.shorten(self.origin.raw, width=80, placeholder=" ...")
        if self.origin.source is Source.ENVIRONMENT:
            return f"{self.origin.place}={raw}"
        between = ": " if self.origin.file else "="
        return f"{self.origin.place}, {self.written}{between}{raw}"


def short_path(path: Path) -> str:
    """Returns a path from the current folder or the repository if it is inside one of them."""
    for root in (Path.cwd(), REPOSITORY):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return str(path)


def shipped_names(folder: Path = SHIPPED) -> list[str]:
    """Returns the YAML files below a folder, as paths from it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yml"))


def preset_names(folder: Path) -> list[str]:
    """Returns the presets in a folder: its YAML files without suffix."""
    return sorted(path.stem for path in folder.glob("*.yml"))


def by_family(names: Sequence[str]) -> list[str]:
    """Returns lines "family: name, name", of names that begin alike.

    The family of gemma3-4b is gemma3, and of muddformer-1.4b muddformer.
    """
    families: dict[str, list[str]] = {}
    for name in names:
        match = _FAMILY.match(name)
        families.setdefault(match[0].lower() if match else name, []).append(name)
    return [f"{family}: {', '.join(members)}" for family, members in sorted(families.items())]


def find_config(name: str | Path, next_to: Path | None = None) -> Path:
    """Finds the file a user means.

    Looks in `next_to`, then as given, then by its name among the shipped configs:
    configs/gpt2.yml, MaxText/configs/gpt2.yml and gpt2.yml all work anywhere.

    Args:
      name: A path, or the name of a shipped config.
      next_to: The folder of the file that names it, if one does.

    Raises:
      ConfigurationError: there is no such file.
    """
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, takes unknown users
    candidates = [next_to / path] if next_to else []
    candidates.append(path)
    if (inside := _inside_shipped(path)) is not None:
        candidates.append(SHIPPED / inside)
    for candidate in candidates:
        try:
            if candidate.is_file():
                return candidate.resolve()
        except OSError as error:  # a name that is too long, a folder that may not be searched
            short_name = textwrap.shorten(str(name), width=80, placeholder=" ...")
            message = f"config file {short_name!r} cannot be looked for: {error.strerror}"
            raise ConfigurationError([ConfigIssue(message)]) from error
    all_shipped = shipped_names()
    same_name = [shipped for shipped in all_shipped if Path(shipped).name == str(path)]
    if len(same_name) == 1:
        return SHIPPED / same_name[0]
    by_name = {Path(shipped).name: shipped for shipped in all_shipped}
    nearest = [f"configs/{by_name[match]}" for match in close_matches(path.name, by_name)]
    issue = ConfigIssue(
        message=f"config file {str(name)!r} not found",
        context=(
            ("searched", ", ".join(map(str, candidates))),
            ("nearest", ", ".join(nearest)),
        ),
    )
    raise ConfigurationError([issue])


def _inside_shipped(path: Path) -> Path | None:
    """Returns a path from the folder of shipped configs if the user may mean a file there."""
    if path.is_relative_to(REPOSITORY):
        path = path.relative_to(REPOSITORY)
    parts = path.parts
    start = parts.index("configs") + 1 if "configs" in parts else 0
    is_shipped = not path.is_absolute() and set(parts[:start]) <= _BEFORE_CONFIGS
    return Path(*parts[start:]) if is_shipped else None


class FileContents(NamedTuple):
    """The settings in a YAML file, those under the name of a section by dotted key."""

    settings: list[Setting]
    problems: list[ConfigIssue]  # of single keys, which then have no setting


def read(path: Path, source: Source = Source.CONFIG_FILE) -> FileContents:
    """Reads the settings in a YAML file.

    Args:
      path: The file.
      source: The layer to which the settings belong.

    Raises:
      ConfigurationError: the file as a whole cannot be read.
    """
    text, root = _read_yaml(path)
    if root is None:
        return FileContents([], [])
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError([ConfigIssue(f"{short_path(path)} holds no `key: value` lines")])
    if (num_keys := len(root.value)) > _MAX_KEYS:
        message = f"{short_path(path)} has {num_keys:,} keys, and at most {_MAX_KEYS:,} are read"
        raise ConfigurationError([ConfigIssue(message)])
    contents = FileContents([], [])
    _read_mapping(root, "", text, Origin(source=source, file=path), contents)
    return contents


def _read_mapping(
    mapping: yaml.MappingNode, prefix: str, text: str, origin: Origin, contents: FileContents
) -> None:
    """Reads the settings in a mapping: the root of a file, or one under the name of a section.

    Args:
      mapping: The node.
      prefix: What the names of its keys begin with, such as "adafactor.".
      text: Of the file.
      origin: Of the file as a whole.
      contents: Gets settings and problems.
    """
    assert origin.file is not None
    first_line: dict[str, int] = {}
    for name_node, value_node in mapping.value:
        line = name_node.start_mark.line + 1
        location = (f"{short_path(origin.file)}:{line}",)
        name = prefix + (str(name_node.value) if isinstance(name_node, yaml.ScalarNode) else "?")
        if name in first_line:
            message = f"{name}: given twice in one file, first on line {first_line[name]}"
            contents.problems.append(ConfigIssue(message, location))
            continue
        first_line[name] = line
        if name in schema.named_sections() and isinstance(value_node, yaml.MappingNode):
            _read_mapping(value_node, f"{name}.", text, origin, contents)
            continue
        raw = " ".join(text[value_node.start_mark.index : value_node.end_mark.index].split())
        try:
            value = values.from_node(value_node)
        except values.InvalidValueError as error:
            contents.problems.append(ConfigIssue(f"{name}: {error}", location))
            continue
        setting_origin = dataclasses.replace(origin, line=line, raw=raw)
        contents.settings.append(
            Setting(name=name, value=value, origin=setting_origin, written=name)
        )


def _read_yaml(path: Path) -> tuple[str, yaml.Node | None]:
    """Returns the text of a YAML file and its root node, None if it is empty.

    Raises:
      ConfigurationError: it is too large, cannot be read, or is not YAML.
    """
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            message = f"{short_path(path)} has {size:,} bytes, and at most {_MAX_BYTES:,} are read"
            raise ConfigurationError([ConfigIssue(message)])
        text = path.read_text(encoding="utf-8")
        return text, values.compose(text)
    except values.InvalidValueError as error:
        raise ConfigurationError([ConfigIssue(f"{short_path(path)}: {error}")]) from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        message = f"{short_path(path)} cannot be read: {error}"
        raise ConfigurationError([ConfigIssue(message)]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{short_path(path)}:{mark.line + 1}" if mark else short_path(path)
        reason = getattr(error, "problem", None) or str(error)
        message = f"{location} is not valid YAML: {reason}"
        raise ConfigurationError([ConfigIssue(message)]) from error
