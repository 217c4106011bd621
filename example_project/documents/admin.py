"""Upload documents, and look at what was found in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from example_project.documents.jobs import jobs_of
from example_project.documents.models import Document

if TYPE_CHECKING:
    _DocumentAdmin = admin.ModelAdmin[Document]
else:  # Django's own class takes no parameter
    _DocumentAdmin = admin.ModelAdmin

_TEXT_SHOWN = 2_000


@admin.register(Document)
class DocumentAdmin(_DocumentAdmin):
    """A document is added and deleted, never changed: findings belong to the file as it came."""

    list_display = ("original_name", "kind", "size_for_people", "found", "uploaded_at")
    list_filter = ("kind",)
    search_fields = ("original_name", "sha256")
    date_hierarchy = "uploaded_at"
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Document]:
        return super().get_queryset(request).defer("entries")

    def get_fields(self, request: HttpRequest, obj: Document | None = None) -> tuple[str, ...]:
        if obj is None:
            return ("file",)
        return (
            "original_name",
            "file",
            "kind",
            "size_for_people",
            "sha256",
            "found",
            "picture",
            "beginning_of_text",
            "listing",
            "jobs",
            "uploaded_at",
            "read_at",
        )

    def get_readonly_fields(
        self, request: HttpRequest, obj: Document | None = None
    ) -> tuple[str, ...]:
        return () if obj is None else self.get_fields(request, obj)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="size", ordering="size")
    def size_for_people(self, document: Document) -> str:
        """The size with a unit."""
        return filesizeformat(document.size or 0)

    @admin.display(description="thumbnail")
    def picture(self, document: Document) -> SafeString | str:
        """The thumbnail, when the document is an image."""
        if not document.thumbnail:
            return ""
        return format_html('<img src="{}" alt="Thumbnail">', document.thumbnail.url)

    @admin.display(description="text")
    def beginning_of_text(self, document: Document) -> str:
        """As much of the text as a page can show."""
        shown = document.text[:_TEXT_SHOWN]
        return shown if shown == document.text else f"{shown} …"

    @admin.display
    def listing(self, document: Document) -> SafeString:
        """The first entries of an archive."""
        return format_html_join(
            "",
            "<div>{} ({})</div>",
            ((entry["name"], filesizeformat(entry["size"])) for entry in document.entries or ()),
        )

    @admin.display
    def jobs(self, document: Document) -> SafeString:
        """The jobs that read this document, with links to them."""
        return format_html_join(
            "",
            '<div><a href="{}">{}</a>: {}</div>',
            (
                (
                    reverse("admin:django_jobqueue_processingjob_change", args=(job.pk,)),
                    job,
                    job.get_status_display(),
                )
                for job in jobs_of([document.pk]).order_by("pk")
            ),
        )
