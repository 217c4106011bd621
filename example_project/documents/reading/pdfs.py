"""Pages and text of a PDF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from pypdf import PdfReader
from pypdf.errors import DependencyError, PdfReadError, PyPdfError

from example_project.documents.reading import Unreadable, storable

#: Text is kept of so many pages, and so many characters of it.
TEXT_PAGES = 50
TEXT_LENGTH = 100_000


class Damaged(Exception):
    """The PDF breaks the rules of the format, so that a careful reading stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pdf:
    """What is in a PDF: all its pages counted, the beginning of its text."""

    page_count: int
    text: str


def read_pdf(stream: IO[bytes], *, careful: bool, after_page: Callable[[], None]) -> Pdf:
    """Count the pages and read the text. `after_page` may raise to give up.

    A careful reading raises `Damaged` where the file breaks the rules. One that is not careful
    looks for the pages itself, which takes longer and may miss some; it raises `Unreadable` when
    there is none. Both raise `Unreadable` when the PDF asks for a password.
    """
    try:
        reader = PdfReader(stream, strict=careful)
        _unlock(reader)
        page_count = len(reader.pages)
        text = _text(reader, after_page)
    except PyPdfError as error:
        if careful:
            raise Damaged(f"The PDF is damaged: {error}.") from error
        raise Unreadable(f"No page can be found in the PDF: {error}.") from error
    if not page_count:
        raise Unreadable("The PDF has no pages.")
    return Pdf(page_count=page_count, text=text)


def _unlock(reader: PdfReader) -> None:
    if not reader.is_encrypted:
        return
    try:
        opened = bool(reader.decrypt(""))
    except (DependencyError, NotImplementedError, PdfReadError):
        opened = False
    if not opened:
        raise Unreadable("The PDF is encrypted and asks for a password.")


def _text(reader: PdfReader, after_page: Callable[[], None]) -> str:
    text = ""
    for page in reader.pages[:TEXT_PAGES]:
        text += page.extract_text() + "\n"
        after_page()
        if len(text) >= TEXT_LENGTH:
            break
    return storable(text.strip())[:TEXT_LENGTH]
