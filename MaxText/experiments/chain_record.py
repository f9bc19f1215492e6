"""Joins the records of a chain of runs into one run record."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from MaxText.metrics.goodput import PARTS, Goodput
from MaxText.metrics.run_record import RunHistory

_COUNTED = ("progress/tokens", "progress/flops")  # accumulate over stages


def merge_stage_records(records: Sequence[RunHistory], folder: epath.Path) -> RunHistory:
    """Joins the records of the completed stages of a chain, in order.

    Steps, tokens and FLOPs accumulate, so that curves show cost since the first stage began. Facts,
    configuration and state come from the last record, the lineage from the first.
    """
    first, *others = records
    whole = first
    for record in others:
        whole = _append_stage(whole, record)
    planned = [record.facts.get("num_steps") or 0 for record in records]
    facts = {**whole.facts, "lineage": first.facts.get("lineage") or [], "num_steps": sum(planned)}
    return dataclasses.replace(whole, folder=folder, name=folder.name, facts=facts)


def _append_stage(before: RunHistory, after: RunHistory) -> RunHistory:
    attempt = before.goodput.attempts[-1].number + 1
    offsets = dict(zip(_COUNTED, (before.tokens, before.flops), strict=True))
    offsets |= {"step": before.last_step + 1 if before.last_step is not None else 0}
    offsets |= {"attempt": attempt}

    def shifted(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**row, **{k: row[k] + by for k, by in offsets.items() if row.get(k) is not None}}
            for row in rows
        ]

    # The start of a stage is not a restart of the chain.
    events = [row for row in after.events if row["event"] != "start"]
    return dataclasses.replace(
        after,
        steps=[*before.steps, *shifted(after.steps)],
        evaluations=[*before.evaluations, *shifted(after.evaluations)],
        events=[*before.events, *shifted(events)],
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
