"""The checksum of a file of any size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

_BLOCK = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """SHA-256 in hexadecimal, and how many bytes it covers."""

    sha256: str
    size: int


def checksum_of(stream: IO[bytes], *, after_block: Callable[[], None]) -> Checksum:
    """Read to the end, block by block. `after_block` may raise to give up."""
    digest, size = hashlib.sha256(), 0
    while block := stream.read(_BLOCK):
        digest.update(block)
        size += len(block)
        after_block()
    return Checksum(sha256=digest.hexdigest(), size=size)
