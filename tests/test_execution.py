"""`execute`: whatever a handler does, an outcome comes back that can be recorded."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from django_jobqueue import DeadLetter, LockLost, Retry, handler
from django_jobqueue.execution import JobContext, execute
from django_jobqueue.handlers import Registry
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Failed, Outcome, Refused, Succeeded
from tests.app import jobs
from tests.rows import sql

A_MINUTE = 60.0


def claimed(name: str, payload: dict[str, Any] | None = None, *, attempt: int = 1) -> JobContext:
    """A job as a worker holds it. `execute` never asks the database about it."""
    job = ProcessingJob(pk=7, handler=name, payload=payload or {}, attempts=attempt, max_attempts=5)
    return JobContext(job, good_until=time.monotonic() + A_MINUTE)


def executed(function: Any, **payload: Any) -> Outcome:
    return execute(claimed(function.name, payload))


def handler_that(act: Callable[[], Any]) -> str:
    """Register a handler that does this, and return its name."""

    @handler(name="does")
    def does() -> Any:
        return act()

    return does.name


def outcome_of(act: Callable[[], Any]) -> Outcome:
    return execute(claimed(handler_that(act)))


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


# --- success -----------------------------------------------------------------------------------


def test_what_the_handler_returns_is_the_result() -> None:
    outcome = executed(jobs.add, a=1, b=2)

    assert isinstance(outcome, Succeeded)
    assert outcome.result == 3


@pytest.mark.parametrize("value", [None, 0, 0.0, False, "", [], {}], ids=repr)
def test_a_falsy_result_is_kept_as_it_is(value: Any) -> None:
    outcome = executed(jobs.echo, value=value)

    assert isinstance(outcome, Succeeded)
    assert outcome.result == value
    assert type(outcome.result) is type(value)


def test_a_tuple_is_kept_as_the_list_that_comes_back(handlers: Registry) -> None:
    outcome = outcome_of(lambda: (1, (2,)))

    assert isinstance(outcome, Succeeded)
    assert outcome.result == [1, [2]]


def test_an_outcome_tells_how_long_the_handler_ran() -> None:
    outcome = executed(jobs.sleep, seconds=0.05)

    assert 0.05 <= outcome.seconds < 5


def test_an_outcome_belongs_to_the_job_it_was_claimed_as() -> None:
    context = claimed(jobs.noop.name)

    assert execute(context).job is context.claim


# --- results that cannot be kept ---------------------------------------------------------------


def loop() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1, 2}, "The result is of type set, which is not JSON."),
        ({"ids": [uuid.UUID(int=1)]}, "The result.ids[0] is of type UUID"),
        (float("nan"), "The result is nan, which JSON does not know."),
        ("\x00", "The result contains a NUL character"),
        ({"\ud800": 1}, "The result has a key with a lone surrogate"),
        ({1: 2}, "The result has a key of type int."),
        (loop(), "or contains itself"),
        (1e300, "back as integers"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_result_that_cannot_be_kept_refuses_the_job_because_its_work_is_done(
    handlers: Registry, value: Any, reason: str
) -> None:
    outcome = outcome_of(lambda: value)

    assert isinstance(outcome, Refused)
    assert outcome.failure.error.startswith(
        "The handler finished, but what it returned cannot be kept. "
    )
    assert reason in outcome.failure.error


# --- failure -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("broken"),
        SystemExit(3),
        SystemExit(),
        KeyboardInterrupt(),
        GeneratorExit(),
        MemoryError(),
        RecursionError("too deep"),
        StopIteration(),
        StopAsyncIteration(),
        asyncio.CancelledError(),
        AssertionError(),
        BaseException("the root"),
        LockLost("stop"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_handler_raises_is_a_failed_attempt(
    handlers: Registry, error: BaseException
) -> None:
    outcome = outcome_of(raising(error))

    assert isinstance(outcome, Failed)
    assert type(error).__name__ in outcome.failure.error
    assert outcome.delay == 30


def test_a_real_recursion_without_end_is_a_failed_attempt(handlers: Registry) -> None:
    def forever() -> None:
        forever()

    outcome = outcome_of(forever)

    assert isinstance(outcome, Failed)
    assert outcome.failure.error.startswith("RecursionError: ")


def test_a_failure_has_the_traceback_down_to_the_handler() -> None:
    outcome = executed(jobs.fail, message="no paper")

    assert isinstance(outcome, Failed)
    assert outcome.failure.error == "ValueError: no paper"
    assert "raise ValueError(message)" in outcome.failure.traceback


def test_a_payload_that_no_longer_fits_is_a_failed_attempt() -> None:
    outcome = execute(claimed(jobs.add.name, {"a": 1, "renamed": 2}))

    assert isinstance(outcome, Failed)
    assert "unexpected keyword argument 'renamed'" in outcome.failure.error


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_a_failure_waits_the_backoff_of_its_attempt(attempt: int) -> None:
    outcome = execute(claimed(jobs.fail.name, attempt=attempt))

    assert isinstance(outcome, Failed)
    assert outcome.delay == attempt * 30


def test_a_failure_waits_what_the_handlers_policy_says() -> None:
    outcome = executed(jobs.fail_at_once)

    assert isinstance(outcome, Failed)
    assert outcome.delay == 0


def test_a_broken_policy_does_not_hide_the_failure(handlers: Registry) -> None:
    @handler(name="broken", backoff=lambda attempts: 1 / 0)
    def broken() -> None:
        raise ValueError("the real reason")

    outcome = execute(claimed("broken"))

    assert isinstance(outcome, Failed)
    assert outcome.failure.error == "ValueError: the real reason"
    assert outcome.delay == 30


def test_a_name_that_is_not_registered_is_refused_with_a_reason() -> None:
    outcome = execute(claimed("os.system", {"command": "true"}))

    assert isinstance(outcome, Refused)
    assert outcome.failure.error == "No handler named 'os.system' is known here."


def test_an_outcome_keeps_neither_the_exception_nor_what_it_held(handlers: Registry) -> None:
    class Heavy:
        """A local variable of the handler."""

    seen: list[weakref.ref[Heavy]] = []

    def act() -> None:
        heavy = Heavy()
        seen.append(weakref.ref(heavy))
        raise ValueError("broken")

    outcome = outcome_of(act)
    gc.collect()

    assert isinstance(outcome, Failed)
    assert seen[0]() is None


# --- what a handler says -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "delay"),
    [(0, 0), (0.5, 0.5), (7, 7), (timedelta(minutes=2), 120), (timedelta(0), 0)],
    ids=repr,
)
def test_a_retry_waits_as_long_as_it_says(
    handlers: Registry, after: float | timedelta, delay: float
) -> None:
    outcome = outcome_of(raising(Retry("not yet", after=after)))

    assert isinstance(outcome, Failed)
    assert outcome.delay == delay
    assert outcome.failure.error == "not yet"


@pytest.mark.parametrize(
    "after",
    [-1, float("nan"), float("inf"), 10**400, None, "5", True, timedelta(-1), timedelta(36_501)],
    ids=lambda after: repr(after)[:20],
)
def test_a_retry_that_says_no_span_waits_the_backoff(handlers: Registry, after: Any) -> None:
    outcome = outcome_of(raising(Retry(after=after)))

    assert isinstance(outcome, Failed)
    assert outcome.delay == 30


class ForgetfulRetry(Retry):
    def __init__(self) -> None:
        Exception.__init__(self, "later")


class SilentDeadLetter(DeadLetter):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_retry_that_forgot_its_span_waits_the_backoff(handlers: Registry) -> None:
    outcome = outcome_of(raising(ForgetfulRetry()))

    assert isinstance(outcome, Failed)
    assert outcome.delay == 30


def test_a_retry_without_a_reason_says_that_the_handler_asked() -> None:
    outcome = executed(jobs.again, after=1)

    assert isinstance(outcome, Failed)
    assert outcome.failure.error == "The handler asked for a retry."
    assert outcome.delay == 1


def test_a_dead_letter_is_refused_in_the_handlers_own_words() -> None:
    outcome = executed(jobs.refuse, reason="card was closed")

    assert isinstance(outcome, Refused)
    assert outcome.failure.error == "card was closed"
    assert "raise DeadLetter(reason)" in outcome.failure.traceback


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DeadLetter("a\x00b"), "a\ufffdb"),
        (DeadLetter("\ud800"), "\ufffd"),
        (DeadLetter(""), "django_jobqueue.exceptions.DeadLetter"),
        (DeadLetter(7), "7"),  # type: ignore[arg-type]
        (SilentDeadLetter("unsaid"), "(its text could not be read)"),
    ],
    ids=["NUL", "surrogate", "empty", "number", "raises"],
)
def test_a_reason_is_kept_as_text_that_can_be_stored(
    handlers: Registry, error: DeadLetter, said: str
) -> None:
    outcome = outcome_of(raising(error))

    assert isinstance(outcome, Refused)
    assert outcome.failure.error == said


def test_a_reason_of_50_megabytes_is_cut(handlers: Registry) -> None:
    outcome = outcome_of(raising(DeadLetter("x" * 50_000_000)))

    assert isinstance(outcome, Refused)
    assert len(outcome.failure.error) <= 10_000


# --- async -------------------------------------------------------------------------------------


def test_an_async_handler_is_awaited() -> None:
    outcome = executed(jobs.add_async, a=1, b=2)

    assert isinstance(outcome, Succeeded)
    assert outcome.result == 3


@pytest.mark.parametrize(
    "error",
    [ValueError("broken"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_an_async_handler_raises_is_a_failed_attempt(
    handlers: Registry, error: BaseException
) -> None:
    @handler(name="does")
    async def does() -> None:
        await asyncio.sleep(0)
        raise error

    outcome = execute(claimed("does"))

    assert isinstance(outcome, Failed)
    assert type(error).__name__ in outcome.failure.error


def test_an_async_handler_may_ask_for_a_retry(handlers: Registry) -> None:
    @handler(name="does")
    async def does() -> None:
        raise Retry(after=5)

    outcome = execute(claimed("does"))

    assert isinstance(outcome, Failed)
    assert outcome.delay == 5


def test_a_plain_function_that_returns_a_coroutine_is_awaited(handlers: Registry) -> None:
    async def inner() -> int:
        return 3

    outcome = outcome_of(inner)

    assert isinstance(outcome, Succeeded)
    assert outcome.result == 3


@pytest.mark.django_db
def test_an_async_handler_uses_the_connection_of_the_thread_that_runs_it(
    handlers: Registry,
) -> None:
    sql("CREATE TEMPORARY TABLE only_in_this_session (id int)")

    @handler(name="does")
    async def does() -> list[int]:
        rows = await sync_to_async(sql)("SELECT count(*)::int FROM only_in_this_session")
        thread = await sync_to_async(threading.get_ident)()
        return [rows[0][0], thread]

    outcome = execute(claimed("does"))

    assert isinstance(outcome, Succeeded)
    assert outcome.result == [0, threading.get_ident()]


# --- context -----------------------------------------------------------------------------------


def test_a_handler_may_take_the_context_first(handlers: Registry) -> None:
    @handler(name="takes", takes_context=True)
    def takes(context: JobContext, word: str) -> list[Any]:
        return [context.job_id, context.attempt, context.lock_lost, word]

    outcome = execute(claimed("takes", {"word": "hello"}, attempt=3))

    assert isinstance(outcome, Succeeded)
    assert outcome.result == [7, 3, False, "hello"]


def test_an_async_handler_may_take_the_context_too(handlers: Registry) -> None:
    @handler(name="takes", takes_context=True)
    async def takes(context: JobContext) -> int:
        return context.attempt

    outcome = execute(claimed("takes", attempt=2))

    assert isinstance(outcome, Succeeded)
    assert outcome.result == 2


def test_a_flaky_handler_succeeds_on_the_attempt_it_was_told() -> None:
    outcomes = [
        execute(claimed(jobs.flaky.name, {"until": 3}, attempt=attempt)) for attempt in (1, 2, 3)
    ]

    assert [type(outcome) for outcome in outcomes] == [Failed, Failed, Succeeded]


def test_a_lock_is_held_until_the_moment_that_is_sure() -> None:
    context = claimed(jobs.noop.name)

    assert not context.lock_lost
    context.check()


def test_a_lock_is_lost_when_its_time_is_over_whatever_the_heartbeat_says() -> None:
    context = JobContext(ProcessingJob(pk=7), good_until=time.monotonic())

    assert context.lock_lost
    with pytest.raises(LockLost, match="Job 7: the lock is lost, so this attempt stops"):
        context.check()


def test_an_extended_lock_is_held_longer() -> None:
    context = JobContext(ProcessingJob(pk=7), good_until=time.monotonic())

    context.extended(good_until=time.monotonic() + A_MINUTE)

    assert not context.lock_lost


def test_a_lock_that_another_claim_has_stays_lost() -> None:
    context = claimed(jobs.noop.name)

    context.lose_lock()
    context.extended(good_until=time.monotonic() + A_MINUTE)

    assert context.lock_lost


def test_a_handler_that_checks_a_lost_lock_stops_there(handlers: Registry) -> None:
    reached: list[str] = []

    @handler(name="long", takes_context=True)
    def long(context: JobContext) -> None:
        context.lose_lock()
        context.check()
        reached.append("the rest")

    outcome = execute(claimed("long"))

    assert isinstance(outcome, Failed)
    assert "LockLost" in outcome.failure.error
    assert reached == []


# --- the database ------------------------------------------------------------------------------


def test_executing_a_job_asks_the_database_nothing() -> None:
    # Without the mark `django_db` any query is an error.
    assert isinstance(executed(jobs.add, a=1), Succeeded)
    assert isinstance(executed(jobs.fail), Failed)
