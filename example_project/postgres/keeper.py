"""The process that owns an embedded PostgreSQL: starts it, and stops it after its last user.

A user is a process that holds a shared lock on `users.lock`. The keeper waits for the exclusive
lock on that file: the kernel gives it when the last user is gone, however that one ended. It keeps
the lock until the server is down, so a user that arrives meanwhile waits, and then starts a new
keeper.

Runs as a script (`python -I -S keeper.py PLAN START_LOCK_FD REPORT_FD`) in a session of its own: a
Ctrl-C in the terminal of a user does not reach it. It imports the standard library only, so that it
depends on nothing that could be removed under it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

PORT = 5432
SUPERUSER = "postgres"
PROGRAM_SECONDS = 120.0
START_SECONDS = 60.0
STOP_SECONDS = 30.0
LOG_TAIL_LINES = 15

READY = "ready"
"""What the keeper reports to its starter; anything else is the text of an error."""


class ServerFailed(Exception):
    """The server could not be started; the text says why, with the end of the log."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerFolder:
    """Where the parts of one embedded server are."""

    path: Path

    @property
    def users_lock(self) -> Path:
        """Held shared by every process that uses the server."""
        return self.path / "users.lock"

    @property
    def keeper_lock(self) -> Path:
        """Held by the keeper for its life."""
        return self.path / "keeper.lock"

    @property
    def start_lock(self) -> Path:
        """Held around "is it up? else start", by the starter and then also by its keeper."""
        return self.path / "start.lock"

    @property
    def sockets(self) -> Path:
        """The folder of the server's socket: only the server's account can enter it."""
        return self.path / "socket"

    @property
    def socket(self) -> Path:
        """The socket as PostgreSQL names it."""
        return self.sockets / f".s.PGSQL.{PORT}"

    @property
    def log(self) -> Path:
        """What initdb, the server and the keeper said since the last start."""
        return self.path / "server.log"

    def data(self, major: int) -> Path:
        """The data folder for one major version: another version could not read it."""
        return self.path / f"data-{major}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a keeper has to know. `account` is (user id, group id) when started as root."""

    folder: str
    programs: str
    major: int
    account: tuple[int, int] | None
    options: dict[str, str]
    throwaway: bool

    def to_json(self) -> str:
        """The plan as one command line argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan back from its argument."""
        fields = json.loads(text)
        account = fields.pop("account")
        return cls(account=tuple(account) if account else None, **fields)

    @property
    def server_folder(self) -> ServerFolder:
        """The layout of the plan's folder."""
        return ServerFolder(Path(self.folder))

    @property
    def data(self) -> Path:
        """The data folder of this server."""
        return self.server_folder.data(self.major)

    @property
    def stop_signal(self) -> signal.Signals:
        """Fast shutdown; for data that nobody keeps, the immediate one."""
        return signal.SIGQUIT if self.throwaway else signal.SIGINT


def main(arguments: list[str]) -> None:
    """Start the server, report to the starter, stay until the last user is gone."""
    plan = Plan.from_json(arguments[0])
    start_lock, report = int(arguments[1]), int(arguments[2])
    os.umask(0o077)
    leave_the_starter()
    # Never closed: the kernel frees it with this process. A keeper whose server died may still be
    # on its way out, so this may wait a moment.
    open_locked(plan.server_folder.keeper_lock, fcntl.LOCK_EX)
    try:
        server = start_server(plan)
    except Exception as error:
        tell_starter(report, str(error))
        raise SystemExit(1) from error
    tell_starter(report, READY)
    # The start lock was handed over by the starter: a starter that is killed half-way must not let
    # the next one start a second server.
    os.close(start_lock)
    keep(plan, server)


def leave_the_starter() -> None:
    """Become a child of init, so that the starter has no child to wait for."""
    if os.fork():
        os._exit(0)


def tell_starter(report: int, text: str) -> None:
    # A starter that was killed reads no more; its server is stopped in the usual way.
    with contextlib.suppress(BrokenPipeError):
        os.write(report, text.encode())
    os.close(report)


def open_locked(path: Path, operation: int) -> int:
    """Open a lock file and lock it; the lock lasts until the returned descriptor is closed.

    Raises BlockingIOError when the operation has LOCK_NB and the lock is held elsewhere.
    """
    # Python's descriptors are not inherited by new programs: a long-lived subprocess of a user does
    # not keep the server alive.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether some process holds the exclusive lock on this file."""
    try:
        os.close(open_locked(path, fcntl.LOCK_SH | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def accepts_connections(folder: ServerFolder) -> bool:
    """Whether a server listens on the folder's socket."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(folder.socket))
        return True
    return False


def start_server(plan: Plan) -> subprocess.Popen[bytes]:
    """Bring the server up, on new data if there are none, and return its process."""
    for pid_file in pid_files(plan):
        forget_recycled_pid(pid_file)
    stop_server_without_keeper(plan)
    plan.server_folder.log.write_bytes(b"")
    plan.server_folder.log.chmod(0o600)
    make_socket_folder(plan)
    if not plan.data.exists():
        make_data(plan)
    return run_postgres(plan)


def pid_files(plan: Plan) -> list[Path]:
    return [*plan.server_folder.path.glob("data-*/postmaster.pid")]


def forget_recycled_pid(pid_file: Path) -> None:
    """Remove the pid file of a server that is gone when another process has its number now.

    PostgreSQL would take that process for a running server and refuse to start. In all other cases
    the file stays: with it PostgreSQL makes sure that no process of the old server is left.
    """
    with contextlib.suppress(OSError):
        pid = int(pid_file.read_text().split("\n", 1)[0])
        # A server's working folder is its data folder.
        if Path(f"/proc/{pid}/cwd").readlink() != pid_file.parent.resolve():
            pid_file.unlink()


def stop_server_without_keeper(plan: Plan) -> None:
    """Stop a server whose keeper was killed.

    On Linux it stops by itself (see `ends_with_keeper`) and this waits for it. It is replaced and
    not adopted, because only the parent of a server is told of its end.
    """
    if not accepts_connections(plan.server_folder):
        return
    # Where the socket answers, the pid in the file is the server's: pg_ctl signals nobody else.
    for pid_file in pid_files(plan):
        run_program(plan, "pg_ctl", "stop", "-D", str(pid_file.parent), "-m", "fast", "-w")
    if accepts_connections(plan.server_folder):
        raise ServerFailed(
            f"A PostgreSQL without a keeper listens on {plan.server_folder.socket} and does not "
            "stop. Stop it by hand and try again."
        )


def make_socket_folder(plan: Plan) -> None:
    sockets = plan.server_folder.sockets
    sockets.mkdir(mode=0o700, exist_ok=True)
    give_to_account(plan, sockets)


def give_to_account(plan: Plan, path: Path) -> None:
    if plan.account is not None:
        os.chown(path, *plan.account)


def make_data(plan: Plan) -> None:
    """Run initdb aside and move the result into place: there is never a half-made data folder."""
    for leftover in plan.server_folder.path.glob("new-data-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="new-data-", dir=plan.folder))
    try:
        give_to_account(plan, fresh)
        exit_code = run_program(plan, "initdb", "-D", str(fresh), *initdb_options(plan))
        if exit_code:
            raise ServerFailed(described(plan, f"initdb failed with exit code {exit_code}."))
        fresh.rename(plan.data)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def initdb_options(plan: Plan) -> list[str]:
    # Trust is safe: there is no TCP, and nobody else can enter the socket's folder.
    options = [f"--username={SUPERUSER}", "--auth=trust", "--encoding=UTF8", "--locale=C"]
    if plan.major >= 17:
        # Knows upper and lower case of all of Unicode and is the same on every system; before 17
        # there was no such locale.
        options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    if plan.throwaway:
        options.append("--no-sync")
    return options


def run_program(plan: Plan, name: str, *arguments: str) -> int:
    """Run one of PostgreSQL's programs to its end and return the exit code; it talks to the log."""
    program = popen(plan, name, *arguments, signal_at_end=signal.SIGTERM)
    try:
        return program.wait(timeout=PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        raise


def popen(
    plan: Plan, name: str, *arguments: str, signal_at_end: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start one of PostgreSQL's programs under the account, and away from our surroundings."""
    user, group = plan.account or (None, None)
    with plan.server_folder.log.open("ab") as log:
        return subprocess.Popen(
            [f"{plan.programs}/{name}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",  # The account may not be able to enter the folder that we are in.
            # Nothing of PGDATA, PGOPTIONS, LC_MESSAGES and the like.
            env={"PATH": os.defpath, "LC_ALL": "C"},
            user=user,
            group=group,
            extra_groups=None if plan.account is None else [],
            preexec_fn=ends_with_keeper(signal_at_end),
        )


def ends_with_keeper(number: signal.Signals) -> Callable[[], None] | None:
    """What makes the kernel send a child this signal when the keeper is killed; Linux only.

    Elsewhere a server that lost its keeper goes on, and the next start replaces it.
    """
    if not sys.platform.startswith("linux"):
        return None
    pr_set_pdeathsig = 1
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(pr_set_pdeathsig, int(number))


def run_postgres(plan: Plan) -> subprocess.Popen[bytes]:
    """Start the server and wait until it is ready."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        server = popen(plan, "postgres", *server_options(plan), signal_at_end=plan.stop_signal)
        if wait_until_ready(plan, server, deadline):
            return server
        # The sessions of a server that was killed need a moment to notice; PostgreSQL refuses to
        # start before the last of them is gone.
        if b"pre-existing shared memory block" not in log_tail(plan) or time.monotonic() > deadline:
            raise ServerFailed(
                described(plan, f"PostgreSQL did not start (exit code {server.returncode}).")
            )
        time.sleep(0.1)


def server_options(plan: Plan) -> list[str]:
    options = {
        "listen_addresses": "",
        "unix_socket_directories": str(plan.server_folder.sockets),
        "port": str(PORT),
        **plan.options,
    }
    settings = [f"--{name}={value}" for name, value in options.items()]
    return ["-D", str(plan.data), *settings]


def wait_until_ready(plan: Plan, server: subprocess.Popen[bytes], deadline: float) -> bool:
    """True when the server says so in its pid file, False when it ended or took too long."""
    while server.poll() is None:
        if is_ready(plan, server.pid):
            return True
        if time.monotonic() > deadline:
            server.kill()
            server.wait()
            return False
        time.sleep(0.02)
    return False


def is_ready(plan: Plan, pid: int) -> bool:
    # The same test as pg_ctl's: the first line is the pid, the eighth the state.
    try:
        lines = (plan.data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def described(plan: Plan, what: str) -> str:
    tail = log_tail(plan).decode(errors="replace")
    return (
        f"{what} The embedded server is in {plan.folder}; set DATABASE_URL to use another one. "
        f"The end of {plan.server_folder.log}:\n{tail}"
    )


def log_tail(plan: Plan) -> bytes:
    return b"\n".join(plan.server_folder.log.read_bytes().splitlines()[-LOG_TAIL_LINES:])


def keep(plan: Plan, server: subprocess.Popen[bytes]) -> None:
    """Stay until the server ends: after its last user, on SIGTERM, or by itself. Never returns."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.send_signal(plan.stop_signal))
    last_user_left = threading.Event()
    # A daemon that nobody joins: it may wait for a lock for ever, and ends with the process.
    threading.Thread(
        target=stop_after_last_user, args=(plan, server, last_user_left), daemon=True
    ).start()
    server.wait()
    if plan.throwaway and last_user_left.is_set():
        shutil.rmtree(plan.folder, ignore_errors=True)
    # At once and past the waiting thread: all locks are freed in the same instant.
    os._exit(0)


def stop_after_last_user(
    plan: Plan, server: subprocess.Popen[bytes], last_user_left: threading.Event
) -> None:
    open_locked(plan.server_folder.users_lock, fcntl.LOCK_EX)
    last_user_left.set()
    server.send_signal(plan.stop_signal)
    try:
        server.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.send_signal(signal.SIGQUIT)


if __name__ == "__main__":
    main(sys.argv[1:])
