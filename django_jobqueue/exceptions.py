"""Everything this package raises, and what a handler may raise to say how its attempt ended."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any


class JobQueueError(Exception):
    """The base of every error of this package."""


class UnknownHandler(JobQueueError, LookupError):
    """No handler is registered under the name."""


class DuplicateHandler(JobQueueError, ValueError):
    """Two functions ask for one handler name."""


class InvalidPayload(JobQueueError, ValueError):
    """The payload cannot be stored as JSON as it is, or does not fit the handler's signature."""


class NoJobAvailable(JobQueueError):
    """Nothing is due for this worker now."""


class LockLost(JobQueueError):
    """The lock of this claim is gone: another worker has the job, or it ended. Nothing changed."""


class NotDeadLetter(JobQueueError):
    """Only a dead letter can be requeued. Nothing was changed."""


class Retry(Exception):
    """Raised by a handler: this attempt failed, run the job again after `after`.

    `after` is in seconds or a `timedelta`. The attempt counts: a job out of attempts becomes a
    dead letter all the same.
    """

    def __init__(self, reason: str = "The handler asked for a retry.", *, after: float | timedelta):
        super().__init__(reason)
        self.after = after

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would forget `after`, and break the process pool of a handler that uses one.
        return partial(type(self), after=self.after), self.args


class DeadLetter(Exception):
    """Raised by a handler: do not try again, a person has to look at this job."""

    def __init__(self, reason: str):
        super().__init__(reason)
