"""The handlers of all tests, each doing one thing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import Error, connection, connections, transaction

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
    _wait_for_file(path)


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


@handler
def select(aliases: list[str], own_thread: bool = False) -> None:
    """Use these databases, on a thread of its own if wanted, which closes what it opened."""

    def ask() -> None:
        for alias in aliases:
            with connections[alias].cursor() as cursor:
                cursor.execute("SELECT 1")

    def ask_and_close() -> None:
        try:
            ask()
        finally:
            connections.close_all()

    if not own_thread:
        ask()
        return
    thread = threading.Thread(target=ask_and_close)
    thread.start()
    thread.join()


@handler
def wait_for_and_fail(path: str) -> None:
    """Run until a file exists, and fail then."""
    wait_for(path)
    raise ValueError(f"{path} appeared")


@handler(timeout=0.4, max_attempts=2, backoff=at_once)
def overrun(path: str) -> str:
    """Run past the timeout, until a file exists; `<path>.started` counts the starts."""
    with Path(f"{path}.started").open("a") as starts:
        starts.write("started\n")
    _wait_for_file(path)
    return "late"


@handler(timeout=0.4, max_attempts=1)
async def overrun_async(path: str) -> None:
    """Run past the timeout; a file tells that it was cancelled."""
    try:
        await asyncio.sleep(_LONGEST_WAIT)
    except asyncio.CancelledError:
        Path(path).touch()
        raise


@handler(timeout=30)
def quick(value: int) -> int:
    """End long before its timeout."""
    return value


@handler(timeout=0.4, takes_context=True, max_attempts=1)
def overrun_politely(context: JobContext, path: str) -> None:
    """Run until the context says that nobody waits for the result any more."""
    while not context.lock_lost:
        time.sleep(0.01)
    Path(path).touch()


@handler(atomic=True, backoff=at_once, max_attempts=2, takes_context=True)
def write(context: JobContext, name: str, how: str = "") -> str:
    """Write a row of the project's own, then do something that should undo it."""
    _write_group(name)
    if how == "enqueue" and context.attempt == 1:
        for number in range(6):
            add.enqueue(a=number)
        raise ValueError("after six of ten")
    if how in WAYS_TO_UNDO:
        WAYS_TO_UNDO[how]()
    return name


def _write_group(name: str) -> None:
    # Not at the top: one test imports these handlers where Django is not set up.
    from django.contrib.auth.models import Group

    Group.objects.create(name=name)


def _raise(error: BaseException) -> None:
    raise error


def _swallow_a_database_error() -> None:
    with contextlib.suppress(Error), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


def _break_a_deferred_constraint() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO auth_group_permissions (group_id, permission_id) VALUES (-1, -1)"
        )


WAYS_TO_UNDO: dict[str, Callable[[], object]] = {
    "raise": lambda: _raise(ValueError("broken")),
    "exit": lambda: _raise(SystemExit(3)),
    "retry": lambda: _raise(Retry(after=0)),
    "refuse": lambda: _raise(DeadLetter("no")),
    "swallow": _swallow_a_database_error,
    "rollback": lambda: transaction.set_rollback(True),
    "plain rollback": lambda: connection.cursor().execute("ROLLBACK"),
    "another transaction": lambda: connection.cursor().execute("ROLLBACK AND CHAIN"),
    "leave open": lambda: transaction.atomic().__enter__(),
    "close": lambda: connection.close(),
    "deferred": _break_a_deferred_constraint,
    "fail after commit": lambda: transaction.on_commit(lambda: _raise(ValueError("too late"))),
}


def _wait_for_file(path: str) -> None:
    give_up = time.monotonic() + _LONGEST_WAIT
    while not Path(path).exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path} did not appear within {_LONGEST_WAIT} s")
        time.sleep(0.01)


@handler(atomic=True)
def ask_nothing() -> str:
    """Find nothing to do."""
    return "nothing"


@handler(atomic=True, timeout=0.4, max_attempts=1)
def write_late(name: str, path: str) -> None:
    """Write, and end after the timeout."""
    _write_group(name)
    _wait_for_file(path)


@handler
def leave_thread_running() -> None:
    """Start a thread that Python waits for at its end."""
    threading.Thread(target=time.sleep, args=(_LONGEST_WAIT * 10,)).start()
