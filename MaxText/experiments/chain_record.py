"""The records of a chain of runs as that of one run, which goes on where the one before ended."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.metrics.goodput import PARTS, Goodput
from MaxText.metrics.run_record import RunRecord

# What counts on from stage to stage, and would begin anew with each.
_COUNTED = ("progress/tokens", "progress/flops")


def joined(records: Sequence[RunRecord], folder: epath.Path) -> RunRecord:
    """One record of the stages that a chain has done.

    Steps, tokens and operations count on, so that curves are drawn over what was spent since the
    first stage began. Facts, configuration and state are those of the last record; what the first
    stage began with is what the chain began with.

    Args:
      records: of its runs in order, at least one.
      folder: of the chain.
    """
    first, *others = records
    whole = first
    for record in others:
        whole = _two(whole, record)
    planned = [record.facts.get("num_steps") or 0 for record in records]
    facts = {**whole.facts, "lineage": first.facts.get("lineage") or [], "num_steps": sum(planned)}
    return dataclasses.replace(whole, folder=folder, name=folder.name, facts=facts)


def _two(before: RunRecord, after: RunRecord) -> RunRecord:
    attempt = before.goodput.attempts[-1].number + 1
    offsets = dict(zip(_COUNTED, (before.tokens, before.flops), strict=True))
    offsets |= {"step": before.last_step + 1 if before.last_step is not None else 0}
    offsets |= {"attempt": attempt}

    def shifted(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**row, **{k: row[k] + by for k, by in offsets.items() if row.get(k) is not None}}
            for row in rows
        ]

    # The beginning of a stage is no restart of the chain.
    marks = [row for row in after.marks if row["event"] != "start"]
    return dataclasses.replace(
        after,
        steps=[*before.steps, *shifted(after.steps)],
        evaluations=[*before.evaluations, *shifted(after.evaluations)],
        marks=[*before.marks, *shifted(marks)],
        goodput=_goodput(before.goodput, after.goodput, attempt),
    )


def _goodput(before: Goodput, after: Goodput, first_attempt: int) -> Goodput:
    seconds = {part: before.seconds[part] + after.seconds[part] for part in PARTS}
    attempts = [
        dataclasses.replace(
            each,
            number=each.number + first_attempt,
            running_before=each.running_before + before.running_seconds,
        )
        for each in after.attempts
    ]
    return Goodput(seconds, (*before.attempts, *attempts))
