"""Arrays: independent tasks that an engine starts from one submission, each by its number.

The tasks read their commands from a file of the submission. A line of it is one run of train.py:
the number of its task, from 0, and the command, quoted for a shell. A task has several lines if its
runs follow each other, such as the stages of a growing model; the task ends with the first run that
fails.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobArray:
    """An array to submit.

    Attributes:
      name: Of the job, unique among the arrays of an engine.
      tasks: For each task the arguments of train.py of its runs, in order.
      folder: Absolute folder of the command file, the script or manifest, and logs. The machines of
        the tasks see the same folder.
      max_parallel: Tasks at a time; None for no limit.
    """

    name: str
    tasks: Sequence[Sequence[Sequence[str]]]
    folder: Path
    max_parallel: int | None = None

    @property
    def command_file(self) -> Path:
        """The file that the tasks read."""
        return self.folder / "commands.txt"

    def commands(self, train_command: Sequence[str]) -> str:
        """Returns the text of the command file.

        Args:
          train_command: Python and train.py on the machines of the tasks.
        """
        return "".join(
            f"{number} {shlex.join([*train_command, *arguments])}\n"
            for number, runs in enumerate(self.tasks)
            for arguments in runs
        )

    def read_commands(self, variable: str) -> str:
        """Returns shell code that sets `commands` to the commands of a task, one per line.

        It exits with code 2 if the task has none.

        Args:
          variable: Environment variable with the number of the task.
        """
        file = shlex.quote(str(self.command_file))
        return "\n".join(
            [
                f'commands="$(sed -n "s/^${variable} //p" {file})" || exit 2',
                f'[ "$commands" ] || {{ echo "{variable}: no such task" >&2; exit 2; }}',
            ]
        )
