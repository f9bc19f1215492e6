"""Registry of parts: the values of keys such as `mixer`.

A part is a class or function that users choose by name: `mixer=attention` takes the class that is
registered as ("mixer", "attention"). Parts are decorated with `register`, built-in ones and those
of modules that `import_modules` names. The generated layers/built_in.yml lists built-in parts,
which are thus known without importing jax.

A part can have keys of its own, a Section. The registry only records it: part_sections.py puts the
section into the configuration, and schema.py checks its keys.
"""

import dataclasses
import functools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from MaxText.config.keys import Section

# Kind of part -> the key that chooses it.
KINDS = {
    "mixer": "mixer",
    "feed_forward": "feed_forward_type",
    "norm": "normalization_type",
    "projection": "attention_projections",
    "position": "position_embedding",
    "connection": "connection_type",
    "head": "head_type",
    "objective": "loss_type",
    "optimizer": "opt_type",
    "data_source": "dataset_type",
}
BUILT_IN = Path(__file__).parents[1] / "layers" / "built_in.yml"
# A class or function that is registered as a part. Any, since each kind has a type of its own.
PartTarget = Any
Target = TypeVar("Target")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class RegistrationError(ValueError):
    """A part cannot be registered; names the part, the file and the line."""


@dataclasses.dataclass(frozen=True)
class Registration:
    """A registered part.

    Attributes:
      kind: One of KINDS.
      name: The value of the kind's key that chooses it.
      target: The class or function; of a built-in part "module:name", imported when it is needed.
      keys: The section with keys of its own, from a module without jax if the part is built in.
      location: File and line of its registration, for messages.
      is_unrolled: Of a built-in connection: `keeps_shapes` is False in its class.
    """

    kind: str
    name: str
    target: PartTarget
    keys: type[Section] | None
    location: str
    is_unrolled: bool = False

    @property
    def keeps_shapes(self) -> bool:
        """Whether a connection's state keeps its shapes from layer to layer.

        Answered without jax.
        """
        return getattr(self.target, "keeps_shapes", not self.is_unrolled)

    @property
    def section(self) -> str:
        """The name of the section with its keys, such as "mixer.mamba2"."""
        return f"{self.kind}.{self.name}"

    @property
    def is_built_in(self) -> bool:
        """Whether it is listed in BUILT_IN, as opposed to registered by a user's module."""
        return isinstance(self.target, str)

    @property
    def checks_itself(self) -> bool:
        """Whether `problem` and `decodes` of its class count, not model_rules."""
        return not self.is_built_in or self.keys is not None

    def is_of(self, target: PartTarget) -> bool:
        """Returns whether this is the registration of a class or function."""
        if self.is_built_in:
            return self.target == f"{target.__module__}:{target.__name__}"
        return self.target is target

    def load(self) -> PartTarget:
        """Returns the class or function; imports the module of a built-in part."""
        return pkgutil.resolve_name(self.target) if self.is_built_in else self.target


class Name:
    """Marks a text key whose choices are the registered parts of a kind.

    Args:
      kind: One of KINDS.
      other_choices: Further values, such as "auto", listed first.
    """

    def __init__(self, kind: str, *other_choices: str):
        assert kind in KINDS
        self.kind = kind
        self.other_choices = other_choices

    @property
    def choices(self) -> tuple[str, ...]:
        """All values, with the parts that are registered now."""
        return (*self.other_choices, *(name for kind, name in _all() if kind == self.kind))


_registered: dict[tuple[str, str], Registration] = {}
# Called after each change of the registry, to clear what is derived from its parts.
on_change: list[Callable[[], None]] = []


def _notify() -> None:
    for forget_derived in on_change:
        forget_derived()


def register(
    kind: str, name: str, *, keys: type[Section] | None = None
) -> Callable[[Target], Target]:
    """Registers a part; a decorator of its class or function.

    Args:
      kind: One of KINDS.
      name: Lower-case letters, digits and underscores.
      keys: A Section with keys of the part's own; its docstring is their title.

    Raises:
      RegistrationError: there is no such kind, the name is malformed or taken, or the section has
        no docstring.
    """
    frame = sys._getframe(1)
    location = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def add(target: Target) -> Target:
        if kind not in KINDS:
            raise RegistrationError(
                f"{location}: unknown kind of part {kind!r}, known: {', '.join(KINDS)}"
            )
        if not _NAME.fullmatch(name):
            raise RegistrationError(f"{location}: {kind} {name!r}: a name is a-z, 0-9 and _")
        if keys is not None and not (keys.__doc__ or "").strip():
            raise RegistrationError(
                f"{location}: {kind} {name!r}: {keys.__name__} has no docstring, the title of its "
                "keys in --help"
            )
        earlier = _all().get((kind, name))
        if earlier and earlier.is_built_in and earlier.is_of(target):
            return target
        if earlier is not None:
            taken_by = "built in" if earlier.is_built_in else f"registered at {earlier.location}"
            raise RegistrationError(f"{location}: {kind} {name!r} is taken: {taken_by}")
        _registered[kind, name] = Registration(
            kind=kind, name=name, target=target, keys=keys, location=location
        )
        _notify()
        return target

    return add


@functools.cache
def _load_built_in() -> None:
    """Registers the parts of BUILT_IN.

    Its lines are `name: module:target`, followed by `module:section` if the part has keys, and by
    `unrolled`.
    """
    for kind, targets in yaml.safe_load(BUILT_IN.read_text(encoding="utf-8")).items():
        for name, line in targets.items():
            target, *attributes = line.split()
            [section] = [pkgutil.resolve_name(word) for word in attributes if ":" in word] or [None]
            _registered[kind, name] = Registration(
                kind=kind,
                name=name,
                target=target,
                keys=section,
                location=str(BUILT_IN),
                is_unrolled="unrolled" in attributes,
            )


def read_built_in() -> None:
    """Forgets all parts and reads BUILT_IN again."""
    _load_built_in.cache_clear()
    _registered.clear()
    _notify()


def _all() -> dict[tuple[str, str], Registration]:
    _load_built_in()
    return _registered


def registration(kind: str, name: str) -> Registration:
    """Returns the registration of a part; KeyError if there is none."""
    return _all()[kind, name]


def registration_of(
    target: PartTarget, among: Iterable[Registration] | None = None
) -> Registration | None:
    """Returns the registration of a function, or of a class or its nearest registered base.

    Args:
      target: The function or class.
      among: The parts to look at; None is all.
    """
    parts = list(_all().values() if among is None else among)
    for base in getattr(target, "__mro__", (target,)):
        for part in parts:
            if part.is_of(base):
                return part
    return None


def lookup(kind: str, name: str) -> PartTarget:
    """Returns the class or function of a part; imports the module of a built-in one."""
    return registration(kind, name).load()


def registrations() -> list[Registration]:
    """Returns all parts, built-in ones first."""
    return list(_all().values())


def split_part_spec(spec: str) -> tuple[str, str]:
    """Returns the module and the class of MODULE[:CLASS]; an empty class for all parts of it."""
    module, _, class_name = spec.rpartition(":")
    if not module or not class_name.isidentifier():
        return spec, ""
    return module, class_name


def parts_named(parts: Iterable[Registration], name: str) -> list[Registration]:
    """Returns the parts with a name, which may be that of their class or function."""
    return [part for part in parts if name in (part.target.__name__, part.name)]


def remove(part: Registration) -> None:
    """Removes one part, so that another can be registered under its name."""
    del _registered[part.kind, part.name]
    _notify()


def forget(module_file: str) -> None:
    """Removes the parts that a file registered, so that it can be imported again."""
    for part in registrations():
        if part.location.startswith(f"{module_file}:"):
            del _registered[part.kind, part.name]
    _notify()


def keep_only(parts: Iterable[Registration]) -> None:
    """Removes all parts but these."""
    remaining = {(part.kind, part.name): part for part in parts}
    if remaining != _registered:
        _registered.clear()
        _registered.update(remaining)
        _notify()
