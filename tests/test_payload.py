"""JSON that comes back from PostgreSQL as it was given, or an error that names the place."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections import OrderedDict, namedtuple
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.db.models import TextChoices
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_jobqueue.exceptions import InvalidPayload
from django_jobqueue.models import ProcessingJob, Queue
from django_jobqueue.payload import checked_json, checked_payload
from tests.app.jobs import add, echo
from tests.rows import count_jobs, sql

Point = namedtuple("Point", "x y")


class Colour(str, Enum):
    RED = "red"


class Size(TextChoices):
    LARGE = "large", "Large"


class Level(IntEnum):
    HIGH = 3


class Plain(Enum):
    ONE = 1


@dataclasses.dataclass
class Order:
    id: int


def stored(text: str) -> Any:
    """What PostgreSQL gives back of a JSON text that was put into a `jsonb`."""
    return json.loads(sql("SELECT %s::jsonb::text", text)[0][0])


def same(one: Any, other: Any) -> bool:
    """Equal and of the same types all the way down: `1 == 1.0 == True` is not enough."""
    return (
        repr(one) == repr(other) if not isinstance(one, (dict, list)) else _same_inside(one, other)
    )


def _same_inside(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other))


# --- what is kept ------------------------------------------------------------------------------

KEPT: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    10**400,
    0.0,
    1.0,
    0.1,
    1e15,
    9_999_999_999_999_998.0,
    1e-300,
    5e-324,
    "",
    "ümläut 😀",
    "a text with e+ in it",
    "\\u0000 spelled out",
    "\x01\x1f\x7f\u2028",
    [],
    {},
    [[[]]],
    {"": {"nested": [1, 2.5, None, {"deep": True}]}},
    [[]] * 500,
]


@pytest.mark.django_db
@pytest.mark.parametrize("value", KEPT, ids=lambda value: repr(value)[:20])
def test_json_comes_back_from_postgresql_equal_and_of_the_same_types(value: Any) -> None:
    kept, text = checked_json(value, what="result")

    assert same(kept, value)
    assert same(stored(text), value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.sampled_from(["\x00", "\ud800", "e+", "\\u0000", "1e+16"]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(codec=None)) | st.integers(), inner)
    ),
    max_leaves=20,
)


@pytest.mark.django_db
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(value=JSON)
def test_whatever_is_accepted_is_what_postgresql_gives_back(value: Any) -> None:
    try:
        kept, text = checked_json(value, what="payload")
    except InvalidPayload:
        return

    assert same(json.loads(text), kept)
    # A negative zero is one without its sign there, and equal to it.
    assert stored(text) == kept
    assert same(stored(text.replace("-0.0", "0.0")), json.loads(text.replace("-0.0", "0.0")))


@pytest.mark.django_db
def test_the_text_that_was_checked_is_what_is_stored() -> None:
    value = {"text": "ü 😀", "list": [1, 2.5, None, True], "tuple": (1, 2)}

    job = echo.enqueue(value=value)

    _kept, text = checked_json({"value": value}, what="payload")
    assert sql("SELECT payload = %s::jsonb FROM processing_jobs", text) == [(True,)]
    assert job.payload == {"value": {**value, "tuple": [1, 2]}}
    assert ProcessingJob.objects.get().payload == job.payload


# --- each type's verdict -----------------------------------------------------------------------

CONVERTED = [
    ((1, 2), [1, 2]),
    (Point(1, 2), [1, 2]),
    (((), ("a",)), [[], ["a"]]),
    (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (Colour.RED, "red"),
    (Size.LARGE, "large"),
    (Level.HIGH, 3),
    (mark_safe("<b>"), "<b>"),
    ({Colour.RED: Level.HIGH}, {"red": 3}),
]


@pytest.mark.parametrize(("value", "kept"), CONVERTED, ids=repr)
@pytest.mark.parametrize("beside", [None, (), [[]] * 300], ids=["fast", "tuple", "many"])
def test_documented_conversions_are_the_same_on_every_path(
    value: Any, kept: Any, beside: Any
) -> None:
    got, text = checked_json([value, beside], what="payload")

    assert same(got[0], kept)
    assert same(json.loads(text)[0], kept)


REFUSED = [
    uuid.UUID(int=7),
    Decimal("1.5"),
    datetime(2030, 1, 1, tzinfo=timezone.utc),
    datetime(2030, 1, 1),  # noqa: DTZ001 - refused as well
    date(2030, 1, 1),
    datetime(2030, 1, 1, tzinfo=timezone.utc).time(),
    timedelta(1),
    {1, 2},
    frozenset({1}),
    b"bytes",
    bytearray(b"bytes"),
    Plain.ONE,
    gettext_lazy("lazy"),
    Queue(name="a model instance"),
    Order(id=1),
    Path("file"),
    object(),
    1j,
    range(3),
    {1: 2}.keys(),
    (item for item in "generator"),
    len,
    ValueError("an exception"),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda value: value, "payload"),
        (lambda value: {"items": [0, value]}, r"payload\.items\[1\]"),
        (lambda value: {"a": {"b": (value,)}}, r"payload\.a\.b\[0\]"),
    ],
    ids=["top", "list", "tuple"],
)
def test_what_is_not_json_is_refused_with_its_place_and_type(
    value: Any, wrap: Any, place: str
) -> None:
    with pytest.raises(
        InvalidPayload, match=rf"^{place} is of type {type(value).__name__}, which is not JSON\."
    ):
        checked_json(wrap(value), what="payload")


@pytest.mark.parametrize("key", [1, 1.5, True, None, (1, 2), b"key"], ids=repr)
def test_a_key_that_is_no_string_is_refused_and_never_turned_into_one(key: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"payload\.a has a key of type .+ keys are strings"):
        checked_json({"a": {key: 1}}, what="payload")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_does_not_know_are_refused_with_their_place(number: float) -> None:
    with pytest.raises(
        InvalidPayload, match=rf"payload\.rate is {number}, which JSON does not know"
    ):
        checked_json({"rate": number}, what="payload")


@pytest.mark.parametrize("number", [1e16, -1e16, 1.5e300, 12345678901234567890.0])
def test_a_float_that_would_come_back_as_an_integer_is_refused(number: float) -> None:
    with pytest.raises(InvalidPayload, match=r"payload\[0\] is .+ back as integers"):
        checked_json([number], what="payload")


@pytest.mark.django_db
def test_postgresql_still_gives_large_floats_back_as_integers() -> None:
    assert same(stored("1e16"), 10**16)  # why they are refused


@pytest.mark.parametrize(
    ("text", "problem"),
    [("\x00", "a NUL character"), ("a\ud800b", "a lone surrogate"), ("\udcff", "a lone surrogate")],
)
def test_text_that_postgresql_cannot_store_is_refused_in_values_and_in_keys(
    text: str, problem: str
) -> None:
    with pytest.raises(InvalidPayload, match=rf"payload\.name contains {problem}"):
        checked_json({"name": text}, what="payload")
    with pytest.raises(InvalidPayload, match=rf"payload\.name has a key with {problem}"):
        checked_json({"name": {text: 1}}, what="payload")


def test_an_integer_too_long_for_python_to_write_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="payload cannot be written as JSON"):
        checked_json([10**5_000], what="payload")


# --- depth and size ----------------------------------------------------------------------------


def nested(depth: int, *, by: type[list[Any]] | type[dict[str, Any]] = list) -> Any:
    value: Any = "core"
    for _ in range(depth):
        value = [value] if by is list else {"inner": value}
    return value


@pytest.mark.django_db
@pytest.mark.parametrize("by", [list, dict])
def test_200_levels_are_stored_and_come_back(by: Any) -> None:
    kept, text = checked_json([nested(199, by=by), (), [[]] * 300], what="payload")

    assert stored(text) == kept


@pytest.mark.parametrize("depth", [201, 1_000, 100_000])
@pytest.mark.parametrize("by", [list, dict])
def test_more_than_200_levels_are_refused(depth: int, by: Any) -> None:
    with pytest.raises(InvalidPayload, match="nested deeper than 200 levels") as caught:
        checked_json(nested(depth, by=by), what="payload")

    assert len(str(caught.value)) < 250


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})

    with pytest.raises(InvalidPayload, match=r"payload\[0\]\.again.+ or contains itself"):
        checked_json(loop, what="payload")


def test_a_huge_key_does_not_make_a_huge_message() -> None:
    with pytest.raises(InvalidPayload) as caught:
        checked_json({"k" * 10**6: {1, 2}}, what="payload")

    assert len(str(caught.value)) < 300


def test_a_payload_of_100_megabytes_is_refused_with_its_size_and_the_limit() -> None:
    with pytest.raises(InvalidPayload, match=r"takes 100,000,011 bytes .+ is 1,048,576\."):
        checked_payload({"text": "x" * 100_000_000}, limit=1_048_576)


def test_the_limit_counts_bytes_and_the_last_one_still_fits() -> None:
    payload = {"a": "ü"}  # {"a":"ü"} takes 10 bytes in 9 characters

    assert checked_payload(payload, limit=10) == (payload, '{"a":"ü"}')
    with pytest.raises(InvalidPayload, match="10 bytes"):
        checked_payload(payload, limit=9)


def test_many_containers_take_time_in_proportion() -> None:
    def seconds_for(count: int) -> float:
        value = {"rows": [{"id": number, "tags": ("a", "b")} for number in range(count)]}
        started = time.thread_time()
        checked_json(value, what="payload")
        return time.thread_time() - started

    seconds_for(1_000)
    assert seconds_for(40_000) < 400 * max(seconds_for(2_000), 0.001)


# --- the whole payload -------------------------------------------------------------------------


def test_no_payload_is_an_empty_one() -> None:
    assert checked_payload(None, limit=100) == ({}, "{}")
    assert checked_payload({}, limit=100) == ({}, "{}")


@pytest.mark.parametrize("payload", [[], [1], (), "text", "", 0, False, [("a", 1)]], ids=repr)
def test_a_payload_that_is_no_dict_is_refused_falsy_ones_too(payload: object) -> None:
    with pytest.raises(InvalidPayload, match="must be a dict of the handler's keyword arguments"):
        checked_payload(payload, limit=100)


def test_the_kept_payload_is_a_copy() -> None:
    given_items = [1, 2]

    kept, _text = checked_payload({"items": given_items}, limit=100)
    given_items.append(3)

    assert kept == {"items": [1, 2]}


@pytest.mark.django_db
@pytest.mark.parametrize(
    "broken",
    [
        {"payload": {"value": "\x00"}},
        {"payload": {"value": {"\ud800": 1}}},
        {"payload": {"value": 1}, "queue": "\x00"},
        {"payload": {"value": 1}, "idempotency_key": "\ud800"},
    ],
    ids=["value", "key", "queue", "idempotency key"],
)
def test_a_refused_text_leaves_the_callers_transaction_usable(broken: dict[str, Any]) -> None:
    with transaction.atomic():
        with pytest.raises(ValueError, match=r"NUL|surrogate"):
            ProcessingJob.objects.enqueue(echo, **broken)
        add.enqueue(a=1)

    assert count_jobs() == 1
