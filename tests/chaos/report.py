"""What the driver shows: a line for each scenario as it ends, and a table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from tests.chaos.scenario import Result

_LOGS = 4
_LINES = 30


def row_of(result: Result) -> str:
    """One scenario in one line."""
    return (
        f"{result.scenario}: {result.verdict.jobs} jobs, {_in_words(result.kills + result.faults)},"
        f" {result.verdict.lost_locks} lost locks, {result.verdict.releases} given back,"
        f" drained {result.recovery:.1f} s after the last fault, {result.seconds:.0f} s in all"
    )


def table_of(results: Sequence[Result], broken: Sequence[str]) -> Table:
    """All scenarios, with totals."""
    table = Table(box=box.SIMPLE, show_footer=True)
    table.add_column("scenario", footer="in all", no_wrap=True)
    for title, figures in _columns(results).items():
        table.add_column(title, footer=str(sum(figures)), justify="right")
    table.add_column("recovery", footer=_longest(results), justify="right")
    for result, *figures in zip(results, *_columns(results).values(), strict=True):
        table.add_row(result.scenario, *map(str, figures), f"{result.recovery:.1f} s")
    for name in broken:
        table.add_row(name, "BROKEN", style="red")
    return table


def kinds_of(results: Sequence[Result]) -> str:
    """What the kills and the other faults were, over all scenarios."""
    kills = sum((result.kills for result in results), Counter[str]())
    faults = sum((result.faults for result in results), Counter[str]())
    return f"Kills: {_in_words(kills)}.\nOther faults: {_in_words(faults)}."


def log_tails(folder: Path) -> str:
    """The ends of the logs that were written last."""
    logs = sorted(folder.rglob("*.log"), key=lambda log: log.stat().st_mtime)[-_LOGS:]
    return "\n".join(f"--- {log.name}\n{_tail(log)}" for log in logs)


def _columns(results: Sequence[Result]) -> dict[str, list[int]]:
    return {
        "jobs": [result.verdict.jobs for result in results],
        "kills": [result.kills.total() for result in results],
        "faults": [result.faults.total() for result in results],
        "lost": [result.verdict.lost for result in results],
        "stale verdicts": [result.verdict.stale for result in results],
        "redelivered": [result.verdict.redelivered for result in results],
        "seconds": [round(result.seconds) for result in results],
    }


def _longest(results: Sequence[Result]) -> str:
    return f"≤ {max((result.recovery for result in results), default=0.0):.1f} s"


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{count} × {what}" for what, count in sorted(counts.items())) or "none"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
