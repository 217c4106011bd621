"""Whatever an exception does, its description can be stored, read and compared."""

from __future__ import annotations

import importlib
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, connection
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_jobqueue.failure import (
    ERROR_LENGTH,
    TRACEBACK_LENGTH,
    Failure,
    described,
    message_of,
    storable,
)

CUT = "characters cut …"


def caught(act: Callable[[], Any]) -> BaseException:
    """What the call raises, with its traceback."""
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def stored(text: str) -> str:
    """What PostgreSQL keeps of a text, in a real column."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE IF NOT EXISTS kept_text (value text)")
        cursor.execute("INSERT INTO kept_text VALUES (%s) RETURNING value", [text])
        (value,) = cursor.fetchone()
    return str(value)


def assert_stored_as_it_is(failure: Failure) -> None:
    assert stored(failure.error) == failure.error
    assert stored(failure.traceback) == failure.traceback
    assert len(failure.error) <= ERROR_LENGTH
    assert len(failure.traceback) <= TRACEBACK_LENGTH
    assert len(failure.fingerprint) == 16


# --- texts that cannot be stored as they are ---------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("plain", "plain"),
        ("a\x00b", "a\ufffdb"),
        ("a\ud800b", "a\ufffdb"),
        (f"a{chr(0xDFFF)}b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        (b"caf\xe9".decode(errors="surrogateescape"), "caf\ufffd"),
        ("😀", "😀"),
        ("\ufffe\uffff\ufeff", "\ufffe\uffff\ufeff"),
        ("", ""),
    ],
)
def test_what_cannot_be_stored_is_replaced_visibly(text: str, kept: str) -> None:
    assert storable(text, length=100) == kept


@pytest.mark.django_db
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.text(st.characters(codec=None) | st.sampled_from("\x00\ud83d\ude00😀")),
    times=st.integers(1, 40),
    length=st.integers(100, 300),
)
@example(text="\x00", times=1, length=100)
@example(text="\ud83d\ude00", times=200, length=101)
def test_every_text_becomes_one_that_postgresql_stores(text: str, times: int, length: int) -> None:
    kept = storable(text * times, length=length)

    assert stored(kept) == kept
    assert len(kept) <= length


@pytest.mark.parametrize("over", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("character", ["x", "😀", "\x00", "\ud800"])
def test_a_text_is_cut_in_the_middle_only_past_its_length(character: str, over: int) -> None:
    kept = storable("<" + character * (98 + over) + ">", length=100)

    assert (CUT in kept) == (over > 0)
    assert len(kept) <= 100
    assert kept[0] == "<"
    assert kept[-1] == ">"


@pytest.mark.parametrize("place", range(26, 35))
def test_no_character_is_torn_apart_by_the_cut(place: int) -> None:
    text = "a" * place + "😀" + "b" * 500

    kept = storable(text, length=100)

    assert "\ufffd" not in kept


def test_a_cut_text_says_how_many_characters_are_missing() -> None:
    kept = storable("a" * 1_000, length=100)

    missing = 1_000 - kept.count("a") + "characters cut".count("a")
    assert f"… {missing} {CUT}" in kept


# --- exceptions --------------------------------------------------------------------------------


class RaisingStr(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class ExitingStr(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


class NumberAsStr(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class RaisingRepr(Exception):
    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        raise ValueError("no repr")


class RaisingAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class RaisingNotes(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise RuntimeError("no notes")


def of_class_named(name: str) -> Exception:
    class Made(Exception):
        pass

    Made.__qualname__ = name
    return Made("text")


ODD = {
    "NUL": ValueError("a\x00b"),
    "surrogate": ValueError("\ud800"),
    "surrogateescape": ValueError(b"\xff".decode(errors="surrogateescape")),
    "50 MB": ValueError("x" * 50_000_000),
    "bytes": ValueError(b"\xff\x00"),
    "no arguments": ValueError(),
    "an object": ValueError(object()),
    "str raises": RaisingStr("hidden"),
    "str exits": ExitingStr("hidden"),
    "str is a number": NumberAsStr("hidden"),
    "repr raises": RaisingRepr("hidden"),
    "attributes raise": RaisingAttributes("hidden"),
    "notes raise": RaisingNotes("hidden"),
    "class name of 10,000 characters": of_class_named("N" * 10_000),
    "class name with NUL": of_class_named("Odd\x00"),
    "class name with a surrogate": of_class_named("Odd\ud800"),
    "system exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "generator exit": GeneratorExit(),
    "memory": MemoryError(),
    "syntax": SyntaxError("odd", ("file\x00", -5, -5, "text\ud800")),
    "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\x00"),
}


@pytest.mark.django_db
@pytest.mark.parametrize("name", ODD)
def test_any_exception_is_described_by_text_that_can_be_stored(name: str) -> None:
    failure = described(caught(raising(ODD[name])))

    assert_stored_as_it_is(failure)
    assert failure.error


@pytest.mark.parametrize("name", ["str raises", "str exits", "str is a number", "repr raises"])
def test_an_exception_without_readable_text_says_so(name: str) -> None:
    assert described(ODD[name]).error.endswith(": (its text could not be read)")


@pytest.mark.django_db
def test_a_traceback_of_5000_frames_keeps_the_innermost_ones() -> None:
    def deep(levels: int) -> None:
        if levels == 0:
            raise ValueError("at the bottom")
        deep(levels - 1)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        failure = described(caught(lambda: deep(5_000)))
    finally:
        sys.setrecursionlimit(limit)

    assert_stored_as_it_is(failure)
    assert 'raise ValueError("at the bottom")' in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: at the bottom")


@pytest.mark.django_db
def test_a_recursion_error_is_described() -> None:
    def forever() -> None:
        forever()

    failure = described(caught(forever))

    assert_stored_as_it_is(failure)
    assert failure.error.startswith("RecursionError: maximum recursion depth exceeded")


@pytest.mark.django_db
def test_a_chain_of_1000_causes_is_described() -> None:
    error = ValueError("the first")
    for number in range(1_000):
        error, cause = ValueError(f"number {number}"), error
        error.__cause__ = cause

    failure = described(caught(raising(error)))

    assert_stored_as_it_is(failure)
    assert "ValueError: number 999" in failure.traceback


if sys.version_info >= (3, 11):

    @pytest.mark.django_db
    def test_a_group_of_10000_exceptions_is_described() -> None:
        group = ExceptionGroup(  # noqa: F821 - Python 3.11
            "many", [ValueError(f"number {n}") for n in range(10_000)]
        )

        failure = described(caught(raising(group)))

        assert_stored_as_it_is(failure)
        assert failure.error == "ExceptionGroup: many (10000 sub-exceptions)"
        assert "ValueError: number 0" in failure.traceback


def test_an_odd_class_name_is_shown_as_far_as_it_can_be_stored() -> None:
    assert "Odd\ufffd: text" in described(ODD["class name with NUL"]).error
    assert "Odd\ufffd: text" in described(ODD["class name with a surrogate"]).error
    assert len(described(ODD["class name of 10,000 characters"]).error) < 600


def test_an_exception_that_lets_nothing_be_read_is_named_at_least() -> None:
    assert "RaisingAttributes: (" in described(caught(raising(ODD["attributes raise"]))).error


def test_an_error_reads_as_class_and_message() -> None:
    assert described(ValueError("broken")).error == "ValueError: broken"
    assert described(ValueError()).error == "ValueError"
    assert described(IntegrityError("twice")).error == "django.db.utils.IntegrityError: twice"


def test_a_plain_text_is_kept_without_a_traceback() -> None:
    failure = described("the worker was lost")

    assert (failure.error, failure.traceback) == ("the worker was lost", "")


def test_the_message_of_an_exception_has_no_class() -> None:
    assert message_of(ValueError("card\x00closed")) == "card\ufffdclosed"
    assert message_of(RaisingStr()) == "(its text could not be read)"


def test_a_traceback_has_the_lines_and_causes_but_no_local_variable() -> None:
    def act() -> None:
        password = "hunter" + str(2)
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer " + "x" * (len(password) - 6)) from error

    failure = described(caught(act))

    assert "KeyError: 'inner'" in failure.traceback
    assert "direct cause" in failure.traceback
    assert "ValueError: outer x" in failure.traceback
    assert "hunter2" not in failure.traceback


# --- fingerprints ------------------------------------------------------------------------------


def fingerprint_at(message: object, error: type[Exception] = ValueError) -> str:
    def act() -> None:
        raise error(message)

    return described(caught(act)).fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 7 failed", "order 12345 failed"),
        ("took 0.5 s", "took 12,345.75 s"),
        ("balance is -5", "balance is 7"),
        ("rate 1e-05", "rate 0.25"),
        (f"no job {uuid.UUID(int=1)}", f"no job {uuid.UUID(int=2**127)}"),
        (f"no job {uuid.UUID(int=1).hex}", f"no job {uuid.UUID(int=2**127).hex}"),
        ("<object at 0x7f00aa>", "<object at 0xDEADBEEF00>"),
        ("commit deadbeef01 is gone", "commit 00C0FFEE99aa is gone"),
        ("no file 'a.txt'", "no file 'b/c d.pdf'"),
        ('column "a" is missing', 'column "b c" is missing'),
        ("can't read file 'a.txt'", "can't read file 'b.txt'"),
        ("got b'abc' instead", "got b'\\x00' instead"),
        ("at 2030-01-01T12:00:00Z", "at 2031-12-24T00:30:59Z"),
        ("from 10.0.0.1:5432", "from 192.168.100.200:6543"),
    ],
)
def test_failures_that_differ_in_numbers_ids_and_quoted_text_share_a_fingerprint(
    one: str, other: str
) -> None:
    assert fingerprint_at(one) == fingerprint_at(other)


def test_other_words_are_another_cause() -> None:
    assert fingerprint_at("order 7 failed") != fingerprint_at("order 7 vanished")
    assert fingerprint_at("can't read") != fingerprint_at("can't write")


def test_another_class_is_another_cause() -> None:
    assert fingerprint_at("broken") != fingerprint_at("broken", RuntimeError)


def test_another_function_is_another_cause() -> None:
    def one() -> None:
        raise ValueError("broken")

    def other() -> None:
        raise ValueError("broken")

    assert described(caught(one)).fingerprint != described(caught(other)).fingerprint


def test_another_line_of_the_function_is_the_same_cause() -> None:
    def act(early: bool) -> None:
        if early:
            raise ValueError("broken")
        raise ValueError("broken")

    assert (
        described(caught(lambda: act(True))).fingerprint
        == described(caught(lambda: act(False))).fingerprint
    )


@pytest.mark.parametrize(
    ("library", "arguments"),
    [
        (os.makedirs, ("/dev/null/below",)),
        (importlib.import_module, ("no_such_package.below",)),
        (uuid.UUID, ("nonsense",)),
    ],
    ids=["frozen module", "import system", "library"],
)
def test_a_failure_inside_a_library_is_told_apart_by_the_projects_function(
    library: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    def one() -> None:
        library(*arguments)

    def other() -> None:
        library(*arguments)

    assert described(caught(one)).fingerprint == described(caught(one)).fingerprint
    assert described(caught(one)).fingerprint != described(caught(other)).fingerprint


def test_plain_texts_have_fingerprints_too() -> None:
    assert described("lost 7").fingerprint == described("lost 8").fingerprint
    assert described("lost 7").fingerprint != described("gone 7").fingerprint


HOSTILE = [
    "0" * 1_000 + "g",
    "a" * 1_000,
    "'" * 1_001,
    '"' * 1_001,
    "a'" * 500,
    "b'" * 500,
    "1." * 500,
    "1e" * 500,
    "+-" * 500,
    "0x" * 500,
    "abcdefab-" * 110,
    "12345678-1234-" * 70,
    "f" * 999 + "0 ",
    "1a" * 500,
]


@pytest.fixture
def long_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages long enough to tell growth in proportion from growth by the square."""
    monkeypatch.setattr("django_jobqueue.failure.ERROR_LENGTH", 10**7)


@pytest.mark.parametrize("piece", HOSTILE, ids=lambda piece: piece[:12])
def test_no_message_makes_blanking_slow(piece: str, long_messages: None) -> None:
    def seconds_for(times: int) -> float:
        text = piece * times
        spans = []
        for _ in range(3):
            started = time.thread_time()  # a busy machine does not count
            described(text)
            spans.append(time.thread_time() - started)
        return min(spans)

    # Ten times the text may take ten times as long; a square would take a hundred.
    assert seconds_for(100) < 60 * max(seconds_for(10), 0.0005)
