"""How one attempt ended: what `execute` returns and `settle` records."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from django_jobqueue.exceptions import DeadLetter, Retry
from django_jobqueue.failure import Failure, described, message_of
from django_jobqueue.handlers import retry_delay
from django_jobqueue.values import checked_delay, shown

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """The handler returned. `result` is JSON, or None for nothing to keep."""

    job: ProcessingJob
    result: Any = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler raised: a retry after `delay` seconds, or a dead letter without attempts left."""

    job: ProcessingJob
    failure: Failure
    delay: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No retry can help: the job becomes a dead letter now, whatever attempts are left."""

    job: ProcessingJob
    failure: Failure
    seconds: float = 0.0


Outcome = Union[Succeeded, Failed, Refused]  # noqa: UP007 - evaluated at run time on Python 3.10


def failed(job: ProcessingJob, error: BaseException | str) -> Failed | Refused:
    """What an error makes of an attempt: `DeadLetter` refuses, `Retry` names its delay, any other
    error waits as long as the handler's backoff says."""
    if not isinstance(error, (BaseException, str)):
        raise TypeError(f"The error must be an exception or a text, not {shown(error)}.")
    if isinstance(error, DeadLetter):
        return Refused(job=job, failure=_said(error))
    if isinstance(error, Retry):
        return Failed(job=job, failure=_said(error), delay=_asked_delay(job, error))
    delay = retry_delay(job.handler, job.attempts)
    return Failed(job=job, failure=described(error), delay=delay)


def _said(error: Exception) -> Failure:
    """The handler's own words, without the class it used to say them."""
    failure = described(error)
    return dataclasses.replace(failure, error=message_of(error) or failure.error)


def _asked_delay(job: ProcessingJob, error: Retry) -> float:
    try:
        return checked_delay(error.after, what="Retry(after=…)")
    except Exception:  # a subclass may do with it what it likes
        return retry_delay(job.handler, job.attempts)
