"""Figures for operators. Read-only, and bounded however large the table is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from django.db.models.functions import Now

from django_jobqueue.models import ProcessingJob
from django_jobqueue.states import CLAIMABLE

_LOOKED_AT = 1_000


def due_for_unknown_handlers(
    known: Collection[str], *, queues: Collection[str] | None, using: str
) -> dict[str, int]:
    """How many of the next 1,000 due jobs wait for each handler that is not among the known.

    That is all of them when a worker asks that has just found nothing to claim.
    """
    due = ProcessingJob.objects.using(using).filter(status__in=CLAIMABLE, available_at__lte=Now())
    if queues is not None:
        due = due.filter(queue__in=queues)
    next_due = due.order_by("-priority", "available_at", "pk").values_list("handler", flat=True)
    return dict(Counter(name for name in next_due[:_LOOKED_AT] if name not in known))
