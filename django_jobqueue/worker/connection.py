"""Connections for the worker's own books, which no handler can spoil, exhaust or close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobqueue.worker.watchdog import Conversation

#: What libpq leaves to the system, which waits for minutes or hours. Seconds, but the last one.
_NOTICES_A_DEAD_PEER = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


@contextmanager
def bookkeeping_connection(alias: str, role: str) -> Iterator[BaseDatabaseWrapper]:
    """Within, this thread's connection to `alias` is one of its own.

    Whatever the project configured for requests: in autocommit (a claim must be committed before a
    handler runs), READ COMMITTED (what the moves are written for), outside any pool, kept open,
    quick to notice a peer that is gone, and named `django_jobqueue <role>` in `pg_stat_activity`.
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


def leave_clean(conversation: Conversation) -> None:
    """After a handler: nothing of its sessions reaches this thread's next job.

    Sessions with an open transaction are closed, those that live on begin anew. One that does not
    answer is cut off by the watchdog of this conversation.
    """
    for connection in connections.all(initialized_only=True):
        try:
            with conversation.asking(connection):
                _leave_session_clean(connection)
        except Exception:
            with suppress(Exception):
                throw_away(connection)


def _leave_session_clean(connection: BaseDatabaseWrapper) -> None:
    if is_spoilt(connection):
        throw_away(connection)
    else:
        _begin_anew(connection)
        connection.close_if_unusable_or_obsolete()


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
    if connection.connection is None or connection.vendor != "postgresql":
        return
    if connection.settings_dict["CONN_MAX_AGE"] == 0 and not getattr(connection, "pool", None):
        return  # it is closed now
    connection.connection.execute("DISCARD ALL")
    connection.init_connection_state()


def _options(configured: dict[str, Any], role: str) -> dict[str, Any]:
    kept = {k: v for k, v in configured.items() if k not in ("pool", "isolation_level")}
    return {**_NOTICES_A_DEAD_PEER, **kept, "application_name": f"django_jobqueue {role}"}
