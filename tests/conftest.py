"""The run's database, and the rule on skipped tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import pytest

from tests.run_database import database_for_run, url_of

if TYPE_CHECKING:
    from django_jobqueue.handlers import Registry

SKIPS_ALLOWED_IN_CI = frozenset[str]({"needs root"})
"""Reasons for which a test may be skipped in CI; any other skip fails the run there."""

unexpected_skips: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The settings read the database from the environment, so they are loaded here and are not named
    # in pyproject.toml: pytest-django would load them before this file.
    if not is_xdist_worker(config):
        run = contextlib.ExitStack()
        run.enter_context(database_for_run())
        config.add_cleanup(run.close)
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()


def is_xdist_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def database_url(django_db_setup: None) -> str:
    """The URL of the test database that this worker uses: `DATABASE_URL` for a subprocess."""
    from django.db import connection

    return url_of(str(connection.settings_dict["NAME"]))


@pytest.fixture
def worker(tmp_path: Path, database_url: str) -> Any:
    """Start a worker process: `worker("--burst")`."""
    from tests.processes import running_worker

    return lambda *flags, **options: running_worker(
        *flags, folder=tmp_path, database_url=database_url, **options
    )


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, empty for the length of the test."""
    from django_jobqueue.handlers import registry

    monkeypatch.setattr(registry, "_handlers", {})
    return registry


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    note_skip(report)


def note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    location: Any = report.longrepr
    reason = str(location[2]).removeprefix("Skipped: ")
    if reason not in SKIPS_ALLOWED_IN_CI:
        unexpected_skips.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    if os.environ.get("CI") and unexpected_skips and not is_xdist_worker(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and unexpected_skips:
        terminalreporter.section("skips that CI does not allow", red=True)
        for line in unexpected_skips:
            terminalreporter.line(line)
