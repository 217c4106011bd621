"""The worker: real threads on a real database, driven from the test's own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import ProgrammingError, connection, transaction

from django_jobqueue import Status, signals
from django_jobqueue.models import JobAttempt, ProcessingJob, Worker
from django_jobqueue.worker import Coordinator, WorkerOptions
from tests.app.jobs import (
    add,
    add_async,
    again,
    close_connection,
    count_jobs,
    echo,
    fail,
    fail_at_once,
    flaky,
    fork_and_exit,
    kill_own_session,
    leave_transaction_open,
    mail,
    meddle_with_job,
    noop,
    raise_exit,
    refuse,
    set_search_path,
    sleep,
    touch,
    wait_for,
)
from tests.coordinators import burst, working
from tests.racing import closing_connections, in_thread
from tests.rows import WORKER_B, make_stale, sql, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects


def status_of(job: ProcessingJob) -> Callable[[Status], Callable[[], bool]]:
    return lambda status: lambda: jobs.status(job.pk) == status


class TestBurst:
    def test_it_runs_what_is_due_and_ends(self) -> None:
        due = [add.enqueue(a=number) for number in range(20)]
        ahead = noop.using(delay=60).enqueue()

        summary = burst(threads=3)

        assert [stored(job).result for job in due] == list(range(1, 21))
        assert (summary.succeeded, summary.failed, summary.dead_letters) == (20, 0, 0)
        assert jobs.status(ahead.pk) == Status.PENDING

    def test_it_runs_what_its_jobs_enqueue_and_what_is_due_again_at_once(self) -> None:
        job = flaky.enqueue(until=3)

        summary = burst()

        assert (stored(job).result, stored(job).attempts) == (3, 3)
        assert (summary.succeeded, summary.failed) == (1, 2)

    def test_nothing_due_ends_at_once(self) -> None:
        assert burst().described().startswith("0 succeeded, 0 failed, 0 dead in ")

    def test_only_the_named_queues(self) -> None:
        mailed, other = mail.enqueue(to="a@example.org"), noop.enqueue()

        burst(queues=("mail",))

        assert (stored(mailed).status, stored(other).status) == ("succeeded", "pending")

    def test_max_jobs_ends_it_after_so_many(self) -> None:
        jobs.enqueue_many({"handler": noop} for _number in range(10))

        Coordinator(WorkerOptions(max_jobs=7, threads=4)).run()

        assert jobs.filter(status=Status.SUCCEEDED).count() == 7
        assert jobs.filter(status=Status.PENDING).count() == 3


class TestVerdicts:
    def test_each_kind_of_end(self) -> None:
        ends = {
            fail.using(max_attempts=1).enqueue(): (Status.DEAD_LETTER, "ValueError: broken"),
            fail.enqueue(message="no luck"): (Status.FAILED, "ValueError: no luck"),
            refuse.enqueue(reason="card was closed"): (Status.DEAD_LETTER, "card was closed"),
            again.enqueue(after=500): (Status.FAILED, "The handler asked for a retry."),
            raise_exit.enqueue(): (Status.FAILED, "SystemExit: 3"),
            add_async.enqueue(a=1): (Status.SUCCEEDED, ""),
        }

        burst(threads=2)

        assert {job: (stored(job).status, stored(job).last_error) for job in ends} == ends

    def test_the_wait_a_handler_asks_for_is_kept(self) -> None:
        job = again.enqueue(after=500)

        burst()

        (wait,) = sql(
            "SELECT available_at - ended_at FROM processing_jobs"
            " JOIN processing_job_attempts ON job_id = processing_jobs.id"
        )[0]
        assert wait.total_seconds() == 500
        assert stored(job).attempts == 1

    def test_a_job_that_always_fails_dies_after_its_attempts(self) -> None:
        job = fail_at_once.using(max_attempts=3).enqueue()

        summary = burst()

        assert (stored(job).status, stored(job).attempts) == (Status.DEAD_LETTER, 3)
        assert (summary.failed, summary.dead_letters) == (2, 1)
        assert job.history.count() == 3

    @pytest.mark.parametrize("value", [0, False, "", [], {}, None])
    def test_falsy_results_are_kept(self, value: Any) -> None:
        job = echo.enqueue(value=value)

        burst()

        assert stored(job).result == value

    def test_an_end_the_database_refuses_is_recorded_in_words_it_takes(self) -> None:
        sql(
            "CREATE FUNCTION refuse_poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF NEW.result = '\"poison\"' OR NEW.last_error LIKE '%%poison%%'"
            " THEN RAISE 'no poison here'; END IF; RETURN NEW; END $$"
        )
        sql(
            "CREATE TRIGGER refuse_poison BEFORE UPDATE ON processing_jobs"
            " FOR EACH ROW EXECUTE FUNCTION refuse_poison()"
        )
        try:
            result, failure = echo.enqueue(value="poison"), fail.enqueue(message="poison")
            fine = noop.enqueue()
            burst(threads=3)
        finally:
            sql("DROP FUNCTION refuse_poison CASCADE")

        assert stored(fine).status == Status.SUCCEEDED
        assert stored(result).status == Status.DEAD_LETTER
        assert stored(failure).status == Status.FAILED
        assert "could not be stored" in stored(result).last_error


class TestUnknownHandlers:
    def test_a_job_nobody_here_knows_is_left_and_shown(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('os.system'), ('os.system')")
        heard: list[dict[str, int]] = []

        def listen(*, waiting: dict[str, int], **_kwargs: Any) -> None:
            heard.append(waiting)

        signals.handlers_unknown.connect(listen)
        try:
            burst()
        finally:
            signals.handlers_unknown.disconnect(listen)

        assert heard == [{"os.system": 2}]
        assert set(jobs.values_list("status", "attempts")) == {("pending", 0)}


class TestStopping:
    def test_an_idle_worker_stops_at_once(self, settings: Any) -> None:
        settings.DJANGO_JOBQUEUE = {"POLL_INTERVAL": 60}
        with working() as coordinator:
            wait_until(Worker.objects.exists)
            asked = time.monotonic()
            coordinator.stop()
        assert time.monotonic() - asked < 20, "it does not wait for the next poll"

    def test_what_runs_may_finish(self, tmp_path: Path) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with working() as coordinator:
            wait_until((tmp_path / "go.started").exists)
            coordinator.stop()
            (tmp_path / "go").touch()
        assert stored(job).status == Status.SUCCEEDED
        assert coordinator.summary.released == 0

    def test_nothing_new_is_claimed(self, tmp_path: Path) -> None:
        wait_for.enqueue(path=str(tmp_path / "go"))
        with working(threads=2) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            coordinator.stop()
            wait_until(lambda: coordinator.shutdown.has_begun)
            late = noop.enqueue()
            (tmp_path / "go").touch()
        assert stored(late).status == Status.PENDING

    def test_what_does_not_finish_in_time_is_given_back_with_no_attempt_spent(
        self, tmp_path: Path
    ) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with working(shutdown_timeout=0.2) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            asked = time.monotonic()
        assert time.monotonic() - asked < 10
        assert (stored(job).status, stored(job).attempts) == (Status.PENDING, 0)
        assert coordinator.summary.released == 1
        (tmp_path / "go").touch()

    def test_a_second_stop_gives_it_back_at_once(self, tmp_path: Path) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with working(shutdown_timeout=60) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            asked = time.monotonic()
            coordinator.stop()
            coordinator.stop()
        assert time.monotonic() - asked < 20, "it does not wait for the shutdown timeout"
        assert stored(job).status == Status.PENDING
        assert coordinator.summary.at_once
        (tmp_path / "go").touch()

    def test_a_late_end_of_a_job_given_back_changes_nothing(self, tmp_path: Path) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with working(shutdown_timeout=0):
            wait_until((tmp_path / "go.started").exists)
        again_claimed = jobs.dequeue(worker=WORKER_B)
        (tmp_path / "go").touch()

        jobs.complete(again_claimed, "the second one's")

        assert stored(job).result == "the second one's"


class TestCrashes:
    """An error of the worker itself is raised; no job stays locked, none comes back for free."""

    @pytest.mark.parametrize("part", ["_heartbeat", "_executor"])
    def test_a_thread_that_ends_by_an_error_ends_the_worker(
        self, tmp_path: Path, part: str
    ) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        coordinator = Coordinator(WorkerOptions(threads=1))

        def crash_soon() -> None:
            wait_until((tmp_path / "go.started").exists)
            getattr(coordinator, part)._on_crash(RuntimeError("a bug"))

        crashing = threading.Thread(target=closing_connections(lambda _: crash_soon()), args=(0,))
        crashing.start()
        with pytest.raises(RuntimeError, match="A thread of this worker ended by an error"):
            coordinator.run()
        crashing.join()
        (tmp_path / "go").touch()

        assert (stored(job).status, stored(job).attempts) == (Status.FAILED, 1)
        assert "The worker crashed while this ran" in stored(job).last_error
        assert not Worker.objects.exists()

    def test_missing_tables_leave_no_thread_behind(self) -> None:
        call_command("migrate", "django_jobqueue", "zero", verbosity=0)
        try:
            with pytest.raises(ProgrammingError):
                Coordinator(WorkerOptions()).run()
        finally:
            call_command("migrate", "django_jobqueue", verbosity=0)

        names = [thread.name for thread in threading.enumerate()]
        assert [name for name in names if name.startswith("jobqueue-")] == []


class TestReceivers:
    @pytest.mark.parametrize("name", ["job_started", "job_succeeded", "worker_started"])
    @pytest.mark.parametrize("error", [ValueError, SystemExit])
    def test_one_that_raises_changes_nothing(self, name: str, error: type[BaseException]) -> None:
        def broken(**_kwargs: Any) -> None:
            raise error

        due = [noop.enqueue() for _number in range(3)]
        getattr(signals, name).connect(broken)
        try:
            summary = burst(threads=2)
        finally:
            getattr(signals, name).disconnect(broken)

        assert [stored(job).status for job in due] == [Status.SUCCEEDED] * 3
        assert (summary.succeeded, summary.lost) == (3, 0)

    @pytest.mark.parametrize("leave_open", ["atomic", "autocommit"])
    def test_one_that_leaves_a_transaction_open_loses_no_verdict(self, leave_open: str) -> None:
        def spoil(**_kwargs: Any) -> None:
            if leave_open == "atomic":
                transaction.atomic().__enter__()
            else:
                transaction.set_autocommit(False)

        due = [noop.enqueue() for _number in range(6)]
        signals.job_succeeded.connect(spoil)
        try:
            burst(threads=2)
        finally:
            signals.job_succeeded.disconnect(spoil)

        assert [stored(job).status for job in due] == [Status.SUCCEEDED] * 6
        assert [stored(job).attempts for job in due] == [1] * 6


class TestHandlersThatMeddle:
    @pytest.mark.parametrize("meddle", ["delete", "refresh", "token", "payload"])
    def test_with_their_copy_of_the_job_change_nothing_of_its_end(self, meddle: str) -> None:
        job = meddle_with_job.enqueue(how=meddle)
        after = noop.enqueue()

        burst(threads=1)

        assert stored(after).status == Status.SUCCEEDED
        if meddle != "delete":
            assert stored(job).status == Status.SUCCEEDED

    def test_a_forked_child_that_exits_is_one_failed_attempt_at_most(self) -> None:
        job, after = fork_and_exit.enqueue(), noop.enqueue()

        burst(threads=1)

        assert stored(job).status == Status.SUCCEEDED
        assert stored(after).status == Status.SUCCEEDED

    def test_what_was_set_for_a_session_does_not_reach_the_next_job(
        self, request_settings: dict[str, Any]
    ) -> None:
        request_settings.update(CONN_MAX_AGE=None)
        set_search_path.enqueue(path="nowhere")
        after = count_jobs.enqueue()

        burst(threads=1)

        assert (stored(after).status, stored(after).last_error) == (Status.SUCCEEDED, "")

    def test_an_end_that_cannot_be_recorded_for_any_words_leaves_the_others_alone(self) -> None:
        sql(
            "CREATE FUNCTION refuse_mail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF OLD.status = 'processing' AND OLD.queue = 'mail' THEN RAISE 'no'; END IF;"
            " RETURN NEW; END $$"
        )
        sql(
            "CREATE TRIGGER refuse_mail BEFORE UPDATE ON processing_jobs"
            " FOR EACH ROW EXECUTE FUNCTION refuse_mail()"
        )
        try:
            stuck = mail.enqueue(to="a@example.org")
            others = [noop.enqueue() for _number in range(4)]
            burst(threads=3)
        finally:
            sql("DROP FUNCTION refuse_mail CASCADE")

        assert stored(stuck).status == Status.PROCESSING, "its lock will run out"
        assert [stored(job).status for job in others] == [Status.SUCCEEDED] * 4

    def test_a_payload_nobody_can_read_is_a_dead_letter_and_stops_no_other(self) -> None:
        sql(
            "INSERT INTO processing_jobs (handler, payload)"
            " VALUES ('tests.app.jobs.echo', ('{\"value\": ' || repeat('9', 5000) || '}')::jsonb)"
        )
        after = noop.enqueue()

        burst(threads=2)

        assert stored(after).status == Status.SUCCEEDED
        echoes = ProcessingJob.objects.filter(handler="tests.app.jobs.echo")
        ((status, error),) = echoes.values_list("status", "last_error")
        assert (status, error) == (
            Status.DEAD_LETTER,
            "This row's payload cannot be read as JSON.",
        )


class TestLocks:
    def test_a_row_somebody_has_locked_costs_no_neighbour_its_lock(self, settings: Any) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 0.9, "RESCUE_INTERVAL": 0.1}
        running = [sleep.enqueue(seconds=2.5) for _number in range(3)]
        with working(threads=3), working(threads=3):
            for job in running:
                wait_until(status_of(job)(Status.PROCESSING))
            with transaction.atomic():
                sql("SELECT 1 FROM processing_jobs WHERE id = %s FOR UPDATE", running[0].pk)
                neighbours = running[1:]
                wait_until(
                    lambda: (
                        in_thread(lambda: [jobs.status(job.pk) for job in neighbours])
                        == [Status.SUCCEEDED] * 2
                    ),
                    timeout=20,
                )
            wait_until(status_of(running[0])(Status.SUCCEEDED), timeout=20)
        assert [stored(job).attempts for job in neighbours] == [1, 1]

    def test_a_healthy_job_longer_than_the_lock_is_started_once(
        self, settings: Any, tmp_path: Path
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 0.6, "RESCUE_INTERVAL": 0.1}
        job = sleep.enqueue(seconds=2)

        with working(threads=2), working(threads=2):
            wait_until(status_of(job)(Status.SUCCEEDED))

        assert stored(job).attempts == 1
        assert not JobAttempt.objects.exists()

    def test_a_busy_worker_rescues_too(self, settings: Any, tmp_path: Path) -> None:
        settings.DJANGO_JOBQUEUE = {"RESCUE_INTERVAL": 0.1}
        lost = add.using(priority=1).enqueue(a=1)
        make_stale(jobs.dequeue(worker=WORKER_B))
        sql("UPDATE processing_jobs SET queue = 'elsewhere'")
        wait_for.enqueue(path=str(tmp_path / "go"))

        with working(threads=1, queues=("default",)):
            wait_until((tmp_path / "go.started").exists)
            wait_until(status_of(lost)(Status.FAILED))
            (tmp_path / "go").touch()

    def test_a_lost_lock_is_told_to_the_handler_and_its_end_is_not_recorded(
        self, settings: Any, tmp_path: Path
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 60, "HEARTBEAT_INTERVAL": 0.05}
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with working(threads=1) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            make_stale(job)
            (context,) = coordinator._hand.held()
            sql("UPDATE processing_jobs SET lock_token = lock_token + 1, locked_by = 'other'")
            wait_until(lambda: context.lock_lost)
            (tmp_path / "go").touch()
        assert (stored(job).status, stored(job).locked_by) == (Status.PROCESSING, "other")
        assert coordinator.summary.lost == 1


class TestSessions:
    def test_no_transaction_is_open_while_a_handler_runs(self, tmp_path: Path) -> None:
        wait_for.enqueue(path=str(tmp_path / "go"))
        with working():
            wait_until((tmp_path / "go.started").exists)
            states = in_thread(
                lambda: sql(
                    "SELECT application_name, state FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    " AND state LIKE 'idle in transaction%%'"
                )
            )
            (tmp_path / "go").touch()
        assert states == []

    def test_a_server_that_kills_idle_transactions_kills_no_job(self) -> None:
        name = connection.settings_dict["NAME"]
        sql(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '100ms'")
        try:
            job = sleep.enqueue(seconds=0.5)
            burst()
        finally:
            sql(f"ALTER DATABASE {name} RESET idle_in_transaction_session_timeout")

        assert (stored(job).status, stored(job).attempts) == (Status.SUCCEEDED, 1)

    @pytest.mark.parametrize("max_age", [0, None])
    def test_a_killed_session_fails_the_job_that_used_it_and_no_other(
        self, request_settings: dict[str, Any], max_age: int | None
    ) -> None:
        request_settings.update(CONN_MAX_AGE=max_age, CONN_HEALTH_CHECKS=True)
        killed = kill_own_session.enqueue()
        others = [count_jobs.enqueue() for _number in range(20)]

        burst(threads=2)

        assert stored(killed).status == Status.FAILED
        assert [stored(job).status for job in others] == [Status.SUCCEEDED] * 20

    @pytest.mark.parametrize("spoil", [leave_transaction_open, close_connection])
    def test_a_handler_that_spoils_its_session_hurts_only_itself(self, spoil: Any) -> None:
        spoilt = spoil.enqueue()
        after = [add.enqueue(a=number) for number in range(3)]

        burst(threads=1)

        assert stored(spoilt).status in (Status.SUCCEEDED, Status.FAILED)
        assert [stored(job).status for job in after] == [Status.SUCCEEDED] * 3

    def test_killed_sessions_are_replaced_and_no_attempt_is_spent(self) -> None:
        with working(threads=2) as coordinator:
            wait_until(Worker.objects.exists)
            for _round in range(3):
                sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'django_jobqueue%%'"
                )
                job = noop.enqueue()
                wait_until(status_of(job)(Status.SUCCEEDED))
                assert stored(job).attempts == 1
        assert coordinator.summary.succeeded == 3

    def test_a_claim_whose_answer_was_lost_with_the_connection_costs_no_attempt(self) -> None:
        with working() as coordinator:
            wait_until(Worker.objects.exists)
            job = noop.using(delay=60).enqueue()
            sql(
                "UPDATE processing_jobs SET status = 'processing', attempts = 1, lock_token = 1,"
                " available_at = now(), locked_at = now(), locked_by = %s,"
                " lock_expires_at = now() + interval '1 hour'",
                coordinator.options.name,
            )
            sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'django_jobqueue coordinator'"
            )
            wait_until(status_of(job)(Status.SUCCEEDED))
        assert (stored(job).attempts, stored(job).lock_token) == (1, 2)

    def test_all_sessions_are_closed_at_the_end(self) -> None:
        noop.enqueue()

        burst(threads=4)

        def others() -> int:
            return int(
                sql(
                    "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
                    " AND datname = current_database() AND pid <> pg_backend_pid()"
                )[0][0]
            )

        wait_until(lambda: others() == 0)
        assert connection.settings_dict["OPTIONS"].get("application_name") is None


class TestEveryJobOnce:
    def test_two_workers_run_each_job_once(self, tmp_path: Path) -> None:
        effects = tmp_path / "effects"
        jobs.enqueue_many(
            {"handler": touch, "payload": {"path": str(effects)}} for _number in range(1_000)
        )

        with working(threads=8), working(threads=8):
            wait_until(lambda: not jobs.exclude(status=Status.SUCCEEDED).exists(), timeout=60)

        lines = effects.read_text().splitlines()
        assert len(lines) == len({line.split()[1] for line in lines}) == 1_000

    def test_the_workers_row_is_there_while_it_runs(self) -> None:
        with working(threads=3, queues=("a", "b")):
            row = wait_until(Worker.objects.first)
        assert row is not None
        assert (row.slots, row.queues, row.version) == (3, ["a", "b"], "0.1.0")
        assert not Worker.objects.exists()


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"threads": 0}, "threads must be a whole number of at least 1"),
            ({"threads": True}, "threads must be a whole number"),
            ({"threads": 99_999}, "threads must be at most 1000"),
            ({"max_jobs": 0}, "max_jobs must be a whole number of at least 1"),
            ({"max_jobs": 1.5}, "max_jobs must be a whole number"),
            ({"queues": "mail"}, "must be a tuple of names"),
            ({"name": ""}, "worker name is empty"),
            ({"shutdown_timeout": -1}, "0 or more"),
            ({"shutdown_timeout": float("nan")}, "0 or more"),
            ({"queues": ("",)}, "queue is empty"),
        ],
    )
    def test_options_without_a_meaning_are_refused(
        self, options: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(ValueError, match=says):
            WorkerOptions(**options)

    def test_no_two_workers_share_a_name(self) -> None:
        assert len({WorkerOptions().name for _number in range(100)}) == 100
