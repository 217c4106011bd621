"""Figures for operators. Read-only, and bounded however large the table is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from django.db.models.functions import Now

from django_jobqueue.models import ProcessingJob
from django_jobqueue.states import CLAIMABLE

_COUNTED = 1_000


def due_for_unknown_handlers(known: Collection[str], *, using: str) -> dict[str, int]:
    """How many due jobs wait for each handler that is not among the known, counting 1,000 at most.

    Cheap when nothing else is due, which is when a worker asks.
    """
    unknown = (
        ProcessingJob.objects.using(using)
        .filter(status__in=CLAIMABLE, available_at__lte=Now())
        .exclude(handler__in=known)
    )
    return dict(Counter(unknown.values_list("handler", flat=True)[:_COUNTED]))
