"""Rescue: what lost workers held runs again, or is shown to a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import ProgrammingError, transaction

from django_jobqueue import Status, signals
from django_jobqueue.models import JobAttempt, ProcessingJob
from tests.app.jobs import noop
from tests.racing import in_thread, together
from tests.rows import WORKER_A, WORKER_B, database_now, make_stale, sql

jobs = ProcessingJob.objects


def claimed(count: int, **options: Any) -> list[ProcessingJob]:
    jobs.enqueue_many({"handler": noop, **options} for _number in range(count))
    return jobs.claim(worker=WORKER_A, limit=count)


@pytest.mark.django_db
class TestRescue:
    def test_a_lost_job_is_failed_and_due_at_once(self) -> None:
        (job,) = claimed(1)
        make_stale(job)

        rescued = jobs.rescue_stale_locks()

        stored = ProcessingJob.objects.get(pk=job.pk)
        assert (rescued.failed, rescued.dead_letters) == (1, 0)
        assert (stored.status, stored.attempts) == (Status.FAILED, 1)
        assert stored.available_at <= database_now()

    def test_the_lost_attempt_leaves_a_history_that_names_the_worker(self) -> None:
        (job,) = claimed(1)
        make_stale(job)

        jobs.rescue_stale_locks()

        (attempt,) = job.history.all()
        assert (attempt.outcome, attempt.number, attempt.worker) == ("lost", 1, WORKER_A)
        assert attempt.started_at == job.locked_at
        assert f"Worker lost: {WORKER_A} took the job at" in attempt.error
        assert ProcessingJob.objects.get(pk=job.pk).last_error == attempt.error

    def test_a_job_that_kills_its_worker_is_started_max_attempts_times_and_then_dead(self) -> None:
        starts = 0
        noop.using(max_attempts=3).enqueue()
        while claimed_again := jobs.claim(worker=WORKER_A, limit=1):
            starts += 1
            make_stale(*claimed_again)

        stored = ProcessingJob.objects.get()
        assert (starts, stored.status, stored.attempts) == (3, Status.DEAD_LETTER, 3)
        assert JobAttempt.objects.filter(outcome="lost").count() == 3

    def test_a_healthy_lock_is_left_alone(self) -> None:
        claimed(1)

        rescued = jobs.rescue_stale_locks()

        assert (rescued.failed, rescued.dead_letters) == (0, 0)

    def test_more_than_one_chunk_is_taken_back_in_one_call(self) -> None:
        make_stale(*claimed(250))

        assert jobs.rescue_stale_locks().failed == 250

    def test_an_attempt_recorded_before_does_not_stop_the_others(self) -> None:
        """A history row with this token can only come from somebody's SQL; rescue goes on."""
        odd, plain = claimed(2)
        JobAttempt.objects.create(
            job=odd, number=1, lock_token=1, outcome="lost", worker="x", started_at=database_now()
        )
        make_stale(odd, plain)

        assert jobs.rescue_stale_locks().failed == 2

    def test_listeners_hear_of_each_lost_job_and_of_each_death(self) -> None:
        heard: list[tuple[str, int, int]] = []

        def lost(*, job: ProcessingJob, worker: str, **_kwargs: Any) -> None:
            heard.append((f"lost by {worker}", job.pk, job.attempts))

        def dead(*, job: ProcessingJob, **_kwargs: Any) -> None:
            heard.append(("dead", job.pk, job.max_attempts))

        (one,) = claimed(1)
        (two,) = claimed(1, max_attempts=1)
        make_stale(one, two)
        signals.job_lost.connect(lost)
        signals.job_dead_lettered.connect(dead)
        try:
            jobs.rescue_stale_locks()
        finally:
            signals.job_lost.disconnect(lost)
            signals.job_dead_lettered.disconnect(dead)

        expected = [
            ("dead", two.pk, 1),
            (f"lost by {WORKER_A}", one.pk, 1),
            (f"lost by {WORKER_A}", two.pk, 1),
        ]
        assert sorted(heard) == expected

    @pytest.mark.django_db(transaction=True)
    def test_when_nothing_is_stale_it_is_one_probe_of_an_index(
        self, django_assert_num_queries: Any
    ) -> None:
        with django_assert_num_queries(1):
            jobs.rescue_stale_locks()

    @pytest.mark.django_db(transaction=True)
    def test_it_reads_no_payload_result_or_traceback(self, django_assert_num_queries: Any) -> None:
        make_stale(*claimed(1))

        with django_assert_num_queries(1) as queries:
            jobs.rescue_stale_locks()

        statement = queries.captured_queries[0]["sql"]
        assert "payload" not in statement
        assert "result" not in statement
        assert "traceback" not in statement


@pytest.mark.django_db(transaction=True)
class TestRescuesAtTheSameTime:
    def test_eight_rescues_take_back_each_job_once(self) -> None:
        make_stale(*claimed(500))

        rescued = together(8, lambda _number: jobs.rescue_stale_locks())

        assert sum(each.failed for each in rescued) == 500
        assert JobAttempt.objects.count() == 500

    def test_a_row_somebody_holds_is_skipped_and_the_others_are_taken_back(self) -> None:
        held, free = claimed(2)
        make_stale(held, free)

        with transaction.atomic():
            sql("SELECT 1 FROM processing_jobs WHERE id = %s FOR UPDATE", held.pk)
            rescued = in_thread(jobs.rescue_stale_locks)

        assert rescued.failed == 1
        assert jobs.status(held.pk) == Status.PROCESSING

    def test_a_lock_extended_while_the_rescue_waits_for_nothing_stays(self) -> None:
        """Race: the heartbeat extends a stale lock in an open transaction; the rescue comes by."""
        (job,) = claimed(1)
        make_stale(job)

        with transaction.atomic():
            jobs.extend_locks([job])
            during = in_thread(jobs.rescue_stale_locks)
        after = jobs.rescue_stale_locks()

        assert during.failed == after.failed == 0
        assert jobs.status(job.pk) == Status.PROCESSING
        jobs.complete(job)


@pytest.mark.django_db
def test_another_worker_continues_with_the_next_attempt() -> None:
    (job,) = claimed(1)
    make_stale(job)

    again = jobs.dequeue(worker=WORKER_B)

    assert (again.pk, again.attempts, again.lock_token) == (job.pk, 2, 2)


REFUSES_ONE = """
CREATE FUNCTION refuse_it() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'Job % is under audit', OLD.id;
END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON processing_jobs
    FOR EACH ROW WHEN (OLD.queue = 'refused') EXECUTE FUNCTION refuse_it();
"""


@pytest.fixture
def trigger_that_refuses_the_queue_refused(db: None) -> None:
    """As an audit of the project may do."""
    sql(REFUSES_ONE.replace("%", "%%"))


@pytest.mark.usefixtures("trigger_that_refuses_the_queue_refused")
class TestARowThatRefuses:
    """One row that a trigger or constraint of the project holds back stops no other."""

    @pytest.fixture
    def refused(self) -> ProcessingJob:
        """Claimed, in the middle of twenty others, and stale like them."""
        jobs.enqueue_many({"handler": noop} for _number in range(10))
        job = noop.enqueue()
        jobs.enqueue_many({"handler": noop} for _number in range(10))
        claimed = jobs.claim(worker=WORKER_A, limit=30)
        make_stale(*claimed)
        sql("UPDATE processing_jobs SET queue = 'refused' WHERE id = %s", job.pk)
        return job

    @pytest.fixture
    def told(self) -> Iterator[list[tuple[int, str]]]:
        told: list[tuple[int, str]] = []

        def listen(*, job_id: int, error: BaseException, **_kwargs: Any) -> None:
            told.append((job_id, str(error).splitlines()[0]))

        signals.row_refused.connect(listen, weak=False)
        yield told
        signals.row_refused.disconnect(listen)

    def test_keeps_no_other_from_its_rescue(
        self, refused: ProcessingJob, told: list[tuple[int, str]]
    ) -> None:
        rescued = jobs.rescue_stale_locks()

        assert rescued.failed == 20
        assert jobs.status(refused.pk) == Status.PROCESSING
        assert told == [(refused.pk, f"Job {refused.pk} is under audit")]

    def test_keeps_no_other_from_being_claimed(self, told: list[tuple[int, str]]) -> None:
        refused = noop.using(queue="refused", priority=1).enqueue()
        others = jobs.enqueue_many({"handler": noop} for _number in range(5))

        taken = jobs.claim(worker=WORKER_A, limit=3)

        assert [job.pk for job in taken] == [job.pk for job in others[:3]]
        assert (jobs.status(refused.pk), told[0][0]) == (Status.PENDING, refused.pk)

    def test_keeps_no_other_from_its_heartbeat_or_its_release(
        self, refused: ProcessingJob, told: list[tuple[int, str]]
    ) -> None:
        held = list(ProcessingJob.objects.filter(status=Status.PROCESSING))

        extended = jobs.extend_locks(held)
        released = jobs.release(held)

        assert len(extended) == len(released) == 20
        assert refused.pk not in {*extended, *released}
        assert [pk for pk, _error in told] == [refused.pk, refused.pk]

    def test_an_error_that_is_not_about_a_row_is_raised(self) -> None:
        sql("ALTER TABLE processing_jobs RENAME locked_by TO locked_by_whom")

        with pytest.raises(ProgrammingError, match="locked_by"):
            jobs.claim(worker=WORKER_A, limit=1)
