"""Migrations: reversible to nothing, stable under every setting, and set up for churn."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection

from tests.projects import environment, project_settings, run_python
from tests.rows import sql

OURS = """
    SELECT relname FROM pg_class WHERE relname LIKE 'processing\\_%%'
    UNION ALL SELECT proname FROM pg_proc WHERE proname LIKE 'processing\\_%%'
    UNION ALL SELECT typname FROM pg_type WHERE typname LIKE '%%processing\\_%%'
    UNION ALL SELECT conname FROM pg_constraint WHERE conname LIKE 'processing\\_%%'
"""


@pytest.mark.django_db(transaction=True)
def test_migrating_to_zero_leaves_nothing_behind_and_forward_again_works() -> None:
    assert sql(OURS)
    try:
        call_command("migrate", "django_jobqueue", "zero", verbosity=0)
        assert sql(OURS) == []
    finally:
        call_command("migrate", "django_jobqueue", verbosity=0)

    assert "processing_jobs" in connection.introspection.table_names()


@pytest.mark.django_db
def test_the_job_table_is_vacuumed_by_the_number_of_dead_rows() -> None:
    (options,) = sql("SELECT reloptions FROM pg_class WHERE relname = 'processing_jobs'")[0]

    assert "autovacuum_vacuum_scale_factor=0.0" in options
    assert any(option.startswith("fillfactor=") for option in options)


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "DEFAULT_AUTO_FIELD = 'django.db.models.AutoField'",
        "LANGUAGE_CODE = 'de'\nUSE_I18N = True",
        "USE_TZ = False",
        "DJANGO_JOBQUEUE = {'MAX_ATTEMPTS': 9, 'STALE_LOCK_AFTER': 5}",
    ],
)
def test_no_project_setting_makes_a_new_migration(
    lines: str, tmp_path: Path, database_url: str
) -> None:
    env = environment(
        tmp_path, settings=project_settings(tmp_path, lines), database_url=database_url
    )

    check = run_python(
        "-m", "django", "makemigrations", "django_jobqueue", "--check", "--dry-run", env=env
    )

    assert check.returncode == 0, check.stdout
