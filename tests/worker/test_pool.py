"""Django's connection pool, smaller than the worker: handlers wait for it, the worker does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from django_jobqueue import Status, handler
from django_jobqueue.handlers import Registry
from django_jobqueue.models import JobAttempt, ProcessingJob
from tests.coordinators import burst
from tests.rows import sql

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

THREADS = 6
LOCK = 1.5
HELD = 2.0
"""Seconds that each job keeps a connection: longer than its lock."""


@pytest.fixture
def pool_of_two(request_settings: dict[str, Any], settings: Any) -> Iterator[dict[str, Any]]:
    settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": LOCK, "RESCUE_INTERVAL": 0.1}
    pool: dict[str, Any] = {"min_size": 0, "max_size": 2, "timeout": 30}
    request_settings.update(CONN_MAX_AGE=0, OPTIONS={"pool": pool})
    yield pool
    begin_anew(pool)


def begin_anew(pool: dict[str, Any], **changes: Any) -> None:
    """A pool is made when it is first used: end it, so that changes count."""
    connection.close()
    connection.close_pool()  # type: ignore[attr-defined]
    pool.update(changes)


@pytest.fixture
def six_that_hold(handlers: Registry) -> list[ProcessingJob]:
    @handler(name="holds")
    def holds(seconds: float) -> None:
        sql("SELECT pg_sleep(%s)", seconds)

    return [holds.enqueue(seconds=HELD) for _number in range(THREADS)]


def test_jobs_that_wait_for_a_connection_are_not_taken_from_a_living_worker(
    pool_of_two: dict[str, Any], six_that_hold: list[ProcessingJob], caplog: Any
) -> None:
    connection.close()

    summary = burst(threads=THREADS)

    assert "has 2 connections for 6 threads" in caplog.text
    assert (summary.succeeded, summary.failed, summary.lost) == (THREADS, 0, 0)
    assert set(jobs.values_list("attempts", flat=True)) == {1}
    assert not JobAttempt.objects.exists()


def test_jobs_that_get_no_connection_in_time_fail_by_themselves_and_none_is_lost(
    pool_of_two: dict[str, Any], six_that_hold: list[ProcessingJob]
) -> None:
    begin_anew(pool_of_two, timeout=1)

    summary = burst(threads=THREADS)

    assert (summary.succeeded, summary.failed, summary.lost) == (2, THREADS - 2, 0)
    assert set(JobAttempt.objects.values_list("outcome", flat=True)) == {"failed"}
    errors = jobs.filter(status=Status.FAILED).values_list("last_error", flat=True)
    assert all("couldn't get a connection after 1.00 sec" in error for error in errors)


def test_a_place_in_the_pool_comes_back_from_every_job_that_spoils_its_session(
    pool_of_two: dict[str, Any], handlers: Registry
) -> None:
    begin_anew(pool_of_two, timeout=5)

    @handler(name="spoils")
    def spoils(how: str) -> None:
        sql("SELECT 1")
        if how == "close":
            connection.connection.close()
        else:
            sql(how)

    ways = ["BEGIN", "SET search_path = nowhere", "close", "LISTEN something"]
    due = [spoils.enqueue(how=ways[number % len(ways)]) for number in range(24)]
    connection.close()

    summary = burst(threads=4)

    assert summary.succeeded == len(due)
