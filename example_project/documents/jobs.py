"""The jobs that read a document.

    save ─┬─▶ read_checksum
          └─▶ read_kind ─┬─▶ read_pdf
                         ├─▶ read_image
                         └─▶ list_archive

A payload is the document's primary key: the job reads the row as it is when it runs. Every handler
may run twice (after a crash, say): it writes the same columns and the same file again.

How a job ends: a file that can never be read is a `DeadLetter`, for a person to look at. What may
go better in another way is a `Retry`. Everything else that goes wrong, such as a storage that does
not answer, is an ordinary exception, and retried after the handler's backoff.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import IO, Any

from django.core.files.base import ContentFile
from django.db import transaction
from django.db.models import QuerySet

from django_jobqueue import DeadLetter, Retry, handler
from django_jobqueue.execution import JobContext
from django_jobqueue.handlers import Handler
from django_jobqueue.models import ProcessingJob
from example_project.documents.models import Document
from example_project.documents.reading import Unreadable, archives, checksums, images, kinds, pdfs

#: Slow kinds of work have a lane of their own, so that a worker can be devoted to them.
QUEUES = ("documents", "pdf", "images")
GONE = {"note": "The document was deleted."}


def soon(attempt: int) -> float:
    """Seconds until the retry: 2, 4, 6, …"""
    return 2.0 * attempt


@handler(queue="documents", priority=-10, backoff=soon, takes_context=True)
def read_checksum(context: JobContext, document_id: int) -> dict[str, Any]:
    """Checksum and true size. Reads the whole file, and nobody waits for it: last in its queue."""
    document = find(document_id)
    if document is None:
        return GONE
    with opened(document) as stream:
        checksum = checksums.checksum_of(stream, after_block=context.check)
    findings = dataclasses.asdict(checksum)
    document.record(**findings)
    return findings


@handler(queue="documents", priority=10, backoff=soon)
def read_kind(document_id: int) -> dict[str, Any]:
    """The kind by content, which decides what else can be read: first in its queue."""
    document = find(document_id)
    if document is None:
        return GONE
    with opened(document) as stream:
        kind = kinds.kind_of(stream)
    reader = reader_of(kind)
    with transaction.atomic():
        document.record(kind=kind)
        if reader:
            enqueue_reader(reader, document)
    promised = kinds.promised_kind(document.original_name)
    if promised and not reader:
        content = "the file is empty" if kind == kinds.EMPTY else f"the content is {kind}"
        raise DeadLetter(f"The name promises {promised}, but {content}.")
    return {"kind": kind}


@handler(queue="pdf", max_attempts=3, backoff=soon, takes_context=True)
def read_pdf(context: JobContext, document_id: int) -> dict[str, Any]:
    """Pages and text. The first attempt is careful; the next ones make do with a damaged file.

    So a damaged PDF is read as far as it goes, and its job's history says what is wrong with it.
    """
    document = find(document_id)
    if document is None:
        return GONE
    careful = context.attempt == 1
    try:
        with opened(document) as stream:
            pdf = pdfs.read_pdf(stream, careful=careful, after_page=context.check)
    except pdfs.Damaged as damaged:
        raise Retry(f"{damaged} The next attempt is less strict.", after=1) from damaged
    except Unreadable as unreadable:
        raise DeadLetter(str(unreadable)) from unreadable
    document.record(page_count=pdf.page_count, text=pdf.text)
    return {"pages": pdf.page_count, "characters": len(pdf.text), "damaged": not careful}


@handler(queue="images", priority=5, backoff=soon)
def read_image(document_id: int) -> dict[str, Any]:
    """Size and thumbnail. Before PDFs and archives: someone looks at the thumbnails."""
    document = find(document_id)
    if document is None:
        return GONE
    try:
        with opened(document) as stream:
            picture = images.read_image(stream)
    except Unreadable as unreadable:
        raise DeadLetter(str(unreadable)) from unreadable
    # One name per document: a second run replaces the file of the first.
    thumbnail = document.thumbnail.storage.save(
        f"thumbnails/{document.pk}.png", ContentFile(picture.thumbnail)
    )
    document.record(width=picture.width, height=picture.height, thumbnail=thumbnail)
    return {"width": picture.width, "height": picture.height}


@handler(queue="documents", backoff=soon)
def list_archive(document_id: int) -> dict[str, Any]:
    """What is in a zip, tar or gzip file, without unpacking it."""
    document = find(document_id)
    if document is None:
        return GONE
    try:
        with opened(document) as stream:
            listing = archives.list_archive(stream, kind=document.kind)
    except Unreadable as unreadable:
        raise DeadLetter(str(unreadable)) from unreadable
    entries = [dataclasses.asdict(entry) for entry in listing.entries]
    document.record(entry_count=listing.count, entries=entries)
    return {"entries": listing.count, "complete": listing.complete}


def enqueue_first_readers(document: Document) -> None:
    """Enqueue what every document needs. Called in the transaction that saves it."""
    for reader in (read_kind, read_checksum):
        enqueue_reader(reader, document)


def reader_of(kind: str) -> Handler[..., Any] | None:
    """Who reads documents of this kind, beyond the checksum."""
    if kind == kinds.PDF:
        return read_pdf
    if kind in kinds.IMAGES:
        return read_image
    if kind in kinds.ARCHIVES:
        return list_archive
    return None


def enqueue_reader(reader: Handler[..., Any], document: Document) -> None:
    """Enqueue one reader of a document, once for its life."""
    key = job_key(reader, document.pk)
    reader.using(idempotency_key=key).enqueue(document_id=document.pk)


def job_key(reader: Handler[..., Any], document_id: int) -> str:
    """The idempotency key of the job: one for each reader of each document."""
    return f"{reader.name}:{document_id}"


def jobs_of(document_ids: Collection[int]) -> QuerySet[ProcessingJob]:
    """The jobs that read these documents, found by their keys through the index on them."""
    keys = [job_key(reader, pk) for reader in READERS for pk in document_ids]
    return ProcessingJob.objects.filter(idempotency_key__in=keys)


def find(document_id: int) -> Document | None:
    """The document, without its text; None when someone deleted it while its job waited."""
    return Document.objects.defer("text", "entries").filter(pk=document_id).first()


@contextmanager
def opened(document: Document) -> Iterator[IO[bytes]]:
    """The document's file, open for reading from its beginning."""
    with document.file.storage.open(document.file.name or "", "rb") as file:
        assert file.file is not None
        yield file.file


READERS: tuple[Handler[..., Any], ...] = (
    read_checksum,
    read_kind,
    read_pdf,
    read_image,
    list_archive,
)
