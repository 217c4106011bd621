"""The app of the example."""

import logging
import warnings

from django.apps import AppConfig


class DocumentsConfig(AppConfig):
    """Uploaded files and what jobs found in them."""

    name = "example_project.documents"
    verbose_name = "Documents"

    def ready(self) -> None:
        from PIL import Image

        # Pillow warns of every flaw of an image; what keeps it from being read is an error as well.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
        # It also only warns of a picture that would fill the memory when opened. Here it is an
        # error, and set once: warning filters belong to the whole process, not to one thread.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        # pypdf logs every flaw of a PDF. What matters of them becomes the error of a job.
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)
