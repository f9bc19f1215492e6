"""Tables about what was run: provenance and configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from MaxText.config.values import to_yaml
from MaxText.metrics.provenance import MAIN_KEYS
from MaxText.metrics.run_record import RunHistory
from MaxText.reports.entries import Entry, alike, all_runs
from MaxText.reports.formatting import ABSENT
from MaxText.reports.page import PageSection, PageTable, Verbatim


def provenance(entries: Sequence[Entry]) -> list[PageSection]:
    """Returns command, code, packages, host and data, by distinct value."""
    runs = all_runs(entries)
    names = dict.fromkeys(name for run in runs.values() for name in _facts(run))
    rows = []
    for name in names:
        values = alike(entries, lambda run, name=name: _facts(run).get(name))
        rows += [[name, value, who if len(values) > 1 else "all"] for who, value in values]
    header = ["fact", "value", "runs"]
    if len(runs) == 1:
        header, rows = header[:2], [row[:2] for row in rows]
    return [PageSection("Provenance", table=PageTable(header, rows))] if rows else []


def _facts(run: RunHistory) -> dict[str, str]:
    facts, found = run.facts, run.facts.get("provenance") or {}
    data = facts.get("data") or {}
    packages = found.get("packages") or {"jax": facts["jax"]} if facts.get("jax") else {}
    shown = {
        "command": found.get("command"),
        "git commit": found.get("commit"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "host": found.get("host"),
        "data": data.get("train"),
        "data identity": data.get("identity"),
        "source of the state": facts.get("source"),
    }
    return {name: str(value) for name, value in shown.items() if value}


def configuration(
    entries: Sequence[Entry], differences: Mapping[str, Mapping[str, Any]]
) -> list[PageSection]:
    """Returns the keys of one run, or `differences` between runs."""
    runs = all_runs(entries)
    if len(runs) > 1:
        rows = [
            [key, *(to_yaml(values[name]) if name in values else ABSENT for name in runs)]
            for key, values in differences.items()
        ]
        table = PageTable(["key", *runs], rows)
        return [PageSection("Configuration differences", table=table)] if rows else []
    (run,) = runs.values()
    if not run.config:
        return []
    changed = run.facts.get("changed_keys") or {}  # absent in older runs
    known = {key: to_yaml(value) for key, value in run.config.items()}
    default = " (default)" if changed else ""
    facts = {key: known[key] + default for key in MAIN_KEYS if key in known} | changed
    everything = "\n".join(f"{key}: {value}" for key, value in known.items())
    texts = [Verbatim(everything, f"All {len(known)} keys", is_open=False)]
    return [PageSection("Configuration", facts=facts, texts=texts)]
