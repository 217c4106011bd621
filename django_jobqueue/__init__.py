"""A job queue for Django on the PostgreSQL a project already has."""

from django_jobqueue.exceptions import (
    DeadLetter,
    DuplicateHandler,
    InvalidPayload,
    JobQueueError,
    LockLost,
    NoJobAvailable,
    NotDeadLetter,
    Retry,
    UnknownHandler,
)
from django_jobqueue.execution import JobContext
from django_jobqueue.handlers import handler
from django_jobqueue.states import Status

__version__ = "0.1.0"

__all__ = [
    "DeadLetter",
    "DuplicateHandler",
    "InvalidPayload",
    "JobContext",
    "JobQueueError",
    "LockLost",
    "NoJobAvailable",
    "NotDeadLetter",
    "Retry",
    "Status",
    "UnknownHandler",
    "handler",
]
