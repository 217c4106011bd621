"""What `manage.py check` says about settings and databases. It opens no connection."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_jobqueue.conf import setting_problems

_POSTGRESQL = "postgresql"


def register_checks() -> None:
    """Called once, when the app is ready."""
    register(check_settings)
    register(check_databases, Tags.models)


def check_settings(**_kwargs: Any) -> list[CheckMessage]:
    """E001: `DJANGO_JOBQUEUE` has an unknown name, a bad value, or values that contradict."""
    return [Error(problem, id="django_jobqueue.E001") for problem in setting_problems()]


def check_databases(**_kwargs: Any) -> list[CheckMessage]:
    """E002: jobs would go to a database that is not PostgreSQL. E003: psycopg 3 is missing."""
    alias = router.db_for_write(apps.get_model("django_jobqueue", "ProcessingJob"))
    try:
        vendor = connections[alias].vendor
    except ImproperlyConfigured as error:  # the driver of its backend is not installed
        return [_not_postgresql(alias, f"cannot be used: {_first_sentence(error)}")]
    if vendor != _POSTGRESQL:
        return [_not_postgresql(alias, f"is {vendor}")]
    return [] if _has_psycopg3() else [_NO_PSYCOPG3]


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _not_postgresql(alias: str, problem: str) -> CheckMessage:
    return Error(
        f"Jobs would be written to the database {alias!r}, which {problem}.",
        hint="django-jobqueue needs PostgreSQL and psycopg 3: set the database's ENGINE to"
        " 'django.db.backends.postgresql', or route the app django_jobqueue to a PostgreSQL"
        " database with DATABASE_ROUTERS.",
        id="django_jobqueue.E002",
    )


def _has_psycopg3() -> bool:
    try:
        from django.db.backends.postgresql.psycopg_any import is_psycopg3
    except (ImportError, ImproperlyConfigured):
        return False
    return is_psycopg3


_NO_PSYCOPG3 = Error(
    "Django uses psycopg 2 here, and django-jobqueue needs psycopg 3.",
    hint="Install it: pip install 'psycopg[binary]'. Django prefers it as soon as it is there.",
    id="django_jobqueue.E003",
)
