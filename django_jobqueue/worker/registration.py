"""The worker's own row, for people to see. Nothing about recovery depends on it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

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

    def beat(self, *, busy_slots: int) -> None:
        """Say that the worker is alive and how many of its slots are busy."""
        if not self._own_row().update(heartbeat_at=Now(), busy_slots=busy_slots):
            self._begin(busy_slots)

    def end(self) -> None:
        """Delete the row."""
        self._own_row().delete()

    def _begin(self, busy_slots: int) -> None:
        self._rows.filter(heartbeat_at__lt=Now() - _FORGOTTEN_AFTER).delete()
        self._rows.create(
            name=self._options.name,
            host=socket.gethostname()[:NAME_LENGTH],
            pid=os.getpid(),
            version=django_jobqueue.__version__,
            queues=None if self._options.queues is None else list(self._options.queues),
            slots=self._options.threads,
            busy_slots=busy_slots,
        )

    def _own_row(self) -> QuerySet[Worker]:
        return self._rows.filter(name=self._options.name)
