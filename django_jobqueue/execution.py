"""Run one job and say how it ended. Nothing here writes to the database."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from copy import copy
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync

from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.exceptions import LockLost
from django_jobqueue.failure import TRACEBACK_LENGTH, described, storable
from django_jobqueue.handlers import Handler, registry
from django_jobqueue.outcomes import Outcome, Refused, Succeeded, failed
from django_jobqueue.payload import checked_result

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob


class JobContext:
    """What a handler with `takes_context=True` gets as its first argument.

    `claim` is the job as this worker claimed it, the only one its end is recorded for; what a
    handler does to `job` changes nothing about that. `good_until` is the moment
    (`time.monotonic`) up to which the lock surely holds.
    """

    def __init__(self, claim: ProcessingJob, *, good_until: float) -> None:
        self.claim = claim
        self._good_until = good_until
        self._lost = False
        self._began_at: float | None = None
        self._ended = False
        self._thread_id: int | None = None
        self._cancel_coroutine: Callable[[], object] | None = None
        self._guard = Lock()  # guards the coroutine between its start and a cancel

    @cached_property
    def job(self) -> ProcessingJob:
        """A copy of the job, for the handler to read."""
        return copy(self.claim)

    @property
    def job_id(self) -> int:
        """The job's id."""
        return self.claim.pk

    @property
    def attempt(self) -> int:
        """1 for the first run since the job was enqueued or requeued."""
        return self.claim.attempts

    @property
    def lock_lost(self) -> bool:
        """True when another worker may have this job: nothing of this attempt will be recorded."""
        return self._lost or time.monotonic() >= self._good_until

    def check(self) -> None:
        """Raise `LockLost` when the lock is lost. For long handlers to call now and then."""
        if self.lock_lost:
            raise LockLost(f"Job {self.job_id}: the lock is lost, so this attempt stops.")

    def extended(self, *, good_until: float) -> None:
        """The heartbeat extended the lock."""
        self._good_until = good_until

    def lose_lock(self) -> None:
        """The heartbeat found that the lock belongs to another claim."""
        self._lost = True

    # --- the run, as the worker sees it --------------------------------------------------------

    def begins(self) -> None:
        """The handler starts, on this thread."""
        self._began_at = time.monotonic()
        self._thread_id = threading.get_ident()

    def ends(self) -> None:
        """The attempt has ended, its commit included: no timeout comes any more."""
        self._ended = True

    @property
    def ran_for(self) -> float:
        """Seconds since the handler started; 0 before."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    @property
    def timeout(self) -> float | None:
        """The handler's timeout in seconds."""
        handler = registry.find(self.claim.handler)
        return None if handler is None else handler.timeout

    @property
    def seconds_left(self) -> float:
        """Until the timeout; infinite without one, and when the attempt has ended."""
        if self._ended or (timeout := self.timeout) is None:
            return math.inf
        return timeout - self.ran_for

    def cancel(self) -> None:
        """Whatever the handler still does, its end is not recorded. A coroutine is cancelled; a
        thread can only be told, by `lock_lost`."""
        with self._guard:
            self.lose_lock()
            if self._cancel_coroutine is not None:
                self._cancel_coroutine()

    def runs_coroutine(self, cancel: Callable[[], object]) -> None:
        """The handler is a coroutine, and this cancels it."""
        with self._guard:
            self._cancel_coroutine = cancel
            if self._lost:
                cancel()

    def coroutine_ended(self) -> None:
        """There is nothing left to cancel: its event loop is about to be closed."""
        with self._guard:
            self._cancel_coroutine = None

    def stack(self) -> str:
        """Where the handler's thread is just now."""
        frame = sys._current_frames().get(self._thread_id or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))


def execute(context: JobContext) -> Outcome:
    """Run the handler of a claimed job.

    Whatever it raises, `SystemExit` and other `BaseException` included, is a failed attempt: the
    thread that runs it goes on with the next job.
    """
    context.begins()
    outcome = _outcome(context)
    return dataclasses.replace(outcome, seconds=context.ran_for)


def timed_out(context: JobContext) -> Outcome:
    """What a timeout makes of an attempt: it failed, and its traceback is where it hangs."""
    name, seconds = context.claim.handler, context.timeout
    outcome = failed(context.claim, f"Timed out: {name} ran longer than its {seconds:g} s.")
    stack = storable(context.stack(), length=TRACEBACK_LENGTH)
    stuck = dataclasses.replace(outcome.failure, traceback=stack)
    return dataclasses.replace(outcome, failure=stuck, seconds=context.ran_for)


def _outcome(context: JobContext) -> Outcome:
    job = context.claim
    handler = registry.find(job.handler)
    if handler is None:
        return Refused(
            job=job, failure=described(f"No handler named {job.handler!r} is known here.")
        )
    if job.payload is None:
        return Refused(job=job, failure=described("This row's payload cannot be read as JSON."))
    try:
        result = _called(handler, context)
    except BaseException as error:
        return failed(job, error)
    return _success(job, result)


def _called(handler: Handler[..., Any], context: JobContext) -> Any:
    arguments = (context,) if handler.takes_context else ()
    returned = handler.function(*arguments, **context.claim.payload)
    return _awaited(returned, context) if inspect.iscoroutine(returned) else returned


@async_to_sync
async def _awaited(coroutine: Coroutine[Any, Any, Any], context: JobContext) -> Any:
    # Not asyncio.run: what the coroutine sends to `sync_to_async`, the ORM above all, runs on this
    # thread, over the connection that is cleaned up after the job.
    task = asyncio.current_task()
    assert task is not None
    context.runs_coroutine(partial(task.get_loop().call_soon_threadsafe, task.cancel))
    try:
        return await coroutine
    finally:
        context.coroutine_ended()


def _success(job: ProcessingJob, result: Any) -> Outcome:
    try:
        kept = checked_result(result, limit=jobqueue_settings().MAX_RESULT_BYTES)
    except Exception as error:
        # Its work is done: a retry would do it again and end here again.
        reason = f"The handler finished, but what it returned cannot be kept. {error}"
        return Refused(job=job, failure=described(reason))
    return Succeeded(job=job, result=kept)
