"""The sections of registered parts: keys that a part brings with it.

The registry knows which parts have keys. `Parts` is the node of the configuration's tree below
which each of them has its section, under the name "kind.part": `model.parts` has the parts of
layers; objectives, optimizers and data sources have theirs in the sections that choose them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_serializer, model_validator

from MaxText.config.keys import Section
from MaxText.config.registry import KINDS, PartTarget, Registration, registration_of, registrations


class Parts(Section):
    """Keys of registered parts: a section for each part with keys of its own.

    Which parts there are can change while the program runs, so the sections are a tuple and not
    fields. A part that was registered after the configuration was made has its defaults.
    """

    kinds: ClassVar[tuple[str, ...]] = tuple(
        kind for kind in KINDS if kind not in ("objective", "optimizer", "data_source")
    )
    sections: tuple[Any, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_names(cls, values: object) -> object:
        """Converts {"kind.part": {key: value}} to the tuple of sections."""
        if not isinstance(values, dict) or "sections" in values:
            return values
        sections = [
            part.keys.model_validate(values.get(part.section, {}))
            for part in cls.with_keys()
            if part.keys is not None
        ]
        return {"sections": tuple(sections)}

    @model_serializer
    def _to_names(self) -> dict[str, dict[str, Any]]:
        return {part.section: self._section_of(part).model_dump() for part in self.with_keys()}

    def named(self, section_name: str) -> Section:
        """Returns the keys of a part by the name of its section, "kind.part"."""
        for part in self.with_keys():
            if part.section == section_name:
                return self._section_of(part)
        raise KeyError(section_name)

    def of(self, target: PartTarget) -> Section | None:
        """Returns the keys of a part by its class or function, or None if it has none."""
        part = registration_of(target, self.with_keys())
        return None if part is None else self._section_of(part)

    def values_by_key(self) -> dict[str, Any]:
        """Returns the values of the keys of all parts, by key."""
        values: dict[str, Any] = {}
        for part in self.with_keys():
            values |= self._section_of(part).values_by_key()
        return values

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Returns these sections with other values of some keys, as Section.with_values."""
        sections = tuple(section.with_values(values) for section in self.sections)
        is_changed = any(new is not old for new, old in zip(sections, self.sections, strict=True))
        return self.model_copy(update={"sections": sections}) if is_changed else self

    def _section_of(self, part: Registration) -> Section:
        section_class = part.keys
        assert section_class is not None
        for section in self.sections:
            if type(section) is section_class:
                return section
        return section_class()

    @classmethod
    def with_keys(cls) -> list[Registration]:
        """Returns the parts of these kinds with keys of their own."""
        return [
            part for part in registrations() if part.kind in cls.kinds and part.keys is not None
        ]


class ObjectiveParts(Parts):
    """Keys of registered objectives."""

    kinds: ClassVar[tuple[str, ...]] = ("objective",)


class OptimizerParts(Parts):
    """Keys of registered optimizers."""

    kinds: ClassVar[tuple[str, ...]] = ("optimizer",)


class DataSourceParts(Parts):
    """Keys of registered data sources."""

    kinds: ClassVar[tuple[str, ...]] = ("data_source",)
