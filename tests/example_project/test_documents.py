"""The documents of the example: saving one enqueues its jobs, and what each of them finds."""

from __future__ import annotations

import gzip
import io
import os
import socket
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.files.base import ContentFile
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.test import Client, override_settings
from django.urls import reverse
from PIL import Image

from django_jobqueue.exceptions import NoJobAvailable
from django_jobqueue.execution import JobContext, execute
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Failed, Outcome, Refused, Succeeded
from example_project.documents.folders import (
    Folder,
    NotImportable,
    look_through,
    opened_regular,
)
from example_project.documents.importing import import_file
from example_project.documents.jobs import QUEUES, jobs_of
from example_project.documents.management.commands.demo import INBOX
from example_project.documents.models import Document
from example_project.documents.reading import Unreadable, archives, kinds, printable
from example_project.documents.reading.archives import list_archive
from example_project.documents.reading.images import read_image
from tests.rows import make_due

FIRST_JOBS = {"read_kind", "read_checksum"}


@pytest.fixture(autouse=True)
def media(tmp_path: Path) -> Iterator[Path]:
    """The folder of uploaded files, of this test alone."""
    with override_settings(MEDIA_ROOT=str(tmp_path / "media")):
        yield tmp_path / "media"


def document_of(content: bytes, name: str = "upload.bin") -> Document:
    return Document.objects.create(file=ContentFile(content, name=name))


def document_in_inbox(name: str) -> Document:
    return document_of((INBOX / name).read_bytes(), name)


def handlers_of(document: Document) -> list[str]:
    names = jobs_of([document.pk]).values_list("handler", flat=True)
    return sorted(name.rpartition(".")[2] for name in names)


def work() -> dict[str, Outcome]:
    """Run due jobs, and retries at once, until none is left. The last outcome by handler."""
    outcomes: dict[str, Outcome] = {}
    while True:
        make_due(*ProcessingJob.objects.filter(status="failed"))
        try:
            job = ProcessingJob.objects.dequeue(worker="test", queues=QUEUES)
        except NoJobAvailable:
            return outcomes
        outcome = execute(JobContext(job, good_until=time.monotonic() + 60))
        ProcessingJob.objects.settle([outcome])
        outcomes[job.handler.rpartition(".")[2]] = outcome


def refusal(outcome: Outcome) -> str:
    assert isinstance(outcome, Refused)
    return outcome.failure.error


@pytest.mark.django_db
class TestSaving:
    def test_a_new_document_has_one_job_for_each_first_reader(self) -> None:
        document = document_of(b"hello", "hello.txt")
        assert set(handlers_of(document)) == FIRST_JOBS
        assert (document.original_name, document.size) == ("hello.txt", 5)

    def test_saving_again_doubles_nothing(self) -> None:
        document = document_of(b"hello")
        document.save()
        Document.objects.get(pk=document.pk).save()
        assert set(handlers_of(document)) == FIRST_JOBS
        assert ProcessingJob.objects.count() == len(FIRST_JOBS)

    def test_a_rolled_back_document_leaves_no_job(self) -> None:
        with transaction.atomic():
            document_of(b"hello")
            transaction.set_rollback(True)
        assert not Document.objects.exists()
        assert not ProcessingJob.objects.exists()

    def test_the_stored_file_keeps_nothing_of_the_name(self) -> None:
        document = document_of(b"<script>", "evil.html")
        assert "." not in str(document.file.name)

    def test_the_payload_is_the_primary_key(self) -> None:
        document = document_of(b"hello")
        payloads = jobs_of([document.pk]).values_list("payload", flat=True)
        assert all(payload == {"document_id": document.pk} for payload in payloads)


@pytest.mark.django_db
class TestAdmin:
    def test_an_upload_makes_a_document_and_its_jobs(self, admin_client: Client) -> None:
        upload = SimpleUploadedFile("notes.txt", b"hello")
        admin_client.post(reverse("admin:documents_document_add"), {"file": upload})
        document = Document.objects.get()
        assert document.original_name == "notes.txt"
        assert set(handlers_of(document)) == FIRST_JOBS

    def test_the_pages_show_findings_and_jobs(self, admin_client: Client) -> None:
        names = ["lighthouse.jpg", "logbook.tar.gz", "letter-to-almeida.pdf"]
        documents = [document_in_inbox(name) for name in names]
        work()
        pages = [reverse("admin:documents_document_changelist")]
        pages += [reverse("admin:documents_document_change", args=(d.pk,)) for d in documents]
        text = "".join(admin_client.get(page).content.decode() for page in pages)
        for expected in ("640 × 480 pixels", "january.txt", "1 page", "read_pdf", "thumbnails/"):
            assert expected in text

    def test_a_document_cannot_be_changed(self, admin_client: Client) -> None:
        document = document_of(b"hello", "hello.txt")
        page = reverse("admin:documents_document_change", args=(document.pk,))
        answer = admin_client.post(page, {"file": SimpleUploadedFile("other.txt", b"other")})
        assert answer.status_code == 403
        assert Document.objects.get().original_name == "hello.txt"

    def test_staff_who_may_only_view_cannot_upload(self, client: Client) -> None:
        user = User.objects.create_user("viewer", is_staff=True)
        user.user_permissions.add(Permission.objects.get(codename="view_document"))
        client.force_login(user)
        upload = SimpleUploadedFile("notes.txt", b"hello")
        answer = client.post(reverse("admin:documents_document_add"), {"file": upload})
        assert answer.status_code == 403
        assert not Document.objects.exists()


@pytest.mark.django_db
class TestJobs:
    @pytest.mark.parametrize(
        ("name", "kind", "found"),
        [
            ("letter-to-almeida.pdf", "application/pdf", {"page_count": 1}),
            ("minutes-harbour-society.pdf", "application/pdf", {"page_count": 3}),
            ("invoice-2041-damaged.pdf", "application/pdf", {"page_count": 1}),
            ("lighthouse.jpg", "image/jpeg", {"width": 640, "height": 480}),
            ("really-a-png.jpg", "image/png", {"width": 200, "height": 200}),
            ("beacon.gif", "image/gif", {"width": 96, "height": 96}),
            ("postcard.webp", "image/webp", {"width": 400, "height": 300}),
            ("stamp.bmp", "image/bmp", {"width": 120, "height": 90}),
            ("fax-page.tiff", "image/tiff", {"width": 860, "height": 600}),
            ("regatta-results.zip", "application/zip", {"entry_count": 3}),
            ("logbook.tar.gz", "application/gzip", {"entry_count": 3}),
            ("harbour-notes.txt", "text/plain", {}),
            ("lettre-latin-1.txt", "text/plain", {}),
            ("notice.html", "text/html", {}),
            ("buoy-sensor.bin", "application/octet-stream", {}),
        ],
    )
    def test_a_readable_file_is_read(self, name: str, kind: str, found: dict[str, Any]) -> None:
        document = document_in_inbox(name)
        outcomes = work()
        assert all(isinstance(outcome, Succeeded) for outcome in outcomes.values())
        document.refresh_from_db()
        assert document.kind == kind
        assert {column: getattr(document, column) for column in found} == found
        assert len(document.sha256) == 64
        assert document.size == (INBOX / name).stat().st_size

    @pytest.mark.parametrize(
        ("name", "reader", "why"),
        [
            ("empty-scan.jpg", "read_kind", "the file is empty"),
            ("not-a-picture.png", "read_kind", "promises image/png, but the content is text"),
            ("broken-picture.png", "read_image", "begins like an image"),
            ("minutes-cut-off.pdf", "read_pdf", "No page can be found"),
            ("invoice-2042-locked.pdf", "read_pdf", "password"),
            ("regatta-results-broken.zip", "list_archive", "archive is broken"),
        ],
    )
    def test_a_file_that_can_never_be_read_is_a_dead_letter(
        self, name: str, reader: str, why: str
    ) -> None:
        document_in_inbox(name)
        assert why in refusal(work()[reader])

    def test_text_of_a_pdf_is_kept(self) -> None:
        document = document_in_inbox("minutes-harbour-society.pdf")
        work()
        document.refresh_from_db()
        assert "The coffee machine has been descaled" in document.text

    def test_a_damaged_pdf_is_read_on_the_second_attempt(self) -> None:
        document = document_in_inbox("invoice-2041-damaged.pdf")
        work()
        job = jobs_of([document.pk]).get(handler__endswith="read_pdf")
        assert (job.status, job.attempts) == ("succeeded", 2)
        assert "Broken xref table" in job.history.get().error

    def test_a_missing_file_is_tried_again(self) -> None:
        document = document_of(b"hello")
        document.file.storage.delete(str(document.file.name))
        job = ProcessingJob.objects.dequeue(worker="test", queues=QUEUES)
        outcome = execute(JobContext(job, good_until=time.monotonic() + 60))
        assert isinstance(outcome, Failed)
        assert outcome.delay == 2

    def test_a_deleted_document_is_no_failure(self) -> None:
        document_of(b"hello").delete()
        outcomes = work()
        assert all(isinstance(outcome, Succeeded) for outcome in outcomes.values())

    def test_a_second_run_changes_nothing(self, media: Path) -> None:
        document = document_in_inbox("lighthouse.jpg")
        work()
        before = Document.objects.filter(pk=document.pk).values().get()
        files = sorted(media.rglob("*"))
        ProcessingJob.objects.all().delete()
        document.save()
        work()
        after = Document.objects.filter(pk=document.pk).values().get()
        assert {**after, "read_at": None} == {**before, "read_at": None}
        assert sorted(media.rglob("*")) == files


@pytest.mark.django_db
class TestImporting:
    def test_a_file_is_imported_once(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        (found,) = everything_in(tmp_path).files
        first, second = import_file(found), import_file(found)
        assert first.new
        assert not second.new
        assert first.document_id == second.document_id
        assert ProcessingJob.objects.count() == len(FIRST_JOBS)

    def test_a_changed_file_is_a_new_document(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        (found,) = everything_in(tmp_path).files
        import_file(found)
        (tmp_path / "notes.txt").write_text("hello, hello")
        assert import_file(found).new

    def test_a_name_of_odd_bytes_is_stored_as_text(self, tmp_path: Path) -> None:
        path = os.path.join(os.fsencode(tmp_path), b"caf\xe9\n\x1b[31m.txt")
        with open(path, "wb") as file:
            file.write(b"hello")
        (found,) = everything_in(tmp_path).files
        document = Document.objects.get(pk=import_file(found).document_id)
        assert document.original_name == r"caf\udce9\n\x1b[31m.txt"

    def test_a_file_larger_than_the_disk_is_refused(self, tmp_path: Path) -> None:
        with (tmp_path / "huge").open("wb") as huge:
            huge.truncate(2**42)
        (found,) = everything_in(tmp_path).files
        with pytest.raises(NotImportable, match="free space"):
            import_file(found)


def everything_in(folder: Path) -> Folder:
    return look_through(str(folder), without=str(folder / "media"), after_folder=lambda: None)


class TestFolders:
    def test_only_regular_files_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "deep" / "er").mkdir(parents=True)
        (tmp_path / "deep" / "er" / "file").touch()
        (tmp_path / "link").symlink_to("deep/er/file")
        (tmp_path / "deep" / "loop").symlink_to(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            bind_in(tmp_path, listener)
            found = everything_in(tmp_path)
        assert [file.name for file in found.files] == ["deep/er/file"]
        reasons = {entry.name: entry.reason for entry in found.passed_over}
        assert reasons == {"link": "a link", "pipe": "a pipe", "socket": "a socket"}

    def test_the_folder_of_uploads_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "media").mkdir()
        (tmp_path / "media" / "copy").touch()
        assert everything_in(tmp_path).files == ()

    def test_a_file_that_became_a_pipe_or_a_link_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to("/etc/hostname")
        for name in ("pipe", "link", "gone"):
            with pytest.raises(NotImportable), opened_regular(str(tmp_path / name)):
                pass

    def test_the_look_can_be_given_up(self, tmp_path: Path) -> None:
        def give_up() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            look_through(str(tmp_path), without="", after_folder=give_up)


def bind_in(folder: Path, listener: socket.socket) -> None:
    """Bind by a relative name: the path of a socket must be short."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        listener.bind("socket")
    finally:
        os.chdir(before)


def tar_block(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a member that says it has this size."""
    member = tarfile.TarInfo("member")
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def in_zip(names: list[str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return packed.getvalue()


class TestArchives:
    def list(self, content: bytes, kind: str) -> archives.Listing:
        return list_archive(io.BytesIO(content), kind=kind)

    def test_a_long_listing_is_cut(self) -> None:
        listing = self.list(in_zip([f"{n}.txt" for n in range(500)]), kinds.ZIP)
        assert listing.count == 500
        assert len(listing.entries) == archives.ENTRIES_KEPT

    def test_a_listing_counts_up_to_a_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archives, "ENTRIES_COUNTED", 300)
        listing = self.list(in_zip([f"{n}.txt" for n in range(500)]), kinds.ZIP)
        assert (listing.count, listing.complete) == (300, False)

    @pytest.mark.parametrize("kind", [kinds.TAR, kinds.GZIP])
    @pytest.mark.parametrize("member_kind", [tarfile.REGTYPE, tarfile.XHDTYPE])
    def test_a_bomb_is_not_read_to_its_end(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, member_kind: bytes
    ) -> None:
        monkeypatch.setattr(archives, "BYTES_READ", 2**20)
        content = tar_block(2**33, member_kind) + bytes(2**24)
        packed = gzip.compress(content, 1) if kind == kinds.GZIP else content
        assert not self.list(packed, kind).complete

    @pytest.mark.parametrize("compress", [gzip.compress, bytes])
    def test_a_member_larger_than_the_archive_is_a_broken_archive(
        self, compress: Callable[[bytes], bytes]
    ) -> None:
        kind = kinds.GZIP if compress is gzip.compress else kinds.TAR
        with pytest.raises(Unreadable):
            self.list(compress(tar_block(2**62) + bytes(1024)), kind)

    def test_a_plain_gzip_file_is_one_entry_with_the_name_in_its_header(self) -> None:
        packed = io.BytesIO()
        with gzip.GzipFile("notes.txt", "wb", fileobj=packed) as file:
            file.write(b"hello")
        (entry,) = self.list(packed.getvalue(), kinds.GZIP).entries
        assert (entry.name, entry.size) == ("notes.txt", 5)

    def test_a_gzip_file_without_a_name_is_one_entry(self) -> None:
        (entry,) = self.list(gzip.compress(b"hello"), kinds.GZIP).entries
        assert (entry.name, entry.size) == ("(content)", 5)

    @pytest.mark.parametrize("length", [2, 9, 20])
    def test_a_gzip_file_cut_off_is_a_broken_archive(self, length: int) -> None:
        with pytest.raises(Unreadable):
            self.list(gzip.compress(os.urandom(1000))[:length], kinds.GZIP)


class TestReaders:
    def test_a_text_that_begins_like_a_signature_is_a_text(self) -> None:
        for text in (
            b"BM begins a bitmap",
            b"{ not json",
            b"MZ, PK and other initials",
        ):
            assert kinds.kind_of(io.BytesIO(text)) == kinds.TEXT

    def test_an_image_of_too_many_pixels_is_refused(self) -> None:
        packed = io.BytesIO()
        Image.new("1", (20_000, 20_000)).save(packed, "PNG")
        packed.seek(0)
        with pytest.raises(Unreadable, match="too large"):
            read_image(packed)

    @pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "I;16", "F", "LA"])
    def test_every_mode_of_pixels_has_a_thumbnail(self, mode: str) -> None:
        packed = io.BytesIO()
        Image.new(mode, (300, 200)).save(packed, "TIFF")
        packed.seek(0)
        picture = read_image(packed)
        assert Image.open(io.BytesIO(picture.thumbnail)).size == (160, 107)

    def test_a_printable_name_stays_as_it_is(self) -> None:
        assert printable("Łódź – 日本語 [red].txt") == "Łódź – 日本語 [red].txt"
