"""The rows: jobs, the history of their failed attempts, workers and queues.

Defaults stand in the database, so that plain SQL, and code older than the table, can insert too.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, ClassVar

from django.db import models
from django.db.models import F, Func, Q, Value
from django.db.models.functions import Now
from django.db.models.lookups import Exact
from django.utils.translation import gettext_lazy as _

from django_jobqueue.queue import JobQuerySet
from django_jobqueue.states import CLAIMABLE, FINISHED, PRUNABLE, Status
from django_jobqueue.values import NAME_LENGTH, PRIORITY_RANGE, YEARS

if TYPE_CHECKING:
    from django.db.models.manager import Manager

EARLIEST = datetime(YEARS[0] - 1, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(YEARS[1] + 1, 1, 1, tzinfo=timezone.utc)


class ProcessingJob(models.Model):
    """One job: one call to be made. Only the moves of `ProcessingJob.objects` write its status."""

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(_("queue"), max_length=NAME_LENGTH, db_default="default")
    handler = models.CharField(_("handler"), max_length=NAME_LENGTH)
    payload = models.JSONField(_("payload"), db_default={})
    priority = models.SmallIntegerField(
        _("priority"), db_default=0, help_text=_("Larger runs first.")
    )
    status = models.CharField(
        _("status"), max_length=16, choices=Status.choices, db_default=Status.PENDING.value
    )
    attempts = models.SmallIntegerField(_("attempts"), db_default=0)
    max_attempts = models.SmallIntegerField(_("max. attempts"), db_default=5)
    available_at = models.DateTimeField(_("available at"), db_default=Now())
    locked_at = models.DateTimeField(_("locked at"), null=True)
    locked_by = models.CharField(_("locked by"), max_length=NAME_LENGTH, null=True)  # noqa: DJ001
    lock_expires_at = models.DateTimeField(_("lock expires at"), null=True)
    lock_token = models.BigIntegerField(_("lock token"), db_default=0)
    idempotency_key = models.CharField(  # noqa: DJ001 - NULL: no key
        _("idempotency key"), max_length=NAME_LENGTH, null=True
    )
    result = models.JSONField(_("result"), null=True)
    last_error = models.TextField(_("last error"), db_default="")
    error_fingerprint = models.CharField(_("error fingerprint"), max_length=16, db_default="")
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    finished_at = models.DateTimeField(_("finished at"), null=True)

    #: On what `enqueue` returns: whether this call inserted the row …
    created: bool = False
    #: … or found one by its key whose handler or payload are not those of the call.
    differs: bool = False
    #: On what `claim` returns: the token of that claim, which `refresh_from_db` does not change.
    claim_token: int | None = None

    objects: ClassVar[Manager[ProcessingJob]] = JobQuerySet.as_manager()

    class Meta:
        db_table = "processing_jobs"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ("view",)
        permissions = (
            ("requeue_processingjob", "Can requeue dead letters"),
            ("cancel_processingjob", "Can cancel jobs"),
        )
        indexes = (
            # Claim: the due jobs in the order they run, of one queue and of all. Live rows only.
            models.Index(
                "queue",
                F("priority").desc(),
                "available_at",
                "id",
                name="processing_jobs_claim",
                condition=Q(status__in=CLAIMABLE),
            ),
            models.Index(
                F("priority").desc(),
                "available_at",
                "id",
                name="processing_jobs_claim_any",
                condition=Q(status__in=CLAIMABLE),
            ),
            # Rescue: what is locked, the stalest first.
            models.Index(
                fields=("lock_expires_at", "id"),
                name="processing_jobs_locked",
                condition=Q(status=Status.PROCESSING),
            ),
            # Admin: the dead letters among millions of finished rows.
            models.Index(
                fields=("id",),
                name="processing_jobs_dead_letters",
                condition=Q(status=Status.DEAD_LETTER),
            ),
            # Prune: the oldest finished rows.
            models.Index(
                fields=("finished_at", "id"),
                name="processing_jobs_prunable",
                condition=Q(status__in=PRUNABLE),
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=("idempotency_key",),
                name="processing_jobs_idempotency_key",
                condition=Q(idempotency_key__isnull=False),
            ),
            models.CheckConstraint(
                name="processing_jobs_status_known", condition=Q(status__in=Status.values)
            ),
            models.CheckConstraint(
                name="processing_jobs_locked_while_processing",
                condition=Q(
                    status=Status.PROCESSING,
                    locked_at__isnull=False,
                    locked_by__isnull=False,
                    lock_expires_at__isnull=False,
                )
                | Q(
                    ~Q(status=Status.PROCESSING),
                    locked_at__isnull=True,
                    locked_by__isnull=True,
                    lock_expires_at__isnull=True,
                ),
            ),
            models.CheckConstraint(
                name="processing_jobs_finished_when_finished",
                condition=Q(status__in=FINISHED, finished_at__isnull=False)
                | Q(~Q(status__in=FINISHED), finished_at__isnull=True),
            ),
            models.CheckConstraint(
                name="processing_jobs_attempts_in_range",
                condition=Q(attempts__gte=0, max_attempts__gte=1, attempts__lte=F("max_attempts")),
            ),
            # A claimable row past its attempts would make every claim that meets it fail.
            models.CheckConstraint(
                name="processing_jobs_attempts_left_to_claim",
                condition=~Q(status__in=CLAIMABLE) | Q(attempts__lt=F("max_attempts")),
            ),
            models.CheckConstraint(
                name="processing_jobs_payload_is_object",
                condition=Q(Exact(Func(F("payload"), function="jsonb_typeof"), Value("object"))),
            ),
            models.CheckConstraint(
                name="processing_jobs_priority_in_range",
                condition=Q(priority__range=PRIORITY_RANGE),
            ),
            models.CheckConstraint(
                name="processing_jobs_names_not_empty",
                condition=~Q(queue="") & ~Q(handler="") & ~Q(locked_by="") & ~Q(idempotency_key=""),
            ),
            models.CheckConstraint(
                name="processing_jobs_lock_token_in_range",
                condition=Q(lock_token__gte=0, lock_token__lt=2**62),
            ),
            # Nobody could read a row with an infinite time, and so claim anything behind it.
            models.CheckConstraint(
                name="processing_jobs_times_in_range",
                condition=Q(available_at__gt=EARLIEST, available_at__lt=LATEST)
                & Q(created_at__gt=EARLIEST, created_at__lt=LATEST),
            ),
        )

    def __str__(self) -> str:
        return f"{self.handler} #{self.pk}"


class JobAttempt(models.Model):
    """A failed or lost attempt. A success leaves none."""

    class Outcome(models.TextChoices):
        FAILED = "failed", _("failed")
        LOST = "lost", _("lost")

    id = models.BigAutoField(primary_key=True)
    job = models.ForeignKey(
        ProcessingJob,
        models.CASCADE,
        related_name="history",
        db_index=False,  # the constraint's index begins with it
        verbose_name=_("job"),
    )
    number = models.SmallIntegerField(_("attempt"))
    lock_token = models.BigIntegerField(_("lock token"))
    outcome = models.CharField(_("outcome"), max_length=16, choices=Outcome.choices)
    worker = models.CharField(_("worker"), max_length=NAME_LENGTH)
    started_at = models.DateTimeField(_("started at"))
    ended_at = models.DateTimeField(_("ended at"), db_default=Now())
    error = models.TextField(_("error"), db_default="")
    traceback = models.TextField(_("traceback"), db_default="")
    error_fingerprint = models.CharField(_("error fingerprint"), max_length=16, db_default="")

    class Meta:
        db_table = "processing_job_attempts"
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        default_permissions = ()
        constraints = (
            # One verdict per claim; its index also serves the look-up by job.
            models.UniqueConstraint(
                fields=("job", "lock_token"), name="processing_job_attempts_one_per_claim"
            ),
        )

    def __str__(self) -> str:
        return f"attempt {self.number} of job {self.job_id}"


class Worker(models.Model):
    """A running worker process. What recovery does never depends on this row."""

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(_("name"), max_length=NAME_LENGTH, unique=True)
    host = models.CharField(_("host"), max_length=NAME_LENGTH)
    pid = models.IntegerField(_("process id"))
    version = models.CharField(_("version"), max_length=32)
    queues = models.JSONField(_("queues"), null=True, help_text=_("Empty: every queue."))
    slots = models.SmallIntegerField(_("slots"), help_text=_("Jobs it runs at a time."))
    busy_slots = models.SmallIntegerField(_("busy slots"), db_default=0)
    hung_slots = models.SmallIntegerField(
        _("hung slots"), db_default=0, help_text=_("Busy with a handler that is past its timeout.")
    )
    full_since = models.DateTimeField(
        _("full since"), null=True, help_text=_("Since when no slot has been free.")
    )
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    heartbeat_at = models.DateTimeField(_("heartbeat at"), db_default=Now())

    class Meta:
        db_table = "processing_workers"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name


class Queue(models.Model):
    """What an operator decided about a queue. A queue without a row runs."""

    name = models.CharField(_("name"), max_length=NAME_LENGTH, primary_key=True)
    paused = models.BooleanField(
        _("paused"), db_default=False, help_text=_("No job of a paused queue is claimed.")
    )

    class Meta:
        db_table = "processing_queues"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return self.name
