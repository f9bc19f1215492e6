"""YAML files: search, and reading with line numbers."""

import dataclasses
import enum
import os
import textwrap
from pathlib import Path
from typing import Any

import yaml

from MaxText.config import values
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches

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

# What may stand in a path up to its first "configs/" for it to mean the shipped configs.
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
        return list(Source).index(self)


@dataclasses.dataclass(frozen=True)
class Origin:
    source: Source
    file: Path | None = None  # YAML file, or None
    line: int | None = None  # line in that file, or None
    raw: str = ""  # the value as it was written
    note: str = ""  # environment variable, or the origin of a derived value

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
    """One `key = value` with its origin; `written` is the user's spelling."""

    name: str
    value: Any
    origin: Origin
    written: str

    @property
    def place(self) -> str:
        raw = textwrap.shorten(self.origin.raw, width=80, placeholder=" ...")
        if self.origin.source is Source.ENVIRONMENT:
            return f"{self.origin.place}={raw}"
        between = ": " if self.origin.file else "="
        return f"{self.origin.place}, {self.written}{between}{raw}"


def short_path(path: Path) -> str:
    for root in (Path.cwd(), REPOSITORY):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return str(path)


def shipped_names(folder: Path = SHIPPED) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yml"))


def preset_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yml"))


# Shipped files under the names of earlier versions, read for one release.
_RENAMED = {
    "recipes/fattorib.yml": "reproductions/fattorib.yml",
    "recipes/wikitext_gpt2.yml": "reproductions/wikitext_gpt2.yml",
    "comparisons/learned.yml": "comparisons/position_learned.yml",
    "comparisons/rotary.yml": "comparisons/position_rotary.yml",
    "comparisons/small.yml": "comparisons/_base.yml",
}


def find_config(name: str | Path, next_to: Path | None = None) -> Path:
    """Finds the file a user means.

    Looks in `next_to`, then as given, then by its name among the shipped configs:
    configs/gpt2.yml, MaxText/configs/gpt2.yml and gpt2.yml all work anywhere.
    """
    given = Path(os.path.expanduser(name))  # unlike Path.expanduser, takes unknown users
    candidates = [next_to / given] if next_to else []
    candidates.append(given)
    if (inside := _inside_shipped(given)) is not None:
        candidates.append(SHIPPED / inside)
        for old, now in _RENAMED.items():
            bare = Path(old).name
            if str(inside) == old or (str(inside) == bare and bare != Path(now).name):
                candidates.append(SHIPPED / now)
    for candidate in candidates:
        try:
            if candidate.is_file():
                return candidate.resolve()
        except OSError as error:  # a name that is too long, a folder that may not be searched
            shown = textwrap.shorten(str(name), width=80, placeholder=" ...")
            what = f"config file {shown!r} cannot be looked for: {error.strerror}"
            raise ConfigurationError([ConfigIssue(what)]) from error
    known = shipped_names()
    same_name = [path for path in known if Path(path).name == str(given)]
    if len(same_name) == 1:
        return SHIPPED / same_name[0]
    searched = ("searched", ", ".join(map(str, candidates)))
    short = {Path(path).name: path for path in known}
    close = (f"configs/{short[found]}" for found in close_matches(given.name, short))
    facts = searched, ("nearest", ", ".join(close))
    raise ConfigurationError([ConfigIssue(f"config file {str(name)!r} not found", context=facts)])


def _inside_shipped(given: Path) -> Path | None:
    if given.is_relative_to(REPOSITORY):
        given = given.relative_to(REPOSITORY)
    parts = given.parts
    inside = parts.index("configs") + 1 if "configs" in parts else 0
    is_shipped = not given.is_absolute() and set(parts[:inside]) <= _BEFORE_CONFIGS
    return Path(*parts[inside:]) if is_shipped else None


def read(
    path: Path, source: Source = Source.CONFIG_FILE
) -> tuple[list[Setting], list[ConfigIssue]]:
    """Returns the top-level entries of a YAML file, and problems by key."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            what = f"{short_path(path)} has {size:,} bytes, and at most {_MAX_BYTES:,} are read"
            raise ConfigurationError([ConfigIssue(what)])
        text = path.read_text(encoding="utf-8")
        root = values.compose(text)
    except values.InvalidValueError as error:
        raise ConfigurationError([ConfigIssue(f"{short_path(path)}: {error}")]) from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(
            [ConfigIssue(f"{short_path(path)} cannot be read: {error}")]
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{short_path(path)}:{mark.line + 1}" if mark else short_path(path)
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigurationError([ConfigIssue(f"{place} is not valid YAML: {reason}")]) from error
    if root is None:
        return [], []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError([ConfigIssue(f"{short_path(path)} holds no `key: value` lines")])
    if (num_keys := len(root.value)) > _MAX_KEYS:
        what = f"{short_path(path)} has {num_keys:,} keys, and at most {_MAX_KEYS:,} are read"
        raise ConfigurationError([ConfigIssue(what)])
    entries: list[Setting] = []
    problems: list[ConfigIssue] = []
    first_line: dict[str, int] = {}
    for name_node, value_node in root.value:
        line = name_node.start_mark.line + 1
        place = f"{short_path(path)}:{line}"
        name = str(name_node.value) if isinstance(name_node, yaml.ScalarNode) else "?"
        if name in first_line:
            what = f"{name}: given twice in one file, first on line {first_line[name]}"
            problems.append(ConfigIssue(what, (place,)))
            continue
        first_line[name] = line
        raw = " ".join(text[value_node.start_mark.index : value_node.end_mark.index].split())
        try:
            value = values.from_node(value_node)
            origin = Origin(source, path, line, raw)
            entries.append(Setting(name, value, origin, name))
        except values.InvalidValueError as error:
            problems.append(ConfigIssue(f"{name}: {error}", (place,)))
    return entries, problems
