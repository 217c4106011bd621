"""An embedded PostgreSQL as the processes that use it see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from example_project.postgres import keeper
from example_project.postgres.folders import (
    SHARED_BASE,
    EmbeddedServerError,
    make_private_folder,
)
from example_project.postgres.keeper import Plan, ServerFolder, open_locked
from example_project.postgres.programs import Account, programs_for

__all__ = ["EmbeddedServer", "EmbeddedServerError", "throwaway_server"]

LONGEST_SOCKET_PATH = 103
FAST_AND_FORGETFUL = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
}
"""For data that nobody needs after a crash of the machine."""


class EmbeddedServer:
    """A PostgreSQL in a folder, which runs while at least one process uses it.

    A process becomes a user with its first `ensure_running` and stays one until it ends or calls
    `release`. Safe to use from several threads and after a fork.
    """

    def __init__(
        self, folder: Path, *, options: Mapping[str, str] | None = None, throwaway: bool = False
    ) -> None:
        """`options` are server settings; a throwaway server takes its folder along at its end."""
        self.folder = ServerFolder(folder)
        self._options = dict(options or {})
        self._throwaway = throwaway
        self._hold: int | None = None

    def ensure_running(self) -> None:
        """Make this process a user of the server, and start it when it is not up.

        Raises EmbeddedServerError with the end of the server's log.
        """
        self._become_user()
        if not self._is_up():
            self._start()

    def release(self) -> None:
        """Stop being a user; the server stops when this was the last one."""
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def connection_params(self) -> dict[str, str]:
        """libpq's parameters for a connection to this server, but for the database."""
        return {
            "host": str(self.folder.sockets),
            "port": str(keeper.PORT),
            "user": keeper.SUPERUSER,
        }

    def url(self, database: str = "postgres") -> str:
        """A `DATABASE_URL` for one of the server's databases."""
        host, name = quote(str(self.folder.sockets)), quote(database, safe="")
        return f"postgres://{keeper.SUPERUSER}@:{keeper.PORT}/{host}/{name}"

    def _become_user(self) -> None:
        if self._hold is None or not self._still_holds(self._hold):
            make_private_folder(self.folder.path, mode=folder_mode())
            # Waits while a keeper is stopping the server. Two threads here at once take two holds;
            # both end with the process.
            self._hold = open_locked(self.folder.users_lock, fcntl.LOCK_SH)

    def _still_holds(self, hold: int) -> bool:
        # The descriptor may have been closed (a process that turned itself into a daemon), and the
        # folder removed by hand.
        try:
            return os.path.samestat(os.fstat(hold), os.stat(self.folder.users_lock))
        except OSError:
            return False

    def _is_up(self) -> bool:
        # A server without a keeper does not count: nobody would stop it.
        return keeper.is_locked(self.folder.keeper_lock) and keeper.accepts_connections(self.folder)

    def _start(self) -> None:
        start_lock = open_locked(self.folder.start_lock, fcntl.LOCK_EX)
        try:
            if not self._is_up():
                start_keeper(self._plan(), start_lock)
        finally:
            os.close(start_lock)

    def _plan(self) -> Plan:
        self._check_socket_path()
        account = server_account()
        programs = programs_for(account)
        return Plan(
            folder=str(self.folder.path),
            programs=str(programs.folder),
            major=programs.major,
            account=(account.user, account.group) if account else None,
            options=self._options,
            throwaway=self._throwaway,
        )

    def _check_socket_path(self) -> None:
        length = len(os.fsencode(self.folder.socket))
        if length > LONGEST_SOCKET_PATH:
            raise EmbeddedServerError(
                f"The path of the server's socket, {self.folder.socket}, has {length} bytes; "
                f"the system allows {LONGEST_SOCKET_PATH}. Choose a shorter folder."
            )


def folder_mode() -> int:
    # The account that runs the server for root has to pass through, and no more.
    return 0o711 if os.geteuid() == 0 else 0o700


def server_account() -> Account | None:
    """The account for the server when this process is root's; else None, for this process's own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(name=name, user=entry.pw_uid, group=entry.pw_gid)
    raise EmbeddedServerError(
        "PostgreSQL refuses to run as root, and there is no user 'postgres' or 'nobody' to run it. "
        "Work as an ordinary user, or set DATABASE_URL."
    )


def start_keeper(plan: Plan, start_lock: int) -> None:
    """Start the process that owns the server, and wait for its report."""
    report, keepers_end = os.pipe()
    try:
        arguments = [plan.to_json(), str(start_lock), str(keepers_end)]
        with plan.server_folder.log.open("ab") as log:
            subprocess.run(
                [sys.executable, "-I", "-S", keeper.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(start_lock, keepers_end),
                check=True,
            )
    finally:
        os.close(keepers_end)
        with open(report, encoding="utf-8", errors="replace") as stream:
            said = stream.read()
    if said != keeper.READY:
        raise EmbeddedServerError(said or keeper.described(plan, "The server's keeper was killed."))


@contextlib.contextmanager
def throwaway_server(options: Mapping[str, str] | None = None) -> Iterator[EmbeddedServer]:
    """A server of its own, for tests: new, fast, and gone with its data afterwards.

    It is also gone when this process is killed; only a keeper that is killed as well leaves files,
    and the next throwaway server removes them.
    """
    server = new_throwaway_server({**FAST_AND_FORGETFUL, **(options or {})})
    try:
        yield server
    finally:
        server.release()
        wait_until_gone(server)


def new_throwaway_server(options: Mapping[str, str]) -> EmbeddedServer:
    base = SHARED_BASE / f"django-jobqueue-{os.geteuid()}-throwaway"
    make_private_folder(base, mode=folder_mode())
    server = EmbeddedServer(base / secrets.token_hex(4), options=options, throwaway=True)
    # Around making and sweeping: a folder that nobody uses yet looks like one that is left over.
    lock = open_locked(base / "lock", fcntl.LOCK_EX)
    try:
        remove_leftovers(base)
        server.ensure_running()
    except BaseException:
        server.release()
        shutil.rmtree(server.folder.path, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    return server


def remove_leftovers(base: Path) -> None:
    # A server that still runs in such a folder (see `ends_with_keeper`) stops within a minute of
    # the loss of its pid file.
    for folder in base.iterdir():
        if folder.is_dir() and not is_used(ServerFolder(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def is_used(folder: ServerFolder) -> bool:
    try:
        for lock in (folder.users_lock, folder.keeper_lock):
            os.close(open_locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def wait_until_gone(server: EmbeddedServer) -> None:
    """Return when a released throwaway server has ended and removed its folder.

    After ten seconds all the same: another process may use the server, and will end it.
    """
    deadline = time.monotonic() + 10
    while server.folder.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
