"""The listing of an archive. Nothing is unpacked to disk, and no more read than a bound."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import IO, Protocol, cast

from example_project.documents.reading import Unreadable, printable
from example_project.documents.reading.kinds import GZIP, TAR, ZIP

#: The listing keeps so many entries, and so many characters of a name …
ENTRIES_KEPT = 200
NAME_LENGTH = 300
#: … counts so many …
ENTRIES_COUNTED = 100_000
#: … and looks at so many bytes, however few of them a compressed bomb has.
BYTES_READ = 64 * 1024 * 1024
_TAR_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name in an archive, and the size that the archive says it has."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The first entries of an archive, and how many were counted; `complete` when that is all."""

    entries: tuple[Entry, ...]
    count: int
    complete: bool


class _Seekable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def seek(self, position: int, /) -> int: ...


def list_archive(stream: IO[bytes], *, kind: str) -> Listing:
    """List what is in a zip, tar or gzip file. Raises `Unreadable` when it is broken."""
    try:
        return _LISTERS[kind](stream)
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,
        ValueError,
    ) as error:
        raise Unreadable(f"The archive is broken: {error}") from error


def _list_zip(stream: IO[bytes]) -> Listing:
    # Reads the directory at the end of the file, which is never larger than the file itself.
    with zipfile.ZipFile(stream) as archive:
        return _listing(_entry(member.filename, member.file_size) for member in archive.infolist())


def _list_tar(stream: _Seekable) -> Listing:
    bounded = _Bounded(stream, BYTES_READ)
    listing = _listing(_tar_entries(bounded))
    if bounded.cut:
        return Listing(entries=listing.entries, count=listing.count, complete=False)
    return listing


def _list_gzip(stream: IO[bytes]) -> Listing:
    with gzip.GzipFile(fileobj=stream) as unpacked:
        is_tar = _is_tar(unpacked.read(_TAR_BLOCK))
        unpacked.seek(0)
        if is_tar:
            return _list_tar(unpacked)
    return _listing([_entry(_gzip_name(stream), _gzip_size(stream))])


def _listing(entries: Iterable[Entry]) -> Listing:
    remaining = iter(entries)
    kept = tuple(islice(remaining, ENTRIES_KEPT))
    count = len(kept) + sum(1 for _ in islice(remaining, ENTRIES_COUNTED - len(kept)))
    return Listing(entries=kept, count=count, complete=next(remaining, None) is None)


def _entry(name: str, size: int) -> Entry:
    return Entry(name=printable(name)[:NAME_LENGTH], size=size)


def _is_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _tar_entries(bounded: _Bounded) -> Iterable[Entry]:
    try:
        # Not as a stream ("r|"): that would read block after block, past the end, of a member that
        # says it is huge.
        with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep them all
                yield _entry(member.name, member.size)
    except tarfile.ReadError:
        if not bounded.cut:
            raise


def _gzip_name(stream: IO[bytes]) -> str:
    """The name in the header (RFC 1952), up to its NUL."""
    stream.seek(0)
    header = stream.read(10 + NAME_LENGTH)
    has_extra, has_name = header[3] & 4, header[3] & 8
    if has_extra or not has_name:
        return "(content)"
    return header[10:].partition(b"\0")[0].decode("latin-1")


def _gzip_size(stream: IO[bytes]) -> int:
    """What the trailer says of the content's size: modulo 4 GiB, and of the last member only."""
    stream.seek(-4, io.SEEK_END)
    (size,) = struct.unpack("<I", stream.read(4))
    return int(size)


class _Bounded:
    """The first so many bytes of a stream, as if it ended there; `cut` when it goes on."""

    def __init__(self, stream: _Seekable, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._position = 0
        self.cut = False

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        self._position = self._stream.seek(min(position, self._limit))
        self._look_past_limit()
        return self._position

    def read(self, size: int) -> bytes:
        block = self._stream.read(min(size, self._limit - self._position))
        self._position += len(block)
        self._look_past_limit()
        return block

    def close(self) -> None:
        """Nothing to do: whoever opened the stream closes it."""

    def _look_past_limit(self) -> None:
        # Nothing is read of the stream after this, so its own position does not matter any more.
        if self._position == self._limit and not self.cut:
            self.cut = bool(self._stream.read(1))


_LISTERS: dict[str, Callable[[IO[bytes]], Listing]] = {
    GZIP: _list_gzip,
    TAR: _list_tar,
    ZIP: _list_zip,
}
