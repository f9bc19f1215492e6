"""Keys of MaxText and other programs: aliases, and refused keys.

A key with the exact meaning of one here is accepted under its old name, as is a value that is
spelled differently or that holds here anyway. Any other is refused with a sentence that says what
to use. maxtext_keys.yml has the tables.
"""

from importlib import resources
from typing import Any, Literal, NamedTuple

import yaml

from MaxText.config import values


class UnsupportedKey(NamedTuple):
    """The reason for the absence of a key."""

    why: str  # the reason, as a phrase
    replacement: str = ""  # the key here that serves its purpose, if one does
    # values ignored with a note: those that switch it off, any (none changes a result), or nothing
    accepts: Literal["off", "any", "nothing"] = "off"

    @property
    def sentence(self) -> str:
        return f"{self.why}; use {self.replacement}" if self.replacement else self.why


class KeyMapping(NamedTuple):
    """The meaning here of another program's `key=value`."""

    name: str  # key here; empty if nothing has to be set
    text: str = ""  # value of that key, as it is typed
    why: str = ""  # a sentence for where nothing has to be set

    @property
    def value(self) -> Any:
        """The value of our key, before its type is checked."""
        return values.from_text(self.text)

    @property
    def sentence(self) -> str:
        if self.name:
            return f"is {self.name}={self.text} here"
        return f"has no effect here: {self.why}"


def _unsupported(row: dict[str, Any]) -> UnsupportedKey:
    return UnsupportedKey(row["why"], row.get("use", ""), row.get("accepts", "off"))


_TABLES = yaml.load(
    (resources.files("MaxText.config") / "maxtext_keys.yml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
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
# Key of another program -> (whose it is, key here). Values mean something else there (a global
# batch, a computed width), so these are not aliases; docs/reference/migration.md has more.
REFERENCE_KEYS = {
    name: (whose, key)
    for whose, keys in _TABLES["other_programs"].items()
    for name, key in keys.items()
}

# Ways to say that something is off, which is true of everything that is not here.
_OFF = frozenset({"null", "", "none", "false", "0", "[]", "{}"})


def current_entry(key: str, entry: str) -> str:
    return ALIASES.get(f"{key}.{entry}", f"{key}.{entry}").removeprefix(f"{key}.")


def find_mapping(name: str, value: Any) -> KeyMapping | None:
    if values.is_null(value):
        spelled = "null"
    else:
        spelled = value.lower() if isinstance(value, str) else values.to_yaml(value)
    if found := TRANSLATIONS.get((name, spelled or "null")):
        return found
    families = (one for start, one in _FAMILIES.items() if name.startswith(start))
    reason = UNSUPPORTED.get(name) or next((one for one in families if one.accepts == "any"), None)
    if reason and (reason.accepts == "any" or (reason.accepts == "off" and spelled in _OFF)):
        return KeyMapping("", why=reason.sentence)
    return None


def other_meaning(name: str) -> str:
    """Returns what a name already stands for here; empty if nothing."""
    if name in ALIASES:
        return f"it is another name of {ALIASES[name]}"
    reason = find_unsupported(name, (name,)) or find_mapping(name, name)
    if reason or any(name == key for key, _ in TRANSLATIONS):
        return "it is a key of another program" + (f" ({reason.sentence})" if reason else "")
    return ""


def find_unsupported(name: str, known: tuple[str, ...] = ()) -> UnsupportedKey | None:
    if name in UNSUPPORTED:
        return UNSUPPORTED[name]
    if name in REFERENCE_KEYS:
        return UnsupportedKey(*REFERENCE_KEYS[name])
    if known:
        return None
    return next((reason for prefix, reason in _FAMILIES.items() if name.startswith(prefix)), None)
