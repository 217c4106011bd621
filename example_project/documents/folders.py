"""The files of a folder: what can be imported, and what is passed over, with the reason.

Nothing here raises for a single file: a folder may hold anything, and change while it is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from example_project.documents.reading import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A regular file: `path` is absolute, as the system has it; `name` can be shown and stored."""

    path: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """Something that is not imported."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """All that was found below a folder, in the order of the paths."""

    files: tuple[FoundFile, ...]
    passed_over: tuple[PassedOver, ...]


class NotImportable(Exception):
    """The file cannot be imported. The text says why."""


def look_through(folder: str, *, without: str, after_folder: Callable[[], None]) -> Folder:
    """Everything below the folder. Links are not followed; the folder `without` is left out.

    `after_folder` may raise to give up.
    """
    files: list[FoundFile] = []
    passed_over: list[PassedOver] = []
    root = os.path.abspath(folder)

    def shown(path: str) -> str:
        return printable(os.path.relpath(path, root))

    def cannot_enter(error: OSError) -> None:
        path = os.fsdecode(error.filename or root)
        passed_over.append(PassedOver(name=shown(path), reason=reason_of(error)))

    for parent, folders, names in os.walk(root, onerror=cannot_enter):
        folders[:] = sorted(
            name for name in folders if not _same(os.path.join(parent, name), without)
        )
        for name in sorted(names):
            path = os.path.join(parent, name)
            if reason := _why_not(path):
                passed_over.append(PassedOver(name=shown(path), reason=reason))
            else:
                files.append(FoundFile(path=path, name=shown(path)))
        after_folder()
    return Folder(files=tuple(files), passed_over=tuple(passed_over))


@contextmanager
def opened_regular(path: str) -> Iterator[IO[bytes]]:
    """Open a regular file for reading. Raises `NotImportable` for everything else."""
    try:
        # Since the look at the folder it may have become a pipe, whose opening would wait for ever,
        # or a link to somewhere else.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise NotImportable(reason_of(error)) from error
    with open(descriptor, "rb") as stream:
        if reason := _why_not_mode(os.fstat(descriptor).st_mode):
            raise NotImportable(reason)
        yield stream


def reason_of(error: OSError) -> str:
    """The system's words, without the path."""
    return (error.strerror or type(error).__name__).lower()


def _same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _why_not(path: str) -> str:
    try:
        return _why_not_mode(os.lstat(path).st_mode)
    except OSError as error:
        return reason_of(error)


def _why_not_mode(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return _SPECIAL.get(stat.S_IFMT(mode), "not a regular file")


_SPECIAL = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
