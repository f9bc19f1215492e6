"""Weights & Biases: the numbers of a run under one id, over all its restarts.

W&B is never worth a run: its package is imported, connects and uploads in a thread of its own, and
what goes wrong there becomes one line on stderr.

events.jsonl is the record of a run; W&B gets a copy. At a restart W&B says which row it lacks
first: the server when online, the files on this machine when offline. Steps from there to the
restart are read from events.jsonl and sent again, steps before it that the run does again are not
sent, since they repeat what W&B has. So there every step stands once, whatever was killed and when.

W&B numbers rows upwards and takes none back (its `rewind` is a preview that servers may lack). So
the column `step` is the axis of all charts, and where a run goes back, or begins again with another
configuration, the steps that it does another time are further rows: W&B has both, the later one
being the valid one (offline_history.RowNumbers).
"""

import importlib.util
import json
import pathlib
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.configuration.training_sections import Monitoring
from MaxText.errors import UserError
from MaxText.monitoring.events import EVENTS_FILE, Event
from MaxText.monitoring.json_lines import stream_rows
from MaxText.monitoring.sinks.offline_history import RowNumbers, next_step
from MaxText.parallelism import processes

# Where the id stands: {"id": text, "last_step": newest step handed to W&B, or null, "shifts": see
# RowNumbers, "rewinds": number of the newest rewind that W&B's rows know of}.
STATE_FILE = "wandb.json"

# Kinds of events that are a row of W&B's history.
_ROWS = ("step", "evaluation")
# The column that charts have as their axis.
_AXIS = "step"

_CONNECT_SECONDS = 45.0
_UPLOAD_SECONDS = 45.0
# The longest that the end of a run waits. Longer than either, so that W&B can say what is wrong.
_CLOSE_SECONDS = 60.0
# Events that may wait, for the connection above all.
_MOST_WAITING = 10_000

# What the thread is asked to do beside taking events.
_FLUSH = "flush"
_CLOSE = "close"


class WeightsAndBiases:
    """Sends updates and evaluations as history, the configuration, and how the run ended."""

    def __init__(
        self,
        monitoring: Monitoring,
        run_folder: epath.Path,
        run_name: str,
        config_flat: Mapping[str, Any],
        first_step: int,
    ):
        """Starts the thread; returns at once.

        Args:
          monitoring: the keys wandb_*.
          run_folder: W&B's files go to its folder `wandb`; of a gs:// folder, to ./wandb.
          run_name: what W&B shows.
          config_flat: the configuration by key.
          first_step: the update done first; 0 begins a new run in W&B if the last one had steps.

        Raises:
          UserError: the package wandb is not installed.
        """
        self._monitoring = monitoring
        self._folder = epath.Path(run_folder)
        self._run_name = run_name
        self._config = dict(config_flat)
        self._first_step = first_step
        self._tasks: queue.SimpleQueue[Event | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up = self._left_out = False
        if monitoring.wandb_mode == "disabled":
            return
        package = importlib.util.find_spec("wandb")
        # A folder named wandb, such as W&B itself makes, looks like a package without an origin.
        if package is None or package.origin is None:
            raise UserError(
                "enable_wandb=true needs the package wandb, which is not installed. Run: "
                "pip install '.[wandb]'"
            )
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Takes an event, for the thread to send."""
        self._ask(event)

    def flush(self) -> None:
        """Notes in wandb.json how far the run is, without waiting for it."""
        self._ask(_FLUSH)

    def end(self) -> None:
        """Asks for the end of the run in W&B, without waiting for it."""
        self._ask(_CLOSE)

    def wait(self, until: float) -> None:
        """Waits for the upload after `end`; `until` of time.monotonic."""
        thread, self._thread = self._thread, None
        if thread is not None:
            began = time.monotonic()
            thread.join(max(0.0, until - began))
            if thread.is_alive():
                processes.leave_behind()
                self._give_up(
                    f"still busy {time.monotonic() - began:.0f} s after the end of the run"
                )

    def close(self) -> None:
        """Ends the run in W&B and waits for the upload, a minute at most. Safe to call twice."""
        self.end()
        self.wait(time.monotonic() + _CLOSE_SECONDS)

    def _ask(self, task: Event | str) -> None:
        # A thread that has given up takes nothing more, and what waited for it would pile up.
        if self._thread is None or not self._thread.is_alive():
            return
        may_go = isinstance(task, Event) and task.kind in _ROWS
        if self._tasks.qsize() < _MOST_WAITING or not may_go:
            self._tasks.put(task)
        elif not self._left_out:
            self._left_out = True
            sys.stderr.write(
                "warning: Weights & Biases is slower than the run: rows are left out there. "
                "events.jsonl has all of them.\n"
            )

    def _work(self) -> None:
        """The thread, from the import to the end of the upload."""
        try:
            self._report()
        except Exception as error:  # Any failure of W&B ends reporting, none ends the run.
            self._give_up((str(error).strip() or type(error).__name__).splitlines()[0])

    def _report(self) -> None:
        state = self._state()
        run = self._begin(state["id"])
        run.define_metric(_AXIS)
        run.define_metric("*", step_metric=_AXIS)
        if self._monitoring.wandb_mode == "online":
            next_row = run.starting_step
        else:
            next_row = next_step(self._local_folder() / "wandb", state["id"])
        numbers = RowNumbers(state["shifts"], next_row)

        def log(step: int, facts: Mapping[str, Any], at: float) -> None:
            run.log(_history(step, facts, at), step=numbers.row(step))

        def go_back(rewind: Mapping[str, Any]) -> None:
            # One without a number is from before they had any, and was dealt with then.
            if rewind.get("number", 0) > state["rewinds"]:
                state["rewinds"] = rewind["number"]
                numbers.begin_again(rewind["to"])
                self._save(state)

        rewinds = self._rewinds_before_restart()
        for rewind in rewinds:
            go_back(rewind)
        for row in self._rows_before_restart(numbers.lacking, rewinds):
            log(row["step"], row, row["time"])
        exit_code = 1  # unless the run says that it was completed
        while (task := self._tasks.get()) is not _CLOSE:
            if not isinstance(task, Event):
                self._save(state)
            elif task.kind in ("start", "resume"):
                run.summary.update(_scalars(task.facts))
            elif task.kind in _ROWS and task.step is not None and task.step >= numbers.lacking:
                log(task.step, task.facts, task.time)
                first, state["last_step"] = state["last_step"] is None, task.step
                if first:
                    self._save(state)
            elif task.kind == "rewind":
                go_back(task.facts)
            elif task.kind == "config_change":
                numbers.begin_again(self._first_step)
                self._save(state)
            elif task.kind == "stop":
                reason = task.facts.get("reason")
                run.summary["stop"] = reason
                exit_code = 0 if reason == "completed" else 1
        self._save(state)
        run.finish(exit_code=exit_code)

    def _begin(self, run_id: str) -> Any:
        """Imports W&B and creates or continues the run there."""
        import wandb

        # Nothing of W&B on the terminal: no lines, and above all no question for a key, which
        # would wait in the midst of the step lines.
        quiet = {"silent": True, "console": "off"}
        wandb.setup(wandb.Settings(**quiet))
        kind, model = self._config.get("decoder_block"), self._config.get("model_name")
        return wandb.init(
            project=self._monitoring.wandb_project_name,
            entity=self._monitoring.wandb_entity or None,
            name=self._run_name,
            id=run_id,
            resume="allow",
            mode=self._monitoring.wandb_mode,
            dir=str(self._local_folder()),
            config=self._config,
            allow_val_change=True,
            tags=[tag for tag in (kind, model) if tag and tag != "default"],
            settings=wandb.Settings(
                **quiet,
                disable_git=True,  # the address of a remote may hold a password
                disable_code=True,
                init_timeout=_CONNECT_SECONDS,
                finish_timeout=_UPLOAD_SECONDS,
                finish_timeout_raises=True,
            ),
        )

    def _local_folder(self) -> pathlib.Path:
        """Where the folder wandb is made; W&B's process writes to local disks only."""
        if str(self._folder).startswith("gs://"):
            return pathlib.Path.cwd()
        return pathlib.Path(self._folder)

    def _state(self) -> dict[str, Any]:
        """What wandb.json holds, with a new id where this is a new run."""
        path = self._folder / STATE_FILE
        state = json.loads(path.read_text()) if path.exists() else None
        # Training that begins at 0 again may have other numbers, and W&B cannot take rows back.
        if state is None or (self._first_step == 0 and state["last_step"] is not None):
            state = {"id": secrets.token_hex(4), "last_step": None}
            self._save(state)
        return {"shifts": [[0, 0]], "rewinds": 0} | state

    def _save(self, state: Mapping[str, Any]) -> None:
        temporary = self._folder / f"{STATE_FILE}.writing"
        temporary.write_text(json.dumps(state) + "\n")
        temporary.replace(self._folder / STATE_FILE)

    def _rewinds_before_restart(self) -> list[dict[str, Any]]:
        """Where earlier attempts went back, of which some may have been killed before W&B knew."""
        if self._first_step == 0:
            return []
        rows = stream_rows(self._folder / EVENTS_FILE)
        return [
            row for row in rows if row.get("event") == "rewind" and row["to"] < self._first_step
        ]

    def _rows_before_restart(
        self, lacking: int, rewinds: Sequence[Mapping[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Rows of earlier attempts that W&B lacks, read line by line as there may be many."""
        if lacking >= self._first_step:
            return
        for row in stream_rows(self._folder / EVENTS_FILE):
            if row.get("event") in _ROWS and lacking <= row["step"] < self._first_step:
                # The file is cut back meanwhile, so that places in it tell nothing.
                stands = (
                    row["time"] > each["time"] or row["step"] < each["to"] for each in rewinds
                )
                if all(stands):
                    yield row

    def _give_up(self, why: str) -> None:
        """Says once why W&B gets nothing more."""
        if not self._given_up:
            self._given_up = True
            sys.stderr.write(
                f"warning: Weights & Biases gets nothing more: {why.rstrip('.')}. Training and its "
                "other records go on; a restart of the unfinished run sends what W&B lacks, and "
                f"`wandb sync` what is in {self._local_folder() / 'wandb'}\n"
            )


def _history(step: int, facts: Mapping[str, Any], time: float) -> dict[str, Any]:
    """A row of W&B's history: the numbers under MaxText's tags, and when they were made."""
    tags = {name: value for name, value in _scalars(facts).items() if "/" in name}
    return {**tags, _AXIS: step, "_timestamp": time}


def _scalars(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B can put into a column; null, lists and tables are left out."""
    plain = {
        name: value.item() if hasattr(value, "item") else value for name, value in facts.items()
    }
    return {name: value for name, value in plain.items() if isinstance(value, str | int | float)}
