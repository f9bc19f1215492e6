"""Judges candidates against a baseline: keep, discard, undecided or refused."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from MaxText import program_start

program_start.install(__name__)  # before the slow imports

from MaxText import exit_codes
from MaxText.config import command_line
from MaxText.experiments.arena.arena_args import ArenaOptions, parse_args

USAGE = """
usage: arena.py output=SESSION [baseline=A.yml candidate=B.yml|part.py ...] [key=value ...]

Trains candidates and a baseline at equal cost, seed by seed, until it is clear whether a candidate
is better, and prints one line of JSON for each. The chance that a session keeps any candidate that
is no better is alpha at most, however many are tried.

  python MaxText/arena.py output=session baseline=configs/quickstart.yml budget=60s \\
      candidate=my_mixer.py candidate='B.yml learning_rate=1e-3'
  python MaxText/arena.py output=session candidate=another_mixer.py:Class
  python MaxText/arena.py output=session --final

The first call sets a session's baseline, budget, alpha and keys; later ones need only output= and
candidate=. The same command resumes. Exit codes: 0 keep, 10 discard, 11 undecided, 12 refused.
docs/how-to/let_an_agent_search.md says what is promised.
"""

_INTERRUPTED = "Interrupted. Run the same command to resume."


def main() -> int:
    """Exit codes: those of the verdicts, 2 user error, 75 SIGTERM and notices, 130 Ctrl-C."""
    arguments = sys.argv[1:]
    if not arguments:
        print(USAGE.strip())
        return exit_codes.USER_ERROR
    command_line.answer_questions("arena.py", arguments, USAGE, ArenaOptions)
    with command_line.exit_on_user_error(_INTERRUPTED):
        args = parse_args(arguments)

        # Once the arguments are accepted, because it imports jax.
        from MaxText.experiments.arena.judging import judge
        from MaxText.experiments.arena.verdict import Verdict, exit_code_of

        def log(line: str) -> None:
            sys.stderr.write(f"{line}\n")

        def report(verdict: Verdict) -> None:
            log(str(verdict))
            print(verdict.to_json(), flush=True)

        verdicts = judge(args, log=log, report=report)
    return exit_code_of(verdicts)


if __name__ == "__main__":
    sys.exit(main())
