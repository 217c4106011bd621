"""The last steps of a worker: what ended is recorded, the rest is given back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from django_jobqueue import Status, signals
from django_jobqueue.models import ProcessingJob
from django_jobqueue.worker import Coordinator, WorkerOptions
from tests.app.jobs import wait_for
from tests.coordinators import working, working_as
from tests.racing import in_thread
from tests.rows import sql
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects


def test_what_finished_is_recorded_although_the_first_try_fails(tmp_path: Path) -> None:
    """Given back, it would be done twice."""
    job = wait_for.enqueue(path=str(tmp_path / "go"))
    coordinator = Coordinator(WorkerOptions(threads=1, shutdown_timeout=0))

    def finish_and_lose_the_session(**_kwargs: Any) -> None:
        (tmp_path / "go").touch()
        wait_until(lambda: coordinator._inbox.qsize())
        (own,) = sql("SELECT pg_backend_pid()")
        in_thread(lambda: sql("SELECT pg_terminate_backend(%s)", own[0]))

    signals.worker_stopping.connect(finish_and_lose_the_session)
    try:
        with working_as(coordinator):
            wait_until((tmp_path / "go.started").exists)
    finally:
        signals.worker_stopping.disconnect(finish_and_lose_the_session)

    stored = ProcessingJob.objects.get(pk=job.pk)
    assert (stored.status, stored.attempts) == (Status.SUCCEEDED, 1)
    assert coordinator.summary.released == 0


def test_a_row_that_is_locked_just_then_is_given_back_too(tmp_path: Path) -> None:
    """By the worker's own heartbeat, or by somebody in the admin."""
    locked, free = [wait_for.enqueue(path=str(tmp_path / name)) for name in "ab"]
    given_back = threading.Event()

    def listen(*, job: ProcessingJob, **_kwargs: Any) -> None:
        given_back.set()

    signals.job_released.connect(listen)
    try:
        with working(threads=2, shutdown_timeout=0) as coordinator:
            wait_until(lambda: all((tmp_path / f"{name}.started").exists() for name in "ab"))
            with transaction.atomic():
                sql("SELECT 1 FROM processing_jobs WHERE id = %s FOR UPDATE", locked.pk)
                coordinator.stop()
                # The other one first: no row waits for one that is locked.
                given_back.wait(timeout=10)
        for name in "ab":
            (tmp_path / name).touch()
    finally:
        signals.job_released.disconnect(listen)
    connection.close()

    for job in (locked, free):
        stored = ProcessingJob.objects.get(pk=job.pk)
        assert (stored.status, stored.attempts) == (Status.PENDING, 0)
    assert coordinator.summary.released == 2
