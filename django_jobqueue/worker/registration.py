"""The worker's own row, for people to see. Nothing about recovery depends on it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

import django_jobqueue
from django_jobqueue.models import Worker
from django_jobqueue.values import NAME_LENGTH
from django_jobqueue.worker.options import WorkerOptions

#: Rows of workers that vanished without a word are removed after this long.
_FORGOTTEN_AFTER = timedelta(days=1)


class Registration:
    """Written by the thread that takes jobs: a row that goes stale means that no job is taken."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._rows = Worker.objects.using(options.database)

    def beat(self, *, busy_slots: int, hung_slots: int, full_for: float | None) -> None:
        """Say that the worker is alive, how many of its slots are busy, how many of these hang,
        and for how many seconds none has been free."""
        state = {
            "heartbeat_at": Now(),
            "busy_slots": busy_slots,
            "hung_slots": hung_slots,
            "full_since": None if full_for is None else Now() - timedelta(seconds=full_for),
        }
        own = self._rows.filter(name=self._options.name)
        with transaction.atomic(using=self._options.database):
            if not _free(own).update(**state) and not own.exists():
                self._begin(state)

    def end(self) -> None:
        """Delete the row."""
        with transaction.atomic(using=self._options.database):
            _free(self._rows.filter(name=self._options.name)).delete()

    def _begin(self, state: dict[str, Any]) -> None:
        _free(self._rows.filter(heartbeat_at__lt=Now() - _FORGOTTEN_AFTER)).delete()
        self._rows.create(
            name=self._options.name,
            host=socket.gethostname()[:NAME_LENGTH],
            pid=os.getpid(),
            version=django_jobqueue.__version__,
            queues=None if self._options.queues is None else list(self._options.queues),
            slots=self._options.threads,
            **state,
        )


def _free(rows: QuerySet[Worker]) -> QuerySet[Worker]:
    """Those of these rows that nobody has locked: no worker waits for a row about itself."""
    return Worker.objects.using(rows.db).filter(
        pk__in=rows.select_for_update(skip_locked=True).values("pk")
    )
