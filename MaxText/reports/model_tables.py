"""Tables about the model: cost, memory, lineage, samples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.metrics.run_record import RunHistory
from MaxText.metrics.tables import short_count
from MaxText.reports import formatting
from MaxText.reports.entries import Entry, alike, all_runs, differing_peaks
from MaxText.reports.page import PageSection, PageTable, Verbatim

_RULES = ("mfu_rule", "attention_rule", "attention_computed")  # cost facts that are sentences

# Fact of the data -> what is different, and the consequence.
_MISMATCHES = {
    "tokenizer": "tokenizers. A loss per token depends on the tokenization, so these losses cannot "
    "be compared.",
    "vocab_size": "sizes of the vocabulary. Losses per token are comparable only if token ids have "
    "the same meaning.",
    "identity": "data. A difference in loss may come from the data instead of the model.",
}

_MAX_SAMPLES = 5
_MAX_OPEN_SAMPLES = 4


def cost(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns parameters and FLOPs of each part of the model."""
    costs = alike(entries, lambda run: run.facts.get("cost"))
    if not costs:
        return []
    rows, notes = [], []
    for names, found in costs:
        parameters, flops = found.get("parameters") or 0, found.get("flops_per_token") or 0
        for part in (*(found.get("parts") or ()), {**found, "name": "total"}):
            held, spent = part.get("parameters") or 0, part.get("flops_per_token") or 0
            held_share = formatting.share(held / (parameters or math.nan))
            spent_share = formatting.share(spent / (flops or math.nan))
            numbers = [formatting.whole(held), held_share, short_count(spent), spent_share]
            rows.append([names, str(part.get("name", "")), *numbers])
        notes += [text for key in _RULES if (text := str(found.get(key) or ""))]
    peaks = alike(entries, _peak)
    for names, (peak, source) in peaks:
        which = f" ({names})" if len(peaks) > 1 else ""
        notes.append(f"Peak of a device{which}: {peak:.4g} TFLOP/s, {source}.")
    if differing := differing_peaks(entries):
        notes.append(
            "MFU is not compared: the peaks of these runs' devices were measured as "
            f"{differing[0]:.4g} to {differing[-1]:.4g} TFLOP/s. Compare tokens per second."
        )
    header = ["run", "part", "parameters", "share", "FLOPs per token", "share"]
    if len(costs) == 1:
        header, rows = header[1:], [row[1:] for row in rows]
    notes = list(dict.fromkeys(notes))
    return [PageSection("Parameters and operations", notes, PageTable(header, rows))]


def _peak(run: RunHistory) -> tuple[float, str] | None:
    peak = run.facts.get("peak_tflops")
    return (peak, str(run.facts.get("peak_source") or "of unknown origin")) if peak else None


def memory(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns memory of the state, of the compiled step, and of the KV cache."""
    runs = all_runs(entries)
    columns = [_memory_of(run) for run in runs.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    if not names:
        return []
    rows = [[name, *(column.get(name, formatting.ABSENT) for column in columns)] for name in names]
    header = ["memory", *runs] if len(runs) > 1 else ["memory", "size"]
    note = (
        "State and cache are of the whole model. The compiled step is per device, as planned by "
        "the compiler; aliased arguments are also outputs."
    )
    return [PageSection("Memory", [note], PageTable(header, rows))]


def _memory_of(run: RunHistory) -> dict[str, str]:
    found = run.facts.get("cost") or {}
    rows = {
        f"state: {name}": formatting.size(value)
        for name, value in (found.get("bytes") or {}).items()
    }
    for mark in run.events:
        # A recompiled shape shows its newest numbers.
        if mark["event"] == "compile" and mark.get("memory"):
            shape = f"{mark.get('rows', '?')} x {mark.get('length', '?')}"
            for name, value in mark["memory"].items():
                rows[f"step of {shape} tokens: {name}"] = formatting.size(value)
    length = found.get("sequence_length")
    whole = f"KV cache: a sequence of {length:,}" if length else "KV cache"
    cache = {"kv_cache_bytes_per_token": "KV cache: per token", "kv_cache_bytes": whole}
    return rows | {
        name: formatting.size(found[key])
        for key, name in cache.items()
        if found.get(key) is not None
    }


def lineage(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns the ancestry of each run; none without ancestors."""
    runs = all_runs(entries)
    if not any(run.facts.get("lineage") for run in runs.values()):
        return []
    lines = []
    for name, run in runs.items():
        spent = f"{short_count(run.tokens)} tokens, {formatting.operations(run.flops)} FLOPs"
        ancestors = map(_ancestor, run.facts.get("lineage") or ())
        lines.append(" -> ".join([*ancestors, f"{name}: {run.state}, {spent}"]))
    note = "Tokens and FLOPs of an ancestor include those of its own ancestors."
    return [PageSection("Lineage", [note], texts=[Verbatim("\n".join(lines))])]


def _ancestor(ancestor: Mapping[str, Any]) -> str:
    step, tokens, flops = (ancestor.get(key) for key in ("step", "tokens", "flops"))
    name = ancestor.get("run_name") or ancestor.get("folder") or "a run without a name"
    words = [
        "" if step is None else f"step {step:,}",
        str(ancestor.get("how") or "").replace("_", " "),
        "" if tokens is None else f"{short_count(tokens)} tokens",
        "" if flops is None else f"{formatting.operations(flops)} FLOPs",
    ]
    return f"{name}: {', '.join(filter(None, words))}"


def samples(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns sampled texts, the newest of a few runs unfolded."""
    texts, runs = [], all_runs(entries)
    for name, run in runs.items():
        rows = [row for row in run.events if row["event"] == "sample" and row.get("text")]
        for age, row in enumerate(reversed(rows[-_MAX_SAMPLES:])):
            step = row.get("step")
            caption = name if step is None else f"{name}, step {step:,}"
            is_open = age == 0 and len(runs) <= _MAX_OPEN_SAMPLES
            texts.append(Verbatim(str(row["text"]), caption, is_open))
    return [PageSection("Samples", texts=texts)] if texts else []


def warnings(entries: Sequence[Entry]) -> list[str]:
    """Returns warnings against comparing the losses of the runs."""
    found = []
    for key, difference in _MISMATCHES.items():
        values = alike(entries, lambda run, key=key: (run.facts.get("data") or {}).get(key))
        if len(values) > 1:
            shown = ((names, str(value)) for names, value in values)
            which = "; ".join(
                f"{names}: {text if len(text) <= 16 else f'{text[:12]}...'}"
                for names, text in shown
            )
            found.append(f"The runs have different {difference} {which}.")
    return found
