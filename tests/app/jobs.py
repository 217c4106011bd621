"""The handlers of all tests, each doing one thing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from django.db import connection, transaction

from django_jobqueue import DeadLetter, Retry, handler
from django_jobqueue.execution import JobContext

_LONGEST_WAIT = 60


def at_once(attempts: int) -> float:
    """A backoff of nothing: tests do not wait."""
    return 0


@handler
def add(a: int, b: int = 1) -> int:
    """The plainest handler with a result."""
    return a + b


@handler
async def add_async(a: int, b: int = 1) -> int:
    """The same, as a coroutine function."""
    return a + b


@handler
def noop() -> None:
    """Nothing."""


@handler
def echo(value: Any) -> Any:
    """Return what was given."""
    return value


@handler
def fail(message: str = "broken") -> None:
    """Fail every time, and wait the default backoff."""
    raise ValueError(message)


@handler(backoff=at_once)
def fail_at_once(message: str = "broken") -> None:
    """Fail every time, and be due again at once."""
    raise ValueError(message)


@handler(backoff=at_once, takes_context=True)
def flaky(context: JobContext, until: int) -> int:
    """Fail before attempt number `until`, then return the attempt."""
    if context.attempt < until:
        raise ValueError(f"attempt {context.attempt} fails")
    return context.attempt


@handler
def refuse(reason: str) -> None:
    """Ask for a person."""
    raise DeadLetter(reason)


@handler
def again(after: float) -> None:
    """Ask for a retry."""
    raise Retry(after=after)


@handler
def sleep(seconds: float) -> None:
    """Take a while."""
    time.sleep(seconds)


@handler(takes_context=True)
def touch(context: JobContext, path: str) -> None:
    """Append `<pid> <job_id> <attempt>` to a file. Processes may do so at the same time."""
    line = f"{os.getpid()} {context.job_id} {context.attempt}\n"
    # One write to a file opened for appending: lines of several processes never mix.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@handler
def wait_for(path: str) -> None:
    """Run until a file exists; another one, `<path>.started`, tells that this runs."""
    Path(f"{path}.started").touch()
    give_up = time.monotonic() + _LONGEST_WAIT
    while not Path(path).exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path} did not appear within {_LONGEST_WAIT} s")
        time.sleep(0.01)


@handler
def kill_worker() -> None:
    """Take the whole process down, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


@handler
def raise_exit() -> None:
    """Try to end the process."""
    raise SystemExit(3)


@handler(queue="mail", priority=10, max_attempts=2)
def mail(to: str) -> str:
    """A handler with defaults of its own."""
    return f"mailed {to}"


@handler
def leave_transaction_open() -> None:
    """Enter a transaction and never leave it."""
    # `__enter__` without a `with` is the mistake this stands for.
    transaction.atomic().__enter__()
    _query()


@handler
def leave_autocommit_off() -> None:
    """The same mistake by the other way."""
    transaction.set_autocommit(False)
    _query()


@handler
def close_connection() -> None:
    """Close the thread's connection, as a handler that forks or cleans up may."""
    connection.close()


def _query() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


@handler
def count_jobs() -> int:
    """Ask the database something."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM processing_jobs")
        return int(cursor.fetchone()[0])


@handler
def kill_own_session() -> None:
    """Lose the connection to the database in the middle."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


@handler
async def hang_async() -> None:
    """Never return, on a thread that Python waits for at its end."""
    time.sleep(_LONGEST_WAIT * 10)


@handler(takes_context=True)
def meddle_with_job(context: JobContext, how: str) -> None:
    """Do something to the job object that a handler has no business doing."""
    if how == "delete":
        context.job.delete()
    elif how == "refresh":
        context.job.refresh_from_db()
    elif how == "token":
        context.job.lock_token = 999
    else:
        context.job.payload.clear()
        context.job.locked_at = None


@handler
def fork_and_exit() -> None:
    """Fork a child that ends the way Python programs end."""
    if not (child := os.fork()):
        raise SystemExit(0)
    os.waitpid(child, 0)


@handler
def set_search_path(path: str) -> None:
    """Leave a session setting behind."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('search_path', %s, false)", [path])
