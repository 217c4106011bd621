"""Settings of the example. Everything works without any environment variable.

DATABASE_URL              a PostgreSQL to use; unset or empty: one that the example brings along
EMBEDDED_POSTGRES_FOLDER  where that one keeps its data
SECRET_KEY, DEBUG, ALLOWED_HOSTS, MEDIA_ROOT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import environ

from example_project.postgres.folders import project_folder

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

# Good enough for a demo on one's own machine, and for nothing else.
SECRET_KEY = env.str("SECRET_KEY", default="demo-only-not-a-secret")
DEBUG = env.bool("DEBUG", default=True)
ALLOWED_HOSTS: list[str] = env.list("ALLOWED_HOSTS", default=[])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_jobqueue",
    "example_project.documents",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"


def database() -> dict[str, Any]:
    """The database of DATABASE_URL, else the embedded one."""
    url = env.str("DATABASE_URL", default="")
    if url:
        return {**env.db_url_config(url)}
    folder = env.str("EMBEDDED_POSTGRES_FOLDER", default="") or str(project_folder(BASE_DIR))
    return {"ENGINE": "example_project.postgres", "NAME": "postgres", "HOST": folder}


DATABASES = {"default": database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

if (
    sys.argv[1:2] == ["makemigrations"]
    and DATABASES["default"]["ENGINE"] == "example_project.postgres"
):
    # It would connect only to compare a database's history with the files. That is worth no server.
    DATABASE_ROUTERS = ["example_project.postgres.routers.NothingToMigrate"]

# The settings of django-jobqueue; all have defaults.
DJANGO_JOBQUEUE: dict[str, Any] = {}

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = True
USE_TZ = True

STATIC_URL = "static/"
MEDIA_URL = "media/"
MEDIA_ROOT = env.str("MEDIA_ROOT", default="") or str(BASE_DIR / "var" / "media")
