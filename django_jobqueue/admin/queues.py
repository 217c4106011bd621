"""The admin of queues: pause one, let it run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest

from django_jobqueue.models import Queue

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Queue]
else:
    _Admin = admin.ModelAdmin


class QueueAdmin(_Admin):
    """Queues an operator decided about. One without a row runs, so a row is added to pause it."""

    list_display = ("name", "paused")
    fields = ("name", "paused")
    ordering = ("name",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return () if obj is None else ("name",)
