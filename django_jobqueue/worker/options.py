"""What a worker is told when it starts."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field

from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.values import NAME_LENGTH, checked_name


def _drawn_name() -> str:
    """Host, process and a fresh random part: no two starts share a name, wherever they run."""
    suffix = f":{os.getpid()}:{secrets.token_hex(4)}"
    return socket.gethostname()[: NAME_LENGTH - len(suffix)] + suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How one worker runs. Spans of time are seconds.

    `queues` None means every queue. `burst` ends the worker when nothing is due. `max_jobs` ends
    it after so many jobs.
    """

    queues: tuple[str, ...] | None = None
    threads: int = field(default_factory=lambda: jobqueue_settings().THREADS)
    burst: bool = False
    max_jobs: int | None = None
    shutdown_timeout: float = field(default_factory=lambda: jobqueue_settings().SHUTDOWN_TIMEOUT)
    database: str = "default"
    name: str = field(default_factory=_drawn_name)

    def __post_init__(self) -> None:
        for queue in self.queues or ():
            checked_name(queue, what="queue")
        if self.threads < 1:
            raise ValueError(f"A worker needs at least 1 thread, not {self.threads}.")
        if self.max_jobs is not None and self.max_jobs < 1:
            raise ValueError(f"max_jobs must be at least 1, not {self.max_jobs}.")
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
