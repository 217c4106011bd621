"""What an error of the database means for a caller, by its SQLSTATE.

The classes are those of PostgreSQL's appendix "Error Codes".
"""

from __future__ import annotations

from django.db import Error, InterfaceError, OperationalError

_OUTAGE_CLASSES = frozenset(
    {
        "08",  # connection
        "25",  # the session became read-only: a primary that is one no more
        "40",  # serialization, deadlock
        "53",  # out of connections, memory or disk
        "55",  # a lock was not to be had
        "57",  # shutting down, starting up, cancelled, timed out
        "58",  # the operating system: a disk that fails
    }
)

#: What PostgreSQL says of a message that is too large, and would be again. Poolers use the same
#: state for all that goes wrong between them and the server.
_PROTOCOL_VIOLATION, _TOO_LARGE = "08P01", "message length"

_REFUSAL_CLASSES = frozenset(
    {
        "09",  # a trigger's action
        "22",  # a value
        "23",  # a constraint
        "27",  # a trigger that changed the row meanwhile
        "38",  # a function that a trigger calls
        "39",
        "44",  # a view's check option
        "P0",  # RAISE in a trigger
    }
)


def is_outage(error: BaseException) -> bool:
    """Whether waiting can help: the database is away, or too busy to answer."""
    if not isinstance(error, Error):
        return False
    state = _sqlstate(error)
    if state is None:
        return isinstance(error, (OperationalError, InterfaceError))
    if state == _PROTOCOL_VIOLATION:
        return _TOO_LARGE not in str(error)
    return state[:2] in _OUTAGE_CLASSES


def is_refusal(error: BaseException) -> bool:
    """Whether a trigger or constraint refused a row; without that row the statement may work."""
    return isinstance(error, Error) and (_sqlstate(error) or "")[:2] in _REFUSAL_CLASSES


def _sqlstate(error: Error) -> str | None:
    state = getattr(error.__cause__, "sqlstate", None)
    return None if state is None else str(state)
