"""The settings of the tests: the smallest project that shows all of the app."""

from __future__ import annotations

import os
import tempfile

from example_project.settings import MIDDLEWARE as MIDDLEWARE
from example_project.settings import TEMPLATES as TEMPLATES
from example_project.settings import database
from tests.run_database import database_name

SECRET_KEY = "tests-only"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django_jobqueue",
    "example_project.documents",
    "tests.app",
]

ROOT_URLCONF = "tests.urls"

DATABASES = {"default": {**database(), "TEST": {"NAME": database_name()}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

USE_TZ = True
TIME_ZONE = "UTC"

STATIC_URL = "static/"
MEDIA_URL = "media/"
# The run's own folder, which tests/conftest.py makes and removes.
MEDIA_ROOT = os.environ.get("JOBQUEUE_TEST_MEDIA") or os.path.join(tempfile.gettempdir(), "media")
