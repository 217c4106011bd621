"""The page between an act and its doing. A GET shows what will happen, a POST makes it happen.

Its URL is its own, with the list's query string: the filters that choose jobs, and the way back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import django
from django.contrib import messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.db.models.functions import Left
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from django_jobqueue.admin.acts import GONE, VARIOUS, Act, carry_out
from django_jobqueue.admin.job_list import ERROR_START
from django_jobqueue.admin.selection import (
    MOST_COUNTED,
    MOST_IDS,
    Ids,
    Matching,
    UnreadableSelection,
    matching_now,
    matching_then,
    read_id,
    read_ids,
)
from django_jobqueue.admin.wording import breakable, first_line
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.states import Status

if TYPE_CHECKING:
    from django_jobqueue.admin.jobs import ProcessingJobAdmin

#: Jobs named on the page.
NAMED = 20
NAMED_COLUMNS = ("pk", "handler", "queue", "status", "attempts", "max_attempts")
_TEMPLATE = "admin/django_jobqueue/processingjob/confirmation.html"
# Where on the list somebody was. The list is another one afterwards: that page may not be there.
_POSITION = ("p", "e", "all", "ids")


def confirmation_view(admin: ProcessingJobAdmin, request: HttpRequest, act: Act) -> HttpResponse:
    """Ask, or act. Needs the act's permission and the right to view jobs."""
    if not (admin.has_view_permission(request) and request.user.has_perm(act.permission)):
        raise PermissionDenied
    try:
        if request.method == "POST":
            return _acted(admin, request, act)
        return _asked(admin, request, act)
    except (UnreadableSelection, IncorrectLookupParameters):
        admin.message_user(
            request, _("The selection could not be read. Nothing was changed."), messages.ERROR
        )
        return HttpResponseRedirect(list_url(admin))


def confirmation_url(
    admin: ProcessingJobAdmin, act: Act, query: QueryDict, ids: list[str] | None = None
) -> str:
    """Where to ask about these ids, or about everything the list's query string matches."""
    chosen = [] if ids is None else [("ids", ",".join(ids))]
    return _url(admin, act.name, [*chosen, *_list_query(query)])


def list_url(admin: ProcessingJobAdmin, query: QueryDict | None = None) -> str:
    """The list, with these filters."""
    return _url(admin, "changelist", [] if query is None else _list_query(query))


def _asked(admin: ProcessingJobAdmin, request: HttpRequest, act: Act) -> HttpResponse:
    if "ids" in request.GET:
        selection: Ids | Matching = Ids(ids=read_ids(request.GET["ids"]))
    else:
        selection = matching_now(admin.matches(request))
    parts = selection.eligible(act)
    count = sum(part.count() for part in parts)
    named = [_row(job) for job in _newest(parts)]
    shown = {
        "count": count,
        "question": act.question % {"count": count},
        "confirm": act.confirm % {"count": count},
        "named": named,
        "unnamed": count - len(named),
        "skipped": _skip_lines(act, selection.ineligible(act)),
    }
    if isinstance(selection, Matching) and 0 < count <= MOST_IDS:
        selection = Ids(ids=tuple(pk for part in parts for pk in part.values_list("pk", flat=True)))
    return _page(
        admin, request, act, {**shown, "fields": {**selection.fields(), "count": str(count)}}
    )


def _page(
    admin: ProcessingJobAdmin, request: HttpRequest, act: Act, shown: dict[str, Any]
) -> HttpResponse:
    context = {
        **admin.admin_site.each_context(request),
        **shown,
        "title": act.title,
        "opts": admin.opts,
        "act": act,
        "form_url": confirmation_url(admin, act, request.GET),
        "list_url": list_url(admin, request.GET),
        # Django 6.1 made a list of them, with its own style.
        "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
    }
    request.current_app = admin.admin_site.name
    return TemplateResponse(request, _TEMPLATE, context)


def _acted(admin: ProcessingJobAdmin, request: HttpRequest, act: Act) -> HttpResponse:
    promised = read_id(request.POST.get("count", "0"))
    if "ids" in request.POST:
        selection: Ids | Matching = Ids(ids=read_ids(request.POST["ids"]))
    else:
        selection = matching_then(admin.matches(request), request.POST)
    report = carry_out(act, selection.chunks(act), user_id=request.user.pk)
    level = messages.SUCCESS if report.done else messages.WARNING
    admin.message_user(request, act.done % {"count": report.done}, level)
    for line in _skip_lines(act, report.skipped):
        admin.message_user(request, line, messages.WARNING)
    if (missed := promised - report.done - sum(report.skipped.values())) > 0:
        line = _("%(count)d skipped: changed or deleted since the page was shown.")
        admin.message_user(request, line % {"count": missed}, messages.WARNING)
    return HttpResponseRedirect(list_url(admin, request.GET))


def _newest(parts: list[JobQuerySet]) -> list[Any]:
    newest = [
        job
        for part in parts
        for job in part.only(*NAMED_COLUMNS)
        .annotate(error_start=Left("last_error", ERROR_START))
        .order_by("-pk")[:NAMED]
    ]
    return sorted(newest, key=lambda job: -job.pk)[:NAMED]


def _row(job: Any) -> dict[str, Any]:
    return {
        "job": job,
        "handler": breakable(job.handler),
        "short_error": first_line(job.error_start),
    }


def _skip_lines(act: Act, skipped: Counter[str]) -> list[str]:
    return [_skip_line(act, status, count) for status, count in skipped.items()]


def _skip_line(act: Act, status: str, count: int) -> str:
    counted = str(count) if count <= MOST_COUNTED else _("more than %d") % MOST_COUNTED
    if status == GONE:
        return _("%(count)s skipped: deleted meanwhile.") % {"count": counted}
    label = _("various statuses") if status == VARIOUS else Status(status).label
    return act.skipped_as.get(status, act.skipped) % {"count": counted, "status": label}


def _list_query(query: QueryDict) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in query.lists() if key not in _POSITION]


def _url(admin: ProcessingJobAdmin, name: str, query: list[tuple[str, Any]]) -> str:
    opts = admin.opts
    viewname = f"admin:{opts.app_label}_{opts.model_name}_{name}"
    url = reverse(viewname, current_app=admin.admin_site.name)
    return f"{url}?{urlencode(query, doseq=True)}" if query else url
