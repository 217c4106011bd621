"""What `enqueue` is asked for, checked before any SQL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django_jobqueue.conf import Settings
from django_jobqueue.exceptions import JobQueueError
from django_jobqueue.handlers import EnqueueOptions, Handler, registry
from django_jobqueue.payload import checked_payload
from django_jobqueue.values import (
    checked_delay,
    checked_instant,
    checked_max_attempts,
    checked_name,
    checked_priority,
    shown,
)

_ARGUMENTS = ("handler", "payload", *EnqueueOptions.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """One job to insert, every value checked and in its final form."""

    handler: str
    queue: str
    payload: dict[str, Any]
    payload_text: str
    priority: int
    max_attempts: int
    delay: float
    available_at: datetime | None
    idempotency_key: str | None

    @property
    def key_order(self) -> str:
        """Sorts jobs without a key first, the others by their key."""
        return self.idempotency_key or ""

    def row(self) -> tuple[Any, ...]:
        """The values in the order of the columns of the INSERT statements in `queue.py`."""
        return (
            self.queue,
            self.handler,
            self.payload_text,
            self.priority,
            self.max_attempts,
            self.available_at,
            self.delay,
            self.idempotency_key,
        )


def checked_new_job(
    settings: Settings,
    *,
    handler: str | Handler[..., Any],
    payload: dict[str, Any] | None = None,
    queue: str | None = None,
    priority: int | None = None,
    delay: float | timedelta | None = None,
    available_at: datetime | None = None,
    max_attempts: int | None = None,
    idempotency_key: str | None = None,
) -> NewJob:
    """Every argument checked, with the most specific value that is not None."""
    if delay is not None and available_at is not None:
        raise ValueError("Both delay and available_at are given. Pass one of them.")
    found = _registered(handler)
    kept, text = checked_payload(payload, limit=settings.MAX_PAYLOAD_BYTES)
    found.check_payload(kept)
    if max_attempts is None:
        max_attempts = found.max_attempts
    return NewJob(
        handler=found.name,
        queue=found.queue if queue is None else checked_name(queue, what="queue"),
        payload=kept,
        payload_text=text,
        priority=found.priority if priority is None else checked_priority(priority),
        max_attempts=(
            settings.MAX_ATTEMPTS if max_attempts is None else checked_max_attempts(max_attempts)
        ),
        delay=0.0 if delay is None else checked_delay(delay),
        available_at=None if available_at is None else checked_instant(available_at),
        idempotency_key=(
            None
            if idempotency_key is None
            else checked_name(idempotency_key, what="idempotency key")
        ),
    )


def checked_new_jobs(settings: Settings, items: Iterable[Mapping[str, Any]]) -> list[NewJob]:
    """Each item a mapping of `checked_new_job`'s arguments. An error names the item's position."""
    return [_checked_item(settings, position, item) for position, item in enumerate(items)]


def _checked_item(settings: Settings, position: int, item: object) -> NewJob:
    try:
        if not isinstance(item, Mapping) or "handler" not in item:
            raise ValueError(f"A mapping with 'handler' is wanted, not {shown(item)}.")
        if unknown := item.keys() - _ARGUMENTS:
            raise ValueError(
                f"enqueue has no argument {shown(next(iter(unknown)))}."
                f" Known are: {', '.join(_ARGUMENTS)}."
            )
        return checked_new_job(settings, **item)
    except (JobQueueError, ValueError) as error:
        same_kind = type(error) if isinstance(error, JobQueueError) else ValueError
        raise same_kind(f"Job {position} of the batch: {error} Nothing was enqueued.") from error


def _registered(handler: str | Handler[..., Any]) -> Handler[..., Any]:
    return registry.get(handler.name if isinstance(handler, Handler) else handler)
