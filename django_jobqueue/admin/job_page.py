"""What the page of one job shows of values that may be of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from django.db.models import F, Func, QuerySet, TextField
from django.db.models.functions import Left, Length
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from django_jobqueue.models import JobAttempt, ProcessingJob

#: Characters shown of a payload, a result, an error and a traceback.
SHOWN = 20_000
#: Attempts shown, the newest.
ATTEMPTS = 50


class ShownJob(Protocol):
    """A job with its large columns as bounded texts."""

    payload_start: str
    payload_length: int
    result_start: str | None
    result_length: int | None
    last_error_start: str
    last_error_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The newest failed and lost attempts of a job."""

    attempts: Sequence[JobAttempt]
    more: bool


def with_bounded_texts(found: QuerySet[ProcessingJob]) -> QuerySet[Any]:
    """The same jobs, large columns indented and cut by the database: one may be past our memory."""
    texts: dict[str, Any] = {
        "payload": Func("payload", function="jsonb_pretty", output_field=TextField()),
        "result": Func("result", function="jsonb_pretty", output_field=TextField()),
        "last_error": F("last_error"),
    }
    return found.defer(*texts).annotate(
        **{f"{name}_start": Left(text, SHOWN) for name, text in texts.items()},
        **{f"{name}_length": Length(text) for name, text in texts.items()},
    )


def history_of(job: ProcessingJob, *, using: str) -> History:
    """The attempts of a job, the newest first, with bounded texts."""
    newest = (
        JobAttempt.objects.using(using)
        .filter(job_id=job.pk)
        .defer("error", "traceback")
        .annotate(error_start=Left("error", SHOWN), traceback_start=Left("traceback", SHOWN))
        .order_by("-lock_token")[: ATTEMPTS + 1]
    )
    attempts = list(newest)
    return History(attempts=attempts[:ATTEMPTS], more=len(attempts) > ATTEMPTS)


def shown_text(start: str | None, length: int | None) -> SafeString | None:
    """A text as it is, cut with a note when it is long."""
    if not start or length is None:
        return None
    if length <= SHOWN:
        return _preformatted(start)
    note = _("Cut: these are the first %(shown)d of %(length)d characters.")
    note %= {"shown": SHOWN, "length": length}
    return format_html("{}<p>{}</p>", _preformatted(start), note)


def _preformatted(text: str) -> SafeString:
    # Reachable by keyboard, because it scrolls.
    return format_html('<pre class="jobqueue-text" tabindex="0">{}</pre>', text)
