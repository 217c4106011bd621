"""What every scenario has in common: load, faults while it lasts, healing, and the verdict."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from django.db import OperationalError, connection

from tests.chaos.crew import Crew, Post
from tests.chaos.producer import USUAL, Producer
from tests.chaos.server import Server, places
from tests.chaos.verdict import (
    Verdict,
    assert_nothing_lost_or_doubled,
    unfinished,
    unfinished_in_words,
)
from tests.waiting import wait_until

_DRAIN_SECONDS = 90.0
_LOOK_EVERY = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Drawn once for a run, so that the driver's settings hold for every scenario."""

    server: int
    standby: int
    proxy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long the load of one scenario lasts, and how many jobs it has."""

    seconds: float
    jobs: int
    stale_lock_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table. `recovery` is the time from the last fault, or the end of the load if
    that came later, until no job was left that waits or runs."""

    scenario: str
    verdict: Verdict
    kills: Counter[str]
    faults: Counter[str]
    recovery: float
    seconds: float


class Scenario:
    """One way to break things. A subclass says how, and `play` does it. Of one use only."""

    name: ClassVar[str]
    mix: ClassVar[Mapping[str, float]] = USUAL
    #: Seconds that a slow job takes, drawn between these.
    slow: ClassVar[tuple[float, float]] = (0.2, 1.0)
    #: Seconds between two strikes, drawn between these.
    pause: ClassVar[tuple[float, float]] = (1.0, 2.0)
    #: Whether it is also part of the short run.
    in_short: ClassVar[bool] = True

    def __init__(
        self, *, template: Server, folder: Path, ports: Ports, size: Size, rng: random.Random
    ) -> None:
        self.template = template
        self.folder = folder
        self.ports = ports
        self.size = size
        self.rng = rng
        #: What ended a process or a session, and what else was done to the product.
        self.kills = Counter[str]()
        self.faults = Counter[str]()
        #: Keys of committed jobs that are not the producer's.
        self.own_keys: list[str] = []
        #: Undone in reverse order when the scenario ends, however it ends.
        self.at_the_end = contextlib.ExitStack()
        self.server = Server(folder / "server", ports.server)
        self.crew = Crew(self.posts(), folder=self._log_folder(), env=self._environment())
        self.producer = Producer(
            self.mix,
            slow=self.slow,
            total=size.jobs,
            seconds=size.seconds,
            rng=random.Random(rng.random()),
        )

    # --- what a scenario says ------------------------------------------------------------------

    def posts(self) -> list[Post]:
        """The workers."""
        return [Post()] * 3

    def worker_ports(self) -> list[int]:
        """Where the workers look for the database."""
        return [self.ports.server]

    def effects_ports(self) -> list[int]:
        """Where the handlers write their effects."""
        return self.worker_ports()

    def prepare(self) -> None:
        """With the server up, before the workers start."""

    def strike(self) -> None:
        """One fault."""
        raise NotImplementedError

    def heal(self) -> None:
        """Undo what the last faults left."""

    def check(self) -> None:
        """What must be true after this scenario only. Raises AssertionError."""

    # --- the play ------------------------------------------------------------------------------

    def play(self) -> Result:
        """From an empty server to the verdict. Leaves no process behind, however it ends."""
        started = time.monotonic()
        with self._stage():
            self._strike_while_busy()
            self.heal()
            recovery = self._drained()
            # Before the crew is dismissed, which is no fault.
            self.kills.update(self.crew.ends)
            self.crew.dismiss()
            verdict = assert_nothing_lost_or_doubled(self.own_keys + self.producer.committed)
            self.check()
        return Result(
            scenario=self.name,
            verdict=verdict,
            kills=self.kills,
            faults=self.faults,
            recovery=recovery,
            seconds=time.monotonic() - started,
        )

    def rest(self, seconds: float) -> None:
        """Wait, while workers that are gone are replaced."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look_after_crew()
            time.sleep(_LOOK_EVERY)

    @contextlib.contextmanager
    def _stage(self) -> Iterator[None]:
        with self.at_the_end:
            self.at_the_end.callback(self.stop_server)
            self.server.create_as_copy_of(self.template)
            self.server.start()
            self.at_the_end.callback(connection.close)
            self.prepare()
            self.at_the_end.callback(self.crew.kill)
            self.crew.begin()
            self.at_the_end.callback(self.producer.stop)
            self.producer.start()
            yield

    def stop_server(self) -> None:
        """End the present server at once; nobody needs its data."""
        self.server.stop(signal.SIGQUIT)

    def _strike_while_busy(self) -> None:
        while self.producer.is_busy():
            self.strike()
            self.rest(self.rng.uniform(*self.pause))

    def _drained(self) -> float:
        since = time.monotonic()
        try:
            wait_until(self._is_drained, timeout=_DRAIN_SECONDS)
        except AssertionError:
            raise AssertionError(f"Jobs are left over:\n{unfinished_in_words()}") from None
        return time.monotonic() - since

    def _is_drained(self) -> bool:
        self._look_after_crew()
        try:
            return not unfinished()
        except OperationalError:
            connection.close()
            return False

    def _look_after_crew(self) -> None:
        # The check of a worker that stopped asks the database, which may be away.
        try:
            self.crew.look_after()
        except OperationalError:
            connection.close()

    # --- surroundings --------------------------------------------------------------------------

    def _log_folder(self) -> Path:
        logs = self.folder / "logs"
        logs.mkdir()
        return logs

    def _environment(self) -> dict[str, str]:
        return {
            **places("CHAOS", self.worker_ports()),
            **places("CHAOS_EFFECTS", self.effects_ports()),
            "CHAOS_ROLE": "chaos handler",
            "CHAOS_STALE_LOCK_AFTER": str(self.size.stale_lock_after),
        }
