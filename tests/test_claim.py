"""Claiming: who gets which job, in what order, and never more than asked for."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from django_jobqueue import NoJobAvailable, Status
from django_jobqueue.models import ProcessingJob, Queue
from tests.app.jobs import add, mail, noop
from tests.racing import in_thread, together
from tests.rows import WORKER_A, WORKER_B, database_now, make_stale, sql

jobs = ProcessingJob.objects


def claimed_ids(limit: int = 100, **choice: Any) -> list[int]:
    return [job.pk for job in jobs.claim(worker=WORKER_A, limit=limit, **choice)]


@pytest.mark.django_db
class TestOneClaim:
    def test_it_locks_the_job_and_counts_the_attempt(self) -> None:
        noop.enqueue()
        before = database_now()

        job = jobs.dequeue(worker=WORKER_A)

        stored = ProcessingJob.objects.get(pk=job.pk)
        assert (stored.status, stored.attempts, stored.lock_token) == (Status.PROCESSING, 1, 1)
        assert stored.locked_by == WORKER_A
        assert stored.locked_at is not None
        assert stored.lock_expires_at is not None
        assert before <= stored.locked_at <= database_now()
        assert stored.lock_expires_at - stored.locked_at == timedelta(seconds=60)
        assert (job.attempts, job.lock_token, job.payload) == (1, 1, {})

    def test_the_owner_decides_how_long_its_lock_is_good(self, settings: Any) -> None:
        noop.enqueue()
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 7}
        job = jobs.dequeue(worker=WORKER_A)

        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 0.001, "HEARTBEAT_INTERVAL": 0.0001}
        assert job.lock_expires_at is not None
        assert job.locked_at is not None
        assert job.lock_expires_at - job.locked_at == timedelta(seconds=7)
        with pytest.raises(NoJobAvailable):
            jobs.dequeue(worker=WORKER_B)

    def test_nothing_due_is_said_with_where_it_looked(self) -> None:
        with pytest.raises(NoJobAvailable, match=r"the queues \['mail'\] for any handler"):
            jobs.dequeue(worker=WORKER_A, queues=["mail"])

    def test_a_job_ahead_of_its_time_is_not_taken(self) -> None:
        noop.using(delay=60).enqueue()

        with pytest.raises(NoJobAvailable):
            jobs.dequeue(worker=WORKER_A)

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_of_nothing_takes_nothing(self, limit: int) -> None:
        noop.enqueue()

        assert jobs.claim(worker=WORKER_A, limit=limit) == []

    @pytest.mark.parametrize("worker", ["", "w" * 300, "w\x00", None])
    def test_a_worker_needs_a_name_that_can_be_stored(self, worker: Any) -> None:
        noop.enqueue()

        with pytest.raises(ValueError, match="worker"):
            jobs.dequeue(worker=worker)

        assert jobs.status(ProcessingJob.objects.get().pk) == Status.PENDING


@pytest.mark.django_db
class TestAWorkerThatDied:
    def test_its_job_is_not_there_until_the_lock_is_stale_and_then_goes_to_another(self) -> None:
        enqueued = noop.enqueue()
        taken = jobs.dequeue(worker=WORKER_A)
        with pytest.raises(NoJobAvailable):
            jobs.dequeue(worker=WORKER_B)

        make_stale(taken)
        again = jobs.dequeue(worker=WORKER_B)

        assert taken.pk == again.pk == enqueued.pk
        assert (again.attempts, again.lock_token, again.locked_by) == (2, 2, WORKER_B)


@pytest.mark.django_db
class TestOrder:
    def test_larger_priorities_run_first_then_first_in_first_out(self) -> None:
        given: list[int | None] = [-100, None, 0, 1, 100, 0]
        made = [
            noop.enqueue() if priority is None else noop.using(priority=priority).enqueue()
            for priority in given
        ]

        assert claimed_ids() == [made[i].pk for i in (4, 3, 1, 2, 5, 0)]

    def test_within_a_priority_the_one_due_the_longest_runs_first(self) -> None:
        late, early = noop.enqueue(), noop.enqueue()
        ProcessingJob.objects.filter(pk=early.pk).update(available_at=Now() - timedelta(hours=1))

        assert claimed_ids() == [early.pk, late.pk]

    def test_a_recovered_urgent_job_goes_before_fresh_work(self) -> None:
        urgent = noop.using(priority=50).enqueue()
        taken = jobs.dequeue(worker=WORKER_A)
        jobs.enqueue_many({"handler": noop, "priority": -1} for _number in range(200))
        make_stale(taken)

        assert jobs.dequeue(worker=WORKER_B).pk == urgent.pk

    def test_a_released_job_keeps_its_place(self) -> None:
        made = [noop.enqueue().pk for _number in range(5)]
        first_three = jobs.claim(worker=WORKER_A, limit=3)

        jobs.release(first_three)

        assert claimed_ids() == made


@pytest.mark.django_db
class TestChoice:
    def test_only_the_named_queues(self) -> None:
        noop.enqueue()
        mailed = mail.enqueue(to="a@example.org")

        assert claimed_ids(queues=["mail", "nobody's"]) == [mailed.pk]

    def test_only_the_named_handlers(self) -> None:
        noop.enqueue()
        added = add.enqueue(a=1)

        assert claimed_ids(handlers=["tests.app.jobs.add"]) == [added.pk]
        with pytest.raises(NoJobAvailable):
            jobs.dequeue(worker=WORKER_A, handlers=["tests.app.jobs.add"])

    @pytest.mark.parametrize("empty", [[], (), set(), frozenset()])
    def test_an_empty_choice_is_a_choice_of_nothing_and_no_error(self, empty: Any) -> None:
        noop.enqueue()

        assert jobs.claim(worker=WORKER_A, queues=empty, limit=1) == []
        assert jobs.claim(worker=WORKER_A, handlers=empty, limit=1) == []
        with pytest.raises(NoJobAvailable):
            jobs.dequeue(worker=WORKER_A, queues=empty, handlers=empty)

    @pytest.mark.parametrize("limit", [None, "1", 1.5, True])
    def test_a_limit_that_is_no_whole_number_is_refused(self, limit: Any) -> None:
        with pytest.raises(ValueError, match="limit must be a whole number"):
            claimed_ids(limit=limit)

    def test_a_limit_past_all_measure_takes_what_there_is(self) -> None:
        noop.enqueue()

        assert len(claimed_ids(limit=10**30)) == 1

    @pytest.mark.parametrize("names", [[None], [7], ["a\x00"], ["\ud800"], [""]])
    def test_names_that_no_row_can_have_are_refused(self, names: Any) -> None:
        with pytest.raises(ValueError, match="queue"):
            claimed_ids(queues=names)

    @pytest.mark.parametrize("choice", ["queues", "handlers"])
    def test_a_string_is_not_taken_for_a_collection_of_letters(self, choice: str) -> None:
        names: dict[str, Any] = {choice: "mail"}
        with pytest.raises(ValueError, match="must be a collection"):
            jobs.claim(worker=WORKER_A, limit=1, **names)

    def test_a_row_written_by_hand_waits_until_some_worker_knows_its_handler(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('os.system')")

        assert claimed_ids(handlers=["tests.app.jobs.noop"]) == []
        assert jobs.status(ProcessingJob.objects.get().pk) == Status.PENDING

    def test_a_paused_queue_gives_nothing_until_it_is_resumed(self) -> None:
        mailed = mail.enqueue(to="a@example.org")
        other = noop.enqueue()
        Queue.objects.create(name="mail", paused=True)

        while_paused = claimed_ids()
        Queue.objects.update(paused=False)

        assert (while_paused, claimed_ids()) == ([other.pk], [mailed.pk])


@pytest.mark.django_db(transaction=True)
class TestNeverMoreThanTheLimit:
    """The plan may flip: then a locking sub-select in any other form is run again and again."""

    ROWS = 20_000

    @pytest.fixture
    def hostile_planner(self) -> Any:
        """20,000 rows in a table that the statistics take for empty, and nested loops only."""
        sql("ALTER TABLE processing_jobs SET (autovacuum_enabled = false)")
        sql("ANALYZE processing_jobs")
        jobs.enqueue_many({"handler": noop} for _number in range(self.ROWS))
        for method in ("hashjoin", "mergejoin", "material", "memoize"):
            sql(f"SET enable_{method} = off")
        yield
        connection.close()
        sql("ALTER TABLE processing_jobs RESET (autovacuum_enabled)")

    @pytest.mark.parametrize("limit", [1, 10])
    def test_rows_taken_are_rows_returned(self, hostile_planner: Any, limit: int) -> None:
        for round_number in range(1, 51):
            assert len(jobs.claim(worker=WORKER_A, limit=limit)) == limit
            taken = ProcessingJob.objects.filter(status=Status.PROCESSING).count()
            assert taken == round_number * limit

    @pytest.mark.parametrize("limit", [1, 10])
    def test_rows_locked_are_rows_returned(self, hostile_planner: Any, limit: int) -> None:
        with transaction.atomic():
            jobs.claim(worker=WORKER_A, limit=limit)
            unlocked = in_thread(_count_unlocked)

        assert unlocked == self.ROWS - limit


def _count_unlocked() -> int:
    """How many rows another session can lock at this moment."""
    with transaction.atomic():
        return len(sql("SELECT id FROM processing_jobs FOR UPDATE SKIP LOCKED"))


@pytest.mark.django_db(transaction=True)
class TestClaimsAtTheSameTime:
    def test_eight_sessions_share_the_jobs_and_none_gets_one_twice(self) -> None:
        jobs.enqueue_many({"handler": noop} for _number in range(2_000))

        def drain(number: int) -> list[int]:
            taken: list[int] = []
            while claimed := jobs.claim(worker=f"worker-{number}", limit=5):
                taken += [job.pk for job in claimed]
            return taken

        shares = together(8, drain)

        taken = [pk for share in shares for pk in share]
        assert len(taken) == len(set(taken)) == 2_000

    def test_two_claims_at_one_instant_never_take_the_same_job(self) -> None:
        jobs.enqueue_many({"handler": noop} for _number in range(400))
        barrier = threading.Barrier(2)

        def claim_in_step(number: int) -> list[int]:
            taken = []
            for _round in range(200):
                barrier.wait(timeout=30)
                taken += [job.pk for job in jobs.claim(worker=f"worker-{number}", limit=1)]
            return taken

        one, two = together(2, claim_in_step)

        assert not set(one) & set(two)
        assert len(one) + len(two) == 400

    def test_a_claim_does_not_wait_for_a_row_another_session_has_locked(self) -> None:
        first, second = noop.enqueue(), noop.enqueue()
        with transaction.atomic():
            sql("SELECT 1 FROM processing_jobs WHERE id = %s FOR UPDATE", first.pk)
            taken = in_thread(lambda: jobs.dequeue(worker=WORKER_B))

        assert taken.pk == second.pk
