"""The admin of queues: pause one, let it run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_jobqueue.admin.job_list import queues_in_use
from django_jobqueue.admin.wording import badge
from django_jobqueue.models import Queue

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Queue]
else:
    _Admin = admin.ModelAdmin


class QueueAdmin(_Admin):
    """Queues an operator decided about. One without a row runs, so a row is added to pause it."""

    list_display = ("name", "state")
    fields = ("name", "paused")
    ordering = ("name",)

    class Media:
        css = {"all": ("django_jobqueue/admin.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return () if obj is None else ("name",)

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        help_texts = {} if change else {"name": _how_to_name_it()}
        return super().get_form(request, obj, change=change, help_texts=help_texts, **kwargs)

    @admin.display(description=gettext_lazy("state"))
    def state(self, queue: Queue) -> SafeString:
        """Whether its jobs are claimed."""
        return badge("paused", _("paused")) if queue.paused else badge("running", _("running"))


def _how_to_name_it() -> SafeString:
    # Escaped here: the admin shows help texts as they are, and anybody may name a queue.
    return format_html(
        "{} {}",
        _("To pause a queue, give its name as in the queue column of the jobs, and tick “paused”."),
        _("Queues in use: %s.") % ", ".join(queues_in_use()),
    )
