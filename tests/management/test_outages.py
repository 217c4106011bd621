"""Worker processes while the database is away, refuses them, or says nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob, Worker
from example_project.postgres.keeper import is_locked
from example_project.postgres.server import EmbeddedServer, throwaway_server
from tests.app.jobs import noop, sleep, wait_for
from tests.processes import WorkerProcess, running_worker
from tests.projects import environment, project_settings, run_python
from tests.rows import sql
from tests.run_database import connection_params
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

AWAY = "The database does not answer"
BACK = "The database answers again."


def waits_told(process: WorkerProcess) -> list[float]:
    """The seconds that each line about the outage names."""
    return [float(wait) for wait in re.findall(rf"{AWAY}, next try in ([\d.]+) s", process.output)]


def moments_told(process: WorkerProcess, text: str) -> list[float]:
    """The time stamps of the lines with this text, in seconds."""
    stamps = [line[:23] for line in process.output.splitlines() if text in line]
    return [
        datetime.strptime(f"{stamp}+0000", "%Y-%m-%d %H:%M:%S,%f%z").timestamp() for stamp in stamps
    ]


def wait_for_tries(process: WorkerProcess, count: int) -> None:
    wait_until(lambda: len(waits_told(process)) >= count, timeout=30, message=process.output)


def assert_succeeded_at_the_first_attempt(*done: ProcessingJob) -> None:
    rows = jobs.filter(pk__in=[job.pk for job in done])
    wait_until(lambda: rows.filter(status=Status.SUCCEEDED).count() == len(done), timeout=30)
    assert set(rows.values_list("attempts", flat=True)) == {1}


def terminate_the_workers_sessions() -> int:
    return len(
        sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'django_jobqueue%%'"
        )
    )


@contextmanager
def altered_database(change: str, back: str) -> Iterator[None]:
    """From here on for new sessions, and the worker's have ended; the test's own lives on."""
    connection.ensure_connection()
    name = connection.ops.quote_name(str(connection.settings_dict["NAME"]))
    # Over another database: nobody can refuse logins to the one he is in.
    with psycopg.connect(**connection_params(), autocommit=True) as beside:
        beside.execute(f"ALTER DATABASE {name} {change}".encode())
        terminate_the_workers_sessions()
        try:
            yield
        finally:
            beside.execute(f"ALTER DATABASE {name} {back}".encode())


def logins_refused() -> Any:
    return altered_database("ALLOW_CONNECTIONS false", "ALLOW_CONNECTIONS true")


def read_only() -> Any:
    return altered_database(
        "SET default_transaction_read_only = on", "RESET default_transaction_read_only"
    )


class TestKilledSessions:
    def test_an_idle_worker_goes_on_after_a_line_or_two(self, worker: Any) -> None:
        with worker("--threads", "2") as process:
            wait_until(Worker.objects.exists, timeout=30)
            assert terminate_the_workers_sessions() >= 1

            process.says(BACK)
            assert_succeeded_at_the_first_attempt(noop.enqueue())

        assert 1 <= len(waits_told(process)) <= 2
        assert "Traceback" not in process.output

    def test_a_busy_worker_loses_no_attempt(self, worker: Any, tmp_path: Path) -> None:
        running = [wait_for.enqueue(path=str(tmp_path / f"go{number}")) for number in range(3)]
        with worker("--threads", "4") as process:
            for number in range(3):
                wait_until((tmp_path / f"go{number}.started").exists, timeout=30)
            terminate_the_workers_sessions()
            for number in range(3):
                (tmp_path / f"go{number}").touch()

            assert_succeeded_at_the_first_attempt(*running, noop.enqueue())

        assert len(waits_told(process)) <= 2


class TestRefusals:
    @pytest.mark.parametrize("refusal", [logins_refused, read_only])
    def test_it_waits_and_goes_on_and_work_done_meanwhile_is_recorded(
        self, worker: Any, tmp_path: Path, refusal: Any
    ) -> None:
        """Logins are refused, or the primary has become read-only."""
        running = wait_for.enqueue(path=str(tmp_path / "go"))
        with worker("--threads", "2") as process:
            wait_until((tmp_path / "go.started").exists, timeout=30)
            with refusal():
                wait_for_tries(process, 1)
                (tmp_path / "go").touch()
                wait_for_tries(process, 3)

            assert_succeeded_at_the_first_attempt(running, noop.enqueue())
            process.says(BACK)

        assert "Traceback" not in process.output

    def test_the_pauses_grow_and_are_kept(self, worker: Any, tmp_path: Path) -> None:
        """Also when the chores would come sooner."""
        own = project_settings(tmp_path, "DJANGO_JOBQUEUE = {'RESCUE_INTERVAL': 0.2}")
        with worker(settings=own) as process:
            wait_until(Worker.objects.exists, timeout=30)
            with logins_refused():
                wait_for_tries(process, 4)

        told, moments = waits_told(process)[:4], moments_told(process, AWAY)[:4]
        assert told[0] <= 1
        assert told[-1] >= 3 * told[0]
        kept = [after - before for before, after in pairwise(moments)]
        # The line rounds to a tenth of a second.
        assert all(pause > wait - 0.1 for pause, wait in zip(kept, told, strict=False)), kept

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
    def test_sigterm_ends_it_in_the_middle_of_a_pause(self, worker: Any, busy: bool) -> None:
        if busy:
            sleep.enqueue(seconds=600)
        with worker("--shutdown-timeout", "0.2", "-v", "2") as process:
            process.says(" started, attempt 1" if busy else "Handlers: ")
            wait_until(Worker.objects.exists, timeout=30)
            with logins_refused():
                wait_until(lambda: max(waits_told(process), default=0) > 3, timeout=30)
                next_try = moments_told(process, AWAY)[-1] + waits_told(process)[-1]
                process.signal(signal.SIGTERM)
                assert process.ended() == 0, process.output

        assert moments_told(process, "Stopping (SIGTERM)")[0] < next_try
        assert "Traceback" not in process.output


def test_sigterm_ends_it_while_a_server_accepts_and_says_nothing(
    worker: Any, tmp_path: Path
) -> None:
    """A machine that is stuck, or a firewall that drops what follows the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        own = project_settings(
            tmp_path, f"DATABASES['default'].update(HOST='127.0.0.1', PORT='{port}')"
        )
        with worker(settings=own) as process:
            process.says("Handlers: ")
            silent.settimeout(10)
            accepted, _address = silent.accept()
            with accepted:
                process.signal(signal.SIGTERM)
                assert process.ended(timeout=4.5) == 0, process.output


def test_of_two_hosts_the_one_that_is_alive_is_used(worker: Any, tmp_path: Path) -> None:
    """As `postgres://user@host1:1,host2:5432/shop?target_session_attrs=read-write` says it."""
    own = project_settings(
        tmp_path,
        "usual = DATABASES['default']\n"
        "usual['HOST'] = f\"127.0.0.1,{usual['HOST']}\"\n"
        "usual['PORT'] = f\"1,{usual['PORT'] or 5432}\"\n"
        "usual['OPTIONS'] = {**usual.get('OPTIONS', {}), 'target_session_attrs': 'read-write'}",
    )
    job = noop.enqueue()

    with worker("--burst", settings=own) as process:
        assert process.ended() == 0, process.output

    assert_succeeded_at_the_first_attempt(job)
    assert AWAY not in process.output


# --- a server that stops -----------------------------------------------------------------------


class OwnServer:
    """A server of the test's own, which stops and starts again with the same data."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self.url = server.url()

    def stop(self) -> None:
        """As `pg_ctl stop -m fast`: every session is ended."""
        (pid_file,) = self._server.folder.path.glob("data-*/postmaster.pid")
        os.kill(int(pid_file.read_text().split("\n", 1)[0]), signal.SIGINT)
        wait_until(lambda: not is_locked(self._server.folder.keeper_lock), timeout=30)

    def start(self) -> None:
        self._server.ensure_running()

    @contextmanager
    def frozen_sessions(self) -> Iterator[None]:
        """The sessions of workers are there and do nothing, as behind a network that is gone."""
        pids = [
            pid
            for (pid,) in self.sql(
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'django_jobqueue%%'"
            )
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def enqueue(self, handler: str, payload: str = "{}") -> int:
        ((pk,),) = self.sql(
            "INSERT INTO processing_jobs (handler, payload) VALUES (%s, %s::jsonb) RETURNING id",
            f"tests.app.jobs.{handler}",
            payload,
        )
        return int(pk)

    def state(self, pk: int) -> tuple[Any, ...]:
        (row,) = self.sql("SELECT status, attempts FROM processing_jobs WHERE id = %s", pk)
        return row

    def sql(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        where: dict[str, Any] = {**self._server.connection_params(), "dbname": "postgres"}
        with psycopg.connect(**where, autocommit=True) as session:
            return session.execute(statement.encode(), params).fetchall()


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    with throwaway_server() as server:
        own = OwnServer(server)
        env = environment(
            tmp_path_factory.mktemp("migrate"), settings="tests.settings", database_url=own.url
        )
        migrated = run_python("-m", "django", "migrate", "django_jobqueue", env=env)
        assert migrated.returncode == 0, migrated.stdout
        yield own


class TestServerThatStops:
    def test_sigterm_ends_it_while_its_session_says_nothing(
        self, own_server: OwnServer, tmp_path: Path
    ) -> None:
        with running_worker(folder=tmp_path, database_url=own_server.url) as process:
            wait_until(lambda: own_server.sql("SELECT 1 FROM processing_workers"), timeout=30)
            with own_server.frozen_sessions():
                next_poll = time.monotonic() + 1.5
                wait_until(lambda: time.monotonic() > next_poll)
                process.signal(signal.SIGTERM)
                assert process.ended(timeout=4.5) == 0, process.output

    def test_it_waits_until_the_server_is_there_again(
        self, own_server: OwnServer, tmp_path: Path
    ) -> None:
        running = own_server.enqueue("wait_for", f'{{"path": "{tmp_path}/go"}}')
        with running_worker(folder=tmp_path, database_url=own_server.url) as process:
            wait_until((tmp_path / "go.started").exists, timeout=30)
            own_server.stop()
            stopped = time.monotonic()
            try:
                wait_for_tries(process, 1)
                (tmp_path / "go").touch()
                wait_for_tries(process, 4)
            finally:
                seconds_away = time.monotonic() - stopped
                own_server.start()
            after = own_server.enqueue("noop")
            wait_until(lambda: own_server.state(after) == ("succeeded", 1), timeout=30)

        assert own_server.state(running) == ("succeeded", 1)
        assert len(waits_told(process)) <= seconds_away + 3
        assert process.output.count(BACK) == 1
        assert "Traceback" not in process.output

    def test_one_that_starts_before_the_server_waits_for_it(
        self, own_server: OwnServer, tmp_path: Path
    ) -> None:
        job = own_server.enqueue("noop")
        own_server.stop()
        try:
            with running_worker(folder=tmp_path, database_url=own_server.url) as process:
                wait_for_tries(process, 2)
                own_server.start()
                wait_until(lambda: own_server.state(job) == ("succeeded", 1), timeout=30)
                process.signal(signal.SIGTERM)
                assert process.ended() == 0
        finally:
            own_server.start()

        assert "Traceback" not in process.output
