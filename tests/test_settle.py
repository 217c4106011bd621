"""How attempts end: success, retry, dead letter, and the fence that keeps a late worker out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_jobqueue import DeadLetter, InvalidPayload, LockLost, Retry, Status, signals
from django_jobqueue.failure import described
from django_jobqueue.models import JobAttempt, ProcessingJob
from django_jobqueue.outcomes import Failed, Outcome, Refused, Succeeded
from tests.app.jobs import add, fail_at_once, noop
from tests.racing import in_thread
from tests.rows import (
    WORKER_A,
    WORKER_B,
    database_now,
    everything_of,
    make_due,
    make_stale,
    sql,
    wait_until_somebody_waits_for_a_lock,
)

jobs = ProcessingJob.objects


def claimed(**options: Any) -> ProcessingJob:
    noop.using(**options).enqueue()
    return jobs.dequeue(worker=WORKER_A)


@pytest.mark.django_db
class TestSuccess:
    @pytest.mark.parametrize("result", [None, 0, False, "", [], {}, {"pages": [1, 2.5, "ü"]}])
    def test_the_result_is_kept_as_it_is(self, result: Any) -> None:
        job = claimed()

        jobs.complete(job, result)

        stored = ProcessingJob.objects.get(pk=job.pk)
        assert (stored.status, stored.result) == (Status.SUCCEEDED, result)
        assert type(stored.result) is type(result)
        assert stored.finished_at is not None
        assert (stored.locked_at, stored.locked_by, stored.lock_expires_at) == (None, None, None)
        assert not JobAttempt.objects.exists(), "a success needs no history"

    def test_the_job_in_hand_knows_its_new_status(self) -> None:
        job = claimed()

        jobs.complete(job, 42)

        assert (job.status, job.result, job.locked_by) == (Status.SUCCEEDED, 42, None)

    def test_a_result_past_the_limit_is_refused_and_changes_nothing(self, settings: Any) -> None:
        settings.DJANGO_JOBQUEUE = {"MAX_RESULT_BYTES": 100}
        job = claimed()
        before = everything_of(job)

        with pytest.raises(InvalidPayload, match=r"The limit \(MAX_RESULT_BYTES\) is 100"):
            jobs.complete(job, "x" * 100)

        assert everything_of(job) == before

    def test_a_result_that_is_no_json_is_refused_and_changes_nothing(self) -> None:
        job = claimed()
        before = everything_of(job)

        with pytest.raises(InvalidPayload, match="result is of type set"):
            jobs.complete(job, {1, 2})

        assert everything_of(job) == before


@pytest.mark.django_db
class TestFailure:
    def test_backoff_is_thirty_seconds_for_each_attempt_up_to_ten(self) -> None:
        job = claimed(max_attempts=13)
        waits = []
        for _attempt in range(12):
            jobs.fail(job, "broken")
            (wait,) = sql(
                "SELECT available_at - ended_at FROM processing_jobs JOIN processing_job_attempts"
                " ON job_id = processing_jobs.id ORDER BY processing_job_attempts.id DESC LIMIT 1"
            )[0]
            waits.append(wait)
            make_due(job)
            job = jobs.dequeue(worker=WORKER_A)

        seconds = [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]
        assert waits == [timedelta(seconds=wait) for wait in seconds]

    def test_the_wait_counts_from_the_databases_time_of_the_failure(self) -> None:
        job = claimed()
        with transaction.atomic():
            sql("SELECT pg_sleep(0.01)")  # the transaction began before the failure
            before = database_now()
            jobs.fail(job, "broken")
            after = database_now()

        assert before <= job.available_at - timedelta(seconds=30) <= after

    def test_a_handlers_own_backoff_is_used(self) -> None:
        fail_at_once.enqueue()
        job = jobs.dequeue(worker=WORKER_A)

        jobs.fail(job, "broken")

        assert jobs.dequeue(worker=WORKER_A).pk == job.pk

    def test_after_its_last_attempt_a_job_is_a_dead_letter(self) -> None:
        job = claimed(max_attempts=2)
        jobs.fail(job, "broken")
        assert jobs.status(job.pk) == Status.FAILED
        make_due(job)
        job = jobs.dequeue(worker=WORKER_A)

        jobs.fail(job, "broken again")

        stored = ProcessingJob.objects.get(pk=job.pk)
        assert (stored.status, stored.attempts) == (Status.DEAD_LETTER, 2)
        assert stored.finished_at is not None
        assert stored.last_error == "broken again"

    def test_every_failed_attempt_leaves_its_history(self) -> None:
        job = claimed()
        locked_at = job.locked_at
        try:
            raise ValueError("broken")
        except ValueError as error:
            jobs.fail(job, error)

        (attempt,) = job.history.all()
        assert (attempt.number, attempt.lock_token, attempt.outcome) == (1, 1, "failed")
        assert (attempt.worker, attempt.started_at) == (WORKER_A, locked_at)
        assert attempt.error == "ValueError: broken"
        assert "test_every_failed_attempt_leaves_its_history" in attempt.traceback
        assert attempt.error_fingerprint == job.error_fingerprint != ""

    @pytest.mark.parametrize(
        "error", ["\x00", "\ud800", "x" * 1_000_000, ValueError("\x00\ud83d"), "", Exception()]
    )
    def test_no_error_text_keeps_a_failure_from_being_recorded(self, error: Any) -> None:
        job = claimed()

        jobs.fail(job, error)

        assert jobs.status(job.pk) == Status.FAILED

    def test_a_later_success_keeps_the_text_of_the_last_failure(self) -> None:
        job = claimed()
        jobs.fail(job, "broken")
        make_due(job)
        job = jobs.dequeue(worker=WORKER_A)

        jobs.complete(job)

        assert ProcessingJob.objects.get(pk=job.pk).last_error == "broken"


LATE_MOVES: dict[str, Callable[[ProcessingJob], Any]] = {
    "complete": lambda job: jobs.complete(job, "late"),
    "fail": lambda job: jobs.fail(job, "late"),
}


def taken_by_another(job: ProcessingJob) -> None:
    make_stale(job)
    assert jobs.dequeue(worker=WORKER_B).pk == job.pk


def taken_by_the_same_worker_again(job: ProcessingJob) -> None:
    make_stale(job)
    assert jobs.dequeue(worker=WORKER_A).pk == job.pk


def requeued_and_taken_again(job: ProcessingJob) -> None:
    """With equal attempts and an equal worker: only the token tells the claims apart."""
    jobs.filter(pk=job.pk).update(max_attempts=1)
    make_stale(job)
    jobs.rescue_stale_locks()
    jobs.requeue_dead_letter(job.pk)
    again = jobs.dequeue(worker=WORKER_A)
    assert (again.attempts, again.locked_by) == (job.attempts, job.locked_by)


def rescued_and_waiting(job: ProcessingJob) -> None:
    make_stale(job)
    jobs.rescue_stale_locks()


def released(job: ProcessingJob) -> None:
    jobs.release([job])


def ended_by_another(job: ProcessingJob) -> None:
    make_stale(job)
    jobs.complete(jobs.dequeue(worker=WORKER_B), "theirs")


def ended_already(job: ProcessingJob) -> None:
    jobs.complete(ProcessingJob.objects.get(pk=job.pk), "first")


def cancelled(job: ProcessingJob) -> None:
    rescued_and_waiting(job)
    jobs.cancel(job.pk)


def pruned(job: ProcessingJob) -> None:
    cancelled(job)
    jobs.prune(older_than=0)


LOSSES = [
    taken_by_another,
    taken_by_the_same_worker_again,
    requeued_and_taken_again,
    rescued_and_waiting,
    released,
    ended_by_another,
    ended_already,
    cancelled,
    pruned,
]


@pytest.mark.django_db
@pytest.mark.parametrize("lose", LOSSES)
class TestAWorkerThatLostItsLock:
    @pytest.mark.parametrize("late", LATE_MOVES)
    def test_cannot_end_the_job(self, lose: Callable[[ProcessingJob], None], late: str) -> None:
        job = claimed()
        lose(job)
        before = sql("SELECT * FROM processing_jobs")
        history = JobAttempt.objects.count()

        with pytest.raises(LockLost, match=f"Job {job.pk} "):
            LATE_MOVES[late](job)

        assert sql("SELECT * FROM processing_jobs") == before
        assert JobAttempt.objects.count() == history

    def test_cannot_extend_or_release_it(self, lose: Callable[[ProcessingJob], None]) -> None:
        job = claimed()
        lose(job)
        before = sql("SELECT * FROM processing_jobs")

        assert jobs.extend_locks([job]) == []
        assert jobs.release([job]) == []
        assert jobs.settle([Succeeded(job=job)]) == []

        assert sql("SELECT * FROM processing_jobs") == before


@pytest.mark.django_db
class TestTheClaimOfAnObject:
    def test_reading_the_row_again_does_not_make_an_old_claim_a_new_one(self) -> None:
        job = claimed()
        taken_by_another(job)
        job.refresh_from_db()

        with pytest.raises(LockLost):
            jobs.complete(job, "late")

    def test_a_job_of_another_database_is_refused(self) -> None:
        job = claimed()
        job._state.db = "other"

        for move in (jobs.complete, lambda job: jobs.fail(job, "x")):
            with pytest.raises(ValueError, match="is from the database 'other'"):
                move(job)
        for many in (jobs.extend_locks, jobs.release):
            with pytest.raises(ValueError, match="is from the database 'other'"):
                many([job])

    @pytest.mark.parametrize("error", [None, 5, b"x", ValueError])
    def test_an_error_that_is_none_is_refused_and_changes_nothing(self, error: Any) -> None:
        job = claimed()
        before = everything_of(job)

        with pytest.raises(TypeError, match="must be an exception or a text"):
            jobs.fail(job, error)

        assert everything_of(job) == before

    @pytest.mark.parametrize("delay", [float("nan"), -5, "soon", None])
    def test_a_delay_that_is_no_span_of_time_is_refused(self, delay: Any) -> None:
        job = claimed()

        with pytest.raises(ValueError, match="delay"):
            jobs.settle([Failed(job=job, failure=described("x"), delay=delay)])


@pytest.mark.django_db
class TestWhatAHandlerSays:
    def test_a_dead_letter_is_one_whatever_attempts_are_left(self) -> None:
        job = claimed()

        jobs.fail(job, DeadLetter("card was closed"))

        assert jobs.status(job.pk) == Status.DEAD_LETTER
        assert job.last_error == "card was closed"

    def test_a_retry_waits_as_long_as_it_says(self) -> None:
        job = claimed()

        jobs.fail(job, Retry(after=7))

        (attempt,) = job.history.all()
        assert job.available_at - attempt.ended_at == timedelta(seconds=7)


@pytest.mark.django_db
class TestALockThatRanOutButWasNotTaken:
    def test_can_still_be_ended_since_nobody_else_has_the_job(self) -> None:
        job = claimed()
        make_stale(job)

        jobs.complete(job, "just in time")

        assert jobs.status(job.pk) == Status.SUCCEEDED


@pytest.mark.django_db
class TestSettle:
    def test_many_ends_of_every_kind_in_one_statement(self, django_assert_num_queries: Any) -> None:
        for number in range(4):
            add.using(max_attempts=1 if number == 3 else 5).enqueue(a=number)
        one, two, three, four = jobs.claim(worker=WORKER_A, limit=4)
        failure = described("broken")
        outcomes: list[Outcome] = [
            Succeeded(job=one, result={"sum": 1}),
            Failed(job=two, failure=failure, delay=7.5),
            Refused(job=three, failure=failure),
            Failed(job=four, failure=failure, delay=7.5),
        ]

        with django_assert_num_queries(1):
            settled = jobs.settle(outcomes)

        assert sorted(settled) == [one.pk, two.pk, three.pk, four.pk]
        statuses = [jobs.status(job.pk) for job in (one, two, three, four)]
        assert statuses == ["succeeded", "failed", "dead_letter", "dead_letter"]
        assert JobAttempt.objects.count() == 3

    def test_a_lost_lock_is_left_out_and_the_others_are_recorded(self) -> None:
        kept, lost = claimed(), claimed()
        taken_by_another(lost)

        assert jobs.settle([Succeeded(job=lost), Succeeded(job=kept)]) == [kept.pk]

    def test_of_two_claims_of_one_job_only_the_newer_ends_it(self) -> None:
        older = claimed()
        make_stale(older)
        newer = jobs.dequeue(worker=WORKER_A)

        settled = jobs.settle(
            [Succeeded(job=newer, result="newer"), Succeeded(job=older, result="older")]
        )

        assert settled == [newer.pk]
        assert ProcessingJob.objects.get(pk=newer.pk).result == "newer"
        assert older.status == Status.PROCESSING, "nothing was recorded for it"

    def test_an_end_whose_answer_was_lost_is_told_as_recorded_the_second_time(self) -> None:
        job = claimed()
        jobs.settle([Succeeded(job=ProcessingJob.objects.get(pk=job.pk), result=1)])

        assert jobs.settle([Succeeded(job=job, result=1)], wait=False) == [job.pk]
        assert (job.status, job.locked_by) == (Status.SUCCEEDED, None)

    def test_nothing_to_settle_asks_nothing(self, django_assert_num_queries: Any) -> None:
        with django_assert_num_queries(0):
            assert jobs.settle([]) == []

    def test_each_end_sends_its_signal_once(self) -> None:
        heard: list[tuple[str, int]] = []

        def listen(name: str) -> Callable[..., None]:
            return lambda *, job, **_kwargs: heard.append((name, job.pk))

        names = ("job_succeeded", "job_failed", "job_dead_lettered", "job_lock_lost")
        listeners = {name: listen(name) for name in names}
        for name, listener in listeners.items():
            getattr(signals, name).connect(listener)
        try:
            one, two, three, four = (claimed() for _number in range(4))
            taken_by_another(four)
            jobs.settle(
                [
                    Succeeded(job=one),
                    Failed(job=two, failure=described("x"), delay=0),
                    Refused(job=three, failure=described("x")),
                    Succeeded(job=four),
                ]
            )
        finally:
            for name, listener in listeners.items():
                getattr(signals, name).disconnect(listener)

        expected = list(zip(names, (one.pk, two.pk, three.pk, four.pk), strict=True))
        assert heard == expected


@pytest.mark.django_db
class TestExtendAndRelease:
    def test_an_extended_lock_is_good_for_its_full_length_again(self) -> None:
        job = claimed()
        make_stale(job)

        assert jobs.extend_locks([job]) == [job.pk]

        (remaining,) = sql("SELECT lock_expires_at - clock_timestamp() FROM processing_jobs")[0]
        assert remaining == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=1))

    @pytest.mark.django_db(transaction=True)
    def test_many_locks_are_extended_in_one_statement(self, django_assert_num_queries: Any) -> None:
        jobs.enqueue_many({"handler": noop} for _number in range(50))
        held = jobs.claim(worker=WORKER_A, limit=50)
        taken_by_another(held[7])

        with django_assert_num_queries(1):
            extended = jobs.extend_locks(held)

        assert set(extended) == {job.pk for job in held} - {held[7].pk}

    def test_a_released_job_has_spent_no_attempt(self) -> None:
        job = claimed(max_attempts=1)

        assert jobs.release([job]) == [job.pk]

        stored = ProcessingJob.objects.get(pk=job.pk)
        assert (stored.status, stored.attempts, stored.lock_token) == (Status.PENDING, 0, 1)
        assert jobs.dequeue(worker=WORKER_B).attempts == 1

    def test_nothing_held_asks_nothing(self, django_assert_num_queries: Any) -> None:
        with django_assert_num_queries(0):
            assert jobs.extend_locks([]) == []
            assert jobs.release([]) == []


@pytest.mark.django_db(transaction=True)
def test_a_row_that_refers_to_the_job_does_not_hold_up_its_heartbeat() -> None:
    """Race: some transaction has inserted a row with a foreign key to the job and is open."""
    job = claimed()

    with transaction.atomic():
        JobAttempt.objects.create(
            job=job, number=1, lock_token=0, outcome="lost", worker="x", started_at=job.created_at
        )
        sql("SET CONSTRAINTS ALL IMMEDIATE")
        extended = in_thread(lambda: jobs.extend_locks([job]))

    assert extended == [job.pk]


@pytest.mark.django_db(transaction=True)
class TestFinishAgainstRescue:
    """Race: two transactions end the same attempt, both opened before either commits."""

    def test_the_rescue_skips_a_row_that_is_being_finished(self) -> None:
        job = claimed(max_attempts=1)
        make_stale(job)

        with transaction.atomic():
            jobs.complete(job)
            rescued = in_thread(jobs.rescue_stale_locks)

        assert (rescued.failed, rescued.dead_letters) == (0, 0)
        assert jobs.status(job.pk) == Status.SUCCEEDED
        assert not JobAttempt.objects.exists()

    def test_the_finish_waits_for_the_rescue_and_then_changes_nothing(self) -> None:
        job = claimed(max_attempts=1)
        make_stale(job)

        def finish() -> str:
            try:
                jobs.complete(job)
            except LockLost:
                return "lost"
            return "won"

        with ThreadPoolExecutor(1) as threads:
            with transaction.atomic():
                jobs.rescue_stale_locks()
                late = threads.submit(in_thread, finish)
                wait_until_somebody_waits_for_a_lock()
            assert late.result(timeout=30) == "lost"

        assert jobs.status(job.pk) == Status.DEAD_LETTER
        assert JobAttempt.objects.count() == 1
