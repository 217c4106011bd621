"""What a worker is told when it starts."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field

from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.values import NAME_LENGTH, checked_name, shown

MOST_THREADS = 1_000


def _drawn_name() -> str:
    """Host, process and a fresh random part: no two starts share a name, wherever they run."""
    suffix = f":{os.getpid()}:{secrets.token_hex(4)}"
    return socket.gethostname()[: NAME_LENGTH - len(suffix)] + suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How one worker runs. Spans of time are seconds.

    `queues` None means every queue. `burst` ends the worker when nothing is due. `max_jobs` ends
    it after so many jobs. `restart_when_hung` ends it when every slot holds a handler past its
    timeout, for whoever started it to start it again.
    """

    queues: tuple[str, ...] | None = None
    threads: int = field(default_factory=lambda: jobqueue_settings().THREADS)
    burst: bool = False
    max_jobs: int | None = None
    shutdown_timeout: float = field(default_factory=lambda: jobqueue_settings().SHUTDOWN_TIMEOUT)
    restart_when_hung: bool = False
    database: str = "default"
    name: str = field(default_factory=_drawn_name)

    def __post_init__(self) -> None:
        if isinstance(self.queues, str):
            raise ValueError(f"queues must be a tuple of names, not the string {self.queues!r}.")
        for queue in self.queues or ():
            checked_name(queue, what="queue")
        checked_name(self.name, what="worker name")
        _check_count(self.threads, "threads", most=MOST_THREADS)
        if self.max_jobs is not None:
            _check_count(self.max_jobs, "max_jobs")
        if not self.shutdown_timeout >= 0:
            raise ValueError(
                f"The shutdown timeout must be 0 or more seconds, not {self.shutdown_timeout}."
            )

    def described(self) -> str:
        """One line for the log."""
        parts = [
            "every queue" if self.queues is None else f"queues {', '.join(self.queues)}",
            f"{self.threads} thread{'s' * (self.threads != 1)}",
            f"database {self.database!r}",
            f"polling every {jobqueue_settings().POLL_INTERVAL:g} s",
        ]
        if self.burst:
            parts.append("until nothing is due")
        if self.max_jobs is not None:
            parts.append(f"for {self.max_jobs} jobs at most")
        return ", ".join(parts)


def _check_count(value: object, what: str, *, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, not {shown(value)}.")
    if most is not None and value > most:
        raise ValueError(f"{what} must be at most {most}, not {value}: start more workers.")
