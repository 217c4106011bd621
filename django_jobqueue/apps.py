"""The Django app: finds handlers, registers checks, turns signals into log lines."""

from django.apps import AppConfig


class JobQueueConfig(AppConfig):
    """`INSTALLED_APPS = [..., "django_jobqueue"]`."""

    name = "django_jobqueue"
    verbose_name = "Job queue"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_jobqueue import checks, handlers, logs

        checks.register_checks()
        logs.connect()
        handlers.autodiscover()
