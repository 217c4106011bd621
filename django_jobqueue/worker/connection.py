"""Connections for the worker's own books, which no handler can spoil, exhaust or close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

_OUTAGE_CLASSES = frozenset(
    {
        "08",  # connection
        "25",  # the session became read-only: a primary that is one no more
        "40",  # serialization, deadlock
        "53",  # out of connections, memory or disk
        "55",  # a lock was not to be had
        "57",  # shutting down, starting up, cancelled, timed out
    }
)

#: Of class 08, but what a message that is too large gets: it would be too large again.
_PROTOCOL_VIOLATION = "08P01"


@contextmanager
def bookkeeping_connection(alias: str, role: str) -> Iterator[BaseDatabaseWrapper]:
    """Within, this thread's connection to `alias` is one of its own.

    Whatever the project configured for requests: in autocommit (a claim must be committed before a
    handler runs), READ COMMITTED (what the moves are written for), outside any pool, kept open, and
    named `django_jobqueue <role>` in `pg_stat_activity`.
    """
    usual = connections[alias]
    own = usual.copy()
    own.settings_dict = {
        **own.settings_dict,
        "AUTOCOMMIT": True,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": False,
        "OPTIONS": _options(own.settings_dict.get("OPTIONS", {}), role),
    }
    connections[alias] = own
    try:
        yield own
    finally:
        own.close()
        connections[alias] = usual


def leave_clean() -> None:
    """After a handler: nothing of its sessions reaches this thread's next job.

    Sessions with an open transaction are closed, those that live on begin anew.
    """
    for connection in connections.all(initialized_only=True):
        try:
            if is_spoilt(connection):
                throw_away(connection)
            else:
                _begin_anew(connection)
                connection.close_if_unusable_or_obsolete()
        except Exception:
            throw_away(connection)


def is_spoilt(connection: BaseDatabaseWrapper) -> bool:
    """Whether somebody left a transaction open, or autocommit changed."""
    if connection.in_atomic_block:
        return True
    if connection.connection is None:
        return False
    if connection.autocommit != connection.settings_dict["AUTOCOMMIT"]:
        return True
    # Django knows nothing of a BEGIN in plain SQL.
    return connection.vendor == "postgresql" and bool(connection.connection.info.transaction_status)


def throw_away(connection: BaseDatabaseWrapper) -> None:
    """Close the session, and forget the wrapper, whose state says that it is inside a block."""
    try:
        if connection.connection is not None:
            connection.connection.close()
        connection.close()  # gives a pool its place back
    finally:
        del connections[connection.alias]


def reopen(connection: BaseDatabaseWrapper) -> None:
    """Replace the session of a connection that is kept, whatever state it is in."""
    if connection.connection is not None:
        connection.connection.close()
    connection.connect()


def _begin_anew(connection: BaseDatabaseWrapper) -> None:
    """Forget what was SET, prepared, listened to or locked in a session that will be used again."""
    outlives_the_job = connection.settings_dict["CONN_MAX_AGE"] != 0 or getattr(
        connection, "pool", None
    )
    if connection.connection is None or connection.vendor != "postgresql" or not outlives_the_job:
        return
    connection.connection.execute("DISCARD ALL")
    connection.init_connection_state()


def is_outage(error: BaseException) -> bool:
    """Whether waiting can help: the database is away, or too busy to answer."""
    if not isinstance(error, Error):
        return False
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    if sqlstate is None:
        return isinstance(error, (OperationalError, InterfaceError))
    return sqlstate != _PROTOCOL_VIOLATION and str(sqlstate)[:2] in _OUTAGE_CLASSES


def _options(configured: dict[str, Any], role: str) -> dict[str, Any]:
    kept = {k: v for k, v in configured.items() if k not in ("pool", "isolation_level")}
    return {**kept, "application_name": f"django_jobqueue {role}"}
