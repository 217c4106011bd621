"""What the jobs of some documents found, counted, and as tables with a bounded number of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from django.db.models import Count
from django.template.defaultfilters import filesizeformat
from rich import box
from rich.table import Table
from rich.text import Text

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob
from example_project.documents.jobs import jobs_of
from example_project.documents.models import Document, counted

#: Rows of a table; the rest is counted.
ROWS = 40
_CHUNK = 1_000
_CHECKSUM_SHOWN = 12
_ERROR_SHOWN = 200
_UNFINISHED = (Status.PENDING, Status.PROCESSING, Status.FAILED)


@dataclass(slots=True, kw_only=True)
class Report:
    """Counts over all documents; documents and jobs in full only as many as a table shows."""

    documents: list[Document] = field(default_factory=list)
    jobs: dict[int, list[ProcessingJob]] = field(default_factory=dict)
    document_count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    succeeded_after_retry: int = 0
    problem_count: int = 0
    problems: list[tuple[ProcessingJob, str]] = field(default_factory=list)
    first_dead_letter: ProcessingJob | None = None


def unfinished(document_ids: Sequence[int]) -> int:
    """How many jobs of these documents wait or run."""
    return sum(
        jobs_of(chunk).filter(status__in=_UNFINISHED).count() for chunk in _chunks(document_ids)
    )


def job_count(document_ids: Sequence[int]) -> int:
    """How many jobs these documents have, ended or not."""
    return sum(jobs_of(chunk).count() for chunk in _chunks(document_ids))


def report_on(document_ids: Sequence[int]) -> Report:
    """Read everything that the tables show, chunk by chunk."""
    report = Report(document_count=len(document_ids))
    shown = document_ids[:ROWS]
    report.documents = list(Document.objects.filter(pk__in=shown).defer("entries").order_by("pk"))
    for chunk in _chunks(document_ids):
        _add_kinds(report, chunk)
        _add_jobs(report, chunk, shown=frozenset(shown))
    return report


def counts_line(report: Report) -> str:
    """All jobs in one line, by how they stand."""
    count = report.statuses
    parts = [
        f"{count[Status.SUCCEEDED]:,} succeeded ({report.succeeded_after_retry:,} of them retried)",
        counted(count[Status.DEAD_LETTER], "dead letter"),
    ]
    waiting = sum(count[status] for status in _UNFINISHED)
    parts += [f"{waiting:,} not finished"] * bool(waiting)
    parts += [f"{count[Status.CANCELLED]:,} cancelled"] * bool(count[Status.CANCELLED])
    return f"Jobs: {', '.join(parts)}."


def findings_table(report: Report, *, plain: bool) -> Table:
    """One row for each document, with what its jobs found."""
    table = _table("What the jobs found", plain=plain)
    table.add_column("Document", overflow="fold")
    table.add_column("Size", justify="right", no_wrap=True)
    table.add_column("Kind by content", overflow="fold")
    table.add_column("SHA-256", no_wrap=True)
    table.add_column("Found", overflow="fold")
    table.add_column("Jobs", overflow="fold")
    for document in report.documents:
        table.add_row(
            Text(document.original_name),
            _size(document),
            Text(document.kind),
            document.sha256[:_CHECKSUM_SHOWN],
            document.found,
            _standing(report.jobs.get(document.pk, [])),
        )
    return table


def kinds_table(report: Report, *, plain: bool) -> Table:
    """How many documents there are of each kind."""
    table = _table("Kinds", plain=plain)
    table.add_column("Kind by content", overflow="fold")
    table.add_column("Documents", justify="right", no_wrap=True)
    for kind, count in report.kinds.most_common(ROWS):
        table.add_row(Text(kind or "not known yet"), f"{count:,}")
    return table


def problems_table(report: Report, *, plain: bool) -> Table:
    """One row for each job that failed at least once: why, and how it stands now."""
    table = _table("What failed, and why", plain=plain)
    table.add_column("Job", justify="right", no_wrap=True)
    table.add_column("Handler", no_wrap=True)
    table.add_column("Document", overflow="fold")
    table.add_column("Why", overflow="fold")
    table.add_column("Now", overflow="fold")
    for job, document_name in report.problems:
        table.add_row(
            str(job.pk),
            short_name(job),
            Text(document_name),
            Text(_first_line(job.last_error)),
            _outcome(job),
        )
    return table


def more_line(shown: int, count: int, what: str) -> str:
    """`… and 4,037 more documents.`, or nothing when all are shown."""
    return f"… and {counted(count - shown, f'more {what}')}." if count > shown else ""


def short_name(job: ProcessingJob) -> str:
    """The handler's name without its module."""
    return job.handler.rpartition(".")[2]


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]


def _add_kinds(report: Report, chunk: Sequence[int]) -> None:
    kinds = Document.objects.filter(pk__in=chunk).order_by().values_list("kind")
    report.kinds.update(dict(kinds.annotate(Count("pk"))))


def _add_jobs(report: Report, chunk: Sequence[int], *, shown: frozenset[int]) -> None:
    problems = []
    for job in jobs_of(chunk).order_by("pk"):
        report.statuses[job.status] += 1
        report.succeeded_after_retry += job.status == Status.SUCCEEDED and bool(job.last_error)
        if job.status == Status.DEAD_LETTER and report.first_dead_letter is None:
            report.first_dead_letter = job
        if job.last_error:  # kept when a later attempt succeeds
            problems.append(job)
        if (document_id := job.payload["document_id"]) in shown:
            report.jobs.setdefault(document_id, []).append(job)
    report.problem_count += len(problems)
    room = ROWS - len(report.problems)
    report.problems += [(job, document_name(job)) for job in problems[:room]]


def document_name(job: ProcessingJob) -> str:
    """The name of the document that a job is about."""
    names = Document.objects.filter(pk=job.payload["document_id"])
    return names.values_list("original_name", flat=True).first() or "(deleted)"


def _table(title: str, *, plain: bool) -> Table:
    return Table(title=title, title_justify="left", box=box.ASCII if plain else box.SIMPLE_HEAD)


def _size(document: Document) -> str:
    return filesizeformat(document.size or 0).replace("\xa0", " ")


def _standing(jobs: Sequence[ProcessingJob]) -> str:
    """`3 succeeded, 1 dead letter`"""
    count = Counter(Status(job.status) for job in jobs)
    return ", ".join(f"{number} {status.label}" for status, number in sorted(count.items()))


def _outcome(job: ProcessingJob) -> str:
    status = Status(job.status)
    if status in (Status.SUCCEEDED, Status.DEAD_LETTER):
        return f"{status.label}, attempt {job.attempts} of {job.max_attempts}"
    return str(status.label)


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _ERROR_SHOWN else f"{line[:_ERROR_SHOWN]}…"
