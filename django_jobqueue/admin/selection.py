"""Which jobs a person chose: ticked ones, or all that the list's filters match.

What was chosen must not grow between the page that shows it and the click that confirms it. Few
jobs travel through the form by their ids. Many are pinned by the database's time and the largest id
when the page was made: what arrived, or died, after that is not part of them. What came into the
set in another way (somebody requeued an old dead letter) can take a place in it, but never makes it
larger than the page said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.db.models.functions import Now
from django.utils.dateparse import parse_datetime

from django_jobqueue.admin.acts import VARIOUS, Act, jobs, statuses_of
from django_jobqueue.queue import CHUNK, JobQuerySet
from django_jobqueue.states import Status
from django_jobqueue.values import checked_instant

#: So many jobs travel by their ids, in one form field.
MOST_IDS = 1_000
#: Jobs an act leaves alone are counted up to here.
MOST_COUNTED = 10_000
_LARGEST_ID = 2**63 - 1


class UnreadableSelection(ValueError):
    """The ids or the pin in a request are not what our pages send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """Jobs named one by one."""

    ids: tuple[int, ...]

    def eligible(self, act: Act) -> list[JobQuerySet]:
        """Those the act would move, in parts."""
        return [jobs().filter(pk__in=self.ids, status__in=act.sources)]

    def ineligible(self, act: Act) -> Counter[str]:
        """How many others have which status, or are gone."""
        counted = statuses_of(self.ids)
        return Counter({status: n for status, n in counted.items() if status not in act.sources})

    def fields(self) -> dict[str, str]:
        """What the confirmation form carries."""
        return {"ids": ",".join(map(str, self.ids))}

    def chunks(self, act: Act) -> Iterator[list[int]]:
        """All of them, so that the report names every one that was skipped."""
        for start in range(0, len(self.ids), CHUNK):
            yield list(self.ids[start : start + CHUNK])


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """All that the filters of a list match and that was there at one moment."""

    matches: JobQuerySet
    instant: datetime
    max_id: int
    most: int = _LARGEST_ID

    def eligible(self, act: Act) -> list[JobQuerySet]:
        """Those the act would move, in parts.

        One part for each status: the partial indexes serve a single status, and a condition on
        several would read millions of finished rows to find a few.
        """
        return [self._pinned().filter(status=status) for status in act.sources]

    def ineligible(self, act: Act) -> Counter[str]:
        """How many others have which status; `VARIOUS` when they are too many to read."""
        others = self._pinned().exclude(status__in=act.sources).order_by()
        total = others.values("pk")[: MOST_COUNTED + 1].count()
        if total > MOST_COUNTED:
            return Counter({VARIOUS: total})
        return Counter(others.values_list("status", flat=True)) if total else Counter()

    def fields(self) -> dict[str, str]:
        """What the confirmation form carries."""
        return {"instant": self.instant.isoformat(), "max_id": str(self.max_id)}

    def chunks(self, act: Act) -> Iterator[list[int]]:
        """The ids in chunks, ascending within a part, each read when the one before is done."""
        left = self.most
        for part in self.eligible(act):
            for chunk in part.id_chunks():
                yield chunk[:left]
                left -= len(chunk)
                if left <= 0:
                    return

    def _pinned(self) -> JobQuerySet:
        # A dead letter arrives when it dies, any other job when it is enqueued.
        dead = Q(status=Status.DEAD_LETTER)
        return self.matches.filter(
            (dead & Q(finished_at__lte=self.instant)) | (~dead & Q(created_at__lte=self.instant)),
            pk__lte=self.max_id,
        )


def matching_now(matches: JobQuerySet) -> Matching | Ids:
    """Everything these filters match at this moment, by the database's time."""
    newest = jobs().order_by("-pk").annotate(now=Now()).values_list("now", "pk").first()
    if newest is None:
        return Ids(ids=())
    return Matching(matches=matches, instant=newest[0], max_id=newest[1])


def matching_then(matches: JobQuerySet, form: Mapping[str, str]) -> Matching:
    """Everything these filters match, as pinned by the confirmation form.

    Raises `UnreadableSelection`.
    """
    try:
        instant = checked_instant(parse_datetime(form.get("instant", "")))
    except ValueError as error:
        raise UnreadableSelection from error
    return Matching(
        matches=matches,
        instant=instant,
        max_id=read_id(form.get("max_id", "")),
        most=read_id(form.get("count", "")),
    )


def read_ids(text: str) -> tuple[int, ...]:
    """Ids separated by commas, sorted, each once. Raises `UnreadableSelection`."""
    return read_each(text.split(",") if text else [])


def read_each(texts: Sequence[str]) -> tuple[int, ...]:
    """These ids, sorted, each once. Raises `UnreadableSelection`."""
    if len(texts) > MOST_IDS:
        raise UnreadableSelection
    return tuple(sorted({read_id(text) for text in texts}))


def read_id(text: str) -> int:
    """A job's id. Raises `UnreadableSelection`."""
    if len(text) > len(str(_LARGEST_ID)) or not (text.isascii() and text.isdigit()):
        raise UnreadableSelection
    if int(text) > _LARGEST_ID:
        raise UnreadableSelection
    return int(text)
