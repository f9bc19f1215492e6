"""Examines a candidate in a process of its own, which imports its code.

    python -m MaxText.experiments.arena.examination SESSION FOLDER [SPEC]

The arena's own process never imports a candidate. This one reads it, refuses what it may not
change, screens it, counts its cost, and leaves in FOLDER examination.json, its resolved
configuration and a copy of its source, from which it is trained: a candidate that is edited later
stays what was judged. Without SPEC it examines the session's baseline.
"""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from MaxText.config.schema import Config, flatten, unflatten
from MaxText.config.serialization import resolved_yaml
from MaxText.errors import UserError, first_line
from MaxText.experiments.arena.isolation import source_files
from MaxText.experiments.arena.ledger import BASELINE, CandidateRow, open_ledger
from MaxText.experiments.arena.session import Session, load_session
from MaxText.storage.atomic import atomic_write_text

if TYPE_CHECKING:
    from MaxText.experiments.arena.candidates import Candidate

RESULT = "examination.json"
CONFIG = "candidate.yml"
_SOURCE = "source"


def load_examination(folder: Path) -> CandidateRow | None:
    """Returns the result of an examination; None if it has left none."""
    path = folder / RESULT
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    return TypeAdapter(CandidateRow).validate_python(fields)


def examine_baseline(session: Session) -> CandidateRow:
    """Returns the baseline with its cost, or with reasons that it is none; prepares its data."""
    from MaxText.experiments.arena.candidates import configuration_hash, hash_files
    from MaxText.experiments.arena.counted_cost import count_cost
    from MaxText.experiments.arena.text_overlap import check_validation_text
    from MaxText.input_pipeline.data_sources import prepare_sources

    earlier_files = set(source_files())
    config = session.load_baseline()
    files = hash_files([path for path in source_files() if path not in earlier_files])
    try:
        prepare_sources(config)
        check_validation_text(config, log=_log)
    except UserError as error:
        return CandidateRow(name=BASELINE, spec="", reasons=(str(error),))
    cost = count_cost(config)
    budget = session.spec.budget
    steps = config.run.steps
    if budget is not None and budget.unit == "FLOPs":
        steps = max(round(budget.amount / cost.flops_per_step), 1)
    return CandidateRow(
        name=BASELINE,
        spec="",
        source_hash=configuration_hash(config, files),
        files=files,
        cost=dataclasses.asdict(cost),
        steps=steps,
    )


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def examine_candidate(session: Session, folder: Path, spec: str) -> CandidateRow:
    """Returns what is known of a candidate before it runs; `reasons` refuse it.

    Args:
      session: With an examined baseline.
      folder: Of the candidate; gets its configuration and source.
      spec: As the user wrote it.
    """
    from MaxText.experiments.arena.candidates import (
        CandidateRefusedError,
        configuration_hash,
        read_candidate,
    )

    baseline = session.load_baseline()
    try:
        # The variables themselves are not set in this process.
        keys = (*session.spec.environment, *session.spec.keys)
        candidate = read_candidate(spec, baseline, keys)
    except CandidateRefusedError as error:
        return CandidateRow(name=folder.name, spec=spec, reasons=tuple(error.reasons))
    ledger = open_ledger(session.folder, writes=False)
    row = CandidateRow(
        name=candidate.label,
        spec=spec,
        source_hash=candidate.source_hash,
        files=candidate.files,
        changes=candidate.changes,
    )
    baseline_row = ledger.candidate(BASELINE)
    assert baseline_row is not None
    # The baseline's own files are imported already, so that no candidate's hash contains them.
    if candidate.source_hash == configuration_hash(baseline, {}):
        return dataclasses.replace(row, reasons=("it is the baseline: no key and no code differs",))
    if any(row.source_hash == earlier.source_hash for earlier in ledger.candidates):
        return row  # answered from the ledger
    return _screened(session, row, candidate, baseline_row, folder)


def _screened(
    session: Session,
    row: CandidateRow,
    candidate: "Candidate",
    baseline: CandidateRow,
    folder: Path,
) -> CandidateRow:
    """Returns the row of a readable candidate with its cost, or with the reasons to refuse it."""
    from MaxText.experiments.arena.counted_cost import CountedCost, cost_reasons, count_cost
    from MaxText.experiments.arena.screening import screen

    reasons = screen(candidate)
    if reasons:
        return dataclasses.replace(row, reasons=tuple(reasons))
    cost = count_cost(candidate.config)
    spec = session.spec
    baseline_cost = TypeAdapter(CountedCost).validate_python(baseline.cost)
    matched = tuple(name for name in spec.match if name != "tokens")
    reasons = [
        *candidate.guard.problems(),
        *cost_reasons(cost, baseline_cost, matched, spec.tolerance),
    ]
    steps = baseline.steps
    if "tokens" not in spec.match:
        flops = baseline.steps * baseline_cost.flops_per_step
        steps = max(round(flops / cost.flops_per_step), 1)
    config = _with_copied_source(candidate.config, candidate.files, folder / _SOURCE)
    atomic_write_text(folder / CONFIG, resolved_yaml(config))
    return dataclasses.replace(
        row, reasons=tuple(reasons), cost=dataclasses.asdict(cost), steps=steps
    )


def _with_copied_source(config: Config, files: Mapping[str, str], folder: Path) -> Config:
    """Copies a candidate's files; returns its configuration with the copies as modules.

    Modules that are named by their import name, not by a path, are used where they are.

    Args:
      config: Of the candidate.
      files: Its source files.
      folder: Gets the copies, which keep their places relative to each other.
    """
    paths = [Path(file).resolve() for file in files]
    if not paths:
        return config
    root = Path(os.path.commonpath([path.parent for path in paths]))
    for path in paths:
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    modules = []
    for module in config.run.import_modules:
        path = Path(module).resolve()
        is_copied = module.endswith(".py") and path in paths
        modules.append(str((folder / path.relative_to(root)).absolute()) if is_copied else module)
    return unflatten(flatten(config) | {"import_modules": tuple(modules)})


def main() -> None:
    """Examines and writes the result; an exception of the candidate is a reason to refuse it."""
    session_folder, folder_name, *specs = sys.argv[1:]
    session = load_session(Path(session_folder))
    assert session is not None
    folder = Path(folder_name)
    if specs:
        try:
            row = examine_candidate(session, folder, specs[0])
        except (Exception, SystemExit) as error:
            message = f"it cannot be examined: {type(error).__name__}: {first_line(error)}"
            row = CandidateRow(name=folder.name, spec=specs[0], reasons=(message,))
    else:
        row = examine_baseline(session)
    atomic_write_text(folder / RESULT, json.dumps(dataclasses.asdict(row), indent=1) + "\n")


if __name__ == "__main__":
    main()
