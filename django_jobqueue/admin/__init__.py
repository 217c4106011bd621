"""The Django admin: see every job, requeue dead letters, cancel what waits, pause a queue."""

from __future__ import annotations

from django.contrib import admin

from django_jobqueue.admin.jobs import ProcessingJobAdmin
from django_jobqueue.admin.queues import QueueAdmin
from django_jobqueue.admin.workers import WorkerAdmin
from django_jobqueue.models import ProcessingJob, Queue, Worker

__all__ = ["ProcessingJobAdmin", "QueueAdmin", "WorkerAdmin"]

admin.site.register(ProcessingJob, ProcessingJobAdmin)
admin.site.register(Queue, QueueAdmin)
admin.site.register(Worker, WorkerAdmin)
