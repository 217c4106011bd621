"""What operators read: the shape of each line, and what no line ever holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.dispatch import Signal

from django_jobqueue import handler, logs, signals
from django_jobqueue.execution import JobContext, execute
from django_jobqueue.failure import described
from django_jobqueue.handlers import Registry
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Failed, Outcome, Succeeded
from django_jobqueue.states import Status
from django_jobqueue.worker import Summary, WorkerOptions
from tests.app import jobs
from tests.rows import WORKER_A, WORKER_B, make_stale

SECRET = "swordfish-4711"

ALL_SIGNALS = {name: one for name, one in vars(signals).items() if isinstance(one, Signal)}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Level and text of every line so far, from DEBUG on."""
    caplog.set_level(logging.DEBUG, logger="django_jobqueue")
    return lambda: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "django_jobqueue"
    ]


def claimed(worker: str = WORKER_A) -> ProcessingJob:
    return ProcessingJob.objects.dequeue(worker=worker)


def run_one() -> Outcome:
    """What a worker does with the next job, on this thread."""
    outcome = execute(JobContext(claimed(), good_until=time.monotonic() + 60))
    ProcessingJob.objects.settle([outcome])
    return outcome


# --- the lines of a job ------------------------------------------------------------------------


@pytest.mark.django_db
class TestTheLinesOfAJob:
    def test_a_success_is_one_line_for_the_curious(self, lines: Any) -> None:
        job = jobs.add.enqueue(a=1)

        ProcessingJob.objects.settle([Succeeded(job=claimed(), result=2, seconds=1.5)])

        assert lines() == [
            ("DEBUG", f"Job {job.pk} tests.app.jobs.add succeeded in 1.500 s."),
        ]

    def test_a_failure_says_when_it_is_tried_again_and_why_it_failed(self, lines: Any) -> None:
        job = jobs.fail.enqueue()

        ProcessingJob.objects.fail(claimed(), "no paper\nin tray 2")

        assert lines() == [
            (
                "WARNING",
                (
                    f"Job {job.pk} tests.app.jobs.fail failed on attempt 1 of 5, retry in 30 s:"
                    " no paper"
                ),
            ),
        ]

    def test_the_traceback_of_a_failure_is_there_for_the_curious(self, lines: Any) -> None:
        job = jobs.fail.enqueue(message="no paper")

        run_one()

        (_failed, (level, text)) = lines()
        assert level == "DEBUG"
        assert text.startswith(
            f"Job {job.pk} tests.app.jobs.fail, attempt 1:\nTraceback (most recent call last):\n"
        )
        assert text.rstrip().endswith("ValueError: no paper")

    def test_a_dead_letter_is_an_error(self, lines: Any) -> None:
        job = jobs.fail.using(max_attempts=1).enqueue(message="no paper")

        run_one()

        assert lines()[0] == (
            "ERROR",
            (
                f"Job {job.pk} tests.app.jobs.fail is a dead letter after attempt 1 of 1:"
                " ValueError: no paper"
            ),
        )

    def test_a_refusal_is_a_dead_letter_in_the_handlers_words(self, lines: Any) -> None:
        job = jobs.refuse.enqueue(reason="card was closed")

        run_one()

        assert lines()[0] == (
            "ERROR",
            (
                f"Job {job.pk} tests.app.jobs.refuse is a dead letter after attempt 1 of 5:"
                " card was closed"
            ),
        )

    def test_a_rescue_says_who_lost_the_job(self, lines: Any) -> None:
        job = jobs.noop.enqueue()
        lost = claimed(WORKER_A)
        make_stale(lost)

        ProcessingJob.objects.rescue_stale_locks()

        since = lost.locked_at.isoformat(timespec="seconds")  # type: ignore[union-attr]
        assert lines() == [
            (
                "WARNING",
                (
                    f"Job {job.pk} tests.app.jobs.noop was lost by worker worker-a, which had it"
                    f" since {since}: taken back after attempt 1 of 5."
                ),
            ),
        ]

    def test_a_job_that_was_lost_for_the_last_time_is_also_a_dead_letter(self, lines: Any) -> None:
        job = jobs.noop.using(max_attempts=1).enqueue()
        make_stale(claimed())

        ProcessingJob.objects.rescue_stale_locks()

        assert [level for level, _text in lines()] == ["WARNING", "ERROR"]
        assert f"Job {job.pk} tests.app.jobs.noop is a dead letter after attempt 1 of 1" in str(
            lines()
        )

    def test_a_worker_that_comes_too_late_is_told(self, lines: Any) -> None:
        job = jobs.noop.enqueue()
        late = claimed(WORKER_A)
        make_stale(late)
        claimed(WORKER_B)

        ProcessingJob.objects.settle([Succeeded(job=late)])

        assert lines()[-1] == (
            "WARNING",
            (
                f"Job {job.pk} tests.app.jobs.noop: this worker lost its lock, so nothing of"
                " attempt 1 was recorded."
            ),
        )

    def test_a_job_that_is_given_back_spends_no_attempt(self, lines: Any) -> None:
        job = jobs.noop.enqueue()

        ProcessingJob.objects.release([claimed()])

        assert lines() == [
            (
                "INFO",
                f"Job {job.pk} tests.app.jobs.noop was given back unfinished, no attempt spent.",
            ),
        ]

    def test_what_people_do_is_counted(self, lines: Any) -> None:
        dead = jobs.refuse.enqueue(reason="closed")
        run_one()
        ProcessingJob.objects.requeue_dead_letter(dead.pk)
        ProcessingJob.objects.cancel(dead.pk)

        assert lines()[-2:] == [
            ("INFO", "1 dead letters requeued."),
            ("INFO", "1 jobs cancelled."),
        ]

    def test_an_error_of_many_lines_or_without_end_stays_one_short_line(self, lines: Any) -> None:
        jobs.noop.enqueue()
        ProcessingJob.objects.fail(claimed(), "first\rsecond\u2028third" + "x" * 5_000)
        jobs.noop.enqueue()
        ProcessingJob.objects.fail(claimed(), "y" * 5_000)

        (_, first), (_, second) = lines()
        assert first.endswith(": first")
        assert second.endswith("y…")
        assert len(second) < 500


def test_a_started_job_is_a_line_for_the_curious(lines: Any) -> None:
    job = ProcessingJob(pk=7, handler="shop.jobs.send", attempts=2, max_attempts=5)

    signals.job_started.send_robust(ProcessingJob, job=job)

    assert lines() == [("DEBUG", "Job 7 shop.jobs.send started, attempt 2 of 5.")]


def test_a_broken_backoff_is_an_error_of_the_project(lines: Any) -> None:
    signals.backoff_broken.send_robust(None, name="shop.jobs.send", error=ValueError("no\nspan"))

    assert lines() == [
        (
            "ERROR",
            "The backoff of shop.jobs.send failed, the default was used: ValueError: no",
        )
    ]


@pytest.mark.parametrize(
    ("delay", "text"),
    [(0.0, "0 s"), (0.5, "0.5 s"), (300.0, "300 s"), (31_536_000.0, "31536000 s")],
)
def test_a_wait_is_written_as_plain_seconds(lines: Any, delay: float, text: str) -> None:
    job = ProcessingJob(pk=7, handler="h", attempts=1, max_attempts=5, last_error="broken")
    failed = Failed(job=job, failure=described("broken"), delay=delay)

    signals.job_failed.send_robust(ProcessingJob, job=job, outcome=failed)

    assert f"retry in {text}: broken" in lines()[0][1]


# --- the lines of a worker ---------------------------------------------------------------------


def test_a_starting_worker_says_what_it_will_do(lines: Any) -> None:
    options = WorkerOptions(name="w1", queues=("mail",), threads=2)

    signals.worker_started.send_robust(None, options=options, handlers=["a.b", "c.d"])

    assert lines() == [
        (
            "INFO",
            "Worker w1 started: queues mail, 2 threads, database 'default', polling every 1 s.",
        ),
        ("INFO", "Handlers: a.b, c.d."),
    ]


def test_a_worker_without_handlers_warns(lines: Any) -> None:
    signals.worker_started.send_robust(None, options=WorkerOptions(name="w1"), handlers=[])

    assert [level for level, _text in lines()] == ["INFO", "WARNING"]
    assert lines()[1][1].startswith("No handler is registered, so no job can run.")


def test_a_stopping_worker_says_why_and_what_it_waits_for(lines: Any) -> None:
    signals.worker_stopping.send_robust(None, running=3, reason="SIGTERM")

    assert lines() == [("INFO", "Stopping (SIGTERM): 3 running jobs may finish.")]


def test_a_stopped_worker_says_what_it_did(lines: Any) -> None:
    summary = Summary(seconds=2.0)
    for status in (Status.SUCCEEDED, Status.SUCCEEDED, Status.FAILED, Status.DEAD_LETTER):
        summary.add(status)

    signals.worker_stopped.send_robust(None, summary=summary)

    assert lines() == [("INFO", "Worker stopped: 2 succeeded, 1 failed, 1 dead in 2.0 s.")]


def test_an_outage_says_when_the_next_try_is(lines: Any) -> None:
    error = RuntimeError("server closed the connection\n\tThis probably means …")

    signals.worker_outage.send_robust(None, error=error, wait=1.25)
    signals.worker_recovered.send_robust(None)

    assert lines() == [
        (
            "ERROR",
            "The database does not answer, next try in 1.2 s: server closed the connection",
        ),
        ("WARNING", "The database answers again."),
    ]


def test_jobs_that_nobody_here_can_run_are_shown_by_handler(lines: Any) -> None:
    waiting = {"gone.jobs.send": 3, "forged\nERROR line": 1}

    signals.handlers_unknown.send_robust(None, waiting=waiting)

    assert lines() == [
        (
            "WARNING",
            "3 due jobs wait for the handler 'gone.jobs.send', which this worker does not know.",
        ),
        (
            "WARNING",
            (
                "1 due jobs wait for the handler 'forged\\nERROR line', which this worker does not"
                " know."
            ),
        ),
    ]


# --- the lines of a parent ---------------------------------------------------------------------


def test_a_parent_says_which_processes_come_and_go(lines: Any) -> None:
    signals.process_started.send_robust(None, pid=4711)
    signals.process_ended.send_robust(None, pid=4711)

    assert lines() == [
        ("INFO", "Worker process 4711 started."),
        ("INFO", "Worker process 4711 ended."),
    ]


def test_a_death_is_an_error_and_says_when_another_one_starts(lines: Any) -> None:
    signals.process_died.send_robust(None, pid=4711, reason="SIGKILL", wait=2.0)
    signals.process_died.send_robust(None, pid=4712, reason="exit code 1", wait=None)

    assert lines() == [
        ("ERROR", "Worker process 4711 ended (SIGKILL), another starts in 2 s."),
        ("ERROR", "Worker process 4712 ended (exit code 1)."),
    ]


def test_a_stopping_parent_says_why_and_what_it_waits_for(lines: Any) -> None:
    signals.parent_stopping.send_robust(None, running=4, reason="SIGTERM")
    signals.parent_stopped.send_robust(None)

    assert lines() == [
        ("INFO", "Stopping (SIGTERM): 4 worker processes."),
        ("INFO", "All worker processes have ended."),
    ]


# --- what no line holds ------------------------------------------------------------------------


@pytest.mark.django_db
def test_no_line_holds_a_payload_or_a_result_at_any_level(handlers: Registry, lines: Any) -> None:
    @handler(name="returns")
    def returns(password: str) -> str:
        return password

    @handler(name="fails")
    def fails(password: str) -> None:
        raise ValueError("no access")

    @handler(name="returns no JSON")
    def returns_no_json(password: str) -> set[str]:
        return {password}

    for one in (returns, fails, returns_no_json):
        one.enqueue(password=SECRET)
        run_one()
    fails.enqueue(password=SECRET)
    make_stale(claimed())
    ProcessingJob.objects.rescue_stale_locks()
    ProcessingJob.objects.release([claimed()])

    assert len(lines()) >= 6
    assert SECRET not in str(lines())


# --- receivers ---------------------------------------------------------------------------------


@pytest.fixture
def raising_receivers() -> Iterator[list[str]]:
    """On every signal, before the log lines, a receiver that raises. Lists what it was told."""
    told: list[str] = []

    def connected(name: str, signal: Signal) -> Callable[[], bool]:
        def receiver(**_kwargs: Any) -> None:
            told.append(name)
            raise RuntimeError("a receiver of the project")

        signal.connect(receiver, weak=False)
        return lambda: signal.disconnect(receiver)

    disconnects = [connected(name, signal) for name, signal in ALL_SIGNALS.items()]
    yield told
    for disconnect in disconnects:
        disconnect()


@pytest.mark.django_db
def test_receivers_that_raise_change_nothing(raising_receivers: list[str]) -> None:
    good, bad = jobs.noop.using(priority=1).enqueue(), jobs.refuse.enqueue(reason="closed")

    run_one()
    run_one()
    ProcessingJob.objects.requeue_dead_letter(bad.pk)
    ProcessingJob.objects.release([claimed()])
    make_stale(claimed())
    ProcessingJob.objects.rescue_stale_locks()
    ProcessingJob.objects.cancel(bad.pk)

    assert ProcessingJob.objects.status(good.pk) == Status.SUCCEEDED
    assert ProcessingJob.objects.status(bad.pk) == Status.CANCELLED
    assert raising_receivers == [
        "job_enqueued",
        "job_enqueued",
        "job_succeeded",
        "job_dead_lettered",
        "jobs_requeued",
        "job_released",
        "job_lost",
        "jobs_cancelled",
    ]


def test_every_signal_but_that_of_enqueue_has_a_line() -> None:
    quiet = {"job_enqueued"}  # the caller's own act, and the hottest of all

    with_line = {name for name, signal in ALL_SIGNALS.items() if signal.receivers}

    assert with_line == set(ALL_SIGNALS) - quiet


def test_connecting_twice_does_not_double_the_lines(lines: Any) -> None:
    logs.connect()

    signals.worker_recovered.send_robust(None)

    assert len(lines()) == 1


def test_a_line_that_nobody_reads_costs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    class Untold:
        def __str__(self) -> str:
            raise AssertionError("was formatted")

    caplog.set_level(logging.ERROR, logger="django_jobqueue")
    stopped = SimpleNamespace(described=lambda: Untold())

    signals.worker_stopped.send_robust(None, summary=stopped)

    assert caplog.records == []
