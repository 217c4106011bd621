"""The kind of a file by its content. The name is only asked what it promises."""

from __future__ import annotations

from pathlib import PurePath
from typing import IO

import puremagic

EMPTY = "inode/x-empty"
TEXT = "text/plain"
UNKNOWN = "application/octet-stream"
PDF = "application/pdf"
ZIP = "application/zip"
GZIP = "application/gzip"
TAR = "application/x-tar"
ARCHIVES = frozenset({ZIP, GZIP, TAR})
IMAGES = frozenset(
    {"image/bmp", "image/gif", "image/jpeg", "image/png", "image/tiff", "image/webp"}
)

_PROMISES = {
    ".bmp": "image/bmp",
    ".gif": "image/gif",
    ".gz": GZIP,
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".pdf": PDF,
    ".png": "image/png",
    ".tar": TAR,
    ".tgz": GZIP,
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".webp": "image/webp",
    ".zip": ZIP,
}
_OTHER_NAMES = {
    "application/x-gzip": GZIP,
    "application/x-zip-compressed": ZIP,
    "image/jpg": "image/jpeg",
    "image/x-ms-bmp": "image/bmp",
}
_SAMPLE = 8192
#: puremagic's confidence in a signature of three bytes. Plain text has shorter ones by chance.
_ENOUGH_FOR_TEXT = 0.3
_NOT_IN_TEXT = bytes({*range(32), 127} - set(b"\b\t\n\f\r\x1b"))


def kind_of(stream: IO[bytes]) -> str:
    """The MIME type that the content shows."""
    sample = stream.read(_SAMPLE)
    if not sample:
        return EMPTY
    stream.seek(0)
    if _looks_like_text(sample):
        return _by_signature(stream, at_least=_ENOUGH_FOR_TEXT) or TEXT
    return _by_signature(stream, at_least=0) or UNKNOWN


def promised_kind(name: str) -> str | None:
    """The kind that the ending of a name promises, where a reader could tell whether it holds."""
    return _PROMISES.get(PurePath(name).suffix.lower())


def _looks_like_text(sample: bytes) -> bool:
    """In UTF-8, Latin-1 or any other encoding with ASCII's control characters."""
    return sample.translate(None, _NOT_IN_TEXT) == sample


def _by_signature(stream: IO[bytes], *, at_least: float) -> str | None:
    try:
        matches = puremagic.magic_stream(stream)
    except (puremagic.PureError, ValueError):
        return None
    named = [match for match in matches if match.mime_type and match.confidence >= at_least]
    if not named:
        return None
    best = named[0].confidence
    kinds = [_named(match.mime_type) for match in named if match.confidence == best]
    # Every office document and every program library is a zip too, by the same four bytes.
    return ZIP if ZIP in kinds else kinds[0]


def _named(mime_type: str) -> str:
    return _OTHER_NAMES.get(mime_type, mime_type)
