"""How many sessions a worker has: one per thread and alias that its handlers use, and two more.

JOBQUEUE_TEST_JOBS in the environment raises the number of jobs of each run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob
from django_jobqueue.worker import executor
from tests.app.jobs import select
from tests.coordinators import burst, working
from tests.onlooker import Onlooker
from tests.processes import running_worker
from tests.projects import project_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

JOBS = int(os.environ.get("JOBQUEUE_TEST_JOBS", "120"))
THREADS = 8
BOOKS = 2
"""The coordinator's session and the heartbeat's."""


def enqueue_alternately(count: int, *payloads: dict[str, Any]) -> None:
    jobs.enqueue_many(
        {"handler": select, "payload": payloads[number % len(payloads)]} for number in range(count)
    )


TWO_ALIASES = "DATABASES['other'] = {**DATABASES['default']}"
HABITS: dict[str, dict[str, Any]] = {
    f"max-age-{age}-{'checked' if checked else 'unchecked'}": {
        "CONN_MAX_AGE": age,
        "CONN_HEALTH_CHECKS": checked,
    }
    for age in (0, 60, None)
    for checked in (False, True)
}
HABITS["pool"] = {"CONN_MAX_AGE": 0, "OPTIONS": {"pool": {"min_size": 1, "max_size": THREADS}}}


@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS.keys())
def test_sessions_are_bounded_by_threads_and_aliases_and_end_with_the_worker(
    tmp_path: Path, database_url: str, onlooker: Onlooker, habit: dict[str, Any]
) -> None:
    own = project_settings(
        tmp_path, f"{TWO_ALIASES}\nfor database in DATABASES.values(): database.update({habit})"
    )
    enqueue_alternately(
        JOBS,
        {"aliases": ["default"]},
        {"aliases": ["default", "other"]},
        {"aliases": ["default"], "own_thread": True},
    )

    with running_worker(
        *("--burst", "--threads", str(THREADS)),
        folder=tmp_path,
        database_url=database_url,
        settings=own,
    ) as worker:
        assert worker.ended(timeout=60) == 0, worker.output

    assert jobs.filter(status=Status.SUCCEEDED, attempts=1).count() == JOBS
    # Of the two aliases and a handler's own thread, each of the worker's threads has one session.
    assert BOOKS < onlooker.most <= THREADS * (2 + 1) + BOOKS
    wait_until(lambda: onlooker.sessions() == 0, message="The worker left sessions behind.")


def test_handlers_that_use_one_alias_need_threads_and_two(
    request_settings: dict[str, Any], onlooker: Onlooker
) -> None:
    request_settings.update(CONN_MAX_AGE=None)
    enqueue_alternately(JOBS, {"aliases": ["default"]})
    connection.close()

    burst(threads=THREADS)

    assert BOOKS < onlooker.most <= THREADS + BOOKS


def test_handlers_that_use_no_database_need_two(onlooker: Onlooker) -> None:
    enqueue_alternately(JOBS, {"aliases": []})
    connection.close()

    burst(threads=THREADS)

    assert onlooker.most <= BOOKS


def test_an_idle_worker_keeps_its_books_only_where_requests_keep_nothing(
    request_settings: dict[str, Any], onlooker: Onlooker
) -> None:
    request_settings.update(CONN_MAX_AGE=0)
    enqueue_alternately(50, {"aliases": ["default"]})

    with working(threads=THREADS):
        wait_until(lambda: jobs.filter(status=Status.SUCCEEDED).count() == 50)
        connection.close()
        wait_until(lambda: onlooker.sessions() <= BOOKS)


def test_an_idle_worker_closes_sessions_past_their_age(
    onlooker: Onlooker, request_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_CLOSE_OLD_SESSIONS_EVERY", 0.1)
    request_settings["CONN_MAX_AGE"] = 1
    with working(threads=2):
        done = [select.enqueue(aliases=["default"]) for _number in range(4)]
        wait_until(lambda: all(jobs.status(job.pk) == Status.SUCCEEDED for job in done))
        connection.close()  # the test's own
        wait_until(lambda: onlooker.sessions() <= BOOKS)
