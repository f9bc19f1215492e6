"""The leaderboard of a session: report.html, one row per candidate that was ever submitted."""

import json
from collections.abc import Sequence
from pathlib import Path

from MaxText.experiments.arena import verdict
from MaxText.experiments.arena.ledger import (
    BASELINE,
    CandidateRow,
    FinalRow,
    Ledger,
    TrialRow,
    open_ledger,
)
from MaxText.experiments.arena.session import Session, load_session
from MaxText.formatting import ABSENT, format_operations, short_count
from MaxText.reports.entries import COMPARISON_FILE
from MaxText.reports.page import PageSection, PageTable
from MaxText.reports.report_writer import write_page
from MaxText.storage.atomic import atomic_write_text

HEADER = (
    "candidate",
    "verdict",
    "difference, nats/token",
    "interval",
    "sd of differences",
    "bits/byte",
    "seeds",
    "hidden half, nats/token",
    "parameters",
    "FLOPs per run",
    "steps",
    "train seconds",
    "why",
)
_ORDER = ("keep", "undecided", "discard", "refused", "")


def table_rows(session: Session, ledger: Ledger) -> list[list[str]]:
    """Returns one row per candidate under HEADER: kept ones first, then by their effect."""
    rows = []
    for row in ledger.candidates:
        decision = ledger.verdict(row.name)
        outcome = "" if decision is None else decision.verdict
        look = verdict.last_look(ledger, row.name)
        rank = (_ORDER.index(outcome), 0.0 if look is None else -look.improvement)
        rows.append((rank, _cells(ledger, row, outcome)))
    return [cells for _, cells in sorted(rows, key=lambda item: item[0])]


def _cells(ledger: Ledger, row: CandidateRow, outcome: str) -> list[str]:
    look = verdict.last_look(ledger, row.name)
    decision = ledger.verdict(row.name)
    trials = ledger.of(TrialRow, row.name)
    cost = verdict.cost_of(ledger, row)
    difference = interval = std = bits = ABSENT
    if look is not None:
        difference = f"{-look.improvement:+.4f}"
        interval = f"{-look.high:+.4f} to {-look.low:+.4f}"
        std = f"{look.std:.4f}"
        per_byte = verdict.bits_per_byte(-look.improvement, trials)
        bits = ABSENT if per_byte is None else f"{per_byte:+.4f}"
    hidden = ABSENT
    for final in ledger.of(FinalRow, row.name):
        hidden = f"{verdict.final_difference(final).mean:+.4f}"
    seconds = cost.get("train_seconds")
    return [
        row.name,
        outcome or "in progress",
        difference,
        interval,
        std,
        bits,
        str(len(trials)),
        hidden,
        short_count(cost["parameters"]) if cost else ABSENT,
        format_operations(cost["flops"]) if cost else ABSENT,
        f"{row.steps:,}" if row.steps else ABSENT,
        ABSENT if seconds is None else f"{seconds:,.1f}",
        "; ".join(decision.reasons) if decision else "",
    ]


def summary(session: Session, ledger: Ledger) -> list[str]:
    """Returns sentences on what the session promises and what it has found."""
    spec = session.spec
    outcomes = [
        decision.verdict
        for row in ledger.candidates
        if (decision := ledger.verdict(row.name)) is not None
    ]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in _ORDER[:4])
    lines = [
        f"{len(ledger.candidates)} candidates submitted: {counts}. "
        f"{verdict.candidates_left(session, ledger)} of {spec.num_candidates} may still run.",
        f"The chance that a session keeps any candidate that is no better by {spec.min_effect:g} "
        f"nats/token is at most {spec.alpha:.0%}, however many looks were taken. Differences are "
        "the candidate's loss minus the baseline's, paired by seed: negative is better. Intervals "
        f"are repeated confidence intervals of {1 - 2 * session.test.level:.1%}, valid at whatever "
        "look a candidate stopped.",
    ]
    if verdict.baseline_std(ledger) is not None:
        lines.append(f"Noise: {verdict.describe_noise(ledger)}.")
    lines += [f"{row.owner} {verdict.describe_final(row)}" for row in ledger.of(FinalRow)]
    return lines


def page_sections(session: Session, ledger: Ledger) -> list[PageSection]:
    """Returns the leaderboard, and what candidates are and cost, as sections of a page."""
    rows = table_rows(session, ledger)
    sections = [PageSection("Leaderboard", summary(session, ledger))]
    if rows:
        sections[0] = PageSection("Leaderboard", sections[0].paragraphs, PageTable(HEADER, rows))
    changes = [
        [row.name, name, values[0], values[1]]
        for row in ledger.candidates
        for name, values in row.changes.items()
    ]
    if changes:
        header = ("candidate", "key", "baseline", "candidate's value")
        sections.append(PageSection("What candidates change", table=PageTable(header, changes)))
    sources = [
        [row.name, row.spec, row.source_hash[:12], ", ".join(row.files)]
        for row in ledger.candidates
    ]
    if sources:
        header = ("candidate", "as submitted", "source hash", "files")
        sections.append(PageSection("Where candidates come from", table=PageTable(header, sources)))
    baseline = ledger.candidate(BASELINE)
    if baseline is not None:
        cost = verdict.cost_of(ledger, baseline)
        facts = {name.replace("_", " "): f"{amount:,.4g}" for name, amount in cost.items()}
        sections.append(PageSection("Cost of the baseline", facts=facts))
    return sections


def sections_of_sessions(folders: Sequence[str]) -> list[PageSection]:
    """Returns the sections of those folders that are sessions."""
    sections = []
    for folder in folders:
        session = load_session(Path(folder).expanduser())
        if session is not None:
            sections += page_sections(session, open_ledger(session.folder, writes=False))
    return sections


def write_leaderboard(session: Session, ledger: Ledger) -> Path:
    """Writes report.html, and the groups by which report.py draws the runs; returns the page."""
    owners = dict.fromkeys(row.owner for row in ledger.of(TrialRow))
    groups = {
        owner: [
            f"{session.runs_folder(owner).relative_to(session.folder)}/seed_{row.seed}"
            for row in ledger.of(TrialRow, owner)
        ]
        for owner in owners
    }
    content = json.dumps({"groups": groups}, indent=1)
    atomic_write_text(session.folder / COMPARISON_FILE, f"{content}\n")
    sections = page_sections(session, ledger)
    return write_page(sections, session.folder, title=f"Arena: {session.folder.name}")
