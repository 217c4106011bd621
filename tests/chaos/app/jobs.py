"""The handlers of the chaos suite. Each writes its effect first, then does what its name says.

Every verdict is signed: the result, or the text of the error, names the claim it comes from. So the
audit can tell whose verdict was recorded, without believing the token in the row.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from django.db import connection, transaction

from django_jobqueue import handler
from django_jobqueue.execution import JobContext
from tests.chaos.app.effects import record_effect

DOOMED_ATTEMPTS = 3
DEADLY_ATTEMPTS = 3

Signed = dict[str, int]


class AttemptFailed(Exception):
    """Whatever went wrong in an attempt, with the attempt's signature."""


def soon(attempts: int) -> float:
    """A backoff that is over before anybody waits for it."""
    return 0.1


def nothing() -> None:
    """The rest of an attempt that is its effect only."""


@handler(takes_context=True, backoff=soon)
def quick(context: JobContext) -> Signed:
    """The effect, and no more."""
    return _attempt(context)


@handler(takes_context=True, backoff=soon)
def slow(context: JobContext, seconds: float) -> Signed:
    """Run on for a while."""
    return _attempt(context, then=lambda: time.sleep(seconds))


@handler(takes_context=True, backoff=soon)
def flaky(context: JobContext) -> Signed:
    """Fail on the first attempt."""
    return _attempt(context, then=_broken if context.attempt == 1 else nothing)


@handler(takes_context=True, backoff=soon, max_attempts=DOOMED_ATTEMPTS)
def doomed(context: JobContext) -> Signed:
    """Fail on every attempt."""
    return _attempt(context, then=_broken)


@handler(takes_context=True, backoff=soon)
def uses_django(context: JobContext) -> Signed:
    """Hold a session of Django's, in a transaction, for some moments."""
    return _attempt(context, then=_query_slowly)


@handler(takes_context=True, backoff=soon)
def kills_once(context: JobContext) -> Signed:
    """Kill the worker between effect and verdict, on the first attempt."""
    return _attempt(context, then=_die if context.attempt == 1 else nothing)


@handler(takes_context=True, backoff=soon, queue="deadly", max_attempts=DEADLY_ATTEMPTS)
def kills_always(context: JobContext) -> Signed:
    """Kill every worker that runs it."""
    return _attempt(context, then=_die)


if not os.environ.get("CHAOS_OLDER_CODE"):

    @handler(takes_context=True, backoff=soon)
    def newest(context: JobContext) -> Signed:
        """What only the newer one of two versions knows."""
        return _attempt(context)


def _attempt(context: JobContext, *, then: Callable[[], None] = nothing) -> Signed:
    token = context.claim.lock_token
    try:
        record_effect(context)
        then()
    except Exception as error:
        raise AttemptFailed(f"token={token}: {error}") from error
    return {"token": token}


def _broken() -> None:
    raise ValueError("broken on purpose")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _query_slowly() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(0.05)")
