"""A worker process: one deciding thread, a heartbeat, and threads that run handlers."""

from django_jobqueue.worker.coordinator import Coordinator
from django_jobqueue.worker.options import WorkerOptions
from django_jobqueue.worker.summary import Summary

__all__ = ["Coordinator", "Summary", "WorkerOptions"]
