"""Run one job and say how it ended. Nothing here writes to the database."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Coroutine
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync

from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.exceptions import LockLost
from django_jobqueue.failure import described
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


def execute(context: JobContext) -> Outcome:
    """Run the handler of a claimed job.

    Whatever it raises, `SystemExit` and other `BaseException` included, is a failed attempt: the
    thread that runs it goes on with the next job.
    """
    started = time.perf_counter()
    outcome = _outcome(context)
    return dataclasses.replace(outcome, seconds=time.perf_counter() - started)


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
    return _awaited(returned) if inspect.iscoroutine(returned) else returned


@async_to_sync
async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    # Not asyncio.run: what the coroutine sends to `sync_to_async`, the ORM above all, runs on this
    # thread, over the connection that is cleaned up after the job.
    return await coroutine


def _success(job: ProcessingJob, result: Any) -> Outcome:
    try:
        kept = checked_result(result, limit=jobqueue_settings().MAX_RESULT_BYTES)
    except Exception as error:
        # Its work is done: a retry would do it again and end here again.
        reason = f"The handler finished, but what it returned cannot be kept. {error}"
        return Refused(job=job, failure=described(reason))
    return Succeeded(job=job, result=kept)
