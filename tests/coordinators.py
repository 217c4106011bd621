"""Workers in the test's own process: real threads on a real database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django_jobqueue.worker import Coordinator, Summary, WorkerOptions
from tests.racing import closing_connections


def burst(**options: Any) -> Summary:
    """Run what is due, in this thread."""
    return Coordinator(WorkerOptions(burst=True, **options)).run()


@contextmanager
def working(**options: Any) -> Iterator[Coordinator]:
    """A coordinator in a thread of its own, stopped at the end unless the test did so.

    An error it ends by is raised.
    """
    with working_as(Coordinator(WorkerOptions(**options))) as coordinator:
        yield coordinator


@contextmanager
def working_as(coordinator: Coordinator) -> Iterator[Coordinator]:
    """The same for a coordinator that the test made."""
    errors: list[BaseException] = []

    def run(_number: int) -> None:
        try:
            coordinator.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=closing_connections(run), args=(0,))
    thread.start()
    try:
        yield coordinator
    finally:
        if not coordinator.shutdown.has_begun:
            coordinator.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert errors == []
