"""The scenarios, in the order they run."""

from __future__ import annotations

import random
import shutil
import signal
from datetime import datetime, timedelta, timezone
from itertools import cycle
from pathlib import Path

import django_jobqueue
from django_jobqueue.models import ProcessingJob, Worker
from tests.chaos.app.effects import APPLICATION_NAME as EFFECTS
from tests.chaos.app.jobs import DEADLY_ATTEMPTS
from tests.chaos.crew import Post, python_path
from tests.chaos.producer import USUAL
from tests.chaos.proxy import Proxy
from tests.chaos.record import rows
from tests.chaos.scenario import Scenario, Size
from tests.chaos.server import Server
from tests.waiting import wait_until

#: Each of its attempts needs a new worker and the end of a lock.
_SECONDS_FOR_A_DEADLY_JOB = 20


class SigkillAtRandom(Scenario):
    """A worker dies in the middle of whatever it does, and is started again at once."""

    name = "SIGKILL at random"

    def strike(self) -> None:
        if worker := self.crew.one_to_spare(self.rng):
            worker.tell(signal.SIGKILL)


class SigkillBeforeTheVerdict(Scenario):
    """Handlers kill their worker after the effect: some once, some every time."""

    name = "SIGKILL before the verdict"
    mix = {**USUAL, "kills_once": 0.6}
    pause = (0.2, 0.4)

    def posts(self) -> list[Post]:
        usual = Post(flags=("--threads", "10", "--queue", "default"), kills_itself=True)
        # One thread: a job that kills its worker must not take another attempt along.
        deadly = Post(flags=("--threads", "1", "--queue", "deadly"), kills_itself=True)
        return [usual, usual, deadly]

    def strike(self) -> None:
        """The jobs do it; these every time."""
        if len(self.own_keys) < max(1, self.size.seconds // _SECONDS_FOR_A_DEADLY_JOB):
            key = f"deadly-{len(self.own_keys) + 1}"
            ProcessingJob.objects.enqueue("tests.chaos.app.jobs.kills_always", idempotency_key=key)
            self.own_keys.append(key)

    def check(self) -> None:
        for job in ProcessingJob.objects.filter(idempotency_key__in=self.own_keys):
            effects = rows("SELECT attempt FROM chaos_effects WHERE job_id = %s", job.pk)
            assert len(effects) == DEADLY_ATTEMPTS, f"{job} had the effects of attempts {effects}."


class SigtermUnderLoad(Scenario):
    """Workers are asked to stop while they are busy, as at every deploy."""

    name = "SIGTERM under load"
    mix = {**USUAL, "slow": 12}
    # Longer than the shutdown timeout, so that every stop gives some back.
    slow = (0.8, 1.6)
    pause = (0.7, 1.5)

    def strike(self) -> None:
        if worker := self.crew.one_to_spare(self.rng):
            worker.tell(signal.SIGTERM)


class SigstopPastTheLock(Scenario):
    """A worker sleeps until its locks are stale, and wakes up in the middle of its work."""

    name = "SIGSTOP past the lock"
    mix = {**USUAL, "slow": 7}
    # So long that the next claim still runs when the sleeper wakes up and wants to settle.
    slow = (1.0, 2.5)
    pause = (0.3, 1.0)

    def strike(self) -> None:
        working = self.crew.working()
        asleep = self.rng.sample(working, k=min(len(working), self.rng.choice((1, 2))))
        for worker in asleep:
            worker.send(signal.SIGSTOP)
            self.faults["SIGSTOP"] += 1
        self.rest(self.size.stale_lock_after + self.rng.uniform(0.5, 1.5))
        for worker in asleep:
            worker.send(signal.SIGCONT)


class SessionsTerminated(Scenario):
    """Somebody, or something in between, ends sessions of every kind."""

    name = "sessions terminated"
    mix = {**USUAL, "uses_django": 25}
    pause = (0.1, 0.5)
    _kinds = (
        "django_jobqueue coordinator",
        "django_jobqueue heartbeat",
        "chaos handler",
        "chaos driver",
        EFFECTS,
    )

    def strike(self) -> None:
        kind = self.rng.choice(self._kinds)
        sessions = rows(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
            " AND pid <> pg_backend_pid() ORDER BY pid",
            kind,
        )
        if sessions:
            rows("SELECT pg_terminate_backend(%s)", *self.rng.choice(sessions))
            self.kills[f"session: {kind}"] += 1


class ServerRestarted(Scenario):
    """The server crashes and comes back, again and again."""

    name = "server restarted"
    mix = {**USUAL, "uses_django": 5}
    pause = (2.0, 5.0)

    def strike(self) -> None:
        self.server.stop(signal.SIGQUIT)
        self.kills["server"] += 1
        self.rest(self.rng.choice((0.0, 0.5, self.size.stale_lock_after + 1)))
        self.server.start()


class PrimaryLost(Scenario):
    """The primary dies for good, and the standby that had every commit takes over."""

    name = "primary lost, standby promoted"
    in_short = False
    pause = (6.0, 10.0)

    def worker_ports(self) -> list[int]:
        return [self.ports.server, self.ports.standby]

    def prepare(self) -> None:
        self._made = 0
        self._standby = self._new_standby(self.ports.standby)

    def strike(self) -> None:
        lost = self.server
        lost.stop(signal.SIGQUIT)
        self.kills["server"] += 1
        self.rest(self.rng.uniform(0, 1))
        self._standby.promote()
        self.server = self._standby
        self._standby = self._new_standby(lost.port)

    def _new_standby(self, port: int) -> Server:
        self._made += 1
        standby = Server(self.folder / f"standby-{self._made}", port)
        standby.create_as_standby_of(self.server)
        self.at_the_end.callback(standby.stop, signal.SIGQUIT)
        standby.start()
        self.server.wait_for_standby()
        return standby


class NetworkBroken(Scenario):
    """A network that resets, closes, delays and swallows. Effects do not pass through it."""

    name = "network broken"
    pause = (0.3, 1.2)

    def worker_ports(self) -> list[int]:
        return [self.ports.proxy]

    def effects_ports(self) -> list[int]:
        return [self.ports.server]

    def prepare(self) -> None:
        self._proxy = Proxy(
            self.ports.proxy, target=self.ports.server, rng=random.Random(self.rng.random())
        )
        self._proxy.start()
        self._in_turn = cycle(("silence", "reset", "close", "delay"))
        self.at_the_end.callback(self._proxy.stop)

    def strike(self) -> None:
        fault = next(self._in_turn)
        self.faults[f"network: {fault}"] += 1
        if fault == "reset":
            self._proxy.reset(share=0.4)
        elif fault == "close":
            self._proxy.close(share=0.4)
        elif fault == "silence":
            self._proxy.half_open(share=0.4)
        else:
            self._deliver_late()

    def heal(self) -> None:
        self._proxy.delay(0)

    def _deliver_late(self) -> None:
        self._proxy.delay(self.rng.uniform(0.05, 0.5))
        self.rest(self.rng.uniform(0.5, 2.0))
        self._proxy.delay(0)


class ClocksWrong(Scenario):
    """Workers on machines whose clocks are an hour ahead and an hour behind, and they die too."""

    name = "clocks an hour off"
    in_short = False
    _hours = (0, 1, -1)

    def posts(self) -> list[Post]:
        return [Post(env=_with_clock_off(hours)) for hours in self._hours]

    def strike(self) -> None:
        if worker := self.crew.one_to_spare(self.rng):
            worker.tell(signal.SIGKILL)

    def heal(self) -> None:
        """Nothing to heal, but a scenario with right clocks would show nothing."""
        hours = {_hours_off(log) for log in self.folder.rglob("worker-*.log")} - {None}
        assert hours == set(self._hours), f"The workers' clocks are {hours} hours off."


class TwoVersions(Scenario):
    """A rolling deploy that goes on for ever: the newer code has one more handler and column."""

    name = "two versions of the code"
    in_short = False
    mix = {**USUAL, "newest": 10}
    _newer_version = "99.0"

    def posts(self) -> list[Post]:
        older = Post(env={"CHAOS_OLDER_CODE": "yes"})
        newer = Post(env=python_path(self.folder / "newer"))
        return [older, newer, older]

    def prepare(self) -> None:
        _make_newer_copy(self.folder / "newer", version=self._newer_version)
        rows("ALTER TABLE processing_jobs ADD COLUMN region text NOT NULL DEFAULT 'unknown'")

    def strike(self) -> None:
        if worker := self.crew.one_to_spare(self.rng):
            worker.tell(self.rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)))

    def heal(self) -> None:
        """Wait until both are at work, or there was no test of two versions."""
        wait_until(self._both_work, timeout=30, message="Not both versions are at work.")

    def _both_work(self) -> bool:
        self.rest(0.1)
        seen = set(Worker.objects.values_list("version", flat=True))
        return seen >= {django_jobqueue.__version__, self._newer_version}


def _with_clock_off(hours: int) -> dict[str, str]:
    if not hours:
        return {}
    return {
        "CHAOS_CLOCK_OFFSET": str(hours * 3600),
        **python_path(Path(__file__).with_name("wrong_clock")),
    }


def _hours_off(log: Path) -> int | None:
    """By how much the clock of the worker that wrote a log differs; None when it wrote nothing."""
    first_line = log.read_text(errors="replace").partition("\n")[0]
    if not first_line:
        return None
    written = datetime.strptime(first_line[:19], "%Y-%m-%d %H:%M:%S").astimezone(timezone.utc)
    return round((written - datetime.now(timezone.utc)) / timedelta(hours=1))


def _make_newer_copy(folder: Path, *, version: str) -> None:
    """Our package as it may look some day."""
    package = folder / "django_jobqueue"
    shutil.copytree(Path(django_jobqueue.__file__).parent, package)
    _change(package / "__init__.py", django_jobqueue.__version__, version)
    first = "    finished_at = models.DateTimeField("
    _change(package / "models.py", first, f'    region = models.TextField(db_default="")\n{first}')


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} does not have {old!r} once."
    path.write_text(text.replace(old, new))


SCENARIOS: tuple[type[Scenario], ...] = (
    SigkillAtRandom,
    SigkillBeforeTheVerdict,
    SigtermUnderLoad,
    SigstopPastTheLock,
    SessionsTerminated,
    ServerRestarted,
    PrimaryLost,
    NetworkBroken,
    ClocksWrong,
    TwoVersions,
)

FULL = Size(seconds=62, jobs=5_600, stale_lock_after=3)
SHORT = Size(seconds=3.5, jobs=450, stale_lock_after=1.5)
