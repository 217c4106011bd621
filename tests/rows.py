"""Time is moved by moving rows, and counted in SQL."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import F
from django.db.models.functions import Now

from django_jobqueue.models import ProcessingJob
from tests.waiting import wait_until

WORKER_A, WORKER_B = "worker-a", "worker-b"


def make_stale(*jobs: ProcessingJob) -> None:
    """The locks of these jobs ran out a second ago."""
    rows = ProcessingJob.objects.filter(pk__in=[job.pk for job in jobs])
    rows.update(lock_expires_at=Now() - timedelta(seconds=1))


def make_due(*jobs: ProcessingJob) -> None:
    """These jobs wait no longer."""
    rows = ProcessingJob.objects.filter(pk__in=[job.pk for job in jobs])
    rows.update(available_at=Now() - timedelta(seconds=1))


def age_finished(seconds: float) -> None:
    """Everything that has finished did so this much earlier."""
    ProcessingJob.objects.exclude(finished_at=None).update(
        finished_at=F("finished_at") - timedelta(seconds=seconds)
    )


def sql(statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """Rows of a statement of the test's own."""
    with connection.cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


def count_jobs() -> int:
    return int(sql("SELECT count(*) FROM processing_jobs")[0][0])


def database_now() -> datetime:
    now: datetime = sql("SELECT clock_timestamp()")[0][0]
    return now


def wait_until_somebody_waits_for_a_lock(holder: int | None = None) -> None:
    """Return when another session waits for what the holder's has locked: a backend's process id,
    or None for this session."""

    def waits() -> bool:
        # Within a transaction the view shows what it showed the first time.
        sql("SELECT pg_stat_clear_snapshot()")
        blocked = (
            "SELECT 1 FROM pg_stat_activity"
            " WHERE COALESCE(%s, pg_backend_pid()) = ANY (pg_blocking_pids(pid))"
        )
        return bool(sql(blocked, holder))

    wait_until(waits)


def stored(job: ProcessingJob) -> ProcessingJob:
    """The job as its row is now."""
    return ProcessingJob.objects.get(pk=job.pk)


def everything_of(job: ProcessingJob) -> dict[str, Any]:
    """The row as it is, to show that nothing changed."""
    return dict(ProcessingJob.objects.filter(pk=job.pk).values().get())
