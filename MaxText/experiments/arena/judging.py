"""Judges candidates: examines them, runs their seeds, takes the looks, and writes the verdicts.

One loop over processes. It starts the next run that a candidate needs while there is a free job, in
the order of the candidates, and handles each run that has ended.
"""

import dataclasses
import os
import re
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from MaxText.config.registry import split_part_spec
from MaxText.errors import UserError
from MaxText.experiments.arena import leaderboard, trials, verdict
from MaxText.experiments.arena.arena_args import ArenaArgs
from MaxText.experiments.arena.candidates import changed_files
from MaxText.experiments.arena.ledger import (
    BASELINE,
    CandidateRow,
    FinalRow,
    Ledger,
    LookRow,
    Outcome,
    TrialRow,
    VerdictRow,
    open_ledger,
)
from MaxText.experiments.arena.measurement import measure_run
from MaxText.experiments.arena.sequential_test import FIRST_LOOK
from MaxText.experiments.arena.session import Session, load_baseline, load_session, open_session
from MaxText.experiments.arena.trials import TrialProcess, make_trial
from MaxText.experiments.execution import (
    DeviceCount,
    find_devices,
    lock_folder,
    signals_as_exceptions,
    subprocess_env,
)
from MaxText.monitoring.step_line import format_duration

Log = Callable[[str], None]
Report = Callable[[verdict.Verdict], None]

_POLL_SECONDS = 0.2
_EXAMINATION_SECONDS = 900.0  # imports, conformance checks and compilations of one candidate
_TIMING_ROUNDS = 2  # alternating with the baseline, so that a slow phase hits both
_LIMIT_FACTOR = 5.0  # of a run's time limit, times the baseline's slowest run
_LIMIT_EXTRA = 120.0  # seconds
_LONGEST_NAME = 40


def judge(args: ArenaArgs, log: Log, report: Report) -> list[verdict.Verdict]:
    """Returns the verdicts on the requested candidates and on unfinished ones, in order.

    Args:
      args: The request.
      log: Gets each line about the progress.
      report: Gets each verdict as soon as it is known.

    Raises:
      UserError: The folder is of another question, or the baseline cannot be trained.
    """
    with signals_as_exceptions(), lock_folder(args.output):
        stored = load_session(args.output)
        config = load_baseline(args) if stored is None else stored.load_baseline()
        devices = find_devices(config.run.hardware)
        num_devices = _devices_per_run(devices, args.options.jobs)
        session = open_session(args, num_devices)
        budget = session.spec.budget
        if args.options.jobs > 1 and budget is not None and budget.unit == "seconds":
            raise UserError(
                f"jobs={args.options.jobs}: a budget in seconds needs one run at a time. Set "
                "jobs=1, or budget= in FLOPs."
            )
        judging = _Judging(
            session,
            open_ledger(args.output),
            trusted=config.run.import_modules,
            platform=devices.platform,
            jobs=args.options.jobs,
            log=log,
            report=report,
        )
        try:
            verdicts = judging.run(args.options.candidate)
            if args.options.final:
                judging.measure_kept()
        finally:
            leaderboard.write_leaderboard(session, judging.ledger)
            judging.ledger.close()
        return verdicts


class _Judging:
    """The state of one call."""

    def __init__(
        self,
        session: Session,
        ledger: Ledger,
        *,
        trusted: Sequence[str],
        platform: str,
        jobs: int,
        log: Log,
        report: Report,
    ):
        """Begins without any process.

        Args:
          session: Of the candidates.
          ledger: Of the session.
          trusted: Modules of the baseline.
          platform: Of the devices.
          jobs: Runs at once.
          log: Gets lines about the progress.
          report: Gets verdicts.
        """
        self.session = session
        self.ledger = ledger
        self.log = log
        self._trusted = trusted
        self._platform = platform
        self._jobs = jobs
        self._report = report
        self._at_work: dict[int, TrialProcess] = {}  # by slot
        self._verdicts: list[verdict.Verdict] = []

    def run(self, specs: Sequence[str]) -> list[verdict.Verdict]:
        """Judges unfinished candidates, then those of `specs`; returns their verdicts."""
        waiting = list(specs)
        self._examine_baseline()
        active = [
            row.name for row in self.ledger.candidates if self.ledger.verdict(row.name) is None
        ]
        try:
            self._run_baseline()
            while waiting or active:
                # With a free job, so that steps are not timed beside a run.
                while waiting and self._free_slots and not self._next_trials(active):
                    name = self._admit(waiting.pop(0))
                    if name is not None and name not in active:
                        active.append(name)
                active = self._advance(active)
        finally:
            for process in self._at_work.values():
                process.interrupt()
        return self._verdicts

    def _examine_baseline(self) -> None:
        """Counts the baseline's cost, once; later, raises UserError if its code has changed."""
        row = self.ledger.candidate(BASELINE)
        if row is not None:
            if files := changed_files(row.files):
                raise UserError(
                    f"the baseline's code has changed since the session began: {', '.join(files)}. "
                    "Restore it, or set output= to another folder, which is a session of its own."
                )
            return
        self.log("examining the baseline")
        session = self.session
        folder = session.folder / BASELINE
        row = trials.examine(session, folder, None, time_limit=_EXAMINATION_SECONDS)
        if row.reasons:
            raise UserError(f"the baseline cannot be compared with: {'; '.join(row.reasons)}")
        budget = session.spec.budget
        if budget is not None and budget.unit == "seconds":
            seconds = self._measure([row])[0]
            steps = max(round(budget.amount / seconds), 1)
            row = dataclasses.replace(row, seconds_per_step=seconds, steps=steps)
        self.ledger.append(row)

    def _measure(self, rows: Sequence[CandidateRow]) -> list[float]:
        """Returns the seconds per step of configurations, measured in turns."""
        seconds: list[list[float]] = [[] for _ in rows]
        for number in range(_TIMING_ROUNDS):
            for index, row in enumerate(rows):
                median = trials.measure_seconds(
                    self.session,
                    row,
                    number=number,
                    trusted=self._trusted,
                    time_limit=_EXAMINATION_SECONDS,
                )
                seconds[index].append(median)
        return [statistics.median(medians) for medians in seconds]

    def _run_baseline(self) -> None:
        """Runs the baseline's first seeds, whose scatter tells clear losers."""
        runs = [(BASELINE, seed) for seed in range(self.session.spec.baseline_seeds)]
        while unfinished := [run for run in runs if self._needs(*run)]:
            self._fill(self._startable(unfinished))
            self._poll()
        self.log(verdict.describe_noise(self.ledger))

    def _needs(self, owner: str, seed: int) -> bool:
        """Returns whether a run has no result yet."""
        return all(row.seed != seed for row in self.ledger.of(TrialRow, owner))

    def _admit(self, spec: str) -> str | None:
        """Examines a candidate; returns its name, or None if its verdict is known."""
        self.log(f"examining {spec}")
        session = self.session
        ledger = self.ledger
        names = {row.name for row in ledger.candidates}
        folder = session.runs_folder(_unique_name(spec, names))
        shutil.rmtree(folder, ignore_errors=True)  # of an examination that was cut off
        row = trials.examine(session, folder, spec, time_limit=_EXAMINATION_SECONDS)
        row = dataclasses.replace(row, name=folder.name)
        for earlier in ledger.candidates:
            if row.source_hash and row.source_hash == earlier.source_hash:
                shutil.rmtree(folder)
                if ledger.verdict(earlier.name) is None:
                    return earlier.name
                self._emit(earlier.name, is_repeated=True)
                return None
        if not row.reasons and verdict.candidates_left(session, ledger) < 1:
            reason = (
                f"the session has run its {session.spec.num_candidates} candidates, for which "
                f"alpha={session.spec.alpha:g} holds. Start another one: output= another folder."
            )
            row = dataclasses.replace(row, reasons=(reason,), source_hash="")
        if not row.reasons:
            row = self._with_budget(row)
        ledger.append(row)
        if row.reasons:
            self._conclude(row.name, "refused", row.reasons)
            return None
        return row.name

    def _with_budget(self, row: CandidateRow) -> CandidateRow:
        """Returns a candidate with its share of alpha, and its steps for a budget in seconds."""
        row = dataclasses.replace(row, level=self.session.test.level)
        baseline = self._baseline
        budget = self.session.spec.budget
        if budget is None or budget.unit != "seconds" or "tokens" in self.session.spec.match:
            return row
        try:
            baseline_seconds, seconds = self._measure([baseline, row])
        except UserError as error:
            return dataclasses.replace(row, reasons=(str(error),))
        # In proportion to the baseline's steps, so that a machine that is slower by now is not
        # taken for a slower candidate.
        steps = max(round(baseline.steps * baseline_seconds / seconds), 1)
        return dataclasses.replace(row, steps=steps, seconds_per_step=seconds)

    @property
    def _baseline(self) -> CandidateRow:
        baseline = self.ledger.candidate(BASELINE)
        assert baseline is not None
        return baseline

    def _next_trials(self, active: Sequence[str]) -> list[tuple[str, int]]:
        """Returns runs that the next looks need and that can be started, first ones first."""
        needed: dict[tuple[str, int], None] = {}
        for name in active:
            for seed in range(self._num_seeds_of_next_look(name)):
                for owner in (BASELINE, name):
                    if self._needs(owner, seed):
                        needed[owner, seed] = None
        return self._startable(list(needed))

    def _startable(self, runs: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Returns the runs that can be started now.

        The first run of a candidate goes alone: it compiles the programs that its others then load
        from the cache, and a candidate that fails does so once.

        Args:
          runs: Owners and seeds, in order.
        """
        at_work = self._runs_at_work
        first_at_work = {owner for owner, _ in at_work}
        startable = []
        for owner, seed in runs:
            if (owner, seed) in at_work:
                continue
            if not self.ledger.of(TrialRow, owner):
                if owner in first_at_work:
                    continue
                first_at_work.add(owner)
            startable.append((owner, seed))
        return startable

    @property
    def _free_slots(self) -> list[int]:
        """Jobs without a process."""
        return [slot for slot in range(self._jobs) if slot not in self._at_work]

    @property
    def _runs_at_work(self) -> set[tuple[str, int]]:
        """Owners and seeds of the runs that have a process."""
        return {(process.trial.owner, process.trial.seed) for process in self._at_work.values()}

    def _num_seeds_of_next_look(self, name: str) -> int:
        looks = self.ledger.of(LookRow, name)
        return looks[-1].num_seeds + 1 if looks else FIRST_LOOK

    def _advance(self, active: Sequence[str]) -> list[str]:
        """Starts and polls runs, and takes the looks that are due; returns undecided names."""
        self._fill(self._next_trials(active))
        self._poll()
        return [name for name in active if not self._decide(name)]

    def _fill(self, runs: Sequence[tuple[str, int]]) -> None:
        """Starts runs, as `_startable` returns them, on free slots."""
        for slot, (owner, seed) in zip(self._free_slots, runs, strict=False):
            row = self.ledger.candidate(owner)
            assert row is not None
            trial = make_trial(self.session, owner, row.steps, seed)
            trials.end_orphan(trial)
            self.log(f"{trial.name}: started")
            self._at_work[slot] = TrialProcess(
                trial,
                trusted=self._trusted,
                time_limit=self._time_limit(owner),
                environment=self._environment(slot),
            )

    def _time_limit(self, owner: str) -> float | None:
        """Returns the longest duration of a run; the baseline's own has none by default."""
        if self.session.spec.time_limit is not None:
            return self.session.spec.time_limit
        if owner == BASELINE:
            return None
        slowest = max(row.duration for row in self.ledger.of(TrialRow, BASELINE))
        return _LIMIT_FACTOR * slowest + _LIMIT_EXTRA

    def _environment(self, slot: int) -> Mapping[str, str] | None:
        """Returns the environment of a run, with its share of the GPUs."""
        if self._jobs == 1 or self._platform != "gpu":
            return None
        first = slot * self.session.spec.num_devices
        devices = _visible_gpus(first + self.session.spec.num_devices)[first:]
        return subprocess_env() | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}

    def _poll(self) -> None:
        """Waits a moment, and records the runs that have ended."""
        time.sleep(_POLL_SECONDS)
        for slot, process in list(self._at_work.items()):
            row = process.poll() or self._stopped_clear_loser(process)
            if row is None:
                continue
            del self._at_work[slot]
            if row.owner == BASELINE and row.state != "completed":
                raise UserError(
                    f"{process.trial.name}: {'; '.join(row.reasons)}. A session needs a baseline "
                    f"whose runs complete; see {process.trial.log}."
                )
            self.ledger.append(row)
            loss = "" if row.loss is None else f", validation loss {row.loss:.4f}"
            reasons = f": {'; '.join(row.reasons)}" if row.reasons else ""
            self.log(
                f"{process.trial.name}: {row.state}{loss}, {format_duration(row.duration)}{reasons}"
            )

    def _stopped_clear_loser(self, process: TrialProcess) -> TrialRow | None:
        """Stops a run that is a clear loser; None if it is not."""
        trial = process.trial
        if trial.owner == BASELINE:
            return None
        rows = self.ledger.of(TrialRow, BASELINE)
        # The baseline's run may be at work beside it.
        same_seed = next((row.evaluations for row in rows if row.seed == trial.seed), ())
        baseline = [row.evaluations for row in rows]
        reason = verdict.clear_loss(process.evaluations(), baseline, same_seed)
        return process.stop(reason) if reason else None

    def _decide(self, name: str) -> bool:
        """Takes the look of a candidate that is due; returns whether it has a verdict."""
        rows = self.ledger.of(TrialRow, name)
        failed = next((row for row in rows if row.state != "completed"), None)
        if failed is not None:
            outcome: Outcome = "refused" if failed.state == "refused" else "discard"
            reasons = tuple(f"seed {failed.seed}: {reason}" for reason in failed.reasons)
            self._stop_runs_of(name)
            self._conclude(name, outcome, reasons)
            return True
        num_seeds = self._num_seeds_of_next_look(name)
        if any(self._needs(owner, seed) for seed in range(num_seeds) for owner in (BASELINE, name)):
            return False
        look = verdict.look_at(self.ledger, self.session.test, name, num_seeds)
        self.ledger.append(look)
        decision = verdict.decide(self.session.test, look)
        self.log(
            f"{name}: {num_seeds} seeds, {-look.improvement:+.4f} nats/token, interval "
            f"{-look.high:+.4f} to {-look.low:+.4f}"
        )
        if decision is None:
            return False
        outcome, reason = decision
        self._conclude(name, outcome, (reason,))
        return True

    def _stop_runs_of(self, name: str) -> None:
        for slot, process in list(self._at_work.items()):
            if process.trial.owner == name:
                process.interrupt()
                del self._at_work[slot]

    def _conclude(self, name: str, outcome: Outcome, reasons: tuple[str, ...]) -> None:
        """Writes a verdict, reports it, and deletes checkpoints that nothing needs any more."""
        self.ledger.append(VerdictRow(owner=name, verdict=outcome, reasons=reasons))
        if outcome != "keep":
            for folder in self.session.runs_folder(name).glob("seed_*/checkpoints"):
                shutil.rmtree(folder, ignore_errors=True)
        self._emit(name, is_repeated=False)

    def _emit(self, name: str, *, is_repeated: bool) -> None:
        result = verdict.verdict_of(self.session, self.ledger, name, is_repeated=is_repeated)
        self._verdicts.append(result)
        self._report(result)
        leaderboard.write_leaderboard(self.session, self.ledger)

    def measure_kept(self) -> None:
        """Measures kept candidates on the hidden half of the validation text, each only once."""
        ledger = self.ledger
        for row in ledger.candidates:
            decision = ledger.verdict(row.name)
            if decision is None or decision.verdict != "keep" or ledger.of(FinalRow, row.name):
                continue
            self.log(f"{row.name}: measuring on the hidden half")
            seeds = sorted(ledger.losses(row.name))
            baseline_losses = {str(seed): self._hidden_loss(BASELINE, seed) for seed in seeds}
            losses = {str(seed): self._hidden_loss(row.name, seed) for seed in seeds}
            final = FinalRow(owner=row.name, losses=losses, baseline_losses=baseline_losses)
            ledger.append(final)
            self.log(f"{row.name}: {verdict.describe_final(final)}")

    def _hidden_loss(self, owner: str, seed: int) -> float:
        trial = make_trial(self.session, owner, self._baseline.steps, seed)
        measurement = measure_run(trial.config_path, "second", trusted=self._trusted)
        if measurement.reasons:
            raise UserError(f"{trial.name}: {'; '.join(measurement.reasons)}")
        return measurement.loss


def _devices_per_run(devices: DeviceCount, jobs: int) -> int:
    """Returns the devices of each run; raises UserError if they cannot be divided."""
    if jobs == 1 or devices.platform == "cpu":
        return devices.count
    if devices.platform != "gpu" or devices.count % jobs:
        raise UserError(
            f"jobs={jobs}: this machine has {devices.count} {devices.platform} devices, which runs "
            "cannot share. Set jobs=1, or a divisor of the number of GPUs."
        )
    return devices.count // jobs


def _visible_gpus(count: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else [str(number) for number in range(count)]


def _unique_name(spec: str, taken: set[str]) -> str:
    """Returns a name of a candidate: that of its file or class, and a number if it is taken."""
    file, *_ = shlex.split(spec) or [spec]
    module, class_name = split_part_spec(file)
    stem = class_name or Path(module).stem
    name = re.sub(r"[^\w.+-]+", "-", stem).strip("-.")[:_LONGEST_NAME] or "candidate"
    if name == BASELINE:
        name += "_1"
    number = 2
    unique = name
    while unique in taken:
        unique = f"{name}_{number}"
        number += 1
    return unique
