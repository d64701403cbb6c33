"""Images are decoded by the formats we mean, within bounds, and fail in one line."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.training.data.images import STILLS, Bucket, list_pictures, read_pixels

BUCKETS = (Bucket(8, 8),)
EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
(owned) (w) file closefile
showpage
"""


def read(folder: Path) -> None:
    for picture in list_pictures(Data(source="images", path=str(folder)), BUCKETS):
        read_pixels(picture, BUCKETS[picture.bucket])


def encoded(size: tuple[int, int] = (8, 8), format: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (1, 2, 3)).save(stream, format)
    return stream.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A tiny file that claims a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


# Pillow warns of a picture of this size before it is refused.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "data",
    [
        EPS,
        encoded(format="TIFF"),
        encoded(format="PPM"),
        encoded(format="PDF"),
        b"",
        b"\x89PNG\r\n\x1a\n",
        encoded()[:40],
        encoded(size=(64, 64), format="JPEG")[:300],
        encoded(format="WEBP")[:20],
        encoded(format="BMP")[:60],
        png_of(100_000, 100_000),
        png_of(12_000, 12_000),
        encoded(size=(1, 5000)),
        encoded(size=(5000, 1)),
    ],
    ids=lambda data: f"{data[:4]!r}-{len(data)}",
)
def test_what_is_no_image_of_ours_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "a.txt").write_text("a caption")
    with pytest.raises(ConfigError, match=r"a\.png") as caught:
        read(tmp_path)
    assert "\n" not in caught.value.message
    assert not Path("w").exists()


def test_no_program_is_started_for_a_postscript_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(EPS)
    (tmp_path / "images" / "a.txt").write_text("a caption")
    with pytest.raises(ConfigError, match="PNG, JPEG"):
        read(tmp_path / "images")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("suffix", STILLS)
def test_images_of_every_kind_are_read(tmp_path: Path, suffix: str) -> None:
    kind = {".jpg": "JPEG", ".jpeg": "JPEG"}.get(suffix, suffix[1:].upper())
    (tmp_path / f"a{suffix}").write_bytes(encoded(size=(64, 8), format=kind))
    (tmp_path / "a.txt").write_text("a caption")
    read(tmp_path)
