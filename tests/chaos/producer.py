"""Enqueues jobs evenly over the time of a scenario, through every outage."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from typing import Any

from django.db import InterfaceError, OperationalError, connection

from django_jobqueue.models import ProcessingJob

_TICK = 0.15
_SINGLES = 0.2
_LONGEST_OUTAGE = 90.0

USUAL: Mapping[str, float] = {"quick": 90, "slow": 4, "flaky": 5, "doomed": 1}
"""How often each handler is used, in shares."""


class Producer:
    """Enqueues `total` jobs within `seconds`, on a thread and connection of its own.

    `mix` says how often each handler is used, `slow` how many seconds the slow one takes.

    A job counts as committed when `enqueue` has returned. When it raised instead, nobody knows; so
    the same jobs are enqueued again with the same keys until the answer arrives.
    """

    def __init__(
        self,
        mix: Mapping[str, float],
        *,
        slow: tuple[float, float],
        total: int,
        seconds: float,
        rng: random.Random,
    ) -> None:
        self.committed: list[str] = []
        self.error: BaseException | None = None
        self._mix = mix
        self._slow = slow
        self._total = total
        self._seconds = seconds
        self._rng = rng
        self._stopped = threading.Event()
        # A daemon for the case that the driver is killed; `stop` joins it.
        self._thread = threading.Thread(target=self._run, name="chaos-producer", daemon=True)

    def start(self) -> None:
        """Begin; the time runs from now."""
        self._thread.start()

    def is_busy(self) -> bool:
        """Whether there is more to come. Raises what ended the producer."""
        if self.error is not None:
            raise self.error
        return self._thread.is_alive()

    def stop(self) -> None:
        """Enqueue no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._enqueue_all()
        except BaseException as error:
            self.error = error
        finally:
            connection.close()

    def _enqueue_all(self) -> None:
        started = time.monotonic()
        while len(self.committed) < self._total and not self._stopped.is_set():
            share = min(1.0, (time.monotonic() - started + _TICK) / self._seconds)
            batch = self._drawn(int(share * self._total) - len(self.committed))
            if batch:
                self._enqueue_surely(batch)
            self._stopped.wait(_TICK)

    def _drawn(self, count: int) -> list[dict[str, Any]]:
        names = self._rng.choices(list(self._mix), weights=list(self._mix.values()), k=count)
        first = len(self.committed)
        return [
            {
                "handler": f"tests.chaos.app.jobs.{name}",
                "payload": {"seconds": self._rng.uniform(*self._slow)} if name == "slow" else {},
                "priority": self._rng.choice((0, 0, 0, 5)),
                "idempotency_key": f"job-{first + place}",
            }
            for place, name in enumerate(names)
        ]

    def _enqueue_surely(self, batch: list[dict[str, Any]]) -> None:
        give_up = time.monotonic() + _LONGEST_OUTAGE
        one_by_one = self._rng.random() < _SINGLES
        while True:
            try:
                _enqueue(batch, one_by_one=one_by_one)
            except (OperationalError, InterfaceError):
                connection.close()
                if self._stopped.is_set() or time.monotonic() > give_up:
                    raise
                time.sleep(0.1)
            else:
                self.committed += [item["idempotency_key"] for item in batch]
                return


def _enqueue(batch: list[dict[str, Any]], *, one_by_one: bool) -> None:
    if one_by_one:
        for item in batch:
            ProcessingJob.objects.enqueue(**item)
    else:
        ProcessingJob.objects.enqueue_many(batch)
