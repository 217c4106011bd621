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
    """After a handler: no open transaction and no broken session reaches this thread's next job.

    What was `SET` for a session lives as long as the session, which CONN_MAX_AGE decides.
    """
    for connection in connections.all(initialized_only=True):
        if connection.connection is None:
            continue
        if connection.in_atomic_block or _in_transaction(connection):
            _throw_away(connection)
        else:
            connection.close_if_unusable_or_obsolete()


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


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    return bool(connection.connection.info.transaction_status)  # 0: idle


def _throw_away(connection: BaseDatabaseWrapper) -> None:
    """Close the session, and forget the wrapper, whose state says that it is inside a block."""
    connection.connection.close()
    connection.close()  # gives a pool its place back
    del connections[connection.alias]
