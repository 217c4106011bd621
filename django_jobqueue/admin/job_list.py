"""The list of jobs, made for tables of millions of rows.

Counts stop at a bound, choices of filters come from the newest jobs and not from a scan, only the
id can be sorted by, and search knows an exact id and an exact idempotency key. Large columns stay
in the database.

The list, and the filters for what is common or a dead letter, stop as soon as page and bounded
count are full. A filter for what is rare (a queue, a handler, a status such as cancelled) finds too
few to stop: it reads the whole table along the primary key, once for the count and once for the
page. `docs/why.md` says what that costs, and why no index serves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from django_jobqueue.admin.acts import jobs
from django_jobqueue.admin.selection import MOST_COUNTED, UnreadableSelection, read_id
from django_jobqueue.admin.wording import breakable
from django_jobqueue.handlers import registry
from django_jobqueue.models import Queue
from django_jobqueue.values import unstorable_text

if TYPE_CHECKING:
    from datetime import datetime

    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

PAGE = 100
#: Characters of the last error that the list reads; it shows the first line of them.
ERROR_START = 160
#: A filter offers the names found in so many of the newest jobs.
NEWEST = 1_000
#: The only columns the list reads.
COLUMNS = (
    "id",
    "status",
    "handler",
    "queue",
    "attempts",
    "max_attempts",
    "available_at",
    "finished_at",
)
# A lookup into payloads, results or errors would scan the table, and its yes or no would tell what
# stands in them.
_LOOKUPS = {
    field + suffix
    for field in ("status", "queue", "handler", "id", "pk")
    for suffix in ("", "__exact")
}


class ListedJob(Protocol):
    """What a row of the list has."""

    pk: int
    status: str
    attempts: int
    max_attempts: int
    available_at: datetime
    error_start: str


class BoundedPaginator(_Paginator):
    """Counts no further than `MOST_COUNTED`: the pages end there, and `has_more` tells."""

    most_counted = MOST_COUNTED

    @cached_property
    def count(self) -> int:
        """The number of rows, or the bound."""
        return min(self._counted, self.most_counted)

    @property
    def has_more(self) -> bool:
        """Whether there are rows past the bound."""
        return self._counted > self.most_counted

    @cached_property
    def _counted(self) -> int:
        rows = cast("QuerySet[Any]", self.object_list).order_by().values("pk")
        return rows[: self.most_counted + 1].count()


class JobChangeList(ChangeList):
    """The stock list without the large columns and without slow orders."""

    def get_filters(self, request: HttpRequest) -> Any:
        values = (value for values in request.GET.lists() for value in values[1])
        if any(unstorable_text(str(value)) for value in values):
            raise IncorrectLookupParameters
        return super().get_filters(request)

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        found = super().get_queryset(request, *args, **kwargs).only(*COLUMNS)
        listed: QuerySet[Any] = found.annotate(error_start=Left("last_error", ERROR_START))
        return listed

    def get_ordering_field(self, field_name: Any) -> Any:
        # The stock list refuses to offer other orders, but follows them when the URL asks.
        return super().get_ordering_field(field_name) if field_name == "id" else None


class NameFilter(SimpleListFilter):
    """Choices that are known without reading the table, and the one in the URL."""

    parameter_name: str

    def lookups(
        self, request: HttpRequest, model_admin: ModelAdmin[Any]
    ) -> Iterable[tuple[str, str]]:
        names = {*self.declared(), *_newest(self.parameter_name), self.value() or ""}
        return [(name, breakable(name)) for name in sorted(names) if name]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        name = self.value()
        return queryset if name is None else queryset.filter(**{self.parameter_name: name})

    def declared(self) -> Iterable[str]:
        """The names that exist whether or not a job has them."""
        raise NotImplementedError


class QueueFilter(NameFilter):
    """Queues of the handlers, with a row of their own, or of new jobs."""

    title = _("queue")
    parameter_name = "queue"

    def declared(self) -> Iterable[str]:
        rows = Queue.objects.using(jobs().db).values_list("name", flat=True)[:NEWEST]
        return {handler.queue for handler in registry}.union(rows)


class HandlerFilter(NameFilter):
    """Handlers of this process, or of new jobs."""

    title = _("handler")
    parameter_name = "handler"

    def declared(self) -> Iterable[str]:
        return registry.names()


def queues_in_use() -> list[str]:
    """Queues of the handlers and of new jobs, sorted."""
    return sorted({*(handler.queue for handler in registry), *_newest("queue")})


def is_offered_lookup(lookup: str) -> bool:
    """Whether a list's URL may filter by this."""
    return lookup in _LOOKUPS


def _newest(column: str) -> Iterable[str]:
    return jobs().order_by("-pk").values_list(column, flat=True)[:NEWEST]


def found_by(term: str) -> Q:
    """The search: exactly this id, or exactly this idempotency key."""
    found = Q(idempotency_key__in={term, term.strip()})
    try:
        return found | Q(pk=read_id(term.strip()))
    except UnreadableSelection:
        return found
