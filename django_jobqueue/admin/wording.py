"""How values look, on every list and page alike."""

from __future__ import annotations

import re
from datetime import datetime

from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

_AFTER_A_DOT = re.compile(r"(?<=\.)")


def breakable(name: str) -> SafeString:
    """A dotted name that may go on in the next line after a dot: nothing else in it lets it."""
    return format_html_join("", "{}<wbr>", ((part,) for part in _AFTER_A_DOT.split(name)))


def badge(kind: str, word: str) -> SafeString:
    """A status as a word; the colour of its kind only repeats it."""
    return format_html('<span class="jobqueue-badge jobqueue-{}">{}</span>', kind, word)


def moment(instant: datetime | None) -> str | None:
    """A time in the current time zone, to the second."""
    if instant is None:
        return None
    local = timezone.localtime(instant) if timezone.is_aware(instant) else instant
    return local.replace(tzinfo=None).isoformat(sep=" ", timespec="seconds")


def first_line(text: str) -> str:
    """The first line that says anything."""
    return text.strip().partition("\n")[0]
