"""One thread, a handler that misbehaves, and the next job on the same thread.

Two promises: what the first one did is recorded, and the second one does not suffer for it. What
belongs to the process (its folder, its environment, its limits) cannot be put back by a worker
whose other threads use it too; of that, only the verdicts are promised.
"""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import decimal
import locale
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.db import Error, connection, transaction
from django.utils import timezone, translation

from django_jobqueue import Status, handler
from django_jobqueue.handlers import Registry
from django_jobqueue.models import ProcessingJob
from tests.coordinators import burst
from tests.rows import sql

pytestmark = pytest.mark.django_db(transaction=True)


def at_once(attempts: int) -> float:
    return 0


@dataclass(frozen=True)
class Witnesses:
    """What was recorded of three jobs that one thread ran in this order."""

    before: ProcessingJob
    misbehaved: ProcessingJob
    after: ProcessingJob

    @property
    def verdict(self) -> tuple[str, str]:
        return self.misbehaved.status, self.misbehaved.last_error

    @property
    def seen(self) -> tuple[Any, Any]:
        """What the first and the last job saw when they looked around."""
        return self.before.result, self.after.result

    def assert_nothing_reached_the_next_job(self) -> None:
        assert (self.after.status, self.after.last_error) == (Status.SUCCEEDED, "")
        before, after = self.seen
        assert after == before


Act = Callable[[], Any]
RunBetween = Callable[..., Witnesses]


@pytest.fixture
def run_between(handlers: Registry) -> RunBetween:
    """Run `act` as a job between two jobs that look around with `look`."""

    def run(act: Act, look: Act = lambda: sql("SELECT 1")) -> Witnesses:
        @handler(name="misbehaves")
        def misbehaves() -> Any:
            return act()

        @handler(name="looks")
        def looks() -> list[Any]:
            return [threading.get_ident(), look()]

        due = [looks.enqueue(), misbehaves.enqueue(), looks.enqueue()]
        burst(threads=1)
        return Witnesses(*(ProcessingJob.objects.get(pk=job.pk) for job in due))

    return run


def raising(error: BaseException) -> Act:
    def act() -> None:
        raise error

    return act


# --- sessions ----------------------------------------------------------------------------------


def session_state() -> list[Any]:
    """Everything about this thread's session that a handler can change."""
    inside = [connection.in_atomic_block, connection.get_autocommit()]
    (row,) = sql(
        "SELECT current_setting('search_path'), current_user::text, session_user::text,"
        " current_setting('timezone'), current_setting('statement_timeout'),"
        " current_setting('default_transaction_read_only'), current_setting('application_name'),"
        " (SELECT count(*) FROM pg_listening_channels()),"
        " (SELECT count(*) FROM pg_prepared_statements),"
        " (SELECT count(*) FROM pg_cursors WHERE is_holdable),"
        " (SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()),"
        " (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
    )
    return [*inside, *row]


def poison_atomic() -> None:
    with transaction.atomic(), pytest.raises(Error):
        sql("SELECT 1/0")


def poison_by_hand() -> None:
    sql("BEGIN")
    with pytest.raises(Error):
        sql("SELECT 1/0")


def leave_atomic() -> None:
    transaction.atomic().__enter__()
    sql("SELECT 1")


def leave_savepoint() -> None:
    transaction.atomic().__enter__()
    connection.savepoint()


def leave_open_cursor() -> None:
    connection.cursor().execute("DECLARE c CURSOR WITH HOLD FOR SELECT 1")


def leave_a_pipeline() -> None:
    """psycopg's pipeline: what was sent has no answer yet."""
    connection.ensure_connection()
    connection.connection.pipeline().__enter__()


def close_behind_djangos_back() -> None:
    connection.ensure_connection()
    connection.connection.close()


def mark_for_rollback() -> None:
    with transaction.atomic():
        transaction.set_rollback(True)


SPOILT_SESSIONS: dict[str, Act] = {
    "aborted atomic block": poison_atomic,
    "aborted BEGIN": poison_by_hand,
    "open atomic block": leave_atomic,
    "open savepoint": leave_savepoint,
    "open BEGIN": lambda: sql("BEGIN"),
    "no autocommit": lambda: transaction.set_autocommit(False),
    "rollback wanted": mark_for_rollback,
    "search_path": lambda: sql("SET search_path = nowhere"),
    "role": lambda: sql("SET ROLE pg_monitor"),
    "time zone": lambda: sql("SET timezone = 'Asia/Kathmandu'"),
    "statement timeout": lambda: sql("SET statement_timeout = '1ms'"),
    "read only": lambda: sql("SET default_transaction_read_only = on"),
    "application name": lambda: sql("SET application_name = 'impostor'"),
    "temporary table": lambda: sql("CREATE TEMPORARY TABLE processing_jobs (id int)"),
    "LISTEN": lambda: sql("LISTEN something"),
    "prepared statement": lambda: sql("PREPARE something AS SELECT 1"),
    "advisory lock": lambda: sql("SELECT pg_advisory_lock(1, 2)"),
    "cursor WITH HOLD": leave_open_cursor,
    "open pipeline": leave_a_pipeline,
    "closed connection": lambda: connection.close(),
    "closed connection of psycopg": close_behind_djangos_back,
}


@pytest.mark.parametrize("max_age", [0, None], ids=["fresh-session", "kept-session"])
@pytest.mark.parametrize("act", SPOILT_SESSIONS.values(), ids=SPOILT_SESSIONS.keys())
def test_the_next_job_finds_the_session_as_it_was(
    run_between: RunBetween, request_settings: dict[str, Any], act: Act, max_age: int | None
) -> None:
    request_settings.update(CONN_MAX_AGE=max_age)

    witnesses = run_between(act, look=session_state)

    assert witnesses.misbehaved.status == Status.SUCCEEDED, witnesses.misbehaved.last_error
    witnesses.assert_nothing_reached_the_next_job()


def test_what_a_transaction_left_open_had_written_is_rolled_back(run_between: RunBetween) -> None:
    def act() -> None:
        leave_atomic()
        sql("INSERT INTO processing_jobs (handler) VALUES ('never committed')")

    run_between(act)

    assert not ProcessingJob.objects.filter(handler="never committed").exists()


def test_statements_that_psycopg_prepares_work_in_every_job_of_a_kept_session(
    handlers: Registry, request_settings: dict[str, Any]
) -> None:
    """The session forgets them after each job; psycopg must not think that they are still there."""
    request_settings.update(CONN_MAX_AGE=None, OPTIONS={"prepare_threshold": 1})

    @handler(name="repeats")
    def repeats() -> int:
        return sum(sql("SELECT %s::int", number)[0][0] for number in range(10))

    due = [repeats.enqueue() for _number in range(5)]
    burst(threads=1)

    assert [ProcessingJob.objects.get(pk=job.pk).result for job in due] == [45] * 5


# --- exceptions --------------------------------------------------------------------------------


class Root(BaseException):
    """Not an Exception."""


class NoWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class WrongWords(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]

    __repr__ = __str__


class ExitsWhenRead(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


def recurse() -> None:
    recurse()


def raise_a_circle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def exception_from(module: object) -> BaseException:
    odd: type[Exception] = type("Odd", (Exception,), {"__module__": module})
    return odd("odd")


RAISED: dict[str, tuple[Act, str]] = {
    "sys.exit": (lambda: sys.exit(0), "SystemExit: 0"),
    "KeyboardInterrupt": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "GeneratorExit": (raising(GeneratorExit()), "GeneratorExit"),
    "CancelledError": (raising(asyncio.CancelledError()), "asyncio.exceptions.CancelledError"),
    "BaseException": (raising(Root("deep")), f"{__name__}.Root: deep"),
    "MemoryError": (raising(MemoryError()), "MemoryError"),
    "RecursionError": (recurse, "RecursionError: maximum recursion depth exceeded"),
    "StopIteration": (raising(StopIteration(3)), "StopIteration: 3"),
    "no words": (raising(NoWords()), f"{__name__}.NoWords: (its text could not be read)"),
    "wrong words": (raising(WrongWords()), f"{__name__}.WrongWords: (its text could not be read)"),
    "exits when read": (raising(ExitsWhenRead()), f"{__name__}.ExitsWhenRead: (its text could"),
    "NUL": (raising(ValueError("a\x00b")), "ValueError: a\ufffdb"),
    "surrogate": (raising(ValueError("\udcff")), "ValueError: \ufffd"),
    "100 MB": (lambda: raising(ValueError("x" * 100_000_000))(), "ValueError: xxx"),
    "cyclic cause": (raise_a_circle, "ValueError: first"),
    "module None": (raising(exception_from(None)), "None.Odd: odd"),
    "module 7": (raising(exception_from(7)), "7.Odd: odd"),
    "module NUL": (raising(exception_from("a\x00b")), "a\ufffdb.Odd: odd"),
    "signal in a thread": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        "ValueError: signal only works in main thread",
    ),
}
if group := getattr(builtins, "BaseExceptionGroup", None):  # since Python 3.11
    both = group("both", [ValueError("one"), SystemExit(2)])
    RAISED["group"] = (raising(both), "BaseExceptionGroup: both (2 sub-exceptions)")


@pytest.mark.parametrize(("act", "said"), RAISED.values(), ids=RAISED.keys())
def test_whatever_a_handler_raises_is_a_failed_attempt_in_its_words(
    run_between: RunBetween, act: Act, said: str
) -> None:
    witnesses = run_between(act)

    status, error = witnesses.verdict
    assert status == Status.FAILED
    assert error.startswith(said)
    assert len(error) <= 10_100
    assert witnesses.misbehaved.history.get().traceback
    witnesses.assert_nothing_reached_the_next_job()


# --- results -----------------------------------------------------------------------------------


def contains_itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


UNKEEPABLE: dict[str, tuple[Act, str]] = {
    "NUL": (lambda: "a\x00b", "contains a NUL character"),
    "surrogate": (lambda: ["\ud800"], "contains a lone surrogate"),
    "NaN": (lambda: {"rate": float("nan")}, "The result.rate is nan"),
    "bytes": (lambda: b"raw", "is of type bytes"),
    "too large": (lambda: "x" * 2_000, "The limit (MAX_RESULT_BYTES) is 1,000"),
    "contains itself": (contains_itself, "contains itself"),
    "object": (object, "is of type object"),
}


@pytest.mark.parametrize(("act", "said"), UNKEEPABLE.values(), ids=UNKEEPABLE.keys())
def test_a_result_that_cannot_be_kept_makes_a_dead_letter_that_says_why(
    run_between: RunBetween, settings: Any, act: Act, said: str
) -> None:
    settings.DJANGO_JOBQUEUE = {"MAX_RESULT_BYTES": 1_000}

    witnesses = run_between(act)

    status, error = witnesses.verdict
    assert status == Status.DEAD_LETTER
    assert "The handler finished, but what it returned cannot be kept." in error
    assert said in error
    witnesses.assert_nothing_reached_the_next_job()


# --- what a thread has of its own --------------------------------------------------------------

SHADE: contextvars.ContextVar[str] = contextvars.ContextVar("SHADE", default="none")


def thread_state() -> list[Any]:
    return [
        translation.get_language(),
        timezone.get_current_timezone_name(),
        SHADE.get(),
        decimal.getcontext().prec,
    ]


def set_shade() -> None:
    SHADE.set("blue")


def set_precision() -> None:
    decimal.getcontext().prec = 3


PERSONAL: dict[str, Act] = {
    "language": lambda: translation.activate("de"),
    "no translation": translation.deactivate_all,
    "time zone": lambda: timezone.activate("Asia/Kathmandu"),
    "context variable": set_shade,
    "decimal context": lambda: decimal.setcontext(decimal.Context(prec=5)),
    "decimal precision": set_precision,
}


@pytest.mark.parametrize("act", PERSONAL.values(), ids=PERSONAL.keys())
def test_what_a_handler_activates_for_itself_ends_with_it(
    run_between: RunBetween, act: Act
) -> None:
    witnesses = run_between(act, look=thread_state)

    assert witnesses.misbehaved.status == Status.SUCCEEDED, witnesses.misbehaved.last_error
    witnesses.assert_nothing_reached_the_next_job()


def test_threads_that_outlive_their_handler_disturb_nobody(run_between: RunBetween) -> None:
    may_end = threading.Event()
    answers: list[Any] = []

    def count_until_told() -> None:
        try:
            while not may_end.wait(0.001):
                answers.append(sql("SELECT pg_backend_pid()")[0][0])
        finally:
            connection.close()

    thread = threading.Thread(target=count_until_told)
    try:
        witnesses = run_between(thread.start, look=session_state)
        assert thread.is_alive()
    finally:
        may_end.set()
        thread.join()

    assert witnesses.misbehaved.status == Status.SUCCEEDED
    witnesses.assert_nothing_reached_the_next_job()
    assert len(set(answers)) == 1, "its connection was its own, and nobody closed it"


# --- what belongs to the process ---------------------------------------------------------------


@pytest.fixture
def process_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The process is as it was, after the test: no worker does that for a handler."""
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    os.environ["JOBQUEUE_SHADE"] = "none"
    limit, timeout = sys.getrecursionlimit(), socket.getdefaulttimeout()
    spoken = locale.setlocale(locale.LC_ALL)
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
    sys.setrecursionlimit(limit)
    socket.setdefaulttimeout(timeout)
    logging.disable(logging.NOTSET)
    locale.setlocale(locale.LC_ALL, spoken)


def remove_the_folder_it_is_in() -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").resolve().rmdir()


def speak_plain_c() -> None:
    locale.setlocale(locale.LC_ALL, "C")


def warn_as_an_error() -> None:
    warnings.simplefilter("error")
    warnings.warn("old", DeprecationWarning, stacklevel=1)


COMMON: dict[str, tuple[Act, Status]] = {
    "folder": (remove_the_folder_it_is_in, Status.SUCCEEDED),
    "environment": (lambda: os.environ.clear(), Status.SUCCEEDED),
    "socket timeout": (lambda: socket.setdefaulttimeout(0.000_001), Status.SUCCEEDED),
    "recursion limit": (lambda: sys.setrecursionlimit(400), Status.SUCCEEDED),
    "locale": (speak_plain_c, Status.SUCCEEDED),
    "no logging": (lambda: logging.disable(logging.CRITICAL), Status.SUCCEEDED),
    "warnings": (warn_as_an_error, Status.FAILED),
}


@pytest.mark.parametrize(("act", "verdict"), COMMON.values(), ids=COMMON.keys())
def test_what_a_handler_changes_for_the_whole_process_keeps_no_verdict_from_being_recorded(
    run_between: RunBetween, process_put_back: None, act: Act, verdict: Status
) -> None:
    witnesses = run_between(act)

    assert witnesses.misbehaved.status == verdict, witnesses.misbehaved.last_error
    witnesses.assert_nothing_reached_the_next_job()


def test_the_folder_and_the_environment_are_not_put_back(
    run_between: RunBetween, process_put_back: None, tmp_path: Path
) -> None:
    """Other threads of the worker use them at the same time: a handler must not change them."""

    def act() -> None:
        os.chdir("/")
        os.environ["JOBQUEUE_SHADE"] = "blue"

    witnesses = run_between(act, look=lambda: [os.getcwd(), os.environ["JOBQUEUE_SHADE"]])

    (_thread, before), (_same_thread, after) = witnesses.seen
    assert before == [str(tmp_path), "none"]
    assert after == ["/", "blue"]


# --- arguments and transactions ----------------------------------------------------------------


def test_arguments_that_a_handler_changed_are_as_they_were_for_its_retry(
    handlers: Registry,
) -> None:
    seen: list[Any] = []

    @handler(name="empties", backoff=at_once, max_attempts=3)
    def empties(basket: dict[str, list[int]]) -> None:
        seen.append(str(basket))
        basket["fruit"].clear()
        basket["eaten"] = [1]
        raise ValueError("still hungry")

    job = empties.enqueue(basket={"fruit": [1, 2]})
    burst(threads=1)

    assert seen == ["{'fruit': [1, 2]}"] * 3
    assert ProcessingJob.objects.get(pk=job.pk).payload == {"basket": {"fruit": [1, 2]}}


def test_a_callback_that_fails_after_the_commit_fails_the_attempt_and_undoes_nothing(
    run_between: RunBetween,
) -> None:
    def act() -> None:
        with transaction.atomic():
            sql("INSERT INTO processing_jobs (handler) VALUES ('committed')")
            transaction.on_commit(raising(ValueError("too late")))

    witnesses = run_between(act, look=session_state)

    assert witnesses.verdict == (Status.FAILED, "ValueError: too late")
    assert ProcessingJob.objects.filter(handler="committed").exists()
    witnesses.assert_nothing_reached_the_next_job()


def test_callbacks_of_a_transaction_that_was_left_open_never_run(run_between: RunBetween) -> None:
    ran: list[str] = []

    def act() -> None:
        leave_atomic()
        transaction.on_commit(lambda: ran.append("the callback"))

    def look() -> list[str]:
        with transaction.atomic():
            transaction.on_commit(lambda: None)
        return list(ran)

    run_between(act, look).assert_nothing_reached_the_next_job()

    assert ran == []
