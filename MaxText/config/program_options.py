"""Options of the programs, besides the keys of a configuration.

A program declares its options, such as hardware= of plan.py, as a frozen dataclass whose fields are
made by `option`. `read_options` reads them with argparse: name=value, --name=value, --name value,
or --name alone for a switch. A value is read and checked like that of a key of the same type.

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class PlanOptions:
      hardware: str = option("", "Machine, for example 8xH100.", required=True)
      num_slices: Count = option(1, "Slices of the machine.")
      fit: bool = option(False, "Search for settings that fit.")

  arguments = read_options(PlanOptions, sys.argv[1:])
  arguments.check()
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

from MaxText.config import sources, values
from MaxText.config.maxtext_keys import ALIASES, find_unsupported
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches, nearest_fact
from MaxText.config.schema import settable_names
from MaxText.config.sources import ARGUMENT, YAML_PATH, print_notices

OptionsT = TypeVar("OptionsT")


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Of a program that has a configuration and no options of its own."""


_DECLARATION = "option"  # key of an _Option in the metadata of a dataclass's field
_INVALID = object()


@dataclasses.dataclass(frozen=True)
class _Option:
    """One declared option; see `option`. `name` is as typed: "from" of the field `from_`."""

    name: str
    default: values.TypedValue
    help: str
    read: Callable[[str], values.TypedValue]
    accepts: str
    metavar: str
    choices: tuple[str, ...]
    required: bool
    repeated: bool

    @property
    def is_switch(self) -> bool:
        """Whether it is typed without a value, since its default is a boolean."""
        return isinstance(self.default, bool)


def option(
    default: Any,
    help: str,
    *,
    read: Callable[[str], Any] | None = None,
    accepts: str = "",
    metavar: str = "VALUE",
    choices: Collection[str] = (),
    required: bool = False,
    repeated: bool = False,
) -> Any:
    """Declares an option as a field of a dataclass.

    The field's name is the option's; a trailing underscore (`from_`) is not typed. Its annotation
    decides how the text is read, as that of a key does: `Count` takes 1e3 and refuses 0. A boolean
    default makes it a switch.

    Args:
      default: Value if the option is not given.
      help: Its line in --help.
      read: Converts text of a form of its own, such as 300B or 5GB; raises ValueError with a reason
        that continues "name: ".
      accepts: What `read` accepts, for messages.
      metavar: Stands for the value in --help.
      choices: The accepted texts, if there are few. A Literal has them.
      required: Whether a command line without it is refused.
      repeated: Whether it may be given several times. Its value is then a tuple.
    """
    settings = {
        "default": default,
        "help": help,
        "read": read,
        "accepts": accepts,
        "metavar": metavar,
        "choices": tuple(choices),
        "required": required,
        "repeated": repeated,
    }
    return dataclasses.field(default=default, metadata={_DECLARATION: settings})


def options_of(kind: type) -> dict[str, _Option]:
    """Returns the options that a dataclass declares, by the name of their field."""
    return {
        field.name: _declared(field)
        for field in dataclasses.fields(kind)
        if _DECLARATION in field.metadata
    }


def _declared(field: dataclasses.Field[Any]) -> _Option:
    """Returns the option that a field declares; what `option` leaves open follows from its type."""
    settings = dict(field.metadata[_DECLARATION])
    # Of an option that may be repeated each value is one item of the tuple.
    annotation = get_args(field.type)[0] if settings["repeated"] else field.type
    if get_origin(annotation) is Literal:
        settings["choices"] = get_args(annotation)
    choices = settings["choices"]
    type_name = f"one of {', '.join(choices)}" if choices else values.type_name(annotation)
    settings["accepts"] = settings["accepts"] or type_name
    settings["metavar"] = "|".join(choices) or settings["metavar"]
    settings["read"] = settings["read"] or functools.partial(_read_typed, annotation=annotation)
    return _Option(name=field.name.rstrip("_"), **settings)


def _read_typed(text: str, annotation: values.Annotation) -> values.TypedValue:
    """Returns the value of a text in a type; raises ValueError with a reason."""
    value = values.UntypedScalar(text) if annotation is str else values.from_text(text)
    return values.convert(value, annotation)


@dataclasses.dataclass
class ProgramArguments(Generic[OptionsT]):
    """The command line of a program, sorted by kind.

    Attributes:
      options: The program's options. Those with a problem have their default.
      given: Names of the options on the command line, as typed.
      config_files: YAML files.
      settings: key=value of the configuration.
      operands: All other words.
      problems: What is wrong with the options.
    """

    options: OptionsT
    given: tuple[str, ...]
    config_files: list[str] = dataclasses.field(default_factory=list)
    settings: list[str] = dataclasses.field(default_factory=list)
    operands: list[str] = dataclasses.field(default_factory=list)
    problems: list[ConfigIssue] = dataclasses.field(default_factory=list)

    @property
    def configuration(self) -> list[str]:
        """Arguments for config.loading.load."""
        return [*self.config_files, *self.operands, *self.settings]

    def check(self) -> None:
        """Raises ConfigurationError if there are problems."""
        if self.problems:
            raise ConfigurationError(self.problems)


def read_options(
    kind: type[OptionsT],
    arguments: Sequence[str],
    *,
    takes_keys: bool = True,
    requires: bool = True,
) -> ProgramArguments[OptionsT]:
    """Reads a program's own options from a command line, and sorts the other words.

    Args:
      kind: Dataclass of the options.
      arguments: The command line without the program.
      takes_keys: Whether the program has a configuration. Then other key=value are left to it.
      requires: Whether a missing required option is a problem.

    Raises:
      ConfigurationError: An option has no value.
    """
    options = options_of(kind)
    reader = _ValueReader()
    parser = _make_parser(options, reader)
    flags = [_as_flag(argument, options.values()) for argument in arguments]
    namespace, remaining = parser.parse_known_args(flags)
    valid = {
        name: tuple(value) if options[name].repeated else value
        for name, value in vars(namespace).items()
        if value is not _INVALID
    }
    parsed = ProgramArguments(
        options=kind(**valid),
        given=tuple(options[name].name for name in valid),
        problems=reader.problems,
    )
    _sort_remaining(remaining, [option.name for option in options.values()], takes_keys, parsed)
    if requires:
        for name, option in options.items():
            if option.required and not vars(namespace).get(name):
                fact = ("accepted", option.help)
                parsed.problems.append(ConfigIssue(f"{option.name}= is missing", context=(fact,)))
    return parsed


def describe(kind: type) -> str:
    """Returns the options of a dataclass for --help, under its docstring.

    Args:
      kind: The dataclass. Its docstring is a sentence for users.
    """
    parser = _make_parser(options_of(kind), _ValueReader())
    _, _, options = parser.format_help().partition("options:\n")
    return f"{(kind.__doc__ or '').strip()}\n\n{options.rstrip()}"


class _ValueReader:
    """Converts the texts of options, and collects what is wrong with them."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # by option, as typed
        self.problems: list[ConfigIssue] = []

    def read(self, option: _Option, text: str) -> values.TypedValue:
        """Returns the value of a text, or _INVALID."""
        if self.texts.get(option.name, text) != text and not option.repeated:
            name = option.name
            print_notices([f"note: {name} is given twice: {name}={text} wins"])
        self.texts[option.name] = text
        try:
            if option.choices and text not in (*option.choices, option.default):
                raise ValueError(f"{text!r} is not among the choices")
            return option.read(text)
        except ValueError as error:
            facts = (("accepted", option.accepts), nearest_fact(text, option.choices))
            location = f"command line, {option.name}={text}"
            self.problems.append(ConfigIssue(f"{option.name}: {error}", (location,), facts))
            return _INVALID


class _ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigurationError instead of printing a mistake and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as a ConfigurationError."""
        raise ConfigurationError([ConfigIssue(message, ("command line",))])


class _HelpFormatter(argparse.HelpFormatter):
    """Shows options as they are usually typed: `tokens=VALUE`, and `--fit` of a switch."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26, width=98)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        (flag,) = action.option_strings
        return flag if action.nargs == 0 else f"{flag.removeprefix('--')}={action.metavar}"


def _make_parser(options: dict[str, _Option], reader: _ValueReader) -> argparse.ArgumentParser:
    """Returns an argparse parser of options in the form --name=value, and --name of a switch.

    The namespace that it returns holds only the options that are given. A value with a problem is
    _INVALID there, and the problem is in `reader`.

    Args:
      options: By the name of their field.
      reader: Converts values and collects problems.
    """
    parser = _ArgumentParser(
        prog="",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # a namespace of what is given
        formatter_class=_HelpFormatter,
    )
    for name, option in options.items():
        flag = f"--{option.name}"
        help_text = option.help.replace("%", "%%")  # argparse formats it
        if option.is_switch:
            parser.add_argument(flag, dest=name, action="store_true", help=help_text)
            parser.add_argument(
                f"--no-{option.name}", dest=name, action="store_false", help=argparse.SUPPRESS
            )
        else:
            parser.add_argument(
                flag,
                dest=name,
                action="append" if option.repeated else "store",
                type=functools.partial(reader.read, option),
                metavar=option.metavar,
                help=help_text,
            )
    return parser


def _as_flag(argument: str, options: Iterable[_Option]) -> str:
    """Returns an option in the form that argparse reads, and other arguments as they are.

    An option may lack the dashes before its name, have dashes for underscores, and a switch may
    have a value.
    """
    name, equals, text = argument.partition("=")
    if not equals and not name.startswith("--"):
        return argument
    name = name.removeprefix("--").replace("-", "_")
    option = next((option for option in options if option.name == name), None)
    if option is None:
        return argument
    if option.is_switch and text.lower() in ("true", "false"):
        return f"--{name}" if text.lower() == "true" else f"--no-{name}"
    return f"--{name}{equals}{text}"


def _sort_remaining(
    remaining: Sequence[str],
    option_names: Sequence[str],
    takes_keys: bool,
    parsed: ProgramArguments[Any],
) -> None:
    """Sorts the words that are no options into `parsed`.

    Args:
      remaining: What argparse left, in order.
      option_names: All options of the program, to suggest the nearest one.
      takes_keys: Whether the program has a configuration.
      parsed: Gets settings, config files, operands, and problems of unknown options.
    """
    switches = sources.SWITCHES if takes_keys else ()
    for argument in sources.without_dashes(remaining, switches):
        match = ARGUMENT.fullmatch(argument)
        name = match[1] if match else ""
        problem = _unknown_option(name, argument, option_names, takes_keys)
        if problem is not None:
            parsed.problems.append(problem)
        elif match:
            parsed.settings.append(argument)
        elif YAML_PATH.fullmatch(argument):
            parsed.config_files.append(argument)
        else:
            parsed.operands.append(argument)


def _unknown_option(
    name: str, argument: str, option_names: Sequence[str], takes_keys: bool
) -> ConfigIssue | None:
    """Returns the problem of a name=value or -word that seems to be meant as an option.

    A program with a configuration leaves names that are closer to a key to it.
    """
    if not name and not argument.startswith("-"):
        return None
    key_names = settable_names() if takes_keys else []
    if takes_keys and (name in (*key_names, *ALIASES) or find_unsupported(name)):
        return None
    typed_name = name or argument.lstrip("-")
    nearest = close_matches(typed_name, dict.fromkeys([*option_names, *key_names]))
    if takes_keys and (not nearest or nearest[0] not in option_names):
        return None
    reason = "neither an option of this program nor a key" if takes_keys else "no option"
    label = "nearest" if nearest else "options"
    names = ", ".join(f"{near}=..." for near in nearest or option_names)
    return ConfigIssue(f"{typed_name}: {reason}", (f"command line, {argument}",), ((label, names),))
