"""Size and thumbnail of an image."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import IO

from PIL import Image, ImageOps, UnidentifiedImageError

from example_project.documents.reading import Unreadable

THUMBNAIL = (160, 160)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The size in pixels, and a small PNG of the (first) picture."""

    width: int
    height: int
    thumbnail: bytes


def read_image(stream: IO[bytes]) -> Picture:
    """Open the image and draw it small. Raises `Unreadable` when it is no image after all."""
    try:
        with Image.open(stream) as image:
            width, height = image.size
            return Picture(width=width, height=height, thumbnail=_thumbnail(image))
    except UnidentifiedImageError:
        raise Unreadable("It begins like an image, but is none.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(f"The image is too large to open: {error}") from error
    # Pillow tells a broken image by whatever went wrong in the decoder.
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise Unreadable(f"The image is broken: {error}.") from error


def _thumbnail(image: Image.Image) -> bytes:
    image.draft("RGB", THUMBNAIL)  # a JPEG is decoded at a fraction of its size
    upright = ImageOps.exif_transpose(image.convert("RGBA"))
    upright.thumbnail(THUMBNAIL)
    small = io.BytesIO()
    upright.save(small, "PNG", optimize=True)
    return small.getvalue()
