"""The settings of the driver and of its workers. The driver says in the environment where the
database is."""

from __future__ import annotations

import os

SECRET_KEY = "chaos-only"

INSTALLED_APPS = ["django_jobqueue", "tests.chaos.app"]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "PASSWORD": os.environ.get("CHAOS_PASSWORD", ""),
        # Several, separated by commas: libpq takes the first that accepts writes.
        "HOST": os.environ.get("CHAOS_HOSTS", ""),
        "PORT": os.environ.get("CHAOS_PORTS", ""),
        "OPTIONS": {
            "application_name": os.environ.get("CHAOS_ROLE", "chaos handler"),
            "connect_timeout": 3,
            "target_session_attrs": "read-write",
        },
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

USE_TZ = True
TIME_ZONE = "UTC"

DJANGO_JOBQUEUE = {
    "STALE_LOCK_AFTER": float(os.environ.get("CHAOS_STALE_LOCK_AFTER", "3")),
    "RESCUE_INTERVAL": 1,
    "POLL_INTERVAL": 0.3,
    "SHUTDOWN_TIMEOUT": 0.5,
    # An ordinary job meets many faults, and none of them may make it a dead letter.
    "MAX_ATTEMPTS": 30,
    "BACKOFF_STEP": 0.1,
}
