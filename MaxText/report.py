"""Writes an HTML report and figures of runs: python MaxText/report.py RUN [RUN ...]"""

import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# The script's own folder comes first on the path; its parent gives every module one name.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import early_signals

early_signals.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.config.problems import close_matches
from MaxText.errors import UserError

USAGE = """
usage: report.py RUN [RUN ...] [output=DIR] [watch=SECONDS] [group_by=KEY]

Writes report.html, a self-contained page, and figures: losses, speed, goodput, and differences
between runs. Works on finished and on active runs. How to read it: docs/how-to/inspect_runs.md.

  python MaxText/report.py runs/quickstart                   one run
  python MaxText/report.py runs/a runs/b output=report       two runs side by side
  python MaxText/report.py runs/comparison                   all runs in a folder, at any depth
  python MaxText/report.py runs/quickstart watch=60          again every minute while it runs

RUN is the folder of a run (base_output_directory/run_name), or a folder of runs. Options:

  output=DIR     output folder; by default RUN/report for one RUN and report for several
  watch=SECONDS  rewrite the report periodically until all runs have ended; Ctrl-C stops it
  group_by=KEY   draw runs with the same value of a configuration key as a mean with a band
"""

_OPTION = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPTIONS = ("output", "watch", "group_by")


@dataclasses.dataclass
class Options:
    """Parsed command line."""

    run_paths: list[str] = dataclasses.field(default_factory=list)  # runs, or folders of runs
    output: Path | None = None  # None for the default
    watch: int = 0  # seconds between two reports; 0 for a single one
    group_by: str = ""  # configuration key; empty for the groups of comparisons

    @property
    def folder(self) -> Path:
        """Output folder; UserError for a run in a bucket, where a page cannot be opened."""
        if self.output is not None:
            return self.output
        if len(self.run_paths) > 1:
            return Path("report")
        if "://" in self.run_paths[0]:
            raise UserError(
                f"{self.run_paths[0]} is in a bucket, but reports are written to a local disk. Add "
                "output=DIR."
            )
        return Path(self.run_paths[0]).expanduser() / "report"


def parse(arguments: Sequence[str]) -> Options:
    """Parses the command line; UserError for an unknown option, a bad value, or no run."""
    options = Options()
    for argument in arguments:
        match = _OPTION.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if name == "output" and text:
            options.output = Path(text).expanduser()
        elif name == "watch" and text.isascii() and text.isdigit() and int(text) > 0:
            options.watch = int(text)
        elif name == "group_by":
            options.group_by = text
        elif name == "output":
            raise UserError("output= is empty. Write for example output=report.")
        elif name == "watch":
            raise UserError(
                f"watch={text}: must be a whole number of seconds, 1 or more. For example watch=60."
            )
        elif argument.startswith("-") or (name and not Path(argument).exists()):
            close = close_matches(name or argument.strip("-").partition("=")[0], _OPTIONS)
            meant = f" Did you mean {close[0]}=?" if close else ""
            raise UserError(
                f"{argument}: unknown option.{meant} Options are output=DIR, watch=SECONDS and "
                "group_by=KEY; see --help."
            )
        else:
            options.run_paths.append(argument)
    if not options.run_paths:
        raise UserError("no run is given. Write: python MaxText/report.py RUN [RUN ...]")
    return options


def report(options: Options) -> bool:
    """Writes the report once and prints its path; returns whether a run is still running."""
    from MaxText.reports.discovery import find_runs
    from MaxText.reports.writing import warnings_about, write_report

    found = find_runs(options.run_paths, options.group_by)
    is_running = any(run.state == "running" for run in found.runs)
    for warning in [*found.problems, *warnings_about(found.runs, found.groups)]:
        sys.stderr.write(f"warning: {warning}\n")
    page = write_report(
        found.runs,
        options.folder,
        groups=found.groups,
        warnings=found.problems,
        refresh=options.watch if is_running else 0,
    )
    print(page, *sorted(path.name for path in page.parent.glob("*.png")), sep="\n", flush=True)
    return is_running


def main() -> int:
    """Exit codes: 0 done, 2 user error or unreadable run, 130 Ctrl-C."""
    # A path may contain characters that the terminal cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        print(USAGE.strip())
        return exit_codes.DONE
    with command_line.exit_on_user_error():
        options = parse(arguments)
        while report(options) and options.watch:
            time.sleep(options.watch)
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
