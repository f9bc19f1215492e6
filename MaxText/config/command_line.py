"""Command lines of all programs: options, help, --show-config, --why.

A program declares options of its own, such as hardware= of plan.py, as a Section, whose class is
also their help. They are typed like keys: name=value, --name=value, --name value, or --name alone
for a switch.
"""

import contextlib
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from MaxText import exit_codes, program_start
from MaxText.config import config_files, import_modules, serialization, sources, values
from MaxText.config.keys import Section
from MaxText.config.loading import LoadedConfig, load, review_file
from MaxText.config.maxtext_keys import ALIASES, find_mapping, find_unsupported
from MaxText.config.merging import converted_value, format_accepted, unknown_key
from MaxText.config.problems import ConfigIssue, ConfigurationError, close_matches, nearest_fact
from MaxText.config.schema import (
    Key,
    all_keys,
    all_names,
    flatten,
    keys_by_section,
    keys_of,
    split_entry,
)
from MaxText.config.sources import ARGUMENT, YAML_PATH, Source, print_notices
from MaxText.errors import UserError, storage_error_line, storage_failure


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
    switches += sources.SWITCHES if takes_keys else ()
    for argument in sources.without_dashes(arguments, switches):
        match = ARGUMENT.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if name in kind.RENAMED:
            name, old = kind.RENAMED[name], name
            print_notices([f"note: {old}= is now {name}="])
        if name in options:
            option = options[name]
            earlier = found.get(options[name].name)
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
        elif problem := _unknown_option(name, argument, options, takes_keys):
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


def _unknown_option(
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


_OPTIONS = """
options:
  --help [KEY]          this text, or everything about one key
  --show-config         print the resolved configuration as YAML and exit
  --why KEY             print a value, where it was set and what it beat, and exit
  --from-maxtext FILE   print what this program makes of a YAML file written for MaxText, and exit

Values come, last wins, from: the schema's defaults, configs/decoder_blocks/<decoder_block>.yml,
base_config files, the config file, configs/models/<model_name>.yml, keys in the file that sets
model_name, environment variables M_<KEY>, key=value arguments.
"""

QUESTIONS = ("-h", "--help", "--show-config", "--why", "--from-maxtext")
Load = Callable[..., LoadedConfig]


def parse(program: str, arguments: Sequence[str], usage: str, load: Load = load) -> LoadedConfig:
    """Resolves the command line of a program, or answers it and exits.

    Args:
      program: Name as typed, such as "train.py", which selects its rules.
      load: (arguments, program or nothing) -> the configuration.
    """
    remaining = list(arguments)
    try:
        if answer := _answer(program, remaining, usage, load):
            # Of a file's name that is not UTF-8, what can be printed.
            sys.stdout.write(answer.encode(errors="backslashreplace").decode())
            raise SystemExit(0)
        return load(remaining, program)
    except UserError as error:
        exit_with_error(error)


def parse_with_options(
    program: str, arguments: Sequence[str], usage: str, kind: type[OptionsT]
) -> tuple[LoadedConfig, OptionsT, Words]:
    found: list[Any] = []

    def load_rest(words: Sequence[str], program: str | None = None) -> LoadedConfig:
        found[:] = read_options(kind, words, requires=program is not None)
        problems = list(found[1].problems)
        try:
            loaded = load(found[1].configuration, program)
        except ConfigurationError as error:
            raise ConfigurationError([*problems, *error.problems]) from None
        found[1].check()
        return loaded

    _answer_about_option(arguments, kind)
    if {"-h", "--help"} & set(arguments):
        usage = _with_options(usage, kind)
    loaded = parse(program, arguments, usage, load_rest)
    return loaded, found[0], found[1]


def answer_questions(
    program: str, arguments: Sequence[str], usage: str, kind: type[ProgramOptions]
) -> None:
    if any(word in QUESTIONS for word in arguments):
        parse_with_options(program, arguments, usage, kind)


def answer_about_options(
    arguments: Sequence[str], usage: str, *kinds: type[ProgramOptions]
) -> None:
    for kind in kinds:
        _answer_about_option(arguments, kind)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(_with_options(usage, *kinds) + "\n")
        raise SystemExit(0)


def _with_options(usage: str, *kinds: type[ProgramOptions]) -> str:
    described = [describe(kind) for kind in kinds if kind.model_fields]
    return "\n\n".join([usage.strip(), *described])


def _answer_about_option(arguments: Sequence[str], kind: type[ProgramOptions]) -> None:
    options = {name.rstrip("_"): option for name, option in keys_of(kind).items()}
    for index, (word, name) in enumerate(itertools.pairwise(arguments)):
        if word not in ("-h", "--help", "--why") or name not in options:
            continue
        text = f"{name}\n  {options[name].help}\n"
        if word == "--why":
            rest = [*arguments[:index], *arguments[index + 2 :]]
            given, words = read_options(kind, rest, requires=False)
            if words.problems:
                exit_with_error(ConfigurationError(words.problems))
            value = values.to_yaml(getattr(given, options[name].name))
            source = Source.COMMAND_LINE if name in words.given else Source.DEFAULT
            text = f"{name}={value}\n  set by: {source.value}\n"
        sys.stdout.write(text)
        raise SystemExit(0)


def program_command(name: str) -> str:
    own = os.path.basename(sys.argv[0])
    if own.startswith("maxtext-"):
        return f"maxtext-{name.replace('_', '-')}"
    path = os.path.join(os.path.dirname(sys.argv[0]), f"{name}.py")
    if own.endswith(".py") and os.path.isfile(path):
        return f"python {path}"
    return f"python -m MaxText.{name}"


def exit_with_error(error: UserError) -> NoReturn:
    sys.stderr.write(f"error: {error}\n")
    program_start.limit_exit(error.exit_code)
    raise SystemExit(error.exit_code)


@contextlib.contextmanager
def exit_on_user_error(stopped: str = "") -> Iterator[None]:
    """Ends the program with one line after a user error or a storage error inside."""
    program_start.leave_to_python()
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        sys.stdout.flush()
        exit_with_error(error)
    except BrokenPipeError:
        # The interpreter would flush it once more at its end.
        _discard_stdout()
        raise SystemExit(exit_codes.BROKEN_PIPE) from None
    except KeyboardInterrupt as error:
        if stopped:
            with contextlib.suppress(OSError):  # the terminal may be gone
                sys.stderr.write(f"{stopped}\n")
        is_request = isinstance(error, program_start.StopRequestedError)
        code = exit_codes.PREEMPTED if is_request else exit_codes.INTERRUPTED
        program_start.limit_exit(code)
        raise SystemExit(code) from None
    except Exception as error:
        failure = storage_failure(error)
        if failure is None:
            raise
        sys.stderr.write(f"{storage_error_line(failure)}\n")
        program_start.limit_exit(exit_codes.USER_ERROR)
        raise SystemExit(exit_codes.USER_ERROR) from None


def stdout_writer() -> Callable[[str], None]:
    """Returns a function for unbuffered writes to standard output.

    Escapes characters that the terminal's encoding lacks. Discards output after a broken pipe
    (head, less), so that the program still writes its files.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]

    def write(text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()

    return write


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(program: str, remaining: list[str], usage: str, load: Load) -> str:
    with contextlib.suppress(UserError):  # the configuration's own mistakes are reported later
        rest = [word for word in remaining if word not in ("-h", "--help", "--why")]
        import_modules.collect(rest)  # its parts have keys
    for index, argument in enumerate(remaining):
        if argument in ("-h", "--help"):
            name = _option_value(remaining, index)
            return _help_key(name, remaining, load) if name else _help(program, usage)
        if argument == "--show-config":
            del remaining[index]
            return _show_config(_loaded(program, remaining, load))
        if argument in ("--why", "--from-maxtext"):
            name = _option_value(remaining, index)
            if not name:
                what = "a key" if argument == "--why" else "a YAML file"
                raise UserError(f"{argument} needs {what} after it")
            if argument == "--from-maxtext":
                return _maxtext_report(program, name, remaining)
            key = _known(name)
            return explain_value(_loaded(program, remaining, load), key.name)
    return ""


def _loaded(program: str, remaining: list[str], load: Load) -> LoadedConfig:
    """Loads by the rules of all programs; own refusals become notes."""
    loaded = load(remaining)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the same notices once more
            load(remaining, program)
    except UserError as error:
        sys.stderr.write(f"note: {program} would refuse this: {error}\n")
    return loaded


def _option_value(remaining: list[str], index: int) -> str:
    option, *operands = remaining[index : index + 2]
    # After --help and --why a YAML file is the configuration, not the key.
    if option != "--from-maxtext" and re.search(r"^-|=|\.ya?ml$", "".join(operands)):
        operands = []
    del remaining[index : index + 1 + len(operands)]
    return "".join(operands)


def _known(name: str) -> Key:
    name, _ = split_entry(ALIASES.get(name, name))
    if name not in all_keys():
        raise ConfigurationError([unknown_key(name)])
    return all_keys()[name]


def _help(program: str, usage: str) -> str:
    usage = usage.strip()
    if not usage.startswith("usage:"):
        usage = f"usage: {program} [config.yml] [key=value ...]\n\n{usage}"
    lines = [usage, _OPTIONS]
    for section, keys in keys_by_section().items():
        lines.append(f"{'.'.join(section)}: {keys[0].title}")
        for key in keys:
            default = values.to_yaml(key.default)
            lines.append(f"  {key.name}={default if len(default) < 60 else f'{default[:1]}...'}")
        lines.append("")
    return "\n".join(lines)


def _help_key(name: str, remaining: list[str], load: Load) -> str:
    key = _known(name)
    lines = [
        key.name,
        f"  {key.help}",
        f"  read by:  {'.'.join(key.section)} ({key.title.rstrip('.')})",
        f"  accepted: {format_accepted(key)}",
    ]
    facts: list[tuple[str, str]] = [("unit", key.unit), ("default", values.to_yaml(key.default))]
    facts += [("only if", key.condition_text(group)) for group in key.conditions]
    lines += [f"  {label + ':':<10}{text}" for label, text in facts if text]
    for entry in key.entries.values():
        lines.append(f"  {entry.name}: {entry.help} ({format_accepted(entry)})")
    try:
        loaded = load(remaining)
    except UserError:
        # A command line with mistakes still gets the help that explains them.
        return "\n".join(lines) + "\n"
    origin = loaded.origins[key.name]
    value = values.to_yaml(flatten(loaded.config)[key.name])
    lines.append(f"  now:      {value} ({origin.place})")
    return "\n".join(lines) + "\n"


def _show_config(loaded: LoadedConfig) -> str:
    origins = loaded.origins.items()
    comments = {name: one.place for name, one in origins if one.source is not Source.DEFAULT}
    return serialization.resolved_yaml(loaded.config, comments)


def _maxtext_report(program: str, path: str, arguments: Sequence[str]) -> str:
    """Returns what `program` makes of a config file written for MaxText."""
    file = config_files.find_config(path)
    review = review_file(path, arguments, program)
    groups = {
        "Supported": [_setting_line(setting) for setting in review.settings],
        "Accepted under another name or value, or without effect": review.notices,
        "Not supported: change or remove these": list(map(_problem_line, review.problems)),
    }
    optional = {
        "MaxText's defaults, which stay": [_setting_line(one) for one in review.defaults],
        "MaxText's defaults of keys that are not here, which have no effect": [
            _setting_line(one) for one in review.absent_defaults
        ],
        f"Still needed by {program}": list(map(_problem_line, review.missing)),
    }
    groups |= {heading: entries for heading, entries in optional.items() if entries}
    num_keys = len(config_files.read(file)[0])
    lines = [f"{config_files.short_path(file)}, {num_keys} keys"]
    for heading, entries in groups.items():
        lines += ["", f"{heading} ({len(entries)}):", *(f"  {line}" for line in entries)]
    return "\n".join(lines) + "\n"


def _setting_line(setting: sources.Setting) -> str:
    """Returns "key: value", or "key.entry: value"."""
    name = setting.name
    if isinstance(setting.value, dict) and len(setting.value) == 1:
        (entry,) = setting.value
        if setting.written != name:
            name = f"{name}.{entry}"
    mapping = find_mapping(setting.written, values.from_text(setting.origin.raw))
    value = mapping.text if mapping and mapping.name else setting.origin.raw
    return f"{name}: {value}"


def _problem_line(problem: ConfigIssue) -> str:
    shown = ("accepted", "closest", "nearest", "note", "try")
    facts = (f"{label}: {text}" for label, text in problem.facts if label in shown)
    return "; ".join([problem.message, *facts])


def explain_value(loaded: LoadedConfig, name: str) -> str:
    """Returns the value of a key and its origins, strongest first."""
    key = all_keys()[name]
    origin = loaded.origins[name]
    places = [f"{Source.DEFAULT.value}, {values.to_yaml(key.default)}"]
    for setting in loaded.settings:
        if setting.name == name:
            source = f"{setting.origin.source.value}, " if setting.origin.file else ""
            places.append(f"{source}{setting.place}")
    if origin.source is Source.DERIVED:
        places.append(origin.place)
    winner, *beaten = reversed(places)
    value = values.to_yaml(flatten(loaded.config)[name])
    lines = [f"{name}={value}", f"  set by: {winner}"]
    lines += [f"  over:   {place}" for place in beaten]
    return "\n".join(lines) + "\n"
