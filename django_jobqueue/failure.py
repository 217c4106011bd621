"""An exception as text that can be stored and searched, whatever the exception does."""

from __future__ import annotations

import hashlib
import re
import site
import sysconfig
import traceback
from dataclasses import dataclass
from types import TracebackType

#: Characters kept of an error's text and of a traceback; what is cut says so.
ERROR_LENGTH = 10_000
TRACEBACK_LENGTH = 50_000
_FRAMES = 100

#: What the path of a file outside the project begins with. Python names its built-in modules
#: `<frozen …>`.
_LIBRARIES = (
    "<frozen ",
    *{sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()},
)
_VARYING = re.compile(
    r"""(?<!\w)b?'[^']*' | b?"[^"]*"           # quoted text; the apostrophe in "can't" opens none
      | [0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}   # UUID
      | 0x[0-9a-f]+ | \b(?=[a-f]*[0-9])[0-9a-f]{8,}\b                  # hexadecimal
      | [+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?                             # numbers
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is recorded of a failed attempt.

    `error` is one text to read, `traceback` where it happened (empty for a plain text),
    `fingerprint` is equal for failures of one cause: 16 hexadecimal digits.
    """

    error: str
    traceback: str
    fingerprint: str


def described(error: BaseException | str) -> Failure:
    """Describe an exception or a plain text. Never raises, and what it returns can be stored."""
    # Asked this way round: `isinstance(error, str)` would read an attribute of the exception.
    if not isinstance(error, BaseException):
        return _described_text(error)
    try:
        return _described_exception(error)
    except BaseException:  # an exception whose own attributes raise must not hide that it happened
        return _described_text(f"{_name_at_least(error)}: (its description could not be read)")


def message_of(error: BaseException) -> str:
    """The exception's own words, without its class. Never raises, and can be stored."""
    try:
        text = str(error)
    except BaseException:
        return "(its text could not be read)"
    # The fingerprint reads the message too: cut before the regular expressions meet 100 MB of it.
    return storable(text, length=ERROR_LENGTH)


def storable(text: str, *, length: int) -> str:
    """Text PostgreSQL can store: U+FFFD for NUL and lone surrogates, the middle cut past `length`.

    `length` is at least 100 characters.
    """
    if len(text) > length:
        half = length // 2 - 20
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters cut …\n{text[-half:]}"
    return (
        text.replace("\x00", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def _described_text(text: str) -> Failure:
    error = storable(text, length=ERROR_LENGTH)
    return Failure(error=error, traceback="", fingerprint=_fingerprint("", "", error))


def _described_exception(error: BaseException) -> Failure:
    name, message = _class_name(error), message_of(error)
    return Failure(
        error=storable(f"{name}: {message}" if message else name, length=ERROR_LENGTH),
        traceback=storable(_traceback(error), length=TRACEBACK_LENGTH),
        fingerprint=_fingerprint(name, _innermost_project_frame(error.__traceback__), message),
    )


def _class_name(error: BaseException) -> str:
    cls = type(error)
    name = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    return storable(name, length=500)


def _name_at_least(error: BaseException) -> str:
    try:
        return _class_name(error)
    except BaseException:  # a metaclass can refuse even that
        return "An exception"


def _traceback(error: BaseException) -> str:
    # A negative limit keeps the innermost frames, where it happened. No local variables: they hold
    # secrets.
    try:
        summary = traceback.TracebackException.from_exception(error, limit=-_FRAMES)
        return "".join(summary.format())
    except BaseException:
        return "".join(traceback.format_tb(error.__traceback__, limit=-_FRAMES))


def _innermost_project_frame(tb: TracebackType | None) -> str:
    innermost = project = ""
    while tb is not None:
        frame = tb.tb_frame
        innermost = f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_name}"
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            project = innermost
        tb = tb.tb_next
    return project or innermost


def _fingerprint(name: str, frame: str, message: str) -> str:
    blanked = _VARYING.sub("*", message)
    return hashlib.sha256(f"{name}\n{frame}\n{blanked}".encode()).hexdigest()[:16]
