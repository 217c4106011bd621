"""The admin of jobs: everything to see, nothing to edit, and two acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_jobqueue.admin import job_list, job_page
from django_jobqueue.admin.acts import ACTS, CANCEL, REQUEUE, Act, jobs
from django_jobqueue.admin.confirmation import confirmation_url, confirmation_view
from django_jobqueue.admin.selection import UnreadableSelection, read_each, read_ids
from django_jobqueue.admin.wording import badge, breakable, first_line, moment
from django_jobqueue.models import ProcessingJob
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.states import Status

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[ProcessingJob]
else:
    _Admin = admin.ModelAdmin

_HELP = {
    "status_badge": gettext_lazy("A failed job waits for its retry. A dead letter waits for you."),
    "error_fingerprint": gettext_lazy("Equal for failures of one cause."),
    "lock_token": gettext_lazy("Rises with every claim."),
}


class ProcessingJobAdmin(_Admin):
    """Jobs: list, page, requeue, cancel. Rows go by `prune`, never from here."""

    actions = ("requeue", "cancel")
    list_display = (
        "id",
        "status_badge",
        "handler_shown",
        "short_error",
        "attempts_of_max",
        "queue",
        "available",
        "finished",
    )
    list_filter = ("status", job_list.QueueFilter, job_list.HandlerFilter)
    list_per_page = list_max_show_all = job_list.PAGE
    ordering = ("-id",)
    paginator = job_list.BoundedPaginator
    search_fields = ("id", "idempotency_key")
    search_help_text = gettext_lazy("An exact id or idempotency key.")
    show_facets = admin.ShowFacets.NEVER  # each would count the table
    show_full_result_count = False
    sortable_by = ("id",)
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "id",
                    "status_badge",
                    "handler",
                    "queue",
                    "priority",
                    "attempts_of_max",
                    "idempotency_key",
                )
            },
        ),
        (gettext_lazy("Call"), {"fields": ("payload_shown",)}),
        (
            gettext_lazy("Outcome"),
            {"fields": ("error_shown", "error_fingerprint", "result_shown")},
        ),
        (gettext_lazy("Times"), {"fields": ("created", "available", "finished")}),
        (
            gettext_lazy("Lock"),
            {"fields": ("locked_by", "locked", "lock_expires", "lock_token")},
        ),
    )

    class Media:
        css = {"all": ("django_jobqueue/admin.css",)}

    # --- who may what --------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        """Whether this person may requeue dead letters."""
        return request.user.has_perm(REQUEUE.permission)

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """Whether this person may cancel jobs."""
        return request.user.has_perm(CANCEL.permission)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        return job_list.is_offered_lookup(lookup)

    # --- the list ------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[ProcessingJob]:
        return jobs().order_by("-id")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return job_list.JobChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if search_term.strip():
            queryset = queryset.filter(job_list.found_by(search_term))
        return queryset, False

    def matches(self, request: HttpRequest) -> JobQuerySet:
        """What the list shows for this query string, on all of its pages."""
        found: JobQuerySet = self.get_changelist_instance(request).queryset
        return found

    @admin.display(description=gettext_lazy("status"))
    def status_badge(self, job: ProcessingJob) -> SafeString:
        """The status as a word; the colour only repeats it."""
        return badge(job.status, str(Status(job.status).label))

    @admin.display(description=gettext_lazy("handler"))
    def handler_shown(self, job: ProcessingJob) -> SafeString:
        """The handler's name, which a narrow column may break."""
        return breakable(job.handler)

    @admin.display(description=gettext_lazy("attempts"))
    def attempts_of_max(self, job: ProcessingJob) -> str:
        """Attempts started in this round, of how many."""
        return f"{job.attempts} / {job.max_attempts}"

    @admin.display(description=gettext_lazy("last error"), empty_value="-")
    def short_error(self, job: job_list.ListedJob) -> str:
        """The first line of the last error, while the job has not got over it."""
        return "" if job.status == Status.SUCCEEDED else first_line(job.error_start)

    @admin.display(description=gettext_lazy("available at"))
    def available(self, job: ProcessingJob) -> str | None:
        """When it is due."""
        return moment(job.available_at)

    @admin.display(description=gettext_lazy("finished at"))
    def finished(self, job: ProcessingJob) -> str | None:
        """When it ended for good."""
        return moment(job.finished_at)

    # --- the acts ------------------------------------------------------------------------------

    @admin.action(description=REQUEUE.title, permissions=["requeue"])
    def requeue(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        """Ask whether to requeue what is selected."""
        return self._ask(request, REQUEUE)

    @admin.action(description=CANCEL.title, permissions=["cancel"])
    def cancel(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse:
        """Ask whether to cancel what is selected."""
        return self._ask(request, CANCEL)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if request.method == "POST":
            self._refuse_forbidden_act(request)
            try:
                read_each(request.POST.getlist(ACTION_CHECKBOX_NAME))
            except UnreadableSelection:
                message = _("The selection could not be read. Nothing was changed.")
                self.message_user(request, message, messages.ERROR)
                return HttpResponseRedirect(request.get_full_path())
            if _selects_all(request) and ACTION_CHECKBOX_NAME not in request.POST:
                # The stock view insists on a tick, though with "select all" it does not matter.
                request.POST = _with_a_tick(request.POST)  # type: ignore[assignment]
        return super().changelist_view(request, extra_context)

    def get_urls(self) -> list[URLPattern]:
        return [*(self._confirmation_path(act) for act in ACTS), *super().get_urls()]

    def _ask(self, request: HttpRequest, act: Act) -> HttpResponse:
        ticked = None if _selects_all(request) else request.POST.getlist(ACTION_CHECKBOX_NAME)
        return HttpResponseRedirect(confirmation_url(self, act, request.GET, ticked))

    def _refuse_forbidden_act(self, request: HttpRequest) -> None:
        # The stock view passes over an action it did not offer; who sent it should be told.
        asked = request.POST.getlist("action")
        if any(act.name in asked and not request.user.has_perm(act.permission) for act in ACTS):
            raise PermissionDenied

    def _confirmation_path(self, act: Act) -> URLPattern:
        def view(request: HttpRequest) -> HttpResponse:
            return confirmation_view(self, request, act)

        name = f"{self.opts.app_label}_{self.opts.model_name}_{act.name}"
        # Each chunk commits by itself, also in a project with ATOMIC_REQUESTS.
        unwrapped = transaction.non_atomic_requests(using=jobs().db)(view)
        return path(f"{act.name}/", self.admin_site.admin_view(unwrapped), name=name)

    # --- the page of one job -------------------------------------------------------------------

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> ProcessingJob | None:
        try:
            (pk,) = read_ids(object_id)
        except (UnreadableSelection, ValueError):
            return None
        return job_page.with_bounded_texts(self.get_queryset(request)).filter(pk=pk).first()

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        return super().get_form(request, obj, change=change, help_texts=_HELP, **kwargs)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: ProcessingJob | None = None,
    ) -> HttpResponse:
        if obj is not None:
            context["history"] = job_page.history_of(obj, using=jobs().db)
            context["acts"] = self._possible_acts(request, obj)
        return super().render_change_form(request, context, add, change, form_url, obj)

    @admin.display(description=gettext_lazy("payload"))
    def payload_shown(self, job: job_page.ShownJob) -> SafeString | None:
        """The payload, indented."""
        return job_page.shown_text(job.payload_start, job.payload_length)

    @admin.display(description=gettext_lazy("result"))
    def result_shown(self, job: job_page.ShownJob) -> SafeString | None:
        """The result, indented."""
        return job_page.shown_text(job.result_start, job.result_length)

    @admin.display(description=gettext_lazy("last error"))
    def error_shown(self, job: job_page.ShownJob) -> SafeString | None:
        """The last error, with its lines."""
        return job_page.shown_text(job.last_error_start, job.last_error_length)

    @admin.display(description=gettext_lazy("created at"))
    def created(self, job: ProcessingJob) -> str | None:
        """When it was enqueued."""
        return moment(job.created_at)

    @admin.display(description=gettext_lazy("locked at"))
    def locked(self, job: ProcessingJob) -> str | None:
        """When a worker claimed it."""
        return moment(job.locked_at)

    @admin.display(description=gettext_lazy("lock expires at"))
    def lock_expires(self, job: ProcessingJob) -> str | None:
        """When others may take it back, unless a heartbeat comes first."""
        return moment(job.lock_expires_at)

    def _possible_acts(self, request: HttpRequest, job: ProcessingJob) -> list[dict[str, Any]]:
        filters = QueryDict(request.GET.get("_changelist_filters", ""))
        return [
            {"title": act.title, "url": confirmation_url(self, act, filters, [str(job.pk)])}
            for act in ACTS
            if job.status in act.sources and request.user.has_perm(act.permission)
        ]


def _selects_all(request: HttpRequest) -> bool:
    field = ActionForm.base_fields["select_across"]
    return bool(field.to_python(request.POST.get("select_across")))


def _with_a_tick(post: QueryDict) -> QueryDict:
    ticked = post.copy()
    ticked[ACTION_CHECKBOX_NAME] = "0"
    return ticked
