"""Writes a page and pictures about runs: python MaxText/report.py RUN [RUN ...]"""

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
usage: report.py RUN [RUN ...] [output=DIR] [watch=SECONDS]

Writes report.html, one file that needs no network, and pictures: losses, speed, where the time
went, and what differs between runs. Also while they run. How to read it:
docs/how-to/inspect_runs.md.

  python MaxText/report.py runs/quickstart                   one run
  python MaxText/report.py runs/a runs/b output=report       two runs side by side
  python MaxText/report.py runs/comparison                   all runs in a folder, at any depth
  python MaxText/report.py runs/quickstart watch=60          again every minute while it runs

RUN is the folder of a run (base_output_directory/run_name), or a folder that holds runs. Besides:

  output=DIR     folder of the files; by default RUN/report for one RUN and report for several
  watch=SECONDS  writes again and again until no run is running any more; Ctrl-C ends it
"""

_OPTION = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPTIONS = ("output", "watch")


@dataclasses.dataclass
class Options:
    """What the command line says.

    Attributes:
      places: folders of runs, or folders that hold some.
      output: where the files go; None for the default.
      watch: seconds between two reports; 0 for a single one.
    """

    places: list[str] = dataclasses.field(default_factory=list)
    output: Path | None = None
    watch: int = 0

    @property
    def folder(self) -> Path:
        """Where the files go.

        Raises:
          UserError: the run lies in a bucket, where a page cannot be opened.
        """
        if self.output is not None:
            return self.output
        if len(self.places) > 1:
            return Path("report")
        if "://" in self.places[0]:
            raise UserError(
                f"{self.places[0]} is in a bucket; pages are written to a local disk. Add "
                "output=DIR."
            )
        return Path(self.places[0]).expanduser() / "report"


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line.

    Raises:
      UserError: an option is unknown or has no usable value, or no run is named.
    """
    options = Options()
    for argument in arguments:
        match = _OPTION.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if name == "output" and text:
            options.output = Path(text).expanduser()
        elif name == "watch" and text.isascii() and text.isdigit() and int(text) > 0:
            options.watch = int(text)
        elif name == "output":
            raise UserError("output= names no folder. Write for example output=report.")
        elif name == "watch":
            raise UserError(
                f"watch={text}: seconds must be a whole number, 1 or more. For example watch=60."
            )
        elif argument.startswith("-") or (name and not Path(argument).exists()):
            close = close_matches(name or argument.strip("-").partition("=")[0], _OPTIONS)
            meant = f" Did you mean {close[0]}=?" if close else ""
            raise UserError(
                f"{argument}: no such option.{meant} There are output=DIR and watch=SECONDS; "
                "--help explains them."
            )
        else:
            options.places.append(argument)
    if not options.places:
        raise UserError("no run is named. Write: python MaxText/report.py RUN [RUN ...]")
    return options


def report(options: Options) -> bool:
    """Writes the report once and says where; returns whether a run is still running."""
    from MaxText.reports.finding import find_runs
    from MaxText.reports.writing import warnings_about, write_report

    found = find_runs(options.places)
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
    pictures = sorted(path.name for path in page.parent.glob("*.png"))
    print(f"{page}\npictures beside it: {', '.join(pictures)}", flush=True)
    return is_running


def main() -> int:
    """Exit codes: 0 done, 2 a mistake in the command line or an unreadable run, 130 Ctrl-C."""
    # A path may hold what the terminal cannot show.
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
