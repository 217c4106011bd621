"""Which ends of a worker cost an attempt, who owns a lock, and whose verdict stands."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from django_jobqueue import Status, handler
from django_jobqueue.execution import JobContext
from django_jobqueue.handlers import Registry
from django_jobqueue.models import JobAttempt, ProcessingJob
from tests.app.jobs import at_once, kill_worker, noop, sleep, wait_for, wait_for_and_fail
from tests.coordinators import burst, working
from tests.projects import QUICK_RESCUE, project_settings
from tests.racing import in_thread
from tests.rows import WORKER_B, database_now, sql, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects


# --- what costs an attempt ---------------------------------------------------------------------


class TestDeploys:
    def test_restarts_cost_no_attempt_and_a_kill_does(self, worker: Any, tmp_path: Path) -> None:
        """Two deploys interrupt a job that has one attempt; then its worker is killed."""
        own = project_settings(
            tmp_path, "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 2, 'SHUTDOWN_TIMEOUT': 0.1}"
        )
        job = wait_for.using(max_attempts=1).enqueue(path=str(tmp_path / "never"))
        started = tmp_path / "never.started"

        for _deploy in range(2):
            with worker(settings=own) as process:
                wait_until(started.exists, timeout=30)
                started.unlink()
                process.signal(signal.SIGTERM)
                assert process.ended() == 0
            assert (stored(job).status, stored(job).attempts) == (Status.PENDING, 0)
        with worker(settings=own) as process:
            wait_until(started.exists, timeout=30)
            process.kill()
        wait_until(lambda: jobs.rescue_stale_locks().dead_letters)

        assert (stored(job).status, stored(job).attempts) == (Status.DEAD_LETTER, 1)
        assert stored(job).lock_token == 3, "claimed three times"
        assert job.history.get().outcome == "lost"

    def test_a_job_that_kills_its_worker_starts_max_attempts_times_and_its_neighbours_finish(
        self, worker: Any, tmp_path: Path
    ) -> None:
        own = project_settings(
            tmp_path,
            QUICK_RESCUE,
        )
        # The neighbours are killed with it each time: they have more attempts than it.
        killing = kill_worker.using(max_attempts=2).enqueue()
        neighbours = [sleep.using(max_attempts=5).enqueue(seconds=0.3) for _number in range(2)]

        def killed() -> bool:
            with worker("--threads", "3", settings=own) as process:
                wait_until(
                    lambda: process.died or not jobs.filter(finished_at=None).exists(), timeout=30
                )
                return bool(process.died)

        ends = [killed() for _start in range(3)]

        assert ends == [True, True, False]
        assert (stored(killing).status, stored(killing).attempts) == (Status.DEAD_LETTER, 2)
        assert killing.history.filter(outcome="lost").count() == 2
        assert [stored(job).status for job in neighbours] == [Status.SUCCEEDED] * 2


class TestFanOut:
    """A handler enqueues ten children, and its first attempt fails after the sixth."""

    @pytest.fixture
    def family(self, handlers: Registry) -> Any:
        @handler(name="child", queue="children")
        def child(number: int) -> None:
            pass

        @handler(name="parent", backoff=at_once, takes_context=True)
        def parent(context: JobContext, keyed: bool) -> None:
            for number in range(10):
                key = {"idempotency_key": f"{context.job_id}-{number}"} if keyed else {}
                child.using(**key).enqueue(number=number)
                if context.attempt == 1 and number == 5:
                    raise ValueError("half-way")

        return parent

    @pytest.mark.parametrize(("keyed", "children"), [(True, 10), (False, 16)])
    def test_children_with_keys_are_there_once_and_without_them_again(
        self, family: Any, keyed: bool, children: int
    ) -> None:
        job = family.enqueue(keyed=keyed)

        burst(queues=("default",))

        assert (stored(job).status, stored(job).attempts) == (Status.SUCCEEDED, 2)
        assert jobs.filter(handler="child").count() == children


# --- who takes it back, and when ---------------------------------------------------------------


class TestRedelivery:
    def test_a_busy_worker_takes_back_what_a_killed_one_had_within_lock_and_rescue_period(
        self, worker: Any, tmp_path: Path
    ) -> None:
        own = project_settings(
            tmp_path, "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 1.5, 'RESCUE_INTERVAL': 0.5}"
        )
        with ExitStack() as stack:
            held = []
            processes = []
            for name in ("killed", "busy"):
                held.append(wait_for.enqueue(path=str(tmp_path / name)))
                processes.append(stack.enter_context(worker("--threads", "1", settings=own)))
                wait_until((tmp_path / f"{name}.started").exists, timeout=30)
            lost, kept = held
            processes[0].kill()
            killed_at = database_now()

            wait_until(lambda: jobs.status(lost.pk) == Status.FAILED)
            waited = (stored(lost).available_at - killed_at).total_seconds()
            assert jobs.status(kept.pk) == Status.PROCESSING
            for name in ("killed", "busy"):
                (tmp_path / name).touch()
            wait_until(lambda: jobs.filter(status=Status.SUCCEEDED).count() == 2)

        assert waited <= 1.5 + 0.5 + 3, "the last three seconds are for a busy machine"
        assert (stored(lost).attempts, stored(kept).attempts) == (2, 1)


# --- healthy jobs that are longer than their lock ----------------------------------------------


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1_000))


def hold_a_transaction(seconds: float) -> None:
    with transaction.atomic():
        sql("SELECT pg_sleep(%s)", seconds)


class TestLongJobs:
    LOCK = 1.5
    LONG = 3.6

    @pytest.mark.parametrize(
        ("act", "count"),
        [(time.sleep, 1), (burn, 1), (hold_a_transaction, 1), (burn, 4)],
        ids=["sleeps", "burns", "holds a transaction", "all threads burn"],
    )
    def test_each_starts_once_and_its_lock_is_never_in_doubt(
        self, handlers: Registry, settings: Any, act: Callable[[float], None], count: int
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": self.LOCK, "RESCUE_INTERVAL": 0.1}
        starts: list[int] = []

        @handler(name="long", takes_context=True)
        def long(context: JobContext) -> bool:
            starts.append(context.job_id)
            act(self.LONG)
            return context.lock_lost

        due = [long.enqueue() for _number in range(count)]
        burst(threads=4)

        assert sorted(starts) == [job.pk for job in due]
        assert [stored(job).result for job in due] == [False] * count
        assert not JobAttempt.objects.exists()

    def test_a_worker_with_a_shorter_lock_leaves_anothers_job_alone(
        self, worker: Any, settings: Any, tmp_path: Path
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 1, "RESCUE_INTERVAL": 0.1}
        theirs = project_settings(tmp_path, "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 60}")
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with worker("--threads", "1", settings=theirs):
            wait_until((tmp_path / "go.started").exists, timeout=30)
            holder = stored(job).locked_by
            ours = sleep.enqueue(seconds=2.5)

            burst(threads=2)

            assert stored(ours).status == Status.SUCCEEDED, "two of our locks have gone by"
            assert (stored(job).locked_by, stored(job).attempts) == (holder, 1)
            (tmp_path / "go").touch()
            wait_until(lambda: jobs.status(job.pk) == Status.SUCCEEDED)

        assert not JobAttempt.objects.exists()


# --- zombies -----------------------------------------------------------------------------------


class TestZombies:
    def test_whatever_a_worker_that_froze_does_later_the_second_attempts_verdict_stands(
        self, worker: Any, settings: Any, tmp_path: Path
    ) -> None:
        """Frozen past its locks, with four jobs: two return late and two raise late; of each two,
        the second attempt succeeded for one and failed for the other."""
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 2}
        own = project_settings(tmp_path, "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 2}")
        zombies = [
            late.using(max_attempts=2).enqueue(path=str(tmp_path / f"{number}"))
            for number, late in enumerate(
                [wait_for, wait_for, wait_for_and_fail, wait_for_and_fail]
            )
        ]
        with worker("--threads", "4", settings=own) as process:
            for number in range(4):
                wait_until((tmp_path / f"{number}.started").exists, timeout=30)
            process.signal(signal.SIGSTOP)

            def all_taken_back() -> bool:
                jobs.rescue_stale_locks()
                return jobs.filter(status=Status.FAILED).count() == 4

            wait_until(all_taken_back)
            second = {job.pk: job for job in jobs.claim(worker=WORKER_B, limit=4)}
            for succeeds, zombie in zip([True, False, True, False], zombies, strict=True):
                if succeeds:
                    jobs.complete(second[zombie.pk], "the second attempt's")
                else:
                    jobs.fail(second[zombie.pk], "the second attempt's")
            before = list(ProcessingJob.objects.order_by("pk").values())

            for number in range(4):
                (tmp_path / f"{number}").touch()
            process.signal(signal.SIGCONT)
            for zombie in zombies:
                process.says(f"Job {zombie.pk} {zombie.handler}: this worker lost its lock")
            after = list(ProcessingJob.objects.order_by("pk").values())
            fresh = noop.enqueue()
            wait_until(lambda: jobs.status(fresh.pk) == Status.SUCCEEDED)

        assert after == before
        assert [row["status"] for row in after] == ["succeeded", "dead_letter"] * 2
        assert {row["attempts"] for row in after} == {2}
        assert process.output.count("this worker lost its lock") == 4


class TestBlockedHeartbeat:
    """The heartbeat's session gets nothing but errors, the coordinator's works."""

    @pytest.fixture
    def no_heartbeats(self) -> Iterator[None]:
        sql(
            "CREATE FUNCTION refuse_heartbeats() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF current_setting('application_name') = 'django_jobqueue heartbeat'"
            " THEN RAISE 'no heartbeats' USING ERRCODE = 'too_many_connections'; END IF;"
            " RETURN NULL; END $$"
        )
        sql(
            "CREATE TRIGGER refuse_heartbeats AFTER UPDATE ON processing_jobs"
            " FOR EACH STATEMENT EXECUTE FUNCTION refuse_heartbeats()"
        )
        yield
        sql("DROP FUNCTION IF EXISTS refuse_heartbeats CASCADE")

    @pytest.fixture
    def watch(self, handlers: Registry, settings: Any) -> Iterator[Watch]:
        settings.DJANGO_JOBQUEUE = {
            "STALE_LOCK_AFTER": 0.8,
            "RESCUE_INTERVAL": 0.1,
            "POLL_INTERVAL": 0.1,
        }
        watch = Watch()

        @handler(name="watchful", takes_context=True)
        def watchful(context: JobContext) -> str:
            if context.attempt == 1:
                wait_until(lambda: context.lock_lost)
                watch.lock_is_lost.set()
                watch.may_return.wait(timeout=30)
            return f"of attempt {context.attempt}"

        watch.job = watchful.enqueue()
        yield watch
        watch.may_return.set()

    def test_the_handler_is_told_and_its_result_is_not_recorded_once_another_has_the_job(
        self, no_heartbeats: None, watch: Watch
    ) -> None:
        def taken_back() -> bool:
            jobs.rescue_stale_locks()
            return jobs.status(watch.job.pk) == Status.FAILED

        with working(threads=1) as coordinator:
            assert watch.lock_is_lost.wait(timeout=10)
            wait_until(taken_back)
            jobs.complete(jobs.dequeue(worker=WORKER_B), "another's")
            watch.may_return.set()
            wait_until(lambda: coordinator.summary.lost)

        assert (stored(watch.job).result, stored(watch.job).attempts) == ("another's", 2)

    def test_a_worker_that_cannot_keep_its_locks_claims_nothing_until_it_can(
        self, no_heartbeats: None, watch: Watch
    ) -> None:
        @handler(name="fresh")
        def fresh() -> None:
            pass

        @handler(name="elsewhere", queue="elsewhere")
        def elsewhere() -> None:
            time.sleep(0.6)

        with working(threads=3, queues=("default",)):
            assert watch.lock_is_lost.wait(timeout=10)
            waiting = fresh.enqueue()
            # Another worker's job is the clock: it takes as long as several polls of this one.
            elsewhere.enqueue()
            in_thread(lambda: burst(queues=("elsewhere",)))
            meanwhile = [jobs.status(waiting.pk), stored(watch.job).attempts]

            sql("DROP FUNCTION refuse_heartbeats CASCADE")
            watch.may_return.set()
            wait_until(lambda: jobs.status(waiting.pk) == Status.SUCCEEDED)

        assert meanwhile == [Status.PENDING, 1], "what it claims now it cannot keep"


class Watch:
    """A job whose first attempt waits until it is told that its lock is lost, then for the test."""

    job: ProcessingJob

    def __init__(self) -> None:
        self.lock_is_lost = threading.Event()
        self.may_return = threading.Event()
