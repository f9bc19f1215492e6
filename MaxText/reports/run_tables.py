"""Tables about runs and their models."""

import datetime
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from MaxText.config.values import to_yaml
from MaxText.formatting import (
    ABSENT,
    format_loss,
    format_operations,
    format_share,
    format_size,
    format_time,
    format_whole,
    pluralize,
    short_count,
)
from MaxText.monitoring.events import MAIN_KEYS
from MaxText.monitoring.run_record import RunHistory
from MaxText.reports.entries import (
    Entry,
    alike,
    all_runs,
    averaged,
    differing_peaks,
    main_keys_first,
    settings,
    shown_parts,
)
from MaxText.reports.page import PageSection, PageTable, Verbatim

_RECENT_ROWS = 200  # reports in the median of the current speed

_MAX_LISTED = 40  # maximum events listed per run, the last ones

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


def overview(entries: Sequence[Entry], keys: Mapping[str, Mapping[str, Any]]) -> PageTable:
    """Returns one row per run; groups have mean and deviation first.

    Args:
        entries: runs and groups.
        keys: hyperparameters to show: key -> run -> value.
    """
    header = [
        "run",
        "state",
        "validation loss",
        *keys,
        "training loss",
        "steps",
        "tokens",
        "FLOPs",
        "time running",
        "tokens/s",
        "MFU",
        "goodput",
        "parameters",
        "devices",
    ]
    comparable = not differing_peaks(entries)
    kinds = {run.loss_kind for run in all_runs(entries).values()}
    rows = []
    for entry in entries:
        if entry.is_group:
            losses = [run.final_loss for run in averaged(entry)]
            known_losses = [loss for loss in losses if loss is not None]
            seeds = f"{len(known_losses)} of {len(losses)} seeds evaluated"
            spread = format_loss(statistics.mean(known_losses) if known_losses else None)
            if len(known_losses) > 1:
                spread += f" \u00b1 {statistics.stdev(known_losses):.4f}"
            rows.append([entry.label, seeds, spread, *[""] * (len(header) - 3)])
        for name, run in entry.runs.items():
            loss = _validation_loss(run)
            if len(kinds) > 1:
                loss += f" ({run.loss_kind})"
            values = [_value_of(run_values, name) for run_values in keys.values()]
            rows.append([name, _state(run), loss, *values, *_progress_cells(run, comparable)])
    return PageTable(header, rows)


def _value_of(values: Mapping[str, Any], name: str) -> str:
    """Formats a run's value of a key."""
    return to_yaml(values[name]) if name in values else ABSENT


def _state(run: RunHistory) -> str:
    """Describes the state of a run; of a running one with the time left."""
    planned = run.facts.get("num_steps")
    seconds = _median(run.steps[-_RECENT_ROWS:], "perf/step_time_seconds")
    if run.state != "running" or seconds is None or not planned:
        return run.state
    return f"running, {format_time(seconds * max(planned - _num_steps(run), 0))} left"


def _num_steps(run: RunHistory) -> int:
    """Returns the number of steps that a run has made."""
    return 0 if run.last_step is None else run.last_step + 1


def _progress_cells(run: RunHistory, comparable_mfu: bool) -> list[str]:
    """Returns the cells of a run from its training loss on."""
    facts = run.facts
    recent = run.steps[-_RECENT_ROWS:]
    speed = _median(recent, "perf/per_device_tokens_per_sec")
    devices = facts.get("num_devices") or 1
    kind = facts.get("device_kind") or facts.get("platform") or ""
    planned = facts.get("num_steps")
    done = _num_steps(run)
    loss, updates = run.training_loss or (None, 0)
    return [
        f"{format_loss(loss)} (mean of {updates:,} steps)" if updates else ABSENT,
        f"{done:,} of {planned:,}" if planned else f"{done:,}",
        _with_ancestors(run.tokens, run.inherited_tokens, short_count),
        _with_ancestors(run.flops, run.inherited_flops, format_operations),
        format_time(run.goodput.running_seconds),
        ABSENT if speed is None else short_count(speed * devices),
        format_share(_median(recent, "perf/mfu") if comparable_mfu else None),
        format_share(run.goodput.goodput),
        short_count(facts["num_parameters"]) if facts.get("num_parameters") else ABSENT,
        f"{devices} x {kind}" if kind else str(devices),
    ]


def _validation_loss(run: RunHistory) -> str:
    """Formats the final loss; beside another objective, with its cross entropy in nats."""
    loss = format_loss(run.final_loss)
    if run.objective_in_nats or run.final_lm_loss is None:
        return loss
    return f"{loss} (cross entropy {format_loss(run.final_lm_loss)})"


def _with_ancestors(amount: float, inherited: float, format_amount: Callable[[float], str]) -> str:
    """Formats what a run spent, and what the runs before it did."""
    if not inherited:
        return format_amount(amount)
    return f"{format_amount(amount)} + {format_amount(inherited)} of ancestors"


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def provenance(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns command, code, packages, host and data, by distinct value."""
    runs = all_runs(entries)
    names = dict.fromkeys(name for run in runs.values() for name in _facts(run))
    rows = []
    for name in names:
        values = alike(entries, lambda run, name=name: _facts(run).get(name))
        for run_names, value in values:
            rows.append([name, value, run_names if len(values) > 1 else "all"])
    header = ["fact", "value", "runs"]
    if len(runs) == 1:
        header = header[:2]
        rows = [row[:2] for row in rows]
    return [PageSection("Provenance", table=PageTable(header, rows))] if rows else []


def _facts(run: RunHistory) -> dict[str, str]:
    """Returns what is known of a run's origin, by name."""
    facts = run.facts
    recorded = run.facts.get("provenance") or {}
    data = facts.get("data") or {}
    packages = recorded.get("packages") or {"jax": facts["jax"]} if facts.get("jax") else {}
    facts_by_name = {
        "command": recorded.get("command"),
        "git commit": recorded.get("commit"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "host": recorded.get("host"),
        "data": data.get("train"),
        "data identity": data.get("identity"),
        "source of the state": facts.get("source"),
    }
    return {name: str(value) for name, value in facts_by_name.items() if value}


def configuration(
    entries: Sequence[Entry], differences: Mapping[str, Mapping[str, Any]]
) -> list[PageSection]:
    """Returns the keys of one run, or common ones and `differences`."""
    runs = all_runs(entries)
    configs = settings(entries)
    if not configs:
        return []
    first, *later_runs = (_main_and_changed(runs[name], config) for name, config in configs.items())
    facts = {}
    for key, value_text in first.items():
        value, *values = (config.get(key) for config in configs.values())
        if any(later_value != value for later_value in values):
            continue
        is_described_alike = all(later_run.get(key) == value_text for later_run in later_runs)
        facts[key] = value_text if is_described_alike else to_yaml(value)
    if len(runs) == 1:
        (config,) = (run.config for run in runs.values())
        everything = "\n".join(f"{key}: {to_yaml(value)}" for key, value in config.items())
        texts = [Verbatim(everything, f"All {len(config)} keys", is_open=False)]
        return [PageSection("Configuration", facts=facts, texts=texts)]
    sections = []
    if facts:
        sections.append(PageSection("Configuration of all runs", facts=facts))
    rows = []
    for key, values in differences.items():
        rows.append([key, *(_value_of(values, name) for name in runs)])
    if rows:
        table = PageTable(["key", *runs], rows)
        sections.append(PageSection("Configuration differences", table=table))
    return sections


def _main_and_changed(run: RunHistory, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns main and changed keys, such as "float32 (auto, default)"."""
    changed = run.facts.get("changed_keys") or {}  # absent in older runs
    resolved = run.facts.get("resolved_keys") or {}
    shown = {}
    for key, value in config.items():
        if key not in (*MAIN_KEYS, *changed, *resolved):
            continue
        requested = run.config.get(key)
        notes = []
        if requested != value:
            notes.append(to_yaml(requested))
        if changed and key not in changed:
            notes.append("default")
        shown[key] = to_yaml(value)
        if notes:
            shown[key] += f" ({', '.join(notes)})"
    return dict(sorted(shown.items(), key=lambda item: main_keys_first(item[0])))


def goodput_table(entries: Sequence[Entry]) -> PageTable:
    """Returns the time of each part, per run."""
    runs = all_runs(entries)
    present = shown_parts(runs.values())
    header = ["run", *present.values(), "time running", "attempts", "down between them"]
    rows = []
    time = format_time
    for name, run in runs.items():
        goodput = run.goodput
        parts = [
            f"{time(goodput.seconds[part])} ({format_share(goodput.share(part))})"
            for part in present
        ]
        total = time(goodput.running_seconds)
        down = time(goodput.down_seconds)
        rows.append([name, *parts, total, str(len(goodput.attempts)), down])
    return PageTable(header, rows)


def event_table(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns starts, stops, skipped steps, and other unusual events."""
    rows = []
    omitted = 0
    for name, run in all_runs(entries).items():
        described = [(row, event_text(row)) for row in run.events]
        described = [(row, text) for row, text in described if text]
        omitted += max(len(described) - _MAX_LISTED, 0)
        for row, text in described[-_MAX_LISTED:]:
            moment = datetime.datetime.fromtimestamp(row["time"]).astimezone()
            step = format_whole(row.get("step"))
            rows.append([name, f"{moment:%Y-%m-%d %H:%M:%S}", str(row["restart"]), step, text])
    if not rows:
        return []
    header = ["run", "time", "attempt", "step", "what"]
    if len(all_runs(entries)) == 1:
        header = header[1:]
        rows = [row[1:] for row in rows]
    note = [f"{omitted:,} earlier rows are omitted."] if omitted else []
    return [PageSection("Events", note, PageTable(header, rows))]


def event_text(row: Mapping[str, Any]) -> str:
    """Returns the text of an event; empty for usual ones."""
    kind = row["event"]
    reason = row.get("reason") or "no reason given"
    if kind in ("start", "resume"):
        text = f"{kind} from {row.get('source') or 'an unknown source'}"
        lost = row.get("lost")
        if not lost or not lost.get("steps"):
            return text
        seconds = math.fsum((lost.get("seconds") or {}).values())
        return f"{text}; {lost['steps']:,} steps lost, {format_time(seconds)} of work"
    if kind == "config_change":
        changes = (row.get("changes") or {}).items()
        return "configuration: " + ", ".join(f"{key}: {a} -> {b}" for key, (a, b) in changes)
    if kind in ("step_skipped", "record_skipped"):
        count = row.get("count") or 1
        skipped = kind.removesuffix("_skipped")
        return f"{pluralize(count, skipped)} skipped: {reason}"
    if kind == "warning":
        return f"warning: {reason}"
    if kind == "rollback":
        return f"rollback to step {row.get('restored_step')}: {reason}"
    if kind == "growth":
        common_fields = ("time", "event", "phase", "restart", "step", "seconds")
        return "growth: " + ", ".join(f"{k}={v}" for k, v in row.items() if k not in common_fields)
    if kind == "stop":
        return f"stop: {reason}"
    return ""


def cost(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns parameters and FLOPs of each part of the model."""
    costs = alike(entries, lambda run: run.facts.get("cost"))
    if not costs:
        return []
    rows = []
    notes = []
    for names, cost_facts in costs:
        parameters = cost_facts.get("parameters") or 0
        flops = cost_facts.get("flops_per_token") or 0
        for part in (*(cost_facts.get("parts") or ()), {**cost_facts, "name": "total"}):
            num_parameters = part.get("parameters") or 0
            part_flops = part.get("flops_per_token") or 0
            parameter_share = format_share(num_parameters / (parameters or math.nan))
            flops_share = format_share(part_flops / (flops or math.nan))
            numbers = [
                format_whole(num_parameters),
                parameter_share,
                short_count(part_flops),
                flops_share,
            ]
            rows.append([names, str(part.get("name", "")), *numbers])
        notes += [str(cost_facts[key]) for key in _RULES if cost_facts.get(key)]
    peaks = alike(entries, _peak)
    for names, (peak, source) in peaks:
        run_names = f" ({names})" if len(peaks) > 1 else ""
        notes.append(f"Peak of a device{run_names}: {peak:.4g} TFLOP/s, {source}.")
    measured_peaks = differing_peaks(entries)
    if measured_peaks:
        notes.append(
            "MFU is not compared: the peaks of these runs' devices were measured as "
            f"{measured_peaks[0]:.4g} to {measured_peaks[-1]:.4g} TFLOP/s. Compare tokens per "
            "second."
        )
    header = ["run", "part", "parameters", "share", "FLOPs per token", "share"]
    if len(costs) == 1:
        header = header[1:]
        rows = [row[1:] for row in rows]
    notes = list(dict.fromkeys(notes))
    return [PageSection("Parameters and operations", notes, PageTable(header, rows))]


def _peak(run: RunHistory) -> tuple[float, str] | None:
    """Returns the peak of a device in TFLOP/s and its source; None if unknown."""
    peak = run.facts.get("peak_tflops")
    if not peak:
        return None
    return peak, str(run.facts.get("peak_source") or "of unknown origin")


def memory(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns memory of the state, of the compiled step, and of the KV cache."""
    runs = all_runs(entries)
    columns = [_memory_of(run) for run in runs.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    if not names:
        return []
    rows = [[name, *(column.get(name, ABSENT) for column in columns)] for name in names]
    header = ["memory", *runs] if len(runs) > 1 else ["memory", "size"]
    note = (
        "State and cache are of the whole model. The compiled step is per device, as planned by "
        "the compiler; aliased arguments are also outputs."
    )
    return [PageSection("Memory", [note], PageTable(header, rows))]


def _memory_of(run: RunHistory) -> dict[str, str]:
    """Returns the rows of a run in the table of memory: name -> size."""
    cost_facts = run.facts.get("cost") or {}
    rows = {
        f"state: {name}": format_size(value)
        for name, value in (cost_facts.get("bytes") or {}).items()
    }
    for mark in run.events:
        # A recompiled shape shows its newest numbers.
        if mark["event"] == "compile" and mark.get("memory"):
            shape = f"{mark.get('rows', '?')} x {mark.get('length', '?')}"
            for name, value in mark["memory"].items():
                rows[f"step of {shape} tokens: {name}"] = format_size(value)
    length = cost_facts.get("sequence_length")
    cache_label = f"KV cache: a sequence of {length:,}" if length else "KV cache"
    cache = {"kv_cache_bytes_per_token": "KV cache: per token", "kv_cache_bytes": cache_label}
    return rows | {
        name: format_size(cost_facts[key])
        for key, name in cache.items()
        if cost_facts.get(key) is not None
    }


def lineage(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns the ancestry of each run; none without ancestors."""
    runs = all_runs(entries)
    if not any(run.facts.get("lineage") for run in runs.values()):
        return []
    lines = []
    for name, run in runs.items():
        spent = f"{short_count(run.tokens)} tokens, {format_operations(run.flops)} FLOPs"
        ancestors = map(_ancestor, run.facts.get("lineage") or ())
        lines.append(" -> ".join([*ancestors, f"{name}: {run.state}, {spent}"]))
    note = "Tokens and FLOPs of an ancestor include those of its own ancestors."
    return [PageSection("Lineage", [note], texts=[Verbatim("\n".join(lines))])]


def _ancestor(ancestor: Mapping[str, Any]) -> str:
    """Describes a run that another one started from."""
    step = ancestor.get("step")
    tokens = ancestor.get("tokens")
    flops = ancestor.get("flops")
    name = ancestor.get("run_name") or ancestor.get("folder") or "a run without a name"
    facts = [
        "" if step is None else f"step {step:,}",
        str(ancestor.get("how") or "").replace("_", " "),
        "" if tokens is None else f"{short_count(tokens)} tokens",
        "" if flops is None else f"{format_operations(flops)} FLOPs",
    ]
    return f"{name}: {', '.join(filter(None, facts))}"


def samples(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns sampled texts, the newest of a few runs unfolded."""
    texts = []
    runs = all_runs(entries)
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
    warning_lines = []
    for key, difference in _MISMATCHES.items():
        values = alike(entries, lambda run, key=key: (run.facts.get("data") or {}).get(key))
        if len(values) > 1:
            values_by_run = "; ".join(f"{names}: {_short(str(value))}" for names, value in values)
            warning_lines.append(f"The runs have different {difference} {values_by_run}.")
    return warning_lines


def _short(text: str) -> str:
    """Shortens a hash or another long value."""
    return text if len(text) <= 16 else f"{text[:12]}..."
