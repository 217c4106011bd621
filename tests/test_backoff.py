"""How long a failed job waits: the arithmetic default, and a handler's own policy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from django_jobqueue import handler
from django_jobqueue.backoff import Arithmetic
from django_jobqueue.handlers import Registry, retry_delay
from django_jobqueue.signals import backoff_broken
from tests.app.jobs import fail, fail_at_once


@pytest.fixture
def broken_policies() -> Any:
    """What `backoff_broken` told: the name and the error."""
    told: list[tuple[str, BaseException]] = []

    def listen(*, name: str, error: BaseException, **_kwargs: Any) -> None:
        told.append((name, error))

    backoff_broken.connect(listen)
    yield told
    backoff_broken.disconnect(listen)


@pytest.mark.parametrize(
    ("attempts", "seconds"), [(1, 30), (2, 60), (9, 270), (10, 300), (11, 300), (32_767, 300)]
)
def test_the_default_wait_is_least_of_attempts_and_10_times_30_s(
    attempts: int, seconds: float
) -> None:
    assert Arithmetic()(attempts) == seconds
    assert retry_delay(fail.name, attempts) == seconds


def test_step_and_steps_come_from_the_settings(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"BACKOFF_STEP": 2, "BACKOFF_STEPS": 3}

    assert [retry_delay(fail.name, attempts) for attempts in (1, 2, 3, 4)] == [2, 4, 6, 6]


def test_a_step_of_zero_means_no_wait(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"BACKOFF_STEP": 0}

    assert retry_delay(fail.name, 5) == 0


def test_a_policy_of_zero_is_honoured_and_not_taken_for_no_policy() -> None:
    assert retry_delay(fail_at_once.name, 5) == 0


def test_a_name_that_is_not_registered_waits_the_default() -> None:
    assert retry_delay("nobody.knows", 2) == 60


@pytest.mark.parametrize("wait", [2.5, timedelta(seconds=2.5)])
def test_a_policy_may_answer_seconds_or_a_timedelta(handlers: Registry, wait: Any) -> None:
    @handler(name="waits", backoff=lambda attempts: wait)
    def waits() -> None: ...

    assert retry_delay("waits", 1) == 2.5


def test_a_policy_gets_the_number_of_the_failed_attempt(handlers: Registry) -> None:
    @handler(name="doubles", backoff=lambda attempts: 2.0**attempts)
    def doubles() -> None: ...

    assert [retry_delay("doubles", attempts) for attempts in (1, 2, 3)] == [2, 4, 8]


def raises(attempts: int) -> float:
    raise ZeroDivisionError(attempts)


BROKEN: dict[str, Callable[..., Any]] = {
    "raises": raises,
    "takes nothing": lambda: 1.0,
    "None": lambda attempts: None,
    "text": lambda attempts: "5",
    "negative": lambda attempts: -1,
    "NaN": lambda attempts: float("nan"),
    "infinite": lambda attempts: float("inf"),
    "an int beyond every float": lambda attempts: 10**400,
    "true": lambda attempts: True,
    "overflows": lambda attempts: 2.0 ** (attempts * 10_000),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_policy_is_replaced_by_the_default_and_told(
    kind: str, handlers: Registry, broken_policies: list[tuple[str, BaseException]]
) -> None:
    @handler(name="broken", backoff=BROKEN[kind])
    def broken() -> None: ...

    assert retry_delay("broken", 3) == 90
    assert [name for name, _error in broken_policies] == ["broken"]
