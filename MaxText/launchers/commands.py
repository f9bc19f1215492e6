"""Runs external commands, or prints them in a dry run."""

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from MaxText.errors import UserError

Show = Callable[[str], None]

# Cloud errors for a temporary lack of capacity. An exhausted quota is not temporary.
_NO_CAPACITY = re.compile(
    r"no more capacity|insufficient capacity|not enough (resources|capacity)|stockout|out of "
    r"capacity|RESOURCE_EXHAUSTED|ZONE_RESOURCE_POOL_EXHAUSTED|currently unavailable|"
    r"internal error|try again later",
    re.IGNORECASE,
)
_QUOTA = re.compile(r"quota", re.IGNORECASE)


class Retry(NamedTuple):
    """Retries for lack of capacity: `tries` in total, `seconds` apart."""

    tries: int
    seconds: float


class Commands:
    """Runs commands one at a time; with `dry_run` only prints them."""

    def __init__(self, show: Show, *, dry_run: bool):
        self._show = show
        self.dry_run = dry_run

    def run(self, command: Sequence[str], *, retry: Retry | None = None) -> None:
        """Runs a command with its output on the terminal.

        With `retry`, the command is repeated while the cloud reports a lack of capacity. Raises
        UserError if it fails.
        """
        self._show(f"+ {shlex.join(command)}")
        if self.dry_run:
            return
        tries = retry.tries if retry else 1
        for number in range(1, tries + 1):
            code, errors = self._once(command, keep_errors=retry is not None)
            if code == 0:
                return
            is_full = _NO_CAPACITY.search(errors) and not _QUOTA.search(errors)
            if retry is None or not is_full or number == tries:
                many = f" (try {number} of {tries})" if retry and is_full else ""
                raise UserError(f"{shlex.join(command)} ended with code {code}{many}; see above.")
            self._show(f"nothing is free: try {number + 1} of {tries} in {retry.seconds:g} s")
            time.sleep(retry.seconds)

    def output(self, command: Sequence[str], *, in_dry_run: str = "") -> str:
        """Returns the stripped output of a command; `in_dry_run` stands in for it in a dry run."""
        self._show(f"+ {shlex.join(command)}")
        if self.dry_run:
            return in_dry_run
        done = self._start(command, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise UserError(f"{shlex.join(command)} ended with code {done.returncode}; see above.")
        return done.stdout.strip()

    def _once(self, command: Sequence[str], *, keep_errors: bool) -> tuple[int, str]:
        if not keep_errors:
            return self._start(command).returncode, ""
        done = self._start(command, stderr=subprocess.PIPE, text=True, errors="replace")
        if done.stderr:
            self._show(done.stderr.rstrip())
        return done.returncode, done.stderr

    def _start(self, command: Sequence[str], **options) -> subprocess.CompletedProcess:
        try:
            return subprocess.run(list(command), check=False, **options)
        except FileNotFoundError as error:
            raise UserError(
                f"{command[0]} is not installed here, or not on PATH. --dry-run prints the "
                "commands, to be run where it is."
            ) from error
