"""The dict `DJANGO_JOBQUEUE` in the project's settings, read and checked here and nowhere else."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured

from django_jobqueue.backoff import Arithmetic
from django_jobqueue.values import (
    LONGEST_DELAY,
    MAX_ATTEMPTS_RANGE,
    checked_delay,
    checked_max_attempts,
    checked_span,
    shown,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting with its default. Spans of time are seconds (a `timedelta` is accepted too)."""

    #: The lock's length: a worker that gives no sign for so long has lost its jobs.
    STALE_LOCK_AFTER: float = 60
    #: How often a worker extends its locks. None: a quarter of STALE_LOCK_AFTER.
    HEARTBEAT_INTERVAL: float | None = None
    #: How often a worker looks for stale locks, also while it is busy.
    RESCUE_INTERVAL: float = 10
    #: How long an idle worker waits before it looks for due jobs again.
    POLL_INTERVAL: float = 1
    #: How long a stopping worker lets running jobs finish.
    SHUTDOWN_TIMEOUT: float = 30
    #: Jobs one worker runs at a time.
    THREADS: int = 4
    #: How often a job is started before it becomes a dead letter.
    MAX_ATTEMPTS: int = 5
    #: The wait after a failed attempt: least(attempts, BACKOFF_STEPS) × BACKOFF_STEP.
    BACKOFF_STEP: float = 30
    BACKOFF_STEPS: int = 10
    #: The largest payload, in bytes of JSON.
    MAX_PAYLOAD_BYTES: int = 1_048_576
    #: The largest result, in bytes of JSON.
    MAX_RESULT_BYTES: int = 16_777_216
    #: How long `prune` keeps succeeded and cancelled jobs. None: for ever.
    RETENTION: float | None = timedelta(days=7).total_seconds()
    #: How long `prune` keeps dead letters. None: for ever.
    DEAD_LETTER_RETENTION: float | None = None

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two extensions of a worker's locks."""
        if self.HEARTBEAT_INTERVAL is None:
            return self.STALE_LOCK_AFTER / 4
        return self.HEARTBEAT_INTERVAL

    @property
    def backoff(self) -> Arithmetic:
        """The policy of handlers that name none."""
        return Arithmetic(step=self.BACKOFF_STEP, most=self.BACKOFF_STEPS)


def jobqueue_settings() -> Settings:
    """The settings in force. Raises `ImproperlyConfigured` with every problem found."""
    try:
        return _checked_once(tuple(_given().items()))
    except (AttributeError, TypeError):  # no dict, or a value that no setting has: it is a problem
        raise ImproperlyConfigured(" ".join(setting_problems())) from None


@functools.lru_cache(maxsize=8)
def _checked_once(given: tuple[tuple[str, Any], ...]) -> Settings:
    """Asked at every move, so that a test may change them; checked once for each set of values."""
    if problems := setting_problems():
        raise ImproperlyConfigured(" ".join(problems))
    return Settings(**_parsed(dict(given)))


def setting_problems() -> list[str]:
    """Everything wrong with `DJANGO_JOBQUEUE`, each with what to do."""
    given = _given()
    if not isinstance(given, Mapping):
        return [f"DJANGO_JOBQUEUE must be a dict, not {shown(given)}."]
    problems = [_unknown(name) for name in given if name not in _PARSERS]
    for name, value in given.items():
        try:
            _PARSERS.get(name, _anything)(value, name)
        except ValueError as error:
            problems.append(f"DJANGO_JOBQUEUE[{name!r}]: {error}")
    return problems or _contradictions(Settings(**_parsed(given)))


def _given() -> Any:
    return getattr(django_settings, "DJANGO_JOBQUEUE", {})


def _contradictions(chosen: Settings) -> list[str]:
    problems = []
    if chosen.heartbeat_interval * 3 > chosen.STALE_LOCK_AFTER:
        problems.append(
            f"DJANGO_JOBQUEUE['HEARTBEAT_INTERVAL'] is {chosen.heartbeat_interval:g} s: fewer than"
            f" three heartbeats fit into STALE_LOCK_AFTER ({chosen.STALE_LOCK_AFTER:g} s), so a"
            " healthy worker could lose its jobs. Set it to at most"
            f" {chosen.STALE_LOCK_AFTER / 3:g}, or leave it out."
        )
    longest_wait = chosen.backoff(MAX_ATTEMPTS_RANGE[1])
    if longest_wait > LONGEST_DELAY.total_seconds():
        problems.append(
            f"DJANGO_JOBQUEUE['BACKOFF_STEP'] ({chosen.BACKOFF_STEP:g} s) times BACKOFF_STEPS"
            f" ({chosen.BACKOFF_STEPS}) exceeds {LONGEST_DELAY.days} days. Lower one of them."
        )
    return problems


def _unknown(name: object) -> str:
    near = difflib.get_close_matches(str(name).upper(), _PARSERS, n=1)
    advice = f"Did you mean {near[0]!r}?" if near else f"Known are: {', '.join(sorted(_PARSERS))}."
    return f"DJANGO_JOBQUEUE has no setting {name!r}. {advice}"


def _parsed(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _PARSERS[name](value, name) for name, value in given.items()}


def _anything(value: object, _name: str) -> object:
    return value


def _span(value: object, name: str) -> float:
    return checked_delay(value, what=name)


def _positive_span(value: object, name: str) -> float:
    return checked_span(value, what=name)


def _optional(parse: Callable[[object, str], float]) -> Callable[[object, str], float | None]:
    return lambda value, name: None if value is None else parse(value, name)


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"The {name} must be a whole number of at least 1, not {shown(value)}.")
    return value


def _attempts(value: object, _name: str) -> int:
    return checked_max_attempts(value)


_PARSERS: dict[str, Callable[[object, str], Any]] = {
    "STALE_LOCK_AFTER": _positive_span,
    "HEARTBEAT_INTERVAL": _optional(_positive_span),
    "RESCUE_INTERVAL": _positive_span,
    "POLL_INTERVAL": _positive_span,
    "SHUTDOWN_TIMEOUT": _span,
    "THREADS": _count,
    "MAX_ATTEMPTS": _attempts,
    "BACKOFF_STEP": _span,
    "BACKOFF_STEPS": _count,
    "MAX_PAYLOAD_BYTES": _count,
    "MAX_RESULT_BYTES": _count,
    "RETENTION": _optional(_span),
    "DEAD_LETTER_RETENTION": _optional(_span),
}
assert {field.name for field in fields(Settings)} == set(_PARSERS)
