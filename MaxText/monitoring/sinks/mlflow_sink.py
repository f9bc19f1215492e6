"""MLflow: a local SQLite database, or a tracking server (https://mlflow.org).

Nothing leaves the machine unless `mlflow.tracking_uri` names a server.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from etils import epath

from MaxText.config.training_sections import MlflowConfig
from MaxText.config.values import to_yaml
from MaxText.monitoring.sinks.tracker import Scalars, TrackerSink

# Next to the runs, so that one server shows all of them.
_DATABASE = "mlflow.db"
_ARTIFACTS = "mlflow_artifacts"

_MAX_PARAMS = 100  # of a request, as MLflow limits them

# Reason of a stop -> status of the run; a run to be resumed was killed.
_STATUSES = {"completed": "FINISHED", "diverged": "FAILED", "error": "FAILED"}

Item = TypeVar("Item")


class MlflowSink(TrackerSink):
    """Sends a run to MLflow. Its state's "run_id" is MLflow's own id."""

    state_file = "mlflow.json"
    upload_seconds = 0.0  # each request waits until it is stored

    def __init__(
        self,
        mlflow: MlflowConfig,
        run_folder: str | epath.Path,
        run_name: str,
        config_flat: Mapping[str, Any],
        first_step: int,
    ):
        """As of TrackerSink; `mlflow` says experiment and tracking URI."""
        super().__init__(run_folder, run_name, config_flat, first_step)
        self._mlflow = mlflow
        parent = self.local_folder(Path(run_folder).parent)
        self.tracking_uri = mlflow.tracking_uri or f"sqlite:///{parent / _DATABASE}"
        self._artifacts = None if mlflow.tracking_uri else str(parent / _ARTIFACTS)

    def connect(self) -> Any:
        """Returns the client; the run's id is in the state."""
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
        import mlflow  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        for name in ("mlflow", "alembic"):  # lines about its database
            logging.getLogger(name).setLevel(logging.ERROR)
        client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        run_id = self.state.get("run_id")
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            return client
        experiment = client.get_experiment_by_name(self._mlflow.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self._mlflow.experiment, self._artifacts)
        else:
            experiment_id = experiment.experiment_id
        run_id = client.create_run(experiment_id, run_name=self.run_name).info.run_id
        self.state["run_id"] = run_id
        self.save_state()
        params = [Param(name, _text(value)) for name, value in self.config.items()]
        for batch in _batches(params, _MAX_PARAMS):
            client.log_batch(run_id, params=batch)
        return client

    def log_summary(self, scalars: Scalars) -> None:
        """Sets tags."""
        from mlflow.entities import RunTag  # pyright: ignore[reportMissingImports]

        tags = [RunTag(name, _text(value)) for name, value in scalars.items()]
        self.run.log_batch(self.state["run_id"], tags=tags)

    def log_row(self, step: int, metrics: Scalars, walltime: float) -> None:
        """Adds metrics in one request."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        milliseconds = int(1000 * walltime)
        values = [
            Metric(name, float(value), milliseconds, step)
            for name, value in metrics.items()
            if not isinstance(value, str)
        ]
        for batch in _batches(values, 1000):
            self.run.log_batch(self.state["run_id"], metrics=batch)

    def log_sample(self, step: int, text: str) -> None:
        """Stores the text as an artifact."""
        self.run.log_text(self.state["run_id"], text, f"samples/{step}.txt")

    def finish(self, reason: str | None) -> None:
        """Sets the status of the run."""
        self.run.set_terminated(self.state["run_id"], _STATUSES.get(reason or "", "KILLED"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_yaml(value).strip()


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
