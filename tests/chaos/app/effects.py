"""What a handler does to the world, written down at once and for good.

Over connections of its own, in autocommit: no rollback of the worker's takes an effect back, as
none would take back a letter that was posted.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import psycopg

from django_jobqueue.execution import JobContext

APPLICATION_NAME = "chaos effects"

_of_this_thread = threading.local()


def record_effect(context: JobContext) -> None:
    """One row for this attempt. On an error it is unknown whether there is one."""
    try:
        _session().execute(
            "INSERT INTO chaos_effects (job_id, lock_token, attempt, pid) VALUES (%s, %s, %s, %s)",
            [context.job_id, context.claim.lock_token, context.attempt, os.getpid()],
        )
    except psycopg.Error:
        _forget_session()
        raise


def _session() -> psycopg.Connection[Any]:
    session: psycopg.Connection[Any] | None = getattr(_of_this_thread, "session", None)
    if session is None:
        session = _of_this_thread.session = psycopg.connect(
            host=os.environ["CHAOS_EFFECTS_HOSTS"],
            port=os.environ["CHAOS_EFFECTS_PORTS"],
            user="postgres",
            password=os.environ["CHAOS_PASSWORD"],
            dbname="postgres",
            application_name=APPLICATION_NAME,
            connect_timeout=3,
            target_session_attrs="read-write",
            autocommit=True,
        )
    return session


def _forget_session() -> None:
    session: psycopg.Connection[Any] | None = getattr(_of_this_thread, "session", None)
    _of_this_thread.session = None
    if session is not None:
        session.close()
