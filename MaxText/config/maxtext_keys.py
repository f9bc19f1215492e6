"""Keys of MaxText and other programs: aliases, and refused keys.

A key with the exact meaning of one here is accepted under its old name, as is a value that is
spelled differently, that holds here anyway, or that is MaxText's default. Any other is refused with
a sentence that says what to use. The tables are in maxtext_keys.yml, the defaults in
maxtext_defaults.yml.
"""

import fnmatch
import functools
from collections.abc import Collection
from importlib import resources
from typing import Any, Literal, NamedTuple

import yaml

from MaxText.config import values


class UnsupportedKey(NamedTuple):
    """The reason for the absence of another program's key.

    Attributes:
      why: The reason, as a phrase.
      replacement: The key here that serves its purpose, if one does.
      accepts: Values that are ignored with a note: those that switch it off, any (none changes a
        result), or nothing.
    """

    why: str
    replacement: str = ""
    accepts: Literal["off", "any", "nothing"] = "off"

    @property
    def sentence(self) -> str:
        """The reason with the replacement, for messages."""
        return f"{self.why}; use {self.replacement}" if self.replacement else self.why


class KeyMapping(NamedTuple):
    """The meaning here of another program's `key=value`.

    Attributes:
      name: Key here; empty if nothing has to be set.
      text: Value of that key, as it is typed.
      why: If nothing has to be set, the reason.
    """

    name: str
    text: str = ""
    why: str = ""

    @property
    def value(self) -> values.UntypedValue:
        """The value of our key, before its type is checked."""
        return values.from_text(self.text)

    @property
    def sentence(self) -> str:
        """The predicate of a note whose subject is `key=value`."""
        if self.name:
            return f"is {self.name}={self.text} here"
        return f"has no effect here: {self.why}"


def _unsupported(row: dict[str, Any]) -> UnsupportedKey:
    return UnsupportedKey(row["why"], row.get("use", ""), row.get("accepts", "off"))


def _read_table(name: str) -> dict[str, Any]:
    return yaml.load(
        (resources.files("MaxText.config") / name).read_text(encoding="utf-8"),
        getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )


_TABLES = _read_table("maxtext_keys.yml")
# Old name -> key here, where both mean exactly the same.
ALIASES: dict[str, str] = _TABLES["aliases"]
UNSUPPORTED = {key: _unsupported(row) for row in _TABLES["absent"] for key in row["keys"]}
# Families too large to list; the first prefix that fits counts.
_FAMILIES = {row["prefix"]: _unsupported(row) for row in _TABLES["prefixes"]}
# (key, value) -> what to choose for a value of MaxText that the key here does not have.
VALUE_NOTES = {(key, value): note for key, value, note in _TABLES["value_notes"]}
# (key, value) -> key and value here. Values in lower case; null is any way to write nothing.
TRANSLATIONS = {
    (key, value): KeyMapping(*target) if len(target) == 2 else KeyMapping("", why=target[0])
    for key, value, *target in _TABLES["translations"]
}
_ABSENT_BLOCKS: list[tuple[str, str, str]] = _TABLES["absent_blocks"]
_MODEL_BLOCKS: list[tuple[str, str]] = _TABLES["model_blocks"]
# Key of another program -> (whose it is, key here). Values mean something else there (a global
# batch, a computed width), so these are not aliases; docs/reference/migration.md has more.
REFERENCE_KEYS = {
    name: (whose, key)
    for whose, keys in _TABLES["other_programs"].items()
    for name, key in keys.items()
}

# With these, a norm follows the mixer and the feed-forward; norm_placement=sandwich is both.
SANDWICH_KEYS = frozenset({"use_post_attn_norm", "use_post_ffw_norm"})

# Ways to say that something is off, which is true of everything that is not here.
_OFF = (None, False, 0.0, (), {})
# A file with this many keys of MaxText that are not here is a copy of its base.yml, which has all
# of them. The smallest, of version 0.1.0, has 180.
_MIN_ABSENT_KEYS = 100


def find_mapping(name: str, value: values.UntypedValue) -> KeyMapping | None:
    """Returns what another program's `name=value` means here; None if nothing is known of it.

    Args:
      name: A key of MaxText or of another program.
      value: Its value, before its type is known.
    """
    if values.is_null(value):
        spelled = "null"
    else:
        spelled = value.lower() if isinstance(value, str) else values.to_yaml(value)
    if translation := TRANSLATIONS.get((name, spelled or "null")):
        return translation
    reason = UNSUPPORTED.get(name) or _accepted_family(name)
    if reason is None:
        return None
    if reason.accepts == "any" or (reason.accepts == "off" and _is_off(_canonical(value))):
        return KeyMapping("", why=reason.sentence)
    if is_maxtext_default(name, value):
        return KeyMapping("", why=f"{reason.sentence} (the value is MaxText's default)")
    return None


def _accepted_family(name: str) -> UnsupportedKey | None:
    """Returns the reason of a key's family if the family's values are ignored with a note."""
    for prefix, reason in _FAMILIES.items():
        if name.startswith(prefix) and reason.accepts == "any":
            return reason
    return None


def _canonical(value: values.UntypedValue) -> values.TypedValue:
    """Returns a value as YAML 1.1 and Python would read it, so that spellings compare equal."""
    if isinstance(value, list | tuple):
        return tuple(map(_canonical, value))
    if isinstance(value, dict):
        return {str(name): _canonical(item) for name, item in value.items()}
    if value == "" or values.is_null(value):
        return None
    if isinstance(value, values.UntypedScalar):
        for convert_to in (bool, float):
            try:
                return values.convert(value, convert_to)
            except values.InvalidValueError:
                continue
    return str(value) if isinstance(value, str) else value


def _is_off(value: values.TypedValue) -> bool:
    """Returns whether a canonical value, or every entry of it, switches a feature off."""
    if isinstance(value, dict):
        return all(map(_is_off, value.values()))
    return value in _OFF


@functools.cache
def maxtext_defaults() -> dict[str, list[Any]]:
    """Returns the values that MaxText's base.yml has had for each of its keys.

    Of logical_axis_rules they are the rules of the list.
    """
    return {
        name: [_canonical(value) for value in defaults]
        for name, defaults in _read_table("maxtext_defaults.yml").items()
    }


def is_maxtext_default(name: str, value: values.UntypedValue) -> bool:
    """Returns whether a value of MaxText's key `name` is the default of one of its versions."""
    defaults = maxtext_defaults().get(name, [])
    if name == "logical_axis_rules":
        return isinstance(value, list) and all(_canonical(rule) in defaults for rule in value)
    return _canonical(value) in defaults


def is_maxtext_base(names: Collection[str]) -> bool:
    """Returns whether a file with these keys is MaxText's base.yml, or a copy with changes."""
    absent = [name for name in names if name in UNSUPPORTED and name in maxtext_defaults()]
    return len(absent) >= _MIN_ABSENT_KEYS


def absent_family(name: str, value: str) -> str:
    """Returns why a decoder_block or model_name of MaxText is not here; "" if nothing is known.

    For example "DeepSeek and Kimi: shared experts and groups of experts".
    """
    block = block_of_model(value) if name == "model_name" else value
    for pattern, family, why in _ABSENT_BLOCKS:
        if fnmatch.fnmatch(block, pattern):
            return f"{family}: {why}"
    return ""


def block_of_model(model_name: str) -> str:
    """Returns the decoder_block of a model of MaxText; "" if its name tells none."""
    blocks = (block for pattern, block in _MODEL_BLOCKS if fnmatch.fnmatch(model_name, pattern))
    return next(blocks, "")


def other_meaning(name: str) -> str:
    """Returns what a name already stands for here; empty if nothing."""
    if name in ALIASES:
        return f"it is another name of {ALIASES[name]}"
    reason = find_unsupported(name, (name,)) or find_mapping(name, name)
    if reason or any(name == key for key, _ in TRANSLATIONS):
        return "it is a key of another program" + (f" ({reason.sentence})" if reason else "")
    return ""


def find_unsupported(name: str, known_names: tuple[str, ...] = ()) -> UnsupportedKey | None:
    """Returns the reason for the absence of another program's key; None if none is known.

    Args:
      name: Of the key.
      known_names: Keys here that the user may have meant. With any, families of keys are not
        looked at: a typing error is more likely.
    """
    if name in UNSUPPORTED:
        return UNSUPPORTED[name]
    if name in REFERENCE_KEYS:
        return UnsupportedKey(*REFERENCE_KEYS[name])
    if known_names:
        return None
    return next((reason for prefix, reason in _FAMILIES.items() if name.startswith(prefix)), None)
