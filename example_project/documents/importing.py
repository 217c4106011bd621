"""From a file of a folder to a document."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from typing import IO

from django.conf import settings
from django.core.files import File
from django.db import IntegrityError

from example_project.documents.folders import (
    FoundFile,
    NotImportable,
    opened_regular,
    reason_of,
)
from example_project.documents.models import Document

#: What an import leaves free on the disk: copying a huge file must not fill it.
DISK_RESERVE = 200 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The document of a file; `new` unless it was imported before."""

    document_id: int
    new: bool


def import_file(found: FoundFile) -> Imported:
    """Make a document of the file, which enqueues its jobs, unless an earlier import did.

    So an import that was interrupted, or is started twice, goes on where it was. A file that
    changed since is a new document. Raises `NotImportable`.
    """
    with opened_regular(found.path) as stream:
        key = _import_key(found.path, os.fstat(stream.fileno()))
        known = _known(key)
        if known is not None:
            return Imported(document_id=known, new=False)
        _check_room(stream)
        return _import(stream, name=found.name, key=key)


def _import_key(path: str, status: os.stat_result) -> str:
    identity = b"%b\0%d\0%d" % (os.fsencode(path), status.st_size, status.st_mtime_ns)
    return hashlib.sha256(identity).hexdigest()


def _known(key: str) -> int | None:
    return Document.objects.filter(import_key=key).values_list("pk", flat=True).first()


def _check_room(stream: IO[bytes]) -> None:
    size = os.fstat(stream.fileno()).st_size
    os.makedirs(settings.MEDIA_ROOT, exist_ok=True)
    if size and size + DISK_RESERVE > shutil.disk_usage(settings.MEDIA_ROOT).free:
        raise NotImportable("too large for the free space of the disk")


def _import(stream: IO[bytes], *, name: str, key: str) -> Imported:
    document = Document(original_name=name, import_key=key, file=File(stream, name="upload"))
    try:
        document.save()
    except IntegrityError:
        known = _known(key)
        if known is None:
            raise
        return Imported(document_id=known, new=False)  # another import was faster
    except OSError as error:
        raise NotImportable(reason_of(error)) from error
    return Imported(document_id=document.pk, new=True)
