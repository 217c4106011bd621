"""The tables, and how PostgreSQL keeps a table healthy whose rows change several times and go."""

import datetime

import django.db.models.deletion
import django.db.models.functions.datetime
import django.db.models.lookups
from django.db import migrations, models

# Vacuum by the number of dead rows, not by a share of a table that may hold millions of finished
# ones: dead entries at the head of the claim's index are what makes a claim slow. Partly filled
# pages leave room for a row's next versions beside it.
CHURN = """
ALTER TABLE processing_jobs SET (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.0,
    autovacuum_vacuum_insert_threshold = 50000,
    autovacuum_analyze_scale_factor = 0.0,
    autovacuum_analyze_threshold = 10000,
    autovacuum_vacuum_cost_delay = 0
)
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Queue",
            fields=[
                (
                    "name",
                    models.CharField(
                        max_length=200, primary_key=True, serialize=False, verbose_name="name"
                    ),
                ),
                (
                    "paused",
                    models.BooleanField(
                        db_default=False,
                        help_text="No job of a paused queue is claimed.",
                        verbose_name="paused",
                    ),
                ),
            ],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "db_table": "processing_queues",
                "default_permissions": ("view", "change"),
            },
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200, unique=True, verbose_name="name")),
                ("host", models.CharField(max_length=200, verbose_name="host")),
                ("pid", models.IntegerField(verbose_name="process id")),
                ("version", models.CharField(max_length=32, verbose_name="version")),
                (
                    "queues",
                    models.JSONField(
                        help_text="Empty: every queue.", null=True, verbose_name="queues"
                    ),
                ),
                (
                    "slots",
                    models.SmallIntegerField(
                        help_text="Jobs it runs at a time.", verbose_name="slots"
                    ),
                ),
                ("busy_slots", models.SmallIntegerField(db_default=0, verbose_name="busy slots")),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="started at",
                    ),
                ),
                (
                    "heartbeat_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="heartbeat at",
                    ),
                ),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "db_table": "processing_workers",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="ProcessingJob",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "queue",
                    models.CharField(db_default="default", max_length=200, verbose_name="queue"),
                ),
                ("handler", models.CharField(max_length=200, verbose_name="handler")),
                ("payload", models.JSONField(db_default={}, verbose_name="payload")),
                (
                    "priority",
                    models.SmallIntegerField(
                        db_default=0, help_text="Larger runs first.", verbose_name="priority"
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("pending", "pending"),
                            ("processing", "processing"),
                            ("failed", "failed"),
                            ("succeeded", "succeeded"),
                            ("dead_letter", "dead letter"),
                            ("cancelled", "cancelled"),
                        ],
                        db_default="pending",
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                ("attempts", models.SmallIntegerField(db_default=0, verbose_name="attempts")),
                (
                    "max_attempts",
                    models.SmallIntegerField(db_default=5, verbose_name="max. attempts"),
                ),
                (
                    "available_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="available at",
                    ),
                ),
                ("locked_at", models.DateTimeField(null=True, verbose_name="locked at")),
                (
                    "locked_by",
                    models.CharField(max_length=200, null=True, verbose_name="locked by"),
                ),
                (
                    "lock_expires_at",
                    models.DateTimeField(null=True, verbose_name="lock expires at"),
                ),
                ("lock_token", models.BigIntegerField(db_default=0, verbose_name="lock token")),
                (
                    "idempotency_key",
                    models.CharField(max_length=200, null=True, verbose_name="idempotency key"),
                ),
                ("result", models.JSONField(null=True, verbose_name="result")),
                ("last_error", models.TextField(db_default="", verbose_name="last error")),
                (
                    "error_fingerprint",
                    models.CharField(
                        db_default="", max_length=16, verbose_name="error fingerprint"
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="created at",
                    ),
                ),
                ("finished_at", models.DateTimeField(null=True, verbose_name="finished at")),
            ],
            options={
                "verbose_name": "job",
                "verbose_name_plural": "jobs",
                "db_table": "processing_jobs",
                "permissions": (
                    ("requeue_processingjob", "Can requeue dead letters"),
                    ("cancel_processingjob", "Can cancel jobs"),
                ),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        models.F("queue"),
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("available_at"),
                        models.F("id"),
                        condition=models.Q(("status__in", ("pending", "failed"))),
                        name="processing_jobs_claim",
                    ),
                    models.Index(
                        models.OrderBy(models.F("priority"), descending=True),
                        models.F("available_at"),
                        models.F("id"),
                        condition=models.Q(("status__in", ("pending", "failed"))),
                        name="processing_jobs_claim_any",
                    ),
                    models.Index(
                        condition=models.Q(("status", "processing")),
                        fields=["lock_expires_at", "id"],
                        name="processing_jobs_locked",
                    ),
                    models.Index(
                        condition=models.Q(("status", "dead_letter")),
                        fields=["id"],
                        name="processing_jobs_dead_letters",
                    ),
                    models.Index(
                        condition=models.Q(("status__in", ("succeeded", "cancelled"))),
                        fields=["finished_at", "id"],
                        name="processing_jobs_prunable",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("idempotency_key__isnull", False)),
                        fields=("idempotency_key",),
                        name="processing_jobs_idempotency_key",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "status__in",
                                [
                                    "pending",
                                    "processing",
                                    "failed",
                                    "succeeded",
                                    "dead_letter",
                                    "cancelled",
                                ],
                            )
                        ),
                        name="processing_jobs_status_known",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("lock_expires_at__isnull", False),
                                ("locked_at__isnull", False),
                                ("locked_by__isnull", False),
                                ("status", "processing"),
                            ),
                            models.Q(
                                models.Q(("status", "processing"), _negated=True),
                                ("lock_expires_at__isnull", True),
                                ("locked_at__isnull", True),
                                ("locked_by__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="processing_jobs_locked_while_processing",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("finished_at__isnull", False),
                                ("status__in", ("succeeded", "dead_letter", "cancelled")),
                            ),
                            models.Q(
                                models.Q(
                                    ("status__in", ("succeeded", "dead_letter", "cancelled")),
                                    _negated=True,
                                ),
                                ("finished_at__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="processing_jobs_finished_when_finished",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempts__gte", 0),
                            ("attempts__lte", models.F("max_attempts")),
                            ("max_attempts__gte", 1),
                        ),
                        name="processing_jobs_attempts_in_range",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status__in", ("pending", "failed")), _negated=True),
                            ("attempts__lt", models.F("max_attempts")),
                            _connector="OR",
                        ),
                        name="processing_jobs_attempts_left_to_claim",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            django.db.models.lookups.Exact(
                                models.Func(models.F("payload"), function="jsonb_typeof"),
                                models.Value("object"),
                            )
                        ),
                        name="processing_jobs_payload_is_object",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("priority__range", (-100, 100))),
                        name="processing_jobs_priority_in_range",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("queue", ""), _negated=True),
                            models.Q(("handler", ""), _negated=True),
                            models.Q(("locked_by", ""), _negated=True),
                            models.Q(("idempotency_key", ""), _negated=True),
                        ),
                        name="processing_jobs_names_not_empty",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("lock_token__gte", 0), ("lock_token__lt", 4611686018427387904)
                        ),
                        name="processing_jobs_lock_token_in_range",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            (
                                "available_at__gt",
                                datetime.datetime(1899, 1, 1, 0, 0, tzinfo=datetime.timezone.utc),
                            ),
                            (
                                "available_at__lt",
                                datetime.datetime(9001, 1, 1, 0, 0, tzinfo=datetime.timezone.utc),
                            ),
                            (
                                "created_at__gt",
                                datetime.datetime(1899, 1, 1, 0, 0, tzinfo=datetime.timezone.utc),
                            ),
                            (
                                "created_at__lt",
                                datetime.datetime(9001, 1, 1, 0, 0, tzinfo=datetime.timezone.utc),
                            ),
                        ),
                        name="processing_jobs_times_in_range",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="JobAttempt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("number", models.SmallIntegerField(verbose_name="attempt")),
                ("lock_token", models.BigIntegerField(verbose_name="lock token")),
                (
                    "outcome",
                    models.CharField(
                        choices=[("failed", "failed"), ("lost", "lost")],
                        max_length=16,
                        verbose_name="outcome",
                    ),
                ),
                ("worker", models.CharField(max_length=200, verbose_name="worker")),
                ("started_at", models.DateTimeField(verbose_name="started at")),
                (
                    "ended_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        verbose_name="ended at",
                    ),
                ),
                ("error", models.TextField(db_default="", verbose_name="error")),
                ("traceback", models.TextField(db_default="", verbose_name="traceback")),
                (
                    "error_fingerprint",
                    models.CharField(
                        db_default="", max_length=16, verbose_name="error fingerprint"
                    ),
                ),
                (
                    "job",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="history",
                        to="django_jobqueue.processingjob",
                        verbose_name="job",
                    ),
                ),
            ],
            options={
                "verbose_name": "attempt",
                "verbose_name_plural": "attempts",
                "db_table": "processing_job_attempts",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("job", "lock_token"), name="processing_job_attempts_one_per_claim"
                    )
                ],
            },
        ),
        migrations.RunSQL(CHURN, migrations.RunSQL.noop),
    ]
