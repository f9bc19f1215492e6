"""Writes an HTML report and figures of runs."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText.config import command_line
from MaxText.config.keys import Count
from MaxText.config.problems import ConfigIssue
from MaxText.config.program_options import option, read_options
from MaxText.errors import UserError


def _folder(text: str) -> Path:
    if not text:
        raise ValueError("is empty. Write for example output=report.")
    return Path(text).expanduser()


USAGE = """
usage: report.py RUN [RUN ...] [output=DIR] [watch=SECONDS] [group_by=KEY]

Writes report.html, a self-contained page, and figures: losses, speed, goodput, and differences
between runs. Works on finished and on active runs. How to read it: docs/how-to/inspect_runs.md.

  python MaxText/report.py runs/quickstart                   one run
  python MaxText/report.py runs/a runs/b output=report       two runs side by side
  python MaxText/report.py runs/comparison                   all runs in a folder, at any depth
  python MaxText/report.py runs/quickstart watch=60          again every minute while it runs

RUN is the folder of a run (base_output_directory/run_name), or a folder of runs. That of
an arena.py session shows its leaderboard first.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of report.py."""

    output: Path | None = option(
        None,
        "Output folder; by default RUN/report for one RUN and report for several.",
        read=_folder,
        accepts="a folder",
        metavar="DIR",
    )
    watch: Count | None = option(
        None,
        "Rewrite the report periodically until all runs have ended; Ctrl-C stops it.",
        metavar="SECONDS",
    )
    group_by: str = option(
        "",
        "Draw runs with the same value of a configuration key as a mean with a band.",
        metavar="KEY",
    )


def output_folder(runs: Sequence[str], options: ReportOptions) -> Path:
    """Returns the output folder of a report.

    Args:
      runs: Folders as typed.
      options: Options of the command line.

    Raises:
      UserError: The only run is in a bucket, where no report is written.
    """
    if options.output is not None:
        return options.output
    if len(runs) > 1:
        return Path("report")
    if "://" in runs[0]:
        raise UserError(
            f"{runs[0]} is in a bucket, but reports are written to a local disk. Add output=DIR."
        )
    return Path(runs[0]).expanduser() / "report"


def parse(arguments: Sequence[str]) -> tuple[list[str], ReportOptions]:
    """Returns the runs and options of a command line.

    Raises:
      ConfigurationError: An option is wrong, or there is no run.
    """
    # Folders of runs that look like options, as those of a sweep do.
    paths = [argument for argument in arguments if "=" in argument and Path(argument).exists()]
    other_arguments = [argument for argument in arguments if argument not in paths]
    parsed = read_options(ReportOptions, other_arguments, takes_keys=False)
    runs = [*parsed.config_files, *parsed.operands, *paths]
    if not runs:
        message = "no run is given. Write: python MaxText/report.py RUN [RUN ...]"
        parsed.problems.append(ConfigIssue(message))
    parsed.check()
    return runs, parsed.options


def report(runs: Sequence[str], options: ReportOptions) -> bool:
    """Writes the report once; returns whether a run is still running."""
    from MaxText.experiments.arena.leaderboard import sections_of_sessions
    from MaxText.reports import run_tables
    from MaxText.reports.entries import find_runs, group_runs
    from MaxText.reports.report_writer import write_report

    selection = find_runs(runs, options.group_by)
    is_running = any(run.state == "running" for run in selection.runs)
    mismatches = run_tables.warnings(group_runs(selection.runs, selection.groups))
    for warning in [*selection.problems, *mismatches]:
        sys.stderr.write(f"warning: {warning}\n")
    page = write_report(
        selection.runs,
        output_folder(runs, options),
        groups=selection.groups,
        leading=sections_of_sessions(runs),
        warnings=selection.problems,
        refresh=(options.watch or 0) if is_running else 0,
    )
    print(page, *sorted(path.name for path in page.parent.glob("*.png")), sep="\n")
    return is_running


def main() -> None:
    """Exit codes: 0 done, 2 user error or unreadable run, 130 Ctrl-C."""
    # A path may contain characters that the terminal cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    arguments = sys.argv[1:]
    command_line.answer_about_options(arguments, USAGE, ReportOptions)
    with command_line.exit_on_user_error():
        runs, options = parse(arguments)
        while report(runs, options) and options.watch:
            time.sleep(options.watch)


if __name__ == "__main__":
    sys.exit(main())
