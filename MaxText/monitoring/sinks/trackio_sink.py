"""Trackio: a local database of metrics with a dashboard (https://github.com/gradio-app/trackio).

Nothing leaves the machine unless `trackio.space_id` names a Space of Hugging Face.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from MaxText.config.training_sections import TrackioConfig
from MaxText.monitoring.sinks.tracker import Scalars, TrackerSink

_FOLDER = "trackio"  # next to the runs, so that one dashboard compares them


class TrackioSink(TrackerSink):
    """Sends a run to Trackio."""

    state_file = "trackio.json"
    upload_seconds = 5.0  # it writes twice a second

    def __init__(
        self,
        trackio: TrackioConfig,
        run_folder: str | epath.Path,
        run_name: str,
        config_flat: Mapping[str, Any],
        first_step: int,
    ):
        """As of TrackerSink; `trackio` says project, folder and Space."""
        super().__init__(run_folder, run_name, config_flat, first_step)
        self._trackio = trackio
        self.database = Path(trackio.folder or self.local_folder(Path(run_folder).parent) / _FOLDER)

    def connect(self) -> Any:
        """Returns the Trackio run."""
        # The package reads its folder once, when it is imported, and falls back to these others.
        folder = self.database.absolute()
        os.environ["TRACKIO_DIR"] = str(folder)
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(name, None)
        import trackio  # pyright: ignore[reportMissingImports]

        used = Path(trackio.utils.TRACKIO_DIR)
        if used != folder:
            raise ValueError(f"this process already writes to another folder of Trackio, {used}")
        return trackio.init(
            project=self._trackio.project,
            # Trackio finds a run by its name.
            name=self.run_name,
            space_id=self._trackio.space_id or None,
            config=self.config,
            resume="allow" if self.state["rows"] else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_summary(self, scalars: Scalars) -> None:
        """Does nothing: Trackio has no summary, and the configuration belongs to the run."""

    def log_row(self, step: int, metrics: Scalars, walltime: float) -> None:
        """Adds the metrics at a step; Trackio sets the time itself."""
        self.run.log(metrics, step=step)

    def log_sample(self, step: int, text: str) -> None:
        """Adds the text as a code block of Markdown."""
        import trackio  # pyright: ignore[reportMissingImports]

        fence = "`" * 8
        self.run.log({"sample": trackio.Markdown(f"{fence}\n{text}\n{fence}")}, step=step)

    def finish(self, reason: str | None) -> None:
        """Waits until all rows are in the database."""
        self.run.finish()
