"""The admin of workers: who runs, and who gave no sign for how long. Read-only."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from django.contrib import admin
from django.db import router
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_jobqueue.admin.wording import moment
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.models import Worker

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[Worker]
else:
    _Admin = admin.ModelAdmin


class AgedWorker(Protocol):
    """A worker with the age of its heartbeat, by the database's clock."""

    queues: list[str] | None
    slots: int
    busy_slots: int
    hung_slots: int
    full_age: timedelta | None
    heartbeat_age: timedelta


class WorkerAdmin(_Admin):
    """Worker processes."""

    list_display = ("name", "host", "pid", "served_queues", "slots_busy", "heartbeat", "version")
    fields = (*list_display, "started", "last_heartbeat")
    ordering = ("name",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        workers = Worker.objects.using(router.db_for_write(Worker))
        aged = workers.annotate(heartbeat_age=_age("heartbeat_at"), full_age=_age("full_since"))
        return aged.order_by("name")

    @admin.display(description=gettext_lazy("queues"))
    def served_queues(self, worker: AgedWorker) -> str:
        """The queues it claims from."""
        return _("every queue") if worker.queues is None else ", ".join(map(str, worker.queues))

    @admin.display(description=gettext_lazy("busy slots"))
    def slots_busy(self, worker: AgedWorker) -> str:
        """How many of its slots run a job, how many of these hang, and since when none is free."""
        parts = [f"{worker.busy_slots} / {worker.slots}"]
        if worker.hung_slots:
            parts.append(_("hanging: %d") % worker.hung_slots)
        if worker.full_age is not None:
            parts.append(_("no free slot for %d s") % worker.full_age.total_seconds())
        return ", ".join(parts)

    @admin.display(description=gettext_lazy("started at"))
    def started(self, worker: Worker) -> str | None:
        """When it started."""
        return moment(worker.started_at)

    @admin.display(description=gettext_lazy("heartbeat at"))
    def last_heartbeat(self, worker: Worker) -> str | None:
        """When it last gave a sign."""
        return moment(worker.heartbeat_at)

    @admin.display(description=gettext_lazy("heartbeat"))
    def heartbeat(self, worker: AgedWorker) -> str:
        """How long ago it gave a sign, and whether that is too long."""
        seconds = max(0, round(worker.heartbeat_age.total_seconds()))
        text = _("%d s ago") % seconds
        lost = seconds > jobqueue_settings().STALE_LOCK_AFTER
        return _("%s: lost?") % text if lost else text


def _age(field: str) -> ExpressionWrapper[Any]:
    return ExpressionWrapper(Now() - F(field), output_field=DurationField())
