"""One value at a time: what is accepted, in which form, and what an error says."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db.models import TextChoices
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from django_jobqueue.values import (
    checked_delay,
    checked_instant,
    checked_max_attempts,
    checked_name,
    checked_priority,
    plain,
    shown,
    unstorable_text,
)


class Lane(TextChoices):
    MAIL = "mail", "Mail"


class Colour(str, Enum):
    RED = "red"


class HostileRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "mail", "shop.jobs.send", "Straße 🚲", " ", "0", "x" * 200])
def test_a_name_of_1_to_200_characters_is_kept_as_it_is(name: str) -> None:
    assert checked_name(name, what="queue") == name


def test_the_limit_of_a_name_counts_characters_and_not_bytes() -> None:
    assert checked_name("🚲" * 200, what="queue") == "🚲" * 200


@pytest.mark.parametrize("name", [Lane.MAIL, Colour.RED, mark_safe("mail")])
def test_a_name_of_a_subclass_of_str_becomes_its_plain_characters(name: str) -> None:
    kept = checked_name(name, what="queue")

    assert type(kept) is str
    assert kept == name


@pytest.mark.parametrize("name", [None, 7, b"mail", ["mail"], gettext_lazy("mail"), object()])
def test_a_name_that_is_no_string_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="The queue must be a string, not "):
        checked_name(name, what="queue")


def test_an_empty_name_is_refused_and_not_taken_for_left_out() -> None:
    with pytest.raises(ValueError, match=r"key is empty\. Leave it out, or give"):
        checked_name("", what="idempotency key")


@pytest.mark.parametrize("length", [201, 300, 10_000_000])
def test_a_name_that_is_too_long_is_refused_with_a_short_message(length: int) -> None:
    with pytest.raises(ValueError, match=rf"has {length} characters. The limit is 200") as caught:
        checked_name("x" * length, what="queue")

    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a\x00b", "a NUL character"),
        ("\ud83d", "a lone surrogate"),
        (chr(0xDC80), "a lone surrogate"),
    ],
)
def test_a_name_that_postgresql_cannot_store_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        checked_name(name, what="queue")

    str(caught.value).encode()  # the message itself can be printed


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [-100, -1, 0, 1, 100])
def test_a_priority_from_minus_100_to_100_is_kept(priority: int) -> None:
    assert checked_priority(priority) == priority


@pytest.mark.parametrize("priority", [-101, 101, 10**30])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(ValueError, match="priority must be from -100 to 100, not "):
        checked_priority(priority)


@pytest.mark.parametrize("priority", [1.5, 1.0, "1", None, True, False, Decimal(1)])
def test_a_priority_that_is_no_whole_number_is_refused(priority: object) -> None:
    with pytest.raises(ValueError, match="priority must be a whole number, not "):
        checked_priority(priority)


@pytest.mark.parametrize("max_attempts", [1, 5, 32_767])
def test_max_attempts_from_1_to_32767_is_kept(max_attempts: int) -> None:
    assert checked_max_attempts(max_attempts) == max_attempts


@pytest.mark.parametrize("max_attempts", [0, -1, 32_768])
def test_max_attempts_out_of_range_is_refused(max_attempts: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 32767, not {max_attempts}"):
        checked_max_attempts(max_attempts)


# --- spans and instants ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (0, 0.0),
        (0.0, 0.0),
        (1.5, 1.5),
        (timedelta(0), 0.0),
        (timedelta(minutes=1), 60.0),
        (timedelta(days=36_500), 36_500 * 86_400.0),
    ],
)
def test_a_delay_is_seconds_or_a_timedelta_and_zero_is_one(
    delay: float | timedelta, seconds: float
) -> None:
    assert checked_delay(delay) == seconds


@pytest.mark.parametrize(
    "delay",
    [
        -1,
        -0.001,
        timedelta(seconds=-1),
        timedelta(days=36_501),
        float("nan"),
        float("inf"),
        float("-inf"),
        10**400,
    ],
)
def test_a_delay_that_is_no_wait_is_refused(delay: float | timedelta) -> None:
    with pytest.raises(ValueError, match="delay must be from 0 seconds to 36500 days"):
        checked_delay(delay)


@pytest.mark.parametrize("delay", [None, "5", True, False, Decimal(5), [5], 5j])
def test_a_delay_of_another_type_is_refused(delay: object) -> None:
    with pytest.raises(ValueError, match="delay must be seconds or a timedelta, not "):
        checked_delay(delay)


def test_an_instant_is_returned_in_utc() -> None:
    noon_in_tokyo = datetime(2030, 1, 1, 12, tzinfo=ZoneInfo("Asia/Tokyo"))

    instant = checked_instant(noon_in_tokyo)

    assert instant == noon_in_tokyo
    assert instant.tzinfo is timezone.utc
    assert instant.hour == 3


@pytest.mark.parametrize("fold", [0, 1])
def test_an_instant_in_the_repeated_hour_of_autumn_keeps_its_side(fold: int) -> None:
    twice = datetime(2030, 10, 27, 2, 30, fold=fold, tzinfo=ZoneInfo("Europe/Berlin"))

    assert checked_instant(twice).hour == fold


def test_a_naive_datetime_is_refused_because_it_names_no_moment() -> None:
    with pytest.raises(ValueError, match="2030-01-01T12:00:00 has no time zone"):
        checked_instant(datetime(2030, 1, 1, 12))  # noqa: DTZ001 - the point


@pytest.mark.parametrize("instant", [None, 0, "2030-01-01T12:00:00Z", datetime(2030, 1, 1).date()])  # noqa: DTZ001
def test_an_instant_of_another_type_is_refused(instant: object) -> None:
    with pytest.raises(ValueError, match="available_at must be an aware datetime, not "):
        checked_instant(instant)


@pytest.mark.parametrize(
    "instant",
    [
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
        datetime(1899, 12, 31, tzinfo=timezone.utc),
        datetime(9000, 1, 1, tzinfo=timezone.utc),
    ],
)
def test_an_instant_that_some_time_zone_could_not_show_is_refused(instant: datetime) -> None:
    with pytest.raises(ValueError, match="lies outside the years 1900 to 9000"):
        checked_instant(instant)


# --- texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", "ümläut", "😀", "\x01\x7f\uffff", "\ufffd"])
def test_ordinary_text_can_be_stored(text: str) -> None:
    assert unstorable_text(text) is None


def test_a_surrogate_is_named_also_when_its_other_half_follows() -> None:
    assert unstorable_text("\ud83d\ude00") == "a lone surrogate (half of a character)"


@pytest.mark.parametrize("text", [Lane.MAIL, Colour.RED, mark_safe("red"), "red"])
def test_the_plain_form_of_a_text_has_its_characters_and_no_other_class(text: str) -> None:
    assert type(plain(text)) is str
    assert plain(text) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("seven", "'seven'"),
        ("a\x00b", r"'a\x00b'"),
        ("\ud83d", r"'\ud83d'"),
        (HostileRepr(), "<HostileRepr>"),
        (10**5_000, "<int>"),
    ],
    ids=["int", "str", "NUL", "surrogate", "hostile", "too long for repr"],
)
def test_a_value_is_shown_by_its_repr_whatever_its_repr_does(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value", ["x" * 10**8, ["x"] * 10**5, b"x" * 1_000], ids=["str", "list", "bytes"]
)
def test_a_long_value_is_shown_cut_short(value: object) -> None:
    assert len(shown(value)) <= 82
