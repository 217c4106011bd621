"""What people do with jobs: requeue, cancel, prune, ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_jobqueue import NotDeadLetter, Status, signals
from django_jobqueue.models import JobAttempt, ProcessingJob
from tests.app.jobs import add, noop
from tests.racing import in_thread, together
from tests.rows import (
    WORKER_A,
    age_finished,
    count_jobs,
    database_now,
    make_stale,
    sql,
    wait_until_somebody_waits_for_a_lock,
)

jobs = ProcessingJob.objects


def dead_letter(**options: Any) -> ProcessingJob:
    noop.using(priority=100, max_attempts=1, **options).enqueue()
    job = jobs.dequeue(worker=WORKER_A)
    jobs.fail(job, "broken")
    return job


def in_status(status: Status) -> ProcessingJob:
    """A job that came to this status by the moves."""
    if status == Status.DEAD_LETTER:
        return dead_letter()
    job = noop.using(priority=100).enqueue()
    if status == Status.CANCELLED:
        jobs.cancel(job.pk)
    elif status != Status.PENDING:
        job = jobs.dequeue(worker=WORKER_A)
        if status == Status.SUCCEEDED:
            jobs.complete(job)
        elif status == Status.FAILED:
            jobs.fail(job, "broken")
    assert jobs.status(job.pk) == status
    return job


def dead_letters_at_once(count: int) -> list[int]:
    sql(
        "INSERT INTO processing_jobs (handler, status, attempts, max_attempts, finished_at)"
        " SELECT 'tests.app.jobs.noop', 'dead_letter', 1, 1, now() FROM generate_series(1, %s)",
        count,
    )
    return list(jobs.order_by("pk").values_list("pk", flat=True))


@pytest.mark.django_db
class TestRequeue:
    def test_a_dead_letter_is_pending_again_with_a_fresh_round_of_attempts(self) -> None:
        dead = dead_letter(delay=0)

        job = jobs.requeue_dead_letter(dead.pk)

        assert (job.status, job.attempts, job.finished_at) == (Status.PENDING, 0, None)
        assert job.available_at <= database_now()
        assert job.lock_token == dead.lock_token, "the token is never reset"
        assert jobs.dequeue(worker=WORKER_A).pk == dead.pk

    @pytest.mark.parametrize("status", [s for s in Status if s != Status.DEAD_LETTER])
    def test_what_is_no_dead_letter_is_refused_and_unchanged(self, status: Status) -> None:
        job = in_status(status)
        before = sql("SELECT * FROM processing_jobs")

        with pytest.raises(NotDeadLetter, match=f"Job {job.pk} is {status.label}"):
            jobs.requeue_dead_letter(job.pk)

        assert sql("SELECT * FROM processing_jobs") == before

    def test_a_job_that_is_gone_is_said_to_be_gone(self) -> None:
        with pytest.raises(ProcessingJob.DoesNotExist, match="no job 123456"):
            jobs.requeue_dead_letter(123456)

    def test_a_queryset_of_dead_letters_is_requeued_and_counted(self) -> None:
        mine = dead_letter(queue="mine")
        other = dead_letter(queue="other")
        running = in_status(Status.PROCESSING)

        assert jobs.filter(queue__in=["mine", "default"]).requeue_dead_letters() == 1

        statuses = [jobs.status(job.pk) for job in (mine, other, running)]
        assert statuses == ["pending", "dead_letter", "processing"]

    def test_thousands_go_chunk_by_chunk(self) -> None:
        dead_letters_at_once(2_500)

        assert jobs.requeue_dead_letters() == 2_500
        assert jobs.requeue_dead_letters() == 0

    def test_many_ids_answer_with_those_that_moved(self) -> None:
        dead, pending = dead_letter(), in_status(Status.PENDING)

        assert jobs.requeue_many([pending.pk, dead.pk, 123456]) == [dead.pk]
        assert jobs.requeue_many([]) == []

    def test_the_history_of_the_round_before_stays(self) -> None:
        dead = dead_letter()
        jobs.requeue_dead_letter(dead.pk)
        jobs.fail(jobs.dequeue(worker=WORKER_A), "broken again")

        history = [(attempt.number, attempt.lock_token) for attempt in dead.history.order_by("pk")]
        assert history == [(1, 1), (1, 2)]

    def test_listeners_hear_which_jobs_moved(self) -> None:
        heard: list[list[int]] = []

        def listen(*, ids: list[int], **_kwargs: Any) -> None:
            heard.append(ids)

        dead, pending = dead_letter(), in_status(Status.PENDING)
        signals.jobs_requeued.connect(listen)
        try:
            jobs.requeue_many([dead.pk, pending.pk])
        finally:
            signals.jobs_requeued.disconnect(listen)

        assert heard == [[dead.pk]]


@pytest.mark.django_db(transaction=True)
def test_two_people_requeue_the_same_dead_letters_and_each_moves_once() -> None:
    ids = dead_letters_at_once(300)

    moved = together(4, lambda _number: jobs.requeue_many(ids))

    assert sorted(pk for each in moved for pk in each) == ids


@pytest.mark.django_db
class TestCancel:
    @pytest.mark.parametrize("status", [Status.PENDING, Status.FAILED, Status.DEAD_LETTER])
    def test_a_job_that_waits_is_cancelled_for_good(self, status: Status) -> None:
        job = in_status(status)

        assert jobs.cancel(job.pk) is True

        stored = ProcessingJob.objects.get(pk=job.pk)
        assert stored.status == Status.CANCELLED
        assert stored.finished_at is not None
        assert jobs.claim(worker=WORKER_A, limit=1) == []

    @pytest.mark.parametrize("status", [Status.PROCESSING, Status.SUCCEEDED, Status.CANCELLED])
    def test_a_job_that_runs_or_has_ended_is_not(self, status: Status) -> None:
        job = in_status(status)
        before = sql("SELECT * FROM processing_jobs")

        assert jobs.cancel(job.pk) is False

        assert sql("SELECT * FROM processing_jobs") == before

    def test_a_job_that_is_gone_is_said_to_be_gone(self) -> None:
        with pytest.raises(ProcessingJob.DoesNotExist):
            jobs.cancel(123456)


@pytest.mark.django_db(transaction=True)
def test_a_job_claimed_while_the_cancel_waits_is_not_cancelled() -> None:
    """Race: the claim's transaction is open when the cancel comes."""
    job = noop.enqueue()

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            jobs.claim(worker=WORKER_A, limit=1)
            cancelled = threads.submit(in_thread, lambda: jobs.cancel(job.pk))
            wait_until_somebody_waits_for_a_lock()
        assert cancelled.result(timeout=30) is False

    assert jobs.status(job.pk) == Status.PROCESSING


@pytest.mark.django_db
@pytest.mark.parametrize("ids", ["12", b"1", [True], [1.7], ["1"], [None]])
def test_ids_that_are_no_whole_numbers_move_nothing(ids: Any) -> None:
    with pytest.raises(ValueError, match="id of a job must be a whole number"):
        jobs.cancel_many(ids)
    with pytest.raises(ValueError, match="id of a job must be a whole number"):
        jobs.requeue_many(ids)


@pytest.mark.django_db
@pytest.mark.parametrize(
    "move",
    [
        lambda few: few.prune(older_than=0),
        lambda few: few.enqueue("tests.app.jobs.noop"),
        lambda few: few.enqueue_many([{"handler": "tests.app.jobs.noop"}]),
        lambda few: few.claim(worker=WORKER_A, limit=1),
        lambda few: few.rescue_stale_locks(),
        lambda few: few.cancel(1),
        lambda few: few.cancel_many([1]),
        lambda few: few.requeue_dead_letter(1),
        lambda few: few.requeue_many([1]),
        lambda few: few.status(1),
    ],
)
def test_a_move_that_does_not_look_at_filters_refuses_them(move: Any) -> None:
    in_status(Status.SUCCEEDED)

    with pytest.raises(TypeError, match="does not look at filters"):
        move(jobs.filter(queue="other"))

    assert count_jobs() == 1


@pytest.mark.django_db
class TestPrune:
    def test_only_what_finished_long_enough_ago_goes(self) -> None:
        gone = [in_status(Status.SUCCEEDED), in_status(Status.CANCELLED)]
        kept = [in_status(s) for s in (Status.FAILED, Status.DEAD_LETTER, Status.PROCESSING)]
        sql("UPDATE processing_jobs SET created_at = created_at - interval '30 days'")
        age_finished(seconds=100)
        kept += [in_status(Status.SUCCEEDED), in_status(Status.PENDING)]

        assert jobs.prune(older_than=timedelta(seconds=50)) == len(gone)

        assert set(jobs.values_list("pk", flat=True)) == {job.pk for job in kept}

    def test_the_history_goes_with_its_job(self) -> None:
        job = in_status(Status.FAILED)
        jobs.cancel(job.pk)

        jobs.prune(older_than=0)

        assert count_jobs() == JobAttempt.objects.count() == 0

    def test_dead_letters_have_an_age_of_their_own_and_are_kept_by_default(self) -> None:
        dead_letter()
        age_finished(seconds=1_000_000_000)

        assert jobs.prune() == 0
        assert jobs.prune(dead_letters_older_than=5) == 1

    def test_the_retention_of_the_settings_is_the_default(self, settings: Any) -> None:
        in_status(Status.SUCCEEDED)
        age_finished(seconds=100)
        kept = jobs.prune()
        settings.DJANGO_JOBQUEUE = {"RETENTION": None}
        kept_for_ever = jobs.prune()
        settings.DJANGO_JOBQUEUE = {"RETENTION": 0}

        assert (kept, kept_for_ever, jobs.prune()) == (0, 0, 1)

    def test_more_than_a_chunk_goes_in_one_call(self) -> None:
        sql(
            "INSERT INTO processing_jobs (handler, status, finished_at)"
            " SELECT 'x', 'succeeded', now() - interval '1 day' FROM generate_series(1, 2500)"
        )

        assert jobs.prune(older_than=60) == 2_500

    @pytest.mark.parametrize("age", [-1, "a week", True])
    def test_an_age_that_is_no_span_of_time_deletes_nothing(self, age: Any) -> None:
        in_status(Status.SUCCEEDED)

        with pytest.raises(ValueError, match="age to prune"):
            jobs.prune(older_than=age)

        assert count_jobs() == 1


@pytest.mark.django_db(transaction=True)
def test_two_prunes_share_the_work_and_do_not_block_each_other() -> None:
    sql(
        "INSERT INTO processing_jobs (handler, status, finished_at)"
        " SELECT 'x', 'succeeded', now() - interval '1 day' FROM generate_series(1, 5000)"
    )

    gone = together(2, lambda _number: jobs.prune(older_than=60))

    assert sum(gone) == 5_000


@pytest.mark.django_db
class TestStatus:
    @pytest.mark.parametrize("status", list(Status))
    def test_it_is_read_from_the_row(self, status: Status) -> None:
        assert jobs.status(in_status(status).pk) is status

    def test_a_job_that_is_gone_is_said_to_be_gone(self) -> None:
        with pytest.raises(ProcessingJob.DoesNotExist, match="It may have been pruned"):
            jobs.status(123456)


@pytest.mark.django_db
def test_a_stale_lock_is_not_a_persons_business() -> None:
    """Requeue and cancel leave a running job alone even when its worker is gone: rescue has it."""
    add.enqueue(a=1)
    job = jobs.dequeue(worker=WORKER_A)
    make_stale(job)

    assert jobs.cancel(job.pk) is False
    assert jobs.requeue_many([job.pk]) == []
