"""TensorBoard: scalars under MaxText's tags, the configuration as text and as hyperparameters."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from MaxText.monitoring.events import Event
from MaxText.monitoring.sinks.hyperparameters import hyperparameter_summaries

TENSORBOARD_FOLDER = "tensorboard"

# What the HParams page compares runs by.
_COMPARED = ("eval/avg_loss", "learning/loss")


class TensorBoard:
    """Writes event files under `<run>/tensorboard`, from the first numbers on."""

    def __init__(self, folder: epath.Path, config_flat: Mapping[str, Any], first_step: int):
        """
        Args:
          folder: of the run.
          config_flat: the configuration by key.
          first_step: the update done first; points of it and later ones are hidden.
        """
        self._folder = folder / TENSORBOARD_FOLDER
        self._first_step = first_step
        self._config = config_flat
        self._texts = {name: str(value) for name, value in config_flat.items()}
        self._writer: Any = None

    def write(self, event: Event) -> None:
        """Adds the numbers of an update or an evaluation; keeps the size of the model as text."""
        if event.kind in ("start", "resume"):
            self._texts["num_model_parameters"] = f"{event.facts.get('num_parameters', 0):,}"
        elif event.kind == "rewind" and self._writer is not None:
            # A new file, whose first line hides the points that are done again.
            self._writer.close()
            self._writer, self._first_step = None, event.facts["to"]
        elif event.kind in ("step", "evaluation"):
            writer = self._opened()
            for name, value in event.facts.items():
                if "/" in name:
                    writer.add_scalar(name, value, event.step, walltime=event.time)

    def flush(self) -> None:
        """Hands what was written to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes. Safe to call twice."""
        if self._texts:
            self._opened()
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        """The writer. Not before the first numbers: its import is not worth delaying a step."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # purge_step hides points from before a crash, which are done again.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step or None)
            for name, text in self._texts.items():
                self._writer.add_text(name, text, self._first_step)
            self._texts.clear()
            for summary in hyperparameter_summaries(self._config, _COMPARED):
                self._writer.file_writer.add_summary(summary)
        return self._writer
