"""`DJANGO_JOBQUEUE`: every setting's default, its zero, its wrong types; names nobody knows."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_jobqueue.conf import Settings, jobqueue_settings, setting_problems

DEFAULTS = {
    "STALE_LOCK_AFTER": 60,
    "HEARTBEAT_INTERVAL": None,
    "RESCUE_INTERVAL": 10,
    "POLL_INTERVAL": 1,
    "SHUTDOWN_TIMEOUT": 30,
    "THREADS": 4,
    "MAX_ATTEMPTS": 5,
    "BACKOFF_STEP": 30,
    "BACKOFF_STEPS": 10,
    "MAX_PAYLOAD_BYTES": 1_048_576,
    "MAX_RESULT_BYTES": 16_777_216,
    "RETENTION": 7 * 86_400,
    "DEAD_LETTER_RETENTION": None,
}
SPANS_OF_ZERO = ["SHUTDOWN_TIMEOUT", "BACKOFF_STEP", "RETENTION", "DEAD_LETTER_RETENTION"]
SPANS_ABOVE_ZERO = ["STALE_LOCK_AFTER", "HEARTBEAT_INTERVAL", "RESCUE_INTERVAL", "POLL_INTERVAL"]
COUNTS = ["THREADS", "MAX_ATTEMPTS", "BACKOFF_STEPS", "MAX_PAYLOAD_BYTES", "MAX_RESULT_BYTES"]
OPTIONAL = ["HEARTBEAT_INTERVAL", "RETENTION", "DEAD_LETTER_RETENTION"]


def problems_of(settings: Any, given: Any) -> list[str]:
    settings.DJANGO_JOBQUEUE = given
    return setting_problems()


def test_these_lists_name_every_setting_once() -> None:
    assert set(DEFAULTS) == {field.name for field in dataclasses.fields(Settings)}
    assert sorted(SPANS_OF_ZERO + SPANS_ABOVE_ZERO + COUNTS) == sorted(DEFAULTS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_setting_has_its_default(settings: Any, name: str) -> None:
    settings.DJANGO_JOBQUEUE = {}

    assert getattr(jobqueue_settings(), name) == DEFAULTS[name]


def test_no_dict_at_all_means_the_defaults(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {}
    del settings.DJANGO_JOBQUEUE

    assert jobqueue_settings() == Settings()


def test_a_setting_is_in_force_as_soon_as_it_changes(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"THREADS": 7}
    assert jobqueue_settings().THREADS == 7

    settings.DJANGO_JOBQUEUE = {"THREADS": 8}
    assert jobqueue_settings().THREADS == 8


@pytest.mark.parametrize("name", SPANS_OF_ZERO)
def test_zero_is_honoured_where_it_means_something(settings: Any, name: str) -> None:
    settings.DJANGO_JOBQUEUE = {name: 0}

    assert getattr(jobqueue_settings(), name) == 0


@pytest.mark.parametrize("name", SPANS_ABOVE_ZERO + COUNTS)
def test_zero_is_refused_where_it_means_nothing(settings: Any, name: str) -> None:
    (problem,) = problems_of(settings, {name: 0})

    assert problem.startswith(f"DJANGO_JOBQUEUE[{name!r}]: The ")


@pytest.mark.parametrize("name", SPANS_OF_ZERO + SPANS_ABOVE_ZERO)
def test_a_span_may_be_seconds_or_a_timedelta(settings: Any, name: str) -> None:
    settings.DJANGO_JOBQUEUE = {name: 1.5}
    assert getattr(jobqueue_settings(), name) == 1.5

    settings.DJANGO_JOBQUEUE = {name: timedelta(seconds=1.5)}
    assert getattr(jobqueue_settings(), name) == 1.5


@pytest.mark.parametrize("name", OPTIONAL)
def test_none_is_a_value_of_the_settings_that_say_so(settings: Any, name: str) -> None:
    settings.DJANGO_JOBQUEUE = {name: None}

    assert getattr(jobqueue_settings(), name) is None


@pytest.mark.parametrize("name", sorted(set(DEFAULTS) - set(OPTIONAL)))
def test_none_is_refused_by_the_others(settings: Any, name: str) -> None:
    (problem,) = problems_of(settings, {name: None})

    assert "not None" in problem


@pytest.mark.parametrize("value", ["5", "", b"5", [], {}, True, False, -1, float("nan")], ids=repr)
@pytest.mark.parametrize("name", DEFAULTS)
def test_a_value_of_a_wrong_type_or_range_is_refused(settings: Any, name: str, value: Any) -> None:
    (problem,) = problems_of(settings, {name: value})

    assert problem.startswith(f"DJANGO_JOBQUEUE[{name!r}]: The ")
    assert repr(value) in problem


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number(settings: Any, name: str) -> None:
    (problem,) = problems_of(settings, {name: 2.0})

    assert "must be a whole number" in problem
    assert "2.0" in problem


def test_max_attempts_has_a_highest_value(settings: Any) -> None:
    assert problems_of(settings, {"MAX_ATTEMPTS": 32_767}) == []
    assert problems_of(settings, {"MAX_ATTEMPTS": 32_768}) == [
        "DJANGO_JOBQUEUE['MAX_ATTEMPTS']: The max_attempts must be from 1 to 32767, not 32768."
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("STALE_LOCK_AFTR", "STALE_LOCK_AFTER"),
        ("threads", "THREADS"),
        ("MAX_ATTEMPT", "MAX_ATTEMPTS"),
        ("BACKOFF_STEPP", "BACKOFF_STEP"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(settings: Any, name: str, meant: str) -> None:
    assert problems_of(settings, {name: 1}) == [
        f"DJANGO_JOBQUEUE has no setting {name!r}. Did you mean {meant!r}?"
    ]


@pytest.mark.parametrize("name", ["QQQQ", "", 7, None, ("a",)], ids=repr)
def test_a_name_like_none_of_ours_is_refused_with_all_of_them(settings: Any, name: Any) -> None:
    (problem,) = problems_of(settings, {name: 1})

    assert problem.startswith(f"DJANGO_JOBQUEUE has no setting {name!r}. Known are: BACKOFF_STEP, ")


@pytest.mark.parametrize("given", [None, [], "", "THREADS", [("THREADS", 1)], 0, False], ids=repr)
def test_what_is_no_dict_is_refused_falsy_values_too(settings: Any, given: Any) -> None:
    (problem,) = problems_of(settings, given)

    assert problem.startswith("DJANGO_JOBQUEUE must be a dict, not ")


def test_another_mapping_will_do(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = UserDict(THREADS=2)

    assert jobqueue_settings().THREADS == 2


# --- values that contradict each other ---------------------------------------------------------


def test_the_heartbeat_beats_four_times_in_the_length_of_a_lock(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 8}

    assert jobqueue_settings().heartbeat_interval == 2


def test_three_heartbeats_must_fit_into_the_length_of_a_lock(settings: Any) -> None:
    assert problems_of(settings, {"STALE_LOCK_AFTER": 60, "HEARTBEAT_INTERVAL": 20}) == []

    (problem,) = problems_of(settings, {"STALE_LOCK_AFTER": 60, "HEARTBEAT_INTERVAL": 20.1})

    assert "'HEARTBEAT_INTERVAL'] is 20.1 s" in problem
    assert "Set it to at most 20, or leave it out" in problem


def test_a_heartbeat_is_compared_with_the_default_lock_too(settings: Any) -> None:
    (problem,) = problems_of(settings, {"HEARTBEAT_INTERVAL": 59})

    assert "STALE_LOCK_AFTER (60 s)" in problem


def test_the_longest_wait_must_be_one_that_can_be_recorded(settings: Any) -> None:
    (problem,) = problems_of(settings, {"BACKOFF_STEP": timedelta(days=36_500)})

    assert "exceeds 36500 days. Lower one of them." in problem


def test_any_number_of_steps_will_do_because_attempts_end_first(settings: Any) -> None:
    assert problems_of(settings, {"BACKOFF_STEPS": 10**12}) == []


# --- all at once -------------------------------------------------------------------------------


def test_every_problem_is_told_at_once(settings: Any) -> None:
    problems = problems_of(settings, {"THREAD": 1, "POLL_INTERVAL": 0, "MAX_ATTEMPTS": "5"})

    assert len(problems) == 3


def test_reading_a_bad_setting_raises_every_problem(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"THREAD": 1, "POLL_INTERVAL": 0}

    with pytest.raises(ImproperlyConfigured, match=r"'THREAD'.* 'THREADS'.*POLL_INTERVAL"):
        jobqueue_settings()
