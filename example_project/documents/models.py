"""Documents: uploaded files, and what the jobs that read them found."""

from __future__ import annotations

import uuid
from typing import Any

from django.core.files.storage import FileSystemStorage
from django.db import models, transaction
from django.db.models.functions import Now

from example_project.documents.reading import printable

NAME_LENGTH = 500


def stored_name(_document: Document, _original: str) -> str:
    """A name of our own: any original fits, two never meet, no server takes it for a web page."""
    return f"documents/{uuid.uuid4().hex}"


def thumbnails() -> FileSystemStorage:
    """Where thumbnails are: a second run of the job replaces the file of the first."""
    return FileSystemStorage(allow_overwrite=True)


class Document(models.Model):
    """An uploaded file. Each job that reads it writes columns of its own, and no others."""

    file = models.FileField(upload_to=stored_name, max_length=200)
    original_name = models.CharField(max_length=NAME_LENGTH, blank=True)
    import_key = models.CharField(  # noqa: DJ001 - NULL: not from a folder
        max_length=64,
        null=True,
        unique=True,
        editable=False,
        help_text="Tells a file of a folder that was imported before.",
    )
    uploaded_at = models.DateTimeField(db_default=Now())
    read_at = models.DateTimeField("last read", null=True)

    size = models.BigIntegerField("size in bytes", null=True)
    sha256 = models.CharField("SHA-256", max_length=64, blank=True)
    kind = models.CharField(max_length=100, blank=True, help_text="By content, not by name.")
    page_count = models.IntegerField("pages", null=True)
    text = models.TextField(blank=True)
    width = models.IntegerField(null=True)
    height = models.IntegerField(null=True)
    thumbnail = models.FileField(storage=thumbnails, blank=True)
    entry_count = models.IntegerField("entries", null=True)
    entries = models.JSONField("listing", null=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return self.original_name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save, and in the same transaction enqueue the jobs that read the file.

        Each job has an idempotency key, so saving again doubles nothing.
        """
        from example_project.documents.jobs import enqueue_first_readers  # it imports this module

        self.original_name = printable(self.original_name or self.file.name or "")[-NAME_LENGTH:]
        if self.size is None:
            self.size = self.file.size
        with transaction.atomic():
            super().save(*args, **kwargs)
            enqueue_first_readers(self)

    def record(self, **findings: Any) -> None:
        """Write what one job found, and nothing else: others write theirs at the same time."""
        type(self).objects.filter(pk=self.pk).update(read_at=Now(), **findings)

    @property
    def found(self) -> str:
        """What all jobs found so far, in one line."""
        return ", ".join(filter(None, (self._pages(), self._pixels(), self._entries())))

    def _pages(self) -> str:
        if self.page_count is None:
            return ""
        return f"{counted(self.page_count, 'page')}, {counted(len(self.text), 'character')} of text"

    def _pixels(self) -> str:
        return "" if self.width is None else f"{self.width} × {self.height} pixels, thumbnail"

    def _entries(self) -> str:
        if self.entry_count is None:
            return ""
        return counted(self.entry_count, "entry", "entries")


def counted(number: int, one: str, many: str = "") -> str:
    """`1 page`, `2,000 pages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
