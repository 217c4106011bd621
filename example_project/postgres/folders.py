"""Folders that no other user can prepare or change."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

SHARED_BASE = Path("/var/tmp")
"""Short, writable for everyone, and outside of folders that the server's account cannot enter."""


class EmbeddedServerError(Exception):
    """The embedded server cannot be used; the text says why and what to do."""


def project_folder(project: Path) -> Path:
    """Where the server of a project keeps its data: one folder for each user and project path."""
    key = hashlib.sha256(str(project.resolve()).encode()).hexdigest()[:10]
    return SHARED_BASE / f"django-jobqueue-{os.geteuid()}-{key}"


def make_private_folder(path: Path, *, mode: int) -> None:
    """Make the folder if it is not there, and refuse one that is not this user's alone.

    Where everyone may write, someone else could have made the folder first and wait for our files.
    """
    try:
        path.mkdir(mode=mode, exist_ok=True)
        # Not followed: a link could lead to a folder that is ours but means something else.
        found = path.lstat()
    except OSError as error:
        raise EmbeddedServerError(f"Cannot make the folder {path}: {error.strerror}.") from error
    if not stat.S_ISDIR(found.st_mode):
        raise EmbeddedServerError(f"{path} is not a folder. Remove it and try again.")
    if found.st_uid != os.geteuid():
        raise EmbeddedServerError(
            f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}. "
            "Remove it and try again."
        )
    if found.st_mode & 0o022:
        raise EmbeddedServerError(f"Other users may write to {path}. Remove it and try again.")
    path.chmod(mode)
