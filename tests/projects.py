"""Settings modules for processes that need a project of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OWN_SETTINGS = "own_settings"
QUICK_RESCUE = (
    "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 0.5, 'RESCUE_INTERVAL': 0.1, 'POLL_INTERVAL': 0.1}"
)
"""What a killed worker had runs again within a second."""

_TESTS_SETTINGS_FIRST = """
from tests import settings

globals().update({name: value for name, value in vars(settings).items() if name.isupper()})
"""


def project_settings(folder: Path, lines: str) -> str:
    """Write a settings module: that of the tests, then these lines. Returns its name."""
    (folder / f"{OWN_SETTINGS}.py").write_text(f"{_TESTS_SETTINGS_FIRST}\n{lines}\n")
    return OWN_SETTINGS


def environment(folder: Path, *, settings: str, database_url: str) -> dict[str, str]:
    """The environment of a process that uses such a module, on the test's database."""
    return {
        **os.environ,
        "DATABASE_URL": database_url,
        "DJANGO_SETTINGS_MODULE": settings,
        "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]),
    }


def run_python(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python process to its end, warnings being errors. Its output is in `stdout`."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
