"""Registry of parts: the values of keys such as `mixer`.

Parts are decorated with `register`, built-in ones and those of modules that `import_modules` names.
The generated layers/built_in.yml lists built-in parts, which are thus known without importing jax.
"""

import dataclasses
import functools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import model_serializer, model_validator

from MaxText.config.keys import Section
from MaxText.config.maxtext_keys import other_meaning

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
}
BUILT_IN = Path(__file__).parents[1] / "layers" / "built_in.yml"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class RegistrationError(ValueError):
    """A part cannot be registered; names the part, the file and the line."""


@dataclasses.dataclass(frozen=True)
class Registration:
    kind: str  # one of KINDS
    name: str
    target: Any  # class or function; of a built-in part "module:name", imported when it is needed
    keys: type[Section] | None  # of its own, from a module without jax if it is built in
    place: str  # file and line
    is_unrolled: bool = False  # of a built-in connection with keeps_shapes = False

    @property
    def keeps_shapes(self) -> bool:
        """Whether a connection's state keeps its shapes; answered without jax."""
        return getattr(self.target, "keeps_shapes", not self.is_unrolled)

    @property
    def section(self) -> str:
        return f"{self.kind}.{self.name}"

    @property
    def is_built_in(self) -> bool:
        return isinstance(self.target, str)

    @property
    def checks_itself(self) -> bool:
        """Whether `problem` and `decodes` of its class count, not model_rules."""
        return not self.is_built_in or self.keys is not None

    def is_of(self, given: Any) -> bool:
        if self.is_built_in:
            return self.target == f"{given.__module__}:{given.__name__}"
        return self.target is given

    def load(self) -> Any:
        return pkgutil.resolve_name(self.target) if self.is_built_in else self.target


class Name:
    """Marks a text key with registered parts (and `others`) as choices."""

    def __init__(self, kind: str, *others: str):
        assert kind in KINDS
        self.kind = kind
        self.others = others

    @property
    def choices(self) -> tuple[str, ...]:
        return (*self.others, *(name for kind, name in _all() if kind == self.kind))


_registered: dict[tuple[str, str], Registration] = {}
on_change: list[Callable[[], None]] = []  # clear data derived from parts; called at changes


def _notify() -> None:
    for forget_derived in on_change:
        forget_derived()


def register(kind: str, name: str, *, keys: type[Section] | None = None) -> Callable[[Any], Any]:
    """Registers a part; a decorator of its class or function.

    Args:
      kind: One of KINDS.
      name: Lower-case letters, digits and underscores.
      keys: A Section with keys of the part's own.
    """
    frame = sys._getframe(1)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def add(given: Any) -> Any:
        if kind not in KINDS:
            raise RegistrationError(
                f"{place}: unknown kind of part {kind!r}, known: {', '.join(KINDS)}"
            )
        if not _NAME.fullmatch(name):
            raise RegistrationError(f"{place}: {kind} {name!r}: a name is a-z, 0-9 and _")
        earlier = _all().get((kind, name))
        if earlier and earlier.is_built_in and earlier.is_of(given):
            return given
        if earlier is not None:
            where = "built in" if earlier.is_built_in else f"registered at {earlier.place}"
            raise RegistrationError(f"{place}: {kind} {name!r} is taken: {where}")
        if keys is not None:
            _check_keys(keys, f"{place}: {kind} {name!r}")
        _registered[kind, name] = Registration(kind, name, given, keys, place)
        _notify()
        return given

    return add


def _check_keys(keys: type[Section], who: str) -> None:
    from MaxText.config.schema import all_keys

    if not (isinstance(keys, type) and issubclass(keys, Section)):
        raise RegistrationError(f"{who}: keys has to be a class derived from Section")
    for key, field in keys.model_fields.items():
        facts = field.json_schema_extra
        if not isinstance(facts, dict) or "unit" not in facts:
            raise RegistrationError(f"{who}: key {key!r} is not declared with key(...)")
        if (taken := all_keys().get(key)) is not None:
            raise RegistrationError(f"{who}: there is a key {key!r} in {'.'.join(taken.section)}")
        if meaning := other_meaning(key):
            raise RegistrationError(f"{who}: a key cannot be called {key!r}: {meaning}")


@functools.cache
def _load_built_in() -> None:
    for kind, targets in yaml.safe_load(BUILT_IN.read_text(encoding="utf-8")).items():
        for name, text in targets.items():
            target, *more = text.split()
            [section] = [pkgutil.resolve_name(word) for word in more if ":" in word] or [None]
            _registered[kind, name] = Registration(
                kind, name, target, section, str(BUILT_IN), is_unrolled="unrolled" in more
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
    return _all()[kind, name]


def registration_of(
    target: Any, among: Iterable[Registration] | None = None
) -> Registration | None:
    """Returns the part of a function, a class or its nearest base."""
    parts = list(_all().values() if among is None else among)
    bases = getattr(target, "__mro__", (target,))
    return next((one for base in bases for one in parts if one.is_of(base)), None)


def lookup(kind: str, name: str) -> Any:
    return registration(kind, name).load()


def registrations() -> list[Registration]:
    return list(_all().values())


def forget(module_file: str) -> None:
    """Removes a file's registered parts, so that it can be reimported."""
    for key in [k for k, one in _registered.items() if one.place.startswith(f"{module_file}:")]:
        del _registered[key]
    _notify()


def keep_only(parts: Iterable[Registration]) -> None:
    kept = {(one.kind, one.name): one for one in parts}
    if kept != _registered:
        _registered.clear()
        _registered.update(kept)
        _notify()


class Parts(Section):
    """Keys of registered parts: a section for each part with keys of its own."""

    kinds: ClassVar[tuple[str, ...]] = tuple(
        kind for kind in KINDS if kind not in ("objective", "optimizer")
    )
    sections: tuple[Any, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Converts {kind.part: {key: value}}."""
        if not isinstance(given, dict) or "sections" in given:
            return given
        parts = [(one.keys, given.get(one.section, {})) for one in cls.with_keys()]
        return {"sections": tuple(keys.model_validate(own) for keys, own in parts if keys)}

    @model_serializer
    def _as_by_name(self) -> dict[str, dict[str, Any]]:
        return {one.section: self._of(one).model_dump() for one in self.with_keys()}

    def named(self, section: str) -> Section:
        return self._of(next(one for one in self.with_keys() if one.section == section))

    def of(self, target: Any) -> Section | None:
        """Returns the keys of a part by its class or function, or None."""
        found = registration_of(target, self.with_keys())
        return None if found is None else self._of(found)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        sections = (
            own.model_copy(update={n: v for n, v in values.items() if n in type(own).model_fields})
            for own in self.sections
        )
        return self.model_copy(update={"sections": tuple(sections)})

    def _of(self, registered: Registration) -> Section:
        assert registered.keys is not None
        kind = registered.keys
        return next((one for one in self.sections if type(one) is kind), None) or kind()

    @classmethod
    def with_keys(cls) -> list[Registration]:
        """Returns parts of these kinds with keys of their own."""
        return [one for one in registrations() if one.kind in cls.kinds and one.keys is not None]


class ObjectiveParts(Parts):
    kinds: ClassVar[tuple[str, ...]] = ("objective",)


class OptimizerParts(Parts):
    kinds: ClassVar[tuple[str, ...]] = ("optimizer",)
