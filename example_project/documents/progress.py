"""How far the jobs of some documents are, told by the library's signals while a worker runs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from django_jobqueue import signals
from django_jobqueue.models import ProcessingJob
from example_project.documents.jobs import QUEUES


class JobProgress:
    """A line of a progress bar: jobs of these documents, as they are enqueued and as they end."""

    def __init__(self, bar: Progress, line: TaskID, document_ids: Collection[int]) -> None:
        self._bar = bar
        self._line = line
        self._document_ids = frozenset(document_ids)
        # Guards the two counts: handlers enqueue on threads of the worker, jobs end on another.
        self._lock = threading.Lock()
        self._total = self._ended = 0

    def set(self, *, total: int, ended: int) -> None:
        """Start from what the job table says."""
        with self._lock:
            self._total, self._ended = total, ended
            self._show()

    def job_enqueued(self, *, job: ProcessingJob, **_signal: Any) -> None:
        """A handler enqueued the next job."""
        self._count(job, enqueued=1)

    def job_ended(self, *, job: ProcessingJob, **_signal: Any) -> None:
        """A job succeeded, or is a dead letter."""
        self._count(job, ended=1)

    def _count(self, job: ProcessingJob, *, enqueued: int = 0, ended: int = 0) -> None:
        if job.queue not in QUEUES or job.payload.get("document_id") not in self._document_ids:
            return
        with self._lock:
            self._total += enqueued
            self._ended += ended
            self._show()

    def _show(self) -> None:
        self._bar.update(self._line, total=self._total, completed=self._ended)


@contextmanager
def followed(progress: JobProgress, console: Console) -> Iterator[None]:
    """Within, the signals of jobs move the progress, and an outage of the database is told."""

    def tell_outage(*, wait: float, **_signal: Any) -> None:
        console.print(f"The database does not answer, next try in {wait:.1f} s.")

    receivers = (
        (signals.job_enqueued, progress.job_enqueued),
        (signals.job_succeeded, progress.job_ended),
        (signals.job_dead_lettered, progress.job_ended),
        (signals.worker_outage, tell_outage),
    )
    for signal, receiver in receivers:
        signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        for signal, receiver in receivers:
            signal.disconnect(receiver)
