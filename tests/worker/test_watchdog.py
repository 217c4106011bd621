"""A database that does not answer: no thread waits for ever, and no deadline is missed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob
from django_jobqueue.states import FINISHED
from django_jobqueue.worker import Coordinator, WorkerOptions
from tests.app.jobs import noop, wait_for
from tests.coordinators import working, working_as
from tests.half_open import Proxy, way_to
from tests.rows import sql, wait_until_somebody_waits_for_a_lock
from tests.run_database import connection_params
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects


@pytest.fixture
def other_session(db: None) -> Iterator[psycopg.Connection[Any]]:
    """Somebody else's connection to the test's database."""
    params = {**connection_params(), "dbname": connection.settings_dict["NAME"]}
    with psycopg.connect(**params) as session:
        yield session
        session.rollback()


@pytest.fixture
def proxy(request_settings: dict[str, Any]) -> Iterator[Proxy]:
    """Between the worker and the database; the test's own connection goes straight."""
    connection.ensure_connection()
    with way_to(request_settings) as proxy:
        yield proxy


def sessions(role: str) -> list[int]:
    rows = sql(
        "SELECT pid FROM pg_stat_activity"
        " WHERE application_name = %s AND datname = current_database()",
        f"django_jobqueue {role}",
    )
    return [pid for (pid,) in rows]


class TestALockedTable:
    """As a migration may hold it, for longer than anybody wants to wait."""

    def test_the_statement_is_given_up_and_the_worker_goes_on_later(
        self, settings: Any, other_session: psycopg.Connection[Any], caplog: Any
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 1, "POLL_INTERVAL": 0.1}
        with working(threads=1):
            wait_until(lambda: sessions("coordinator"))
            other_session.execute("LOCK TABLE processing_jobs IN ACCESS EXCLUSIVE MODE")
            wait_until(lambda: "has not answered the coordinator" in caplog.text)
            other_session.rollback()
            job = noop.enqueue()
            wait_until(lambda: jobs.status(job.pk) == Status.SUCCEEDED)

    def test_keeps_no_idle_worker_from_its_end(
        self, other_session: psycopg.Connection[Any]
    ) -> None:
        with working(threads=1) as coordinator:
            wait_until(lambda: sessions("coordinator"))
            other_session.execute("LOCK TABLE processing_jobs IN ACCESS EXCLUSIVE MODE")
            wait_until_somebody_waits_for_a_lock(other_session.info.backend_pid)
            coordinator.stop()
            wait_until(lambda: coordinator.summary.seconds, timeout=5)

    def test_keeps_no_busy_worker_past_its_timeout(
        self, other_session: psycopg.Connection[Any], tmp_path: Path
    ) -> None:
        wait_for.enqueue(path=str(tmp_path / "go"))
        with working(threads=2, shutdown_timeout=1) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            other_session.execute("LOCK TABLE processing_jobs IN ACCESS EXCLUSIVE MODE")
            wait_until_somebody_waits_for_a_lock(other_session.info.backend_pid)
            asked = time.monotonic()
            coordinator.stop()
            wait_until(lambda: coordinator.summary.seconds, timeout=10)
            (tmp_path / "go").touch()
        assert 1 <= time.monotonic() - asked < 5

    def test_a_second_stop_ends_it_at_once(
        self, other_session: psycopg.Connection[Any], tmp_path: Path
    ) -> None:
        wait_for.enqueue(path=str(tmp_path / "go"))
        with working(threads=2, shutdown_timeout=60) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            other_session.execute("LOCK TABLE processing_jobs IN ACCESS EXCLUSIVE MODE")
            wait_until_somebody_waits_for_a_lock(other_session.info.backend_pid)
            coordinator.stop()
            coordinator.stop()
            wait_until(lambda: coordinator.summary.seconds, timeout=5)
            (tmp_path / "go").touch()
        assert coordinator.summary.at_once


class TestAConnectionThatDeliversNothing:
    """A half-open socket takes no cancel: only closing it helps."""

    @pytest.mark.parametrize("role", ["coordinator", "heartbeat"])
    def test_is_cut_off_and_replaced(
        self, settings: Any, proxy: Proxy, role: str, tmp_path: Path
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 2, "POLL_INTERVAL": 0.1}
        running = wait_for.enqueue(path=str(tmp_path / "go"))
        with working(threads=2):
            wait_until((tmp_path / "go.started").exists)
            wait_until(lambda: proxy.silence(f"django_jobqueue {role}"))
            wait_until(lambda: proxy.connected(f"django_jobqueue {role}"), timeout=20)
            job = noop.enqueue()
            wait_until(lambda: jobs.status(job.pk) == Status.SUCCEEDED)
            (tmp_path / "go").touch()
            wait_until(lambda: jobs.status(running.pk) in FINISHED)

    def test_of_the_heartbeat_is_said_and_jobs_run_when_it_beats_again(
        self, settings: Any, proxy: Proxy, tmp_path: Path, caplog: Any
    ) -> None:
        settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 6, "POLL_INTERVAL": 0.05}
        wait_for.enqueue(path=str(tmp_path / "go"))
        with working(threads=2) as coordinator:
            wait_until((tmp_path / "go.started").exists)
            wait_until(lambda: proxy.silence("django_jobqueue heartbeat"))
            wait_until(lambda: coordinator._heartbeat.fails, timeout=15)
            waiting = noop.enqueue()
            wait_until(lambda: not coordinator._heartbeat.fails)
            wait_until(lambda: jobs.status(waiting.pk) == Status.SUCCEEDED)
            (tmp_path / "go").touch()
        assert "so no new job is claimed" in caplog.text


class TestTheEndOfPatience:
    """A healthy worker that takes its time to stop is not ended from outside."""

    @pytest.mark.parametrize("ends", ["by itself", "given back"])
    def test_does_not_come_while_jobs_may_still_run(self, tmp_path: Path, ends: str) -> None:
        left: list[str] = []
        options = WorkerOptions(threads=1, shutdown_timeout=60 if ends == "by itself" else 3)
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        each_row = "BEFORE UPDATE ON processing_jobs FOR EACH ROW EXECUTE FUNCTION nap()"
        slow = "CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        sql(f"{slow} PERFORM pg_sleep(0.25); RETURN NEW; END $$")
        sql(f"CREATE TRIGGER nap {each_row}")
        try:
            with working_as(Coordinator(options, leave=lambda: left.append("left"))) as coordinator:
                wait_until((tmp_path / "go.started").exists)
                asked = time.monotonic()
                coordinator.stop()
                wait_until(lambda: time.monotonic() - asked > 2.6)
                if ends == "by itself":
                    (tmp_path / "go").touch()
            (tmp_path / "go").touch()
        finally:
            sql("DROP TRIGGER nap ON processing_jobs; DROP FUNCTION nap")
        assert left == []
        expected = Status.SUCCEEDED if ends == "by itself" else Status.PENDING
        assert jobs.status(job.pk) == expected
