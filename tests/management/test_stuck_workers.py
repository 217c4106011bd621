"""A process that cannot go on by itself: hung handlers, and a database that does not answer."""

from __future__ import annotations

import array
import fcntl
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from django.db import connection

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob
from tests.app.jobs import leave_thread_running, noop, overrun, wait_for
from tests.half_open import Proxy, url_through
from tests.processes import running_worker
from tests.projects import environment
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

_ALMOST_FULL = 60_000
"""Bytes: a pipe on Linux takes 65,536."""


def test_a_process_all_of_whose_slots_hang_is_replaced(tmp_path: Path, database_url: str) -> None:
    hung = overrun.using(max_attempts=1).enqueue(path=str(tmp_path / "go"))
    flags = ("--threads", "1", "--restart-when-hung")
    with running_worker(*flags, folder=tmp_path, database_url=database_url) as worker:
        wait_until(lambda: jobs.status(hung.pk) == Status.DEAD_LETTER, timeout=30)
        waiting = noop.enqueue()
        wait_until(lambda: jobs.status(waiting.pk) == Status.SUCCEEDED, timeout=30)
        assert "every slot hangs" in worker.output
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


@pytest.mark.parametrize(
    ("signals", "code", "within"),
    # A second of its own, and what a busy machine takes for the rest.
    [([signal.SIGTERM], 0, 2 + 1 + 3), ([signal.SIGTERM, signal.SIGINT], 1, 1 + 3)],
    ids=["one signal", "two signals"],
)
def test_a_database_that_delivers_nothing_keeps_no_process(
    tmp_path: Path, proxy: Proxy, signals: list[signal.Signals], code: int, within: float
) -> None:
    wait_for.enqueue(path=str(tmp_path / "go"))
    url = url_through(proxy, str(connection.settings_dict["NAME"]))
    flags = ("--threads", "2", "--shutdown-timeout", "2")
    with running_worker(*flags, folder=tmp_path, database_url=url) as worker:
        wait_until((tmp_path / "go.started").exists, timeout=30)
        proxy.silence_all_for_good()
        asked = time.monotonic()
        for number in signals:
            worker.signal(number)
            wait_until(lambda: "Stopping" in worker.output)
        assert worker.ended() == code
        assert time.monotonic() - asked < within
        assert "Traceback" not in worker.output


def test_a_thread_that_a_handler_left_keeps_no_process(tmp_path: Path, database_url: str) -> None:
    job = leave_thread_running.enqueue()
    flags = ("--shutdown-timeout", "1")
    with running_worker(*flags, folder=tmp_path, database_url=database_url) as worker:
        wait_until(lambda: jobs.status(job.pk) == Status.SUCCEEDED, timeout=30)
        worker.signal(signal.SIGTERM)
        assert worker.ended(timeout=8) == 0
        assert "Worker stopped" in worker.output


def test_output_that_nobody_reads_keeps_no_process(tmp_path: Path, database_url: str) -> None:
    jobs.enqueue_many({"handler": noop} for _number in range(2_000))
    env = environment(tmp_path, settings="tests.settings", database_url=database_url)
    worker = subprocess.Popen(
        [sys.executable, "-m", "django", "runworker", "-v", "2", "--shutdown-timeout", "1"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert worker.stdout is not None
    unread = worker.stdout
    try:
        wait_until(lambda: unread_bytes(unread) > _ALMOST_FULL, timeout=30)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=8) == 0
    finally:
        worker.kill()
        worker.wait()
        unread.close()


def unread_bytes(pipe: IO[bytes]) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]
