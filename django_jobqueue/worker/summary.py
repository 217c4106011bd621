"""What a worker says when it stops."""

from __future__ import annotations

from dataclasses import dataclass

from django_jobqueue.states import Status


@dataclass(slots=True, kw_only=True)
class Summary:
    """What a worker did, counted by how each attempt ended.

    `failed` attempts wait for their retry, `released` jobs were given back unfinished, `lost` ones
    belonged to another worker by the time they ended. Jobs `left_behind` could be neither recorded
    nor given back. `hung` handlers were still running when the worker stopped. `at_once` tells that
    a second stop cut the shutdown short, `hangs` that the worker stopped because every slot held a
    handler past its timeout.
    """

    succeeded: int = 0
    failed: int = 0
    dead_letters: int = 0
    released: int = 0
    lost: int = 0
    left_behind: int = 0
    hung: int = 0
    seconds: float = 0.0
    at_once: bool = False
    hangs: bool = False

    def add(self, status: Status) -> None:
        """Count an attempt by the status its job has now; `processing`: it was another worker's."""
        match status:
            case Status.SUCCEEDED:
                self.succeeded += 1
            case Status.FAILED:
                self.failed += 1
            case Status.DEAD_LETTER:
                self.dead_letters += 1
            case _:
                self.lost += 1

    def described(self) -> str:
        """One line for the log."""
        counts = [
            f"{self.succeeded} succeeded",
            f"{self.failed} failed",
            f"{self.dead_letters} dead",
        ]
        counts += [f"{self.released} given back"] * bool(self.released)
        counts += [f"{self.lost} lost"] * bool(self.lost)
        counts += [f"{self.left_behind} left behind"] * bool(self.left_behind)
        counts += [f"{self.hung} handlers cut off"] * bool(self.hung)
        return f"{', '.join(counts)} in {self.seconds:.1f} s"
