"""PostgreSQL servers that are there to be killed."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg

from example_project.postgres.keeper import ends_with_keeper
from example_project.postgres.programs import Account, programs_for
from example_project.postgres.server import server_account
from tests.waiting import wait_until

HOST = "127.0.0.1"
USER = "postgres"
# TCP is open to every user of the machine, so it asks for a password; the socket's folder is not.
PASSWORD = secrets.token_hex(16)

_START_SECONDS = 60.0
_OPTIONS = {
    "listen_addresses": HOST,
    "max_connections": "200",
    # Processes crash here, never the machine: what was written to a file stays written.
    "fsync": "off",
    "synchronous_commit": "on",
    # Restarts are what is tested, not how much they have to replay.
    "checkpoint_timeout": "30s",
    "shared_buffers": "64MB",
}


class Server:
    """One server in a folder, on a TCP port that stays the same over restarts.

    To be started and stopped by one thread that lives as long as the program: the kernel ends a
    server with the thread that started it.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self._account = server_account()
        self._programs = _programs_folder()
        self._data = folder / "data"
        self._sockets = folder / "socket"
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        for made in (folder, self._data, self._sockets):
            made.mkdir(mode=0o700)
            self._give_away(made)

    # --- making ------------------------------------------------------------------------------

    def create(self) -> None:
        """New data, with nothing in it."""
        password = self._data.with_name("password")
        password.write_text(PASSWORD)
        self._give_away(password)
        self._run(
            "initdb",
            f"--pgdata={self._data}",
            f"--username={USER}",
            f"--pwfile={password}",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )

    def create_as_copy_of(self, stopped: Server) -> None:
        """The data of a server that was stopped in order."""
        subprocess.run(["cp", "-a", f"{stopped._data}/.", str(self._data)], check=True)

    def create_as_standby_of(self, primary: Server) -> None:
        """A copy of a running server, which follows it once started."""
        self._run(
            "pg_basebackup",
            f"--pgdata={self._data}",
            f"--dbname=host={HOST} port={primary.port} user={USER} application_name=standby",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
        )

    # --- running -----------------------------------------------------------------------------

    def start(self) -> None:
        """Return when it accepts connections."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._started():
            # The last sessions of a killed server need a moment to notice.
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{self.log_tail()}")
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT is the fast shutdown, SIGQUIT the immediate one, SIGKILL none at all."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def promote(self) -> None:
        """From standby to primary. Returns when it accepts writes."""
        with self.session() as session:
            session.execute("SELECT pg_promote(wait := false)")
        wait_until(self._accepts_writes, timeout=_START_SECONDS)

    def wait_for_standby(self) -> None:
        """From now on no commit is answered before a standby has it."""
        with self.session() as session:
            session.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            session.execute("SELECT pg_reload_conf()")
        wait_until(self._is_followed, timeout=_START_SECONDS)

    def session(self) -> psycopg.Connection[Any]:
        """A superuser's session over the socket, in autocommit."""
        return psycopg.connect(
            host=str(self._sockets),
            port=self.port,
            user=USER,
            dbname="postgres",
            application_name="chaos driver",
            autocommit=True,
        )

    def log_tail(self, lines: int = 30) -> str:
        """The end of what the server said."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    # --- steps -------------------------------------------------------------------------------

    def _started(self) -> bool:
        self._process = process = self._popen(
            "postgres", "-D", str(self._data), *self._settings(), signal_at_end=signal.SIGQUIT
        )
        while process.poll() is None:
            if self._is_ready(process.pid):
                return True
            time.sleep(0.02)
        return False

    def _settings(self) -> list[str]:
        options = _OPTIONS | {
            "port": str(self.port),
            "unix_socket_directories": str(self._sockets),
        }
        return [f"--{name}={value}" for name, value in options.items()]

    def _is_ready(self, pid: int) -> bool:
        # The same test as pg_ctl's: the first line is the pid, the eighth the state.
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _accepts_writes(self) -> bool:
        with self.session() as session:
            return not _answer(session, "SELECT pg_is_in_recovery()")

    def _is_followed(self) -> bool:
        with self.session() as session:
            return bool(
                _answer(session, "SELECT count(*) FROM pg_stat_replication WHERE sync_state='sync'")
            )

    def _run(self, program: str, *arguments: str) -> None:
        if self._popen(program, *arguments, signal_at_end=signal.SIGTERM).wait():
            raise RuntimeError(f"{program} failed:\n{self.log_tail()}")

    def _popen(
        self, program: str, *arguments: str, signal_at_end: signal.Signals
    ) -> subprocess.Popen[bytes]:
        account = self._account
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(self._programs / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.defpath, "LC_ALL": "C", "PGPASSWORD": PASSWORD},
                user=account.user if account else None,
                group=account.group if account else None,
                extra_groups=[] if account else None,
                # A Ctrl-C is for the driver, which stops everything in order.
                start_new_session=True,
                preexec_fn=ends_with_keeper(signal_at_end),
            )

    def _give_away(self, path: Path) -> None:
        account: Account | None = self._account
        if account is not None:
            os.chown(path, account.user, account.group)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def places(prefix: str, ports: list[int]) -> dict[str, str]:
    """Servers on these ports as environment variables, in the form that libpq reads."""
    return {
        f"{prefix}_HOSTS": ",".join([HOST] * len(ports)),
        f"{prefix}_PORTS": ",".join(map(str, ports)),
    }


@functools.cache
def _programs_folder() -> Path:
    return programs_for(server_account()).folder


def _answer(session: psycopg.Connection[Any], query: str) -> Any:
    row = session.execute(query).fetchone()
    assert row is not None
    return row[0]
