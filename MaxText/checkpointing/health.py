"""Healthy checkpoints: the rule that decides which states are healthy, and the list in a file.

A rollback restores the newest healthy checkpoint, and retention never deletes it. A state is not
healthy just because it was saved: the loss of a step is that of the state before it, so a state can
be broken before any metric shows it.

`HealthyCheckpoints.is_healthy` is the only place that decides. It gets everything that the run
knows about a state (`HealthEvidence`) and is asked

  - about each saved checkpoint when it is saved and after every later step, until it is healthy;
  - about the newest state, before it is copied to memory as a target of rollbacks (after the
    evaluation of the same step, if there is one);
  - about the final state, when a run ends on purpose.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from etils import epath

from MaxText.checkpointing.history import read_run_file
from MaxText.storage.atomic import write_json_with_digest

_MAX_EVALUATIONS = 1_000  # that are remembered; each checkpoint stores them, in some 20 KB


@dataclasses.dataclass(frozen=True)
class HealthEvidence:
    """What a run knows about one of its states when it asks whether the state is healthy.

    Attributes:
      step: The state is that after this step. For the newest state: the newest step with reported
        metrics, up to `step_log_period` steps before that of the state.
      num_accepted: Number of steps in a row that the spike guard accepted. For a checkpoint: steps
        after it, up to the newest reported one. For the newest state, which has no later step: the
        last steps up to it, math.inf if no step of the run was ever skipped.
      problems: What speaks against the state besides skipped steps, in words: a rollback that is
        due, a diverged loss. Known for the newest state only; empty for checkpoints.
      validation_losses: Validation loss after each evaluated step, also of steps after the state
        and of earlier starts of the run; only those that a rollback undid are missing, and all but
        the newest 1,000. An evaluated step rarely has a checkpoint: with periods of 100,
        evaluations follow steps 99, 199, and checkpoints 100, 200. The unit is that of the
        objective, as in `eval/avg_loss`; NaN if the loss was not finite. The rule does not depend
        on it.
    """

    step: int
    num_accepted: float
    problems: Sequence[str] = ()
    validation_losses: Mapping[int, float] = dataclasses.field(default_factory=dict)


class HealthyCheckpoints:
    """Decides which states are healthy; remembers healthy checkpoints over restarts.

    Steps must be observed in order. All processes observe the same steps, and so decide alike.

    A mark may be in the file before its checkpoint is complete, and after it was deleted. So a
    killed run never loses the mark of a checkpoint; a step counts if its checkpoint exists, too.

    Args:
      folder: The folder of the run's checkpoints; the list is its file healthy.json.
      healthy_after_steps: See `is_healthy`. With 0, a checkpoint is healthy once it is saved.
      log: Gets a line about a file that cannot be read or written.
    """

    def __init__(self, folder: epath.Path, healthy_after_steps: int, log: Callable[[str], None]):
        self._folder = folder
        self._healthy_after_steps = healthy_after_steps
        self._log = log
        # Checkpoints that are not yet healthy: step -> steps accepted in a row since it was saved.
        self._candidates: dict[int, int] = {}
        self._written: list[int] = []  # the content of the file
        self._newest_step = -1  # the newest observed step
        self._last_skipped = -1  # the newest skipped step; -1 if there was none
        self._validation_losses: dict[int, float] = {}

    # --- The rule ---------------------------------------------------------------------------------

    def is_healthy(self, evidence: HealthEvidence) -> bool:
        """Returns whether a state is healthy: the only definition in the program.

        It is if nothing speaks against it and `healthy_after_steps` steps in a row were accepted.

        Retention asks about candidates, too, with `num_accepted` infinite: whether one becomes
        healthy if all steps from now on are accepted. It protects the first one that does. So a
        rule may refuse a state for good, for its validation loss for example. One that waits for
        an evaluation after the state must not refuse it before.
        """
        return not evidence.problems and evidence.num_accepted >= self._healthy_after_steps

    def is_newest_healthy(self, problems: Sequence[str] = ()) -> bool:
        """Returns whether the newest state of the run is healthy, judged by the observed steps.

        Args:
          problems: See `HealthEvidence`.
        """
        return self.is_healthy(
            self._evidence(self._newest_step, self._accepted_up_to_newest, problems)
        )

    def why_newest_is_not_healthy(self, problems: Sequence[str] = ()) -> str:
        """Returns why the newest state of the run is not healthy, for a message; "" if it is."""
        if self.is_newest_healthy(problems):
            return ""
        if problems:
            return "; ".join(problems)
        if self._accepted_up_to_newest < self._healthy_after_steps:
            return (
                f"{self._accepted_up_to_newest} steps were accepted since step "
                f"{self._last_skipped} was skipped, fewer than "
                f"healthy_after_steps={self._healthy_after_steps}"
            )
        return "the rule for healthy checkpoints refuses it"

    @property
    def _accepted_up_to_newest(self) -> float:
        """Accepted steps in a row up to the newest one; math.inf if none was ever skipped."""
        return self._newest_step - self._last_skipped if self._last_skipped >= 0 else math.inf

    def _evidence(
        self, step: int, num_accepted: float, problems: Sequence[str] = ()
    ) -> HealthEvidence:
        return HealthEvidence(step, num_accepted, problems, self._validation_losses)

    # --- Observations -----------------------------------------------------------------------------

    def begin(self, first_step: int, last_skipped: int) -> None:
        """Begins to observe a run, or begins again after a rollback.

        Args:
          first_step: The next step to train.
          last_skipped: The newest skipped step before it; -1 if there was none.
        """
        self._newest_step = first_step - 1
        self._last_skipped = last_skipped
        self._validation_losses = {
            step: loss for step, loss in self._validation_losses.items() if step < first_step
        }

    def observe_steps(self, last_step: int, last_skipped: int) -> None:
        """Observes all steps since the last call, up to `last_step`.

        Args:
          last_skipped: The newest skipped step; -1 if there was none. Between two calls only the
            last skip is known. Any step before it may have been skipped, too, and counts as such.
        """
        self._last_skipped = last_skipped
        for step in range(self._newest_step + 1, last_step + 1):
            self._newest_step = step
            self._observe_step(step, is_accepted=step > last_skipped)

    def _observe_step(self, step: int, is_accepted: bool) -> None:
        # The metrics of a step are of the state before it, so they say nothing about a checkpoint
        # of the same step.
        earlier_checkpoints = [saved for saved in self._candidates if saved < step]
        for saved in earlier_checkpoints:
            self._candidates[saved] = self._candidates[saved] + 1 if is_accepted else 0
            self._promote_if_healthy(saved)

    def observe_evaluation(self, step: int, validation_loss: float) -> None:
        """Observes the validation loss of the state after `step`."""
        is_finite = math.isfinite(validation_loss)  # JSON has one word for all others
        self._validation_losses[step] = validation_loss if is_finite else math.nan
        while len(self._validation_losses) > _MAX_EVALUATIONS:
            del self._validation_losses[min(self._validation_losses)]

    @property
    def evaluations(self) -> list[tuple[int, float | None]]:
        """The remembered validation losses by step, for a checkpoint; None for NaN."""
        return [
            (step, None if math.isnan(loss) else loss)
            for step, loss in sorted(self._validation_losses.items())
        ]

    def restore_evaluations(self, evaluations: Sequence[tuple[int, float | None]]) -> None:
        """Remembers the `evaluations` of a checkpoint, as if they had been observed."""
        for step, loss in evaluations:
            self.observe_evaluation(step, math.nan if loss is None else loss)

    # --- Checkpoints ------------------------------------------------------------------------------

    @functools.cached_property
    def steps(self) -> set[int]:
        """The steps with a mark; some may have no checkpoint yet, or no more."""
        consequence = "no checkpoint counts as healthy"
        self._written = read_run_file(self._folder, "healthy", self._log, consequence) or []
        return set(self._written)

    def begin_save(self, step: int) -> None:
        """Makes a checkpoint that is about to be written a candidate; forgets an earlier mark.

        A killed save, or one of an abandoned past, may have left a mark of the same step.
        """
        self.forget(lambda saved: saved == step)
        self.add_candidate(step)

    def add_candidate(self, step: int) -> None:
        """Makes a saved checkpoint a candidate, or promotes it if it needs no accepted step."""
        if step not in self.steps:
            self._candidates[step] = 0
            self._promote_if_healthy(step)

    def _promote_if_healthy(self, step: int) -> None:
        if self.is_healthy(self._evidence(step, self._candidates[step])):
            self.promote(step)

    def promote(self, step: int) -> None:
        """Adds a checkpoint to the healthy ones, whatever is known about it."""
        self.steps.add(step)
        self._candidates.pop(step, None)

    def forget(self, is_gone: Callable[[int], bool]) -> None:
        """Removes deleted or renamed checkpoints, those with `is_gone(step)`."""
        self.steps = {step for step in self.steps if not is_gone(step)}
        self._candidates = {
            step: count for step, count in self._candidates.items() if not is_gone(step)
        }

    def steps_to_preserve(self, steps: Collection[int]) -> set[int]:
        """Returns the newest healthy step and the first candidate after it that can become healthy.

        Without the latter, retention would delete each candidate before it becomes healthy. One
        that accepted steps cannot make healthy would take the place of all later ones.

        Args:
          steps: The checkpoints on disk, and one that is being written.
        """
        newest = max(self.steps.intersection(steps), default=-1)
        later_candidates = (
            step
            for step in self._candidates.keys() & set(steps)
            if step > newest and self.is_healthy(self._evidence(step, math.inf))
        )
        next_candidate = min(later_candidates, default=-1)
        return {step for step in (newest, next_candidate) if step >= 0}

    # --- The file ---------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether the file differs from the healthy checkpoints."""
        return sorted(self.steps) != self._written

    def write(self) -> None:
        """Writes the file atomically if it differs. Raises OSError."""
        if not self.changed:
            return
        steps = sorted(self.steps)
        write_json_with_digest(self._folder / "healthy.json", "healthy", steps)
        self._written = steps

    def try_write(self) -> bool:
        """Writes the file on process 0 if it differs; logs a failure, to be repeated later.

        Returns:
          Whether the file is up to date; True on the other processes, which do not write it.
        """
        if jax.process_index() != 0:
            return True
        try:
            self.write()
        except OSError as error:
            self._log(
                f"WARNING: cannot write the list of healthy checkpoints: {error}. Retrying later."
            )
            return False
        return True
