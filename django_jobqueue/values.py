"""What one value of a job may be. Each function returns the value to store, or raises `ValueError`
naming what was given and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

NAME_LENGTH = 200
PRIORITY_RANGE = (-100, 100)
MAX_ATTEMPTS_RANGE = (1, 32_767)
LARGEST_LIMIT = 100_000
LONGEST_DELAY = timedelta(days=36_500)
YEARS = (1900, 9000)
_SHOWN = 80


def checked_name(value: object, *, what: str) -> str:
    """A name of a queue, handler or worker, or a key: 1 to 200 characters PostgreSQL can store."""
    if not isinstance(value, str):
        raise ValueError(f"The {what} must be a string, not {shown(value)}.")
    if not value:
        raise ValueError(
            f"The {what} is empty. Leave it out, or give it 1 to {NAME_LENGTH} characters."
        )
    if len(value) > NAME_LENGTH:
        raise ValueError(
            f"The {what} {shown(value)} has {len(value)} characters. The limit is {NAME_LENGTH}."
        )
    if problem := unstorable_text(value):
        raise ValueError(f"The {what} {shown(value)} contains {problem}. Remove it.")
    return plain(value)


def checked_priority(value: object) -> int:
    """A whole number from -100 to 100; larger runs first."""
    return _checked_integer(value, "priority", *PRIORITY_RANGE)


def checked_max_attempts(value: object) -> int:
    """How often the job may be started in one round: 1 to 32,767."""
    return _checked_integer(value, "max_attempts", *MAX_ATTEMPTS_RANGE)


def checked_delay(value: object, *, what: str = "delay") -> float:
    """A time span in seconds, given as a number or a `timedelta`: zero to 36,500 days."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ValueError(f"The {what} must be seconds or a timedelta, not {shown(value)}.")
    if not 0 <= seconds <= LONGEST_DELAY.total_seconds():
        raise ValueError(
            f"The {what} must be from 0 seconds to {LONGEST_DELAY.days} days, not {shown(value)}."
        )
    return float(seconds)


def checked_span(value: object, *, what: str) -> float:
    """A time span like a delay, but longer than nothing."""
    seconds = checked_delay(value, what=what)
    if seconds == 0:
        raise ValueError(f"The {what} must be longer than 0 seconds.")
    return seconds


def checked_instant(value: object, *, what: str = "available_at") -> datetime:
    """A moment: an aware datetime, returned in UTC."""
    if not isinstance(value, datetime):
        raise ValueError(f"The {what} must be an aware datetime, not {shown(value)}.")
    if value.utcoffset() is None:
        raise ValueError(
            f"The {what} {value.isoformat()} has no time zone, so it names no moment."
            " Pass an aware datetime, such as datetime.now(timezone.utc)."
        )
    # Moments that every time zone can show, and psycopg can read.
    if not YEARS[0] <= value.year < YEARS[1]:
        raise ValueError(
            f"The {what} {value.isoformat()} lies outside the years {YEARS[0]} to {YEARS[1]}."
        )
    return value.astimezone(timezone.utc)


def checked_limit(value: object) -> int:
    """How many rows to take at most: a whole number; zero and less are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"The limit must be a whole number, not {shown(value)}.")
    return min(max(value, 0), LARGEST_LIMIT)


def checked_ids(values: Iterable[object]) -> list[int]:
    """Ids of jobs, each a whole number."""
    ids: list[int] = []
    for value in [values] if isinstance(values, (str, bytes)) else values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"The id of a job must be a whole number, not {shown(value)}.")
        ids.append(value)
    return ids


def unstorable_text(value: str) -> str | None:
    """Name what PostgreSQL cannot store of a text, or None."""
    if "\x00" in value:
        return "a NUL character"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "a lone surrogate (half of a character)"
    return None


def plain(text: str) -> str:
    """The characters of a string of any subclass. `str()` would ask an enum for its name."""
    return str.__str__(text)


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, cut short, whatever its repr does."""
    try:
        text = repr(value[:_SHOWN] if isinstance(value, str) else value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _checked_integer(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"The {what} must be a whole number, not {shown(value)}.")
    if not low <= value <= high:
        raise ValueError(f"The {what} must be from {low} to {high}, not {shown(value)}.")
    return int(value)
