"""SIGTERM and SIGINT at any moment of a claim, a settle, a heartbeat or their commits.

The statements are made slow, so that a signal at a random moment meets one of them. Whatever it
meets: exit code 0, no traceback, and no job that is locked by a worker that is gone.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob, Worker
from tests.app.jobs import sleep
from tests.processes import WorkerProcess, running_worker
from tests.projects import project_settings
from tests.rows import sql

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

TOGETHER = 4
LATEST = 1.5
"""Seconds after its start at which a worker gets its signal at the latest."""

BUSY = "DJANGO_JOBQUEUE = {'HEARTBEAT_INTERVAL': 0.2, 'POLL_INTERVAL': 0.1, 'RESCUE_INTERVAL': 0.2}"


@pytest.fixture
def slow_statements() -> Iterator[None]:
    """Every UPDATE takes 150 ms, and so does its COMMIT; the worker's own row too."""
    sql(
        "CREATE FUNCTION take_a_while() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_sleep(0.15); RETURN NULL; END $$"
    )
    for trigger, moment in {
        "TRIGGER slow": "UPDATE ON processing_jobs FOR EACH STATEMENT",
        "CONSTRAINT TRIGGER slow_commit": (
            "UPDATE ON processing_jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        ),
        "TRIGGER slow_row": "INSERT OR UPDATE OR DELETE ON processing_workers FOR EACH STATEMENT",
    }.items():
        sql(f"CREATE {trigger} AFTER {moment} EXECUTE FUNCTION take_a_while()")
    yield
    sql("DROP FUNCTION take_a_while CASCADE")


@pytest.mark.parametrize(
    ("number", "seed"),
    [
        *((signal.SIGTERM, seed) for seed in range(5)),
        (signal.SIGINT, 5),
    ],
)
def test_a_signal_at_any_moment_ends_the_worker_in_order(
    slow_statements: None,
    tmp_path: Path,
    database_url: str,
    number: signal.Signals,
    seed: int,
) -> None:
    jobs.enqueue_many({"handler": sleep, "payload": {"seconds": 0.1}} for _number in range(300))
    own = project_settings(tmp_path, BUSY)
    # The seed is the test's id, so a failure names it.
    moments = [random.Random(f"{seed} {start}").uniform(0, LATEST) for start in range(TOGETHER)]

    with ExitStack() as stack:
        started = [
            stack.enter_context(
                running_worker(
                    "--threads", "2", folder=tmp_path, database_url=database_url, settings=own
                )
            )
            for _start in range(TOGETHER)
        ]
        for worker, moment in zip(started, moments, strict=True):
            worker.says("Handlers: ")
            signal_later(worker, number, moment)
        ends = [(worker.ended(), worker.output) for worker in started]

    assert [code for code, _output in ends] == [0] * TOGETHER, ends
    assert not any("Traceback" in output for _code, output in ends), ends
    assert not jobs.filter(status=Status.PROCESSING).exists(), ends
    assert not Worker.objects.exists()
    assert not jobs.filter(attempts__gt=1).exists(), "what was given back cost no attempt"


def signal_later(worker: WorkerProcess, number: signal.Signals, seconds: float) -> None:
    threading.Timer(seconds, worker.signal, (number,)).start()
