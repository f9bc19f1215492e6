"""Options of single programs, such as hardware= of plan.py.

A program declares them as a Section, whose class is also their help. They are typed like keys:
name=value, --name=value, --name value, or --name alone for a switch.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from MaxText.config import values
from MaxText.config.keys import Section
from MaxText.config.loading import converted_value, format_accepted
from MaxText.config.maxtext_keys import ALIASES, find_unsupported
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches, nearest_fact
from MaxText.config.schema import Key, all_names, keys_of
from MaxText.config.sources import ARGUMENT, YAML_PATH, print_notices, without_dashes


class ProgramOptions(Section):
    """Options of one program.

    `from_` is typed from=. REQUIRED options have no default. RENAMED maps old names to new ones.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ()
    RENAMED: ClassVar[Mapping[str, str]] = {}


OptionsT = TypeVar("OptionsT", bound=ProgramOptions)


class Words(NamedTuple):
    """The rest of a command line, sorted by kind."""

    given: tuple[str, ...]  # names of the program's own options
    files: list[str]  # YAML files
    keys: list[str]  # key=value of the configuration
    others: list[str]
    problems: list[ConfigIssue]

    @property
    def configuration(self) -> list[str]:
        return [*self.files, *self.others, *self.keys]

    def check(self) -> None:
        if self.problems:
            raise ConfigurationError(self.problems)


def read_options(
    kind: type[OptionsT],
    arguments: Sequence[str],
    *,
    takes_keys: bool = True,
    requires: bool = True,
) -> tuple[OptionsT, Words]:
    """Takes a program's own options out of a command line.

    Those with a problem have their default. `takes_keys`: other key=value are those of a
    configuration, which judges them. `requires`: a missing option is a problem.
    """
    options = {name.rstrip("_"): key for name, key in keys_of(kind).items()}
    switches = [name for name, key in options.items() if key.annotation is bool]
    words = Words((), [], [], [], [])
    found: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for argument in without_dashes(arguments, switches):
        match = ARGUMENT.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if name in kind.RENAMED:
            name, old = kind.RENAMED[name], name
            print_notices([f"note: {old}= is now {name}="])
        if name in options:
            option, earlier = options[name], found.get(options[name].name)
            adds = option.parser is not None and option.parser.adds
            if texts.setdefault(name, text) != text and not adds:
                print_notices([f"note: {name} is given twice: {name}={text} wins"])
            try:
                value = converted_value(text if option.parser else values.from_text(text), option)
                found[option.name] = earlier + value if adds and earlier else value
            except ValueError as error:
                nearest = nearest_fact(text, filter(None, option.choices))
                facts = ("accepted", format_accepted(option)), nearest
                place = f"command line, {name}={text}"
                words.problems.append(ConfigIssue(f"{name}: {error}", (place,), facts))
        elif problem := _unknown(name, argument, options, takes_keys):
            words.problems.append(problem)
        elif match:
            words.keys.append(argument)
        else:
            (words.files if YAML_PATH.fullmatch(argument) else words.others).append(argument)
    for name in kind.REQUIRED:
        if requires and not texts.get(name):
            fact = ("accepted", options[name].help)
            words.problems.append(ConfigIssue(f"{name}= is missing", context=(fact,)))
    given = tuple(name.rstrip("_") for name in found)
    return kind(**found), words._replace(given=given)


def _unknown(
    name: str, argument: str, options: dict[str, Key], takes_keys: bool
) -> ConfigIssue | None:
    if not name and not argument.startswith("-"):
        return None
    if takes_keys and (name in (*all_names(), *ALIASES) or find_unsupported(name)):
        return None
    word = name or argument.lstrip("-")
    close = close_matches(word, {**options, **dict.fromkeys(all_names() if takes_keys else ())})
    if takes_keys and (not close or close[0] not in options):
        return None
    what = "neither an option of this program nor a key" if takes_keys else "no option"
    fact = ("nearest" if close else "options", ", ".join(f"{one}=..." for one in close or options))
    return ConfigIssue(f"{word}: {what}", (f"command line, {argument}",), (fact,))


def describe(kind: type[ProgramOptions]) -> str:
    lines = [(kind.__doc__ or "").strip(), ""]
    for name, option in keys_of(kind).items():
        choices = "|".join(str(choice) for choice in option.choices if choice)
        value = choices if 0 < len(choices) < 16 else option.unit.upper() or "VALUE"
        head = f"--{name}" if option.annotation is bool else f"{name.rstrip('_')}={value}"
        lines += textwrap.wrap(
            f"{head:<23} {option.help}", 98, initial_indent="  ", subsequent_indent=" " * 26
        )
    return "\n".join(lines)
