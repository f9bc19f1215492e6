"""Command lines of all programs: --help, --show-config, --why, --from-maxtext, exit codes.

`parse` resolves the configuration of a program. Programs with options of their own, such as
hardware= of plan.py, call `parse_with_options`; program_options.py declares and reads these.
"""

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from MaxText import exit_codes, program_start
from MaxText.config import config_files, import_modules, serialization, sources, values
from MaxText.config.loading import LoadedConfig, load, review_file
from MaxText.config.maxtext_keys import ALIASES, find_mapping
from MaxText.config.merging import format_accepted, unknown_key
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.program_options import ProgramArguments, describe, options_of, read_options
from MaxText.config.schema import (
    Key,
    all_keys,
    flatten,
    keys_by_section,
    named_sections,
)
from MaxText.config.sources import Source
from MaxText.errors import UserError, storage_error_line, storage_failure

OptionsT = TypeVar("OptionsT")

_OPTIONS = """
options:
  --help [KEY]          this text, or everything about one key or named section
  --show-config         print the resolved configuration as YAML and exit
  --why KEY             print a value, where it was set and what it beat, and exit
  --from-maxtext FILE   print what this program makes of a YAML file written for MaxText, and exit

Values come, last wins, from: the schema's defaults, configs/decoder_blocks/<decoder_block>.yml,
base_config files, the config file, configs/models/<model_name>.yml, keys in the file that sets
model_name, environment variables M_<KEY>, key=value arguments.
"""

QUESTIONS = ("-h", "--help", "--show-config", "--why", "--from-maxtext")
Load = Callable[..., LoadedConfig]
Consequences = Callable[[LoadedConfig, str], str]  # (configuration, key) -> lines, or ""


def parse(
    program: str,
    arguments: Sequence[str],
    usage: str,
    load: Load = load,
    consequences: Consequences = lambda loaded, name: "",
) -> LoadedConfig:
    """Resolves the command line of a program, or answers it and exits.

    Args:
      program: Name as typed, such as "train.py", which selects its rules.
      arguments: The command line without the program.
      usage: Text for --help.
      load: (arguments, program or nothing) -> the configuration.
      consequences: What --why prints after the value of a key and where it was set.
    """
    remaining = list(arguments)
    try:
        if answer := _answer(program, remaining, usage, load, consequences):
            # Of a file's name that is not UTF-8, what can be printed.
            sys.stdout.write(answer.encode(errors="backslashreplace").decode())
            raise SystemExit(0)
        return load(remaining, program)
    except UserError as error:
        exit_with_error(error)


def parse_with_options(
    program: str, arguments: Sequence[str], usage: str, kind: type[OptionsT]
) -> tuple[LoadedConfig, ProgramArguments[OptionsT]]:
    """Resolves the command line of a program that has a configuration and options of its own.

    Answers questions (--help, --why, ...) and exits, as `parse` does.

    Args:
      program: Name as typed, such as "plan.py", which selects its rules.
      arguments: The command line without the program.
      usage: Text for --help.
      kind: Dataclass of the program's options.
    """
    program_arguments: ProgramArguments[OptionsT] | None = None

    def load_rest(remaining: Sequence[str], program: str | None = None) -> LoadedConfig:
        nonlocal program_arguments
        program_arguments = read_options(kind, remaining, requires=program is not None)
        try:
            loaded = load(program_arguments.configuration, program)
        except ConfigurationError as error:
            problems = [*program_arguments.problems, *error.problems]
            raise ConfigurationError(problems) from None
        program_arguments.check()
        return loaded

    _answer_about_option(arguments, kind)
    if _asks_for_help(arguments):
        usage = _with_options(usage, kind)
    loaded = parse(program, arguments, usage, load_rest)
    assert program_arguments is not None  # `parse` calls `load_rest`
    return loaded, program_arguments


def answer_questions(program: str, arguments: Sequence[str], usage: str, kind: type) -> None:
    """Answers --help, --why, ... and exits, in a program that reads its arguments itself.

    Args:
      program: Name as typed, such as "convert.py".
      arguments: The command line without what is neither an option nor of the configuration.
      usage: Text for --help.
      kind: Dataclass of the program's options.
    """
    if any(argument in QUESTIONS for argument in arguments):
        parse_with_options(program, arguments, usage, kind)


def answer_about_options(arguments: Sequence[str], usage: str, *kinds: type) -> None:
    """Answers --help and --help OPTION and exits, in a program without a configuration.

    Args:
      arguments: The command line without the program.
      usage: Text for --help.
      *kinds: Dataclasses of options; several if a program has subcommands.
    """
    for kind in kinds:
        _answer_about_option(arguments, kind)
    if _asks_for_help(arguments):
        sys.stdout.write(_with_options(usage, *kinds) + "\n")
        raise SystemExit(0)


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """Returns whether the command line asks for --help."""
    return "-h" in arguments or "--help" in arguments


def _with_options(usage: str, *kinds: type) -> str:
    """Returns the usage, followed by a description of each dataclass of options."""
    descriptions = [describe(kind) for kind in kinds if options_of(kind)]
    return "\n\n".join([usage.strip(), *descriptions])


def _answer_about_option(arguments: Sequence[str], kind: type) -> None:
    """Answers --help OPTION and --why OPTION, and exits."""
    options = {option.name: field for field, option in options_of(kind).items()}
    for index, (question, name) in enumerate(itertools.pairwise(arguments)):
        if question not in ("-h", "--help", "--why") or name not in options:
            continue
        field = options[name]
        answer = f"{name}\n  {options_of(kind)[field].help}\n"
        if question == "--why":
            other_arguments = [*arguments[:index], *arguments[index + 2 :]]
            try:
                parsed = read_options(kind, other_arguments, requires=False)
                parsed.check()
            except ConfigurationError as error:
                exit_with_error(error)
            value = values.to_yaml(getattr(parsed.options, field))
            source = Source.COMMAND_LINE if name in parsed.given else Source.DEFAULT
            answer = f"{name}={value}\n  set by: {source.value}\n"
        sys.stdout.write(answer)
        raise SystemExit(0)


def program_command(name: str) -> str:
    """Returns how the user would start a program, in the way in which this one was started.

    Args:
      name: Stem of the program's file: "decode".
    """
    script_name = os.path.basename(sys.argv[0])
    if script_name.startswith("maxtext-"):
        return f"maxtext-{name.replace('_', '-')}"
    python = "python"
    on_path = shutil.which("python")
    # Outside an active environment, python is another one or none.
    if on_path is None or os.path.dirname(on_path) != os.path.dirname(sys.executable):
        python = shlex.quote(sys.executable.removeprefix(os.getcwd() + os.sep))
    path = os.path.join(os.path.dirname(sys.argv[0]), f"{name}.py")
    if script_name.endswith(".py") and os.path.isfile(path):
        return f"{python} {path}"
    return f"{python} -m MaxText.{name}"


def exit_with_error(error: UserError) -> NoReturn:
    """Prints an error's message and exits with its code."""
    sys.stderr.write(f"error: {error}\n")
    program_start.limit_exit(error.exit_code)
    raise SystemExit(error.exit_code)


@contextlib.contextmanager
def exit_on_user_error(stopped: str = "") -> Iterator[None]:
    """Ends the program with one line after a user error or a storage error inside.

    Also ends it without a traceback after Ctrl-C, after a request to stop (SIGTERM), or when the
    reader of its output is gone. Each has its exit code (exit_codes.py). Other exceptions pass.

    Args:
      stopped: Line to print after Ctrl-C or a request to stop; "" for none.
    """
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
        """Writes text at once; without a reader it is discarded."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()

    return write


def _discard_stdout() -> None:
    """Redirects standard output to /dev/null: its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(
    program: str, remaining: list[str], usage: str, load: Load, consequences: Consequences
) -> str:
    """Returns the answer to the first question on a command line; "" without one.

    Args:
      program: Name as typed.
      remaining: The command line. The question and its operand are removed from it, so that what
        remains is the configuration that the answer is about.
      usage: Text for --help.
      load: (arguments, program or nothing) -> the configuration.
      consequences: As in `parse`.

    Raises:
      UserError: The question has no operand, or the configuration that it needs is wrong.
    """
    with contextlib.suppress(UserError):  # the configuration's own mistakes are reported later
        without_questions = [word for word in remaining if word not in ("-h", "--help", "--why")]
        import_modules.collect(without_questions)  # its parts have keys
    for index, argument in enumerate(remaining):
        if argument in ("-h", "--help"):
            name = _option_value(remaining, index)
            return _help_keys(_keys_named(name), remaining, load) if name else _help(program, usage)
        if argument == "--show-config":
            del remaining[index]
            return _show_config(_loaded(program, remaining, load))
        if argument in ("--why", "--from-maxtext"):
            name = _option_value(remaining, index)
            if not name:
                operand = "a key" if argument == "--why" else "a YAML file"
                raise UserError(f"{argument} needs {operand} after it")
            if argument == "--from-maxtext":
                return _maxtext_report(program, name, remaining)
            keys = _keys_named(name)
            loaded = _loaded(program, remaining, load)
            return "".join(
                explain_value(loaded, key.name) + consequences(loaded, key.name) for key in keys
            )
    return ""


def _loaded(program: str, remaining: list[str], load: Load) -> LoadedConfig:
    """Loads a configuration by the rules of all programs, and notes what `program` would refuse.

    So a question is answered about a configuration that the program itself cannot run.
    """
    loaded = load(remaining)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the same notices once more
            load(remaining, program)
    except UserError as error:
        sys.stderr.write(f"note: {program} would refuse this: {error}\n")
    return loaded


def _option_value(remaining: list[str], index: int) -> str:
    """Removes a question and its operand from a command line; returns the operand, or ""."""
    option, *operands = remaining[index : index + 2]
    # After --help and --why a YAML file is the configuration, not the key.
    if option != "--from-maxtext" and re.search(r"^-|=|\.ya?ml$", "".join(operands)):
        operands = []
    del remaining[index : index + 1 + len(operands)]
    return "".join(operands)


def _keys_named(name: str) -> list[Key]:
    """Returns the key of a name, MaxText's names included, or all keys of a named section.

    Raises:
      ConfigurationError: there is no such key or section.
    """
    name = ALIASES.get(name, name)
    if name in named_sections():
        return named_sections()[name]
    if name not in all_keys():
        raise ConfigurationError([unknown_key(name)])
    return [all_keys()[name]]


def _help(program: str, usage: str) -> str:
    """Returns the text of --help: usage, questions, and every key with its default."""
    usage = usage.strip()
    if not usage.startswith("usage:"):
        usage = f"usage: {program} [config.yml] [key=value ...]\n\n{usage}"
    lines = [usage, _OPTIONS]
    for section, keys in keys_by_section().items():
        lines.append(f"{'.'.join(section)}: {keys[0].title}")
        for key in keys:
            default = key.default_text
            lines.append(f"  {key.name}={default if len(default) < 60 else f'{default[:1]}...'}")
        lines.append("")
    return "\n".join(lines)


def _help_keys(keys: Sequence[Key], remaining: list[str], load: Load) -> str:
    """Returns the text of --help KEY for each key, with its value if the configuration loads."""
    loaded: LoadedConfig | None = None
    # A command line with mistakes still gets the help that explains them.
    with contextlib.suppress(UserError):
        loaded = load(remaining)
    return "\n".join(_help_key(key, loaded) for key in keys)


def _help_key(key: Key, loaded: LoadedConfig | None) -> str:
    """Returns all that is declared about a key, and its value in a configuration."""
    lines = [
        key.name,
        f"  {key.help}",
        f"  read by:  {'.'.join(key.section)} ({key.title.rstrip('.')})",
        f"  accepted: {format_accepted(key)}",
    ]
    facts: list[tuple[str, str]] = [("unit", key.unit), ("default", key.default_text)]
    facts += [("only if", key.condition_text(group)) for group in key.conditions]
    lines += [f"  {label + ':':<10}{text}" for label, text in facts if text]
    if key.name == "model_name":
        families = config_files.by_family(config_files.preset_names(config_files.MODELS))
        lines += ["  presets:", *(f"    {line}" for line in families)]
    elif key.name == "decoder_block":
        lines.append(
            f"  blocks:   {', '.join(config_files.preset_names(config_files.DECODER_BLOCKS))}"
        )
    if loaded is not None:
        value = values.to_yaml(flatten(loaded.config)[key.name])
        lines.append(f"  now:      {value} ({loaded.origins[key.name].place})")
    return "\n".join(lines) + "\n"


def _show_config(loaded: LoadedConfig) -> str:
    """Returns the configuration as YAML, with the origin of each value that is no default."""
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
    """Returns "key: value"."""
    mapping = find_mapping(setting.written, values.from_text(setting.origin.raw))
    value = mapping.text if mapping and mapping.name else setting.origin.raw
    return f"{setting.name}: {value}"


def _problem_line(problem: ConfigIssue) -> str:
    """Returns an issue in one line, with the facts that say what is accepted or closest."""
    shown = ("accepted", "closest", "nearest", "note", "try")
    facts = (f"{label}: {text}" for label, text in problem.facts if label in shown)
    return "; ".join([problem.message, *facts])


def explain_value(loaded: LoadedConfig, name: str) -> str:
    """Returns the value of a key and its origins, strongest first."""
    key = all_keys()[name]
    origin = loaded.origins[name]
    places = [f"{Source.DEFAULT.value}, {key.default_text}"]
    for setting in loaded.settings:
        if setting.name == name:
            source = f"{setting.origin.source.value}, " if setting.origin.file else ""
            places.append(f"{source}{setting.place}")
    if origin.source is Source.DERIVED:
        places.append(origin.place)
    winner, *beaten = reversed(places)
    value = values.to_yaml(flatten(loaded.config)[name])
    lines = [f"{name}={value}", f"  set by: {winner}"]
    lines += [f"  over:   {location}" for location in beaten]
    return "\n".join(lines) + "\n"
