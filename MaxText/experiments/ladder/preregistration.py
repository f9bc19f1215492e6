"""Predictions of the top rung that are written before it runs, and how they came out.

`preregistration.json` has the rungs below the top, the predictions, and a SHA-256 of both;
`ladder_events.jsonl` repeats the hash. Whoever publishes a ladder publishes the hash first.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from etils import epath

from MaxText.errors import UserError
from MaxText.experiments.ladder.measurements import LEVEL, Arm, Interval
from MaxText.experiments.ladder.scaling_law import fit_law
from MaxText.monitoring.json_lines import JsonlFile
from MaxText.storage.atomic import read_json_with_digest, write_json_with_digest
from MaxText.value_types import JsonObject

PREREGISTRATION_FILE = "preregistration.json"
LADDER_EVENTS_FILE = "ladder_events.jsonl"
_NAME = "preregistration"  # of the record in its file
_SCHEMA_VERSION = 1


class PredictionOutcome(NamedTuple):
    """A preregistered loss of the top rung, and the measured one."""

    label: str
    compute: float  # FLOPs of the top rung
    prediction: Interval  # nats per token
    loss: float | None  # mean over seeds; None until a run completed
    sha256: str  # of the preregistration

    @property
    def is_inside(self) -> bool | None:
        """Whether the outcome is in the interval; None until a run completed."""
        return None if self.loss is None else self.prediction.contains(self.loss)


def preregister(
    folder: Path,
    arms: Sequence[Arm],
    top_computes: Mapping[str, float],
    asymptote: float | None = None,
) -> JsonObject:
    """Predicts the top rung of each arm from the rungs below, and writes the predictions once.

    Args:
      folder: Of the ladder.
      arms: With the rungs below the top only.
      top_computes: Label of an arm -> FLOPs of its top rung.
      asymptote: Pins that of the laws, in nats per token.

    Returns:
      The record: "arms" has a label, "compute", "prediction" (low, median, high) and "below" (the
      arm's rungs) for each.

    Raises:
      UserError: The folder has a preregistration, or a law cannot be fitted.
    """
    if load_preregistration(folder) is not None:
        raise UserError(
            f"{folder / PREREGISTRATION_FILE} exists; a prediction is made once, before its rung "
            "runs. Use another name= for a ladder with other predictions."
        )
    predictions = []
    for arm in arms:
        compute = top_computes[arm.label]
        if arm.rungs[-1].compute >= compute:
            raise ValueError(f"{arm.label}: the rung at {compute:.3g} FLOPs has run already")
        prediction = fit_law(arm, asymptote).predict(compute, beyond=True)
        predictions.append(
            {
                "label": arm.label,
                "compute": compute,
                "prediction": [*prediction],
                "below": arm.to_json(),
            }
        )
    record = {
        "schema_version": _SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "level": LEVEL,
        "asymptote": asymptote,
        "arms": predictions,
    }
    write_json_with_digest(epath.Path(folder / PREREGISTRATION_FILE), _NAME, record)
    sha256 = preregistered_sha256(folder)
    events = JsonlFile(str(folder / LADDER_EVENTS_FILE), keep=None)
    events.append({"event": "preregistered", "time": record["created"], "sha256": sha256})
    events.close()
    return record


def load_preregistration(folder: Path) -> JsonObject | None:
    """Returns the record that `preregister` wrote to a folder; None if there is none.

    Raises:
      UserError: It was changed since.
    """
    path = epath.Path(folder / PREREGISTRATION_FILE)
    try:
        return read_json_with_digest(path, _NAME)
    except ValueError as error:
        raise UserError(
            f"{path}: {error}. A prediction that was changed proves nothing: restore the file, or "
            "use another name= for a new ladder."
        ) from error


def preregistered_sha256(folder: Path) -> str:
    """Returns the hash of a folder's preregistration, to publish before the top rung runs."""
    return json.loads((folder / PREREGISTRATION_FILE).read_text(encoding="utf-8"))["sha256"]


def check_preregistered(folder: Path, arms: Sequence[Arm]) -> list[PredictionOutcome]:
    """Compares the top rungs with what was predicted of them.

    Args:
      folder: Of the ladder.
      arms: With all rungs.

    Returns:
      One outcome per arm; none without a preregistration.

    Raises:
      UserError: The record, or a loss that it was made from, was changed since.
    """
    record = load_preregistration(folder)
    if record is None:
        return []
    sha256 = preregistered_sha256(folder)
    arms_by_label = {arm.label: arm for arm in arms}
    outcomes = []
    for fields in record["arms"]:
        label = fields["label"]
        if label not in arms_by_label:
            raise UserError(
                f"{folder / PREREGISTRATION_FILE} predicts {label}, which is not among "
                f"{', '.join(arms_by_label)}. Run the same command as before."
            )
        arm = arms_by_label[label]
        _check_unchanged(Arm.from_json(fields["below"]), arm)
        tops = [rung for rung in arm.rungs if rung.compute == fields["compute"]]
        loss = tops[0].loss if tops and tops[0].losses else None
        outcomes.append(
            PredictionOutcome(
                label=label,
                compute=fields["compute"],
                prediction=Interval(*fields["prediction"]),
                loss=loss,
                sha256=sha256,
            )
        )
    return outcomes


def _check_unchanged(below: Arm, arm: Arm) -> None:
    """Raises UserError if a loss that the prediction was made from is another one now."""
    rungs = {rung.compute: rung for rung in arm.rungs}
    for rung in below.rungs:
        now = rungs[rung.compute].losses if rung.compute in rungs else {}
        for seed, loss in rung.losses.items():
            if now.get(seed) != loss:
                raise UserError(
                    f"{arm.label} seed {seed} at {rung.compute:.3g} FLOPs: the prediction was made "
                    f"from a loss of {loss}, and now it is {now.get(seed)}. The prediction does "
                    "not hold for other runs; use another name= for them."
                )
