"""TensorBoard: scalars under MaxText's tags, charts, texts and HParams."""

import logging
import tempfile
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etils import epath

from MaxText.config.serialization import section_lines
from MaxText.config.values import to_yaml
from MaxText.monitoring.events import MAIN_KEYS, SECONDS_TO_CLOSE, Event, Sink
from MaxText.monitoring.sinks.background import BackgroundUploader
from MaxText.storage.paths import is_object_store_path

if TYPE_CHECKING:
    from MaxText.monitoring.sinks.tensorboard_file import TensorBoardFile

TENSORBOARD_FOLDER = "tensorboard"

_COMPARED = ("eval/avg_loss", "learning/loss")  # metrics that the HParams page compares runs by

# Keys that name a run or its place.
_NAMES_OF_A_RUN = ("run_name", "base_output_directory")
# Reason of a stop -> status on the HParams page: success or failure.
_STATUSES = {"completed": 1, "diverged": 2, "error": 2}

# Charts of several tags (regular expressions) on the Custom Scalars page.
_LOSS_CHARTS: dict[str, list[Any]] = {
    "training and validation": ["Multiline", ["learning/lm_loss", "eval/avg_loss"]]
}
_OTHER_LOSS_CHARTS: dict[str, list[Any]] = {  # of an objective that is no cross entropy
    "training and validation": ["Multiline", ["learning/loss", "eval/avg_loss"]],
    "cross entropy": ["Multiline", ["learning/lm_loss", "eval/lm_loss"]],
}
_CHARTS: dict[str, dict[str, list[Any]]] = {
    "memory": {"in use and peak, GiB": ["Multiline", ["perf/memory_.*"]]},
}
_LAYER_CHARTS = {
    f"{kind} by layer": {"all layers": ["Multiline", [f"learning/{kind}/layer_.*"]]}
    for kind in (
        "grad_norm",
        "param_norm",
        "update_ratio",
        "attention_entropy",
        "attention_max_logit",
        "moe_max_load_ratio",
    )
}


class TensorBoardSink(Sink):
    """Writes event files; older points from `first_step` on are hidden.

    A bucket cannot append: a thread copies the file from a temporary folder.
    """

    def __init__(self, folder: epath.Path, config_flat: Mapping[str, Any], first_step: int):
        self._folder = folder / TENSORBOARD_FOLDER
        self._first_step = first_step
        self._config = dict(config_flat)
        self._changed_keys: list[str] = []
        self._objective_in_nats = True
        self._texts = {"config": _preformatted(section_lines((), config_flat))}
        self._file: TensorBoardFile | None = None
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._copy: BackgroundUploader | None = None  # of the file

    def write(self, event: Event) -> None:
        """Adds the points, texts and status of an event."""
        if event.kind in ("start", "resume"):
            self._texts["num_model_parameters"] = f"{event.fields.get('num_parameters', 0):,}"
            self._objective_in_nats = event.fields.get("objective_in_nats", True)
            self._changed_keys = [*event.fields.get("changed_keys", ())]
            self._config |= event.fields.get("resolved_keys", {})
        elif event.kind == "rollback" and self._file is not None:
            # A new file, which hides the points to be repeated.
            self._close_file()
            self._first_step = event.fields["restored_step"]
        elif event.kind in ("step", "evaluation") and event.step is not None:
            file = self._opened()
            for name, value in event.fields.items():
                # The progress is that of the steps; evaluations would repeat it at the same step.
                is_repeated = event.kind == "evaluation" and name.startswith("progress/")
                if "/" in name and not is_repeated:
                    file.add_scalar(name, value, event.step, walltime=event.time)
        elif event.kind == "sample" and event.step is not None:
            text = _preformatted(event.fields["text"])
            self._opened().add_text("sample", text, event.step, walltime=event.time)
        elif event.kind == "stop":
            self._add_hparams_end(event.fields.get("reason"))

    def flush(self) -> None:
        """Flushes to the operating system, or starts the copy to the bucket."""
        if self._file is not None:
            self._file.flush()
            self._copy_file(self._file)

    def close(self, until: float | None = None) -> None:
        """Closes the file; creates it first if a run without metrics has texts."""
        if self._texts:
            self._opened()
        self._close_file()
        if self._temporary is not None:
            self._temporary.cleanup()

    def discard(self) -> None:
        """Drops the file, so that nothing touches it again."""
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._copy_file(self._file)
            self._file = None
        if self._copy is not None:
            self._copy.close(time.monotonic() + SECONDS_TO_CLOSE)
            self._copy = None

    def _copy_file(self, file: "TensorBoardFile") -> None:
        if self._copy is not None:
            self._copy.write(file.path.read_bytes)

    def _opened(self) -> "TensorBoardFile":
        """Returns the open file, created at the first metrics."""
        if self._file is not None:
            return self._file
        from tensorboardX.summary import custom_scalars

        from MaxText.monitoring.sinks.tensorboard_file import TensorBoardFile

        # It logs a line for each NaN loss, which the step line shows anyway.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        # purge_step hides points from before a crash, which will be repeated, even from step 0.
        folder = str(self._folder)
        if is_object_store_path(folder):
            self._temporary = self._temporary or tempfile.TemporaryDirectory()
            folder = tempfile.mkdtemp(dir=self._temporary.name)
        file = TensorBoardFile(folder, purge_step=self._first_step)
        self._file = file
        if self._temporary is not None:
            self._copy = BackgroundUploader(self._folder / file.path.name)
        for name, text in self._texts.items():
            file.add_text(name, text, self._first_step)
        self._texts.clear()
        losses = _LOSS_CHARTS if self._objective_in_nats else _OTHER_LOSS_CHARTS
        layers = _LAYER_CHARTS if self._config.get("log_layer_metrics") else {}
        file.add_summary(custom_scalars({"loss": losses} | _CHARTS | layers))
        self._add_hparams_start(file)
        return file

    def _add_hparams_start(self, file: "TensorBoardFile") -> None:
        """Writes the columns of the HParams page, and this run's values.

        These are the main keys and those that differ from their defaults.
        """
        from tensorboardX.summary import hparams

        values: dict[str, bool | int | float | str] = {}
        for name in (*MAIN_KEYS, *self._changed_keys):
            value = self._config.get(name)
            if name in _NAMES_OF_A_RUN or value is None:
                continue
            values[name] = value if isinstance(value, bool | int | float | str) else to_yaml(value)
        experiment, session_start, _ = hparams(values, dict.fromkeys(_COMPARED))
        file.add_summary(experiment)
        file.add_summary(session_start)

    def _add_hparams_end(self, reason: str | None) -> None:
        """Writes the status that the HParams page shows; a run to be resumed has none."""
        if reason not in _STATUSES:
            return
        from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData  # pyright: ignore
        from tensorboardX.summary import hparams

        _, _, session_end = hparams({}, {})
        plugin_data = session_end.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin_data.content)
        content.session_end_info.status = _STATUSES[reason]
        plugin_data.content = content.SerializeToString()
        self._opened().add_summary(session_end)


def _preformatted(text: str) -> str:
    """Returns a text as a code block of Markdown."""
    return textwrap.indent(text, "    ", lambda line: True)
