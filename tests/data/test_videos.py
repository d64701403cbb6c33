"""Clips from video files: which frames are taken, and what cannot be read."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.training.data.images import Bucket, Picture, read_pixels
from fsdptool.training.data.videos import read_video, video_size

av = pytest.importorskip("av")


def video(file: Path, *, frames: int, rate: int, size: tuple[int, int] = (48, 64)) -> Path:
    """Write a video whose frame n is of grey 10 n."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4" if file.suffix != ".webm" else "libvpx-vp9", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = Fraction(1, rate)
        for number in range(frames):
            grey = np.full((*size, 3), 10 * number, dtype=np.uint8)
            picture = av.VideoFrame.from_ndarray(grey, format="rgb24")
            picture.pts = number
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file


def shown(file: Path, count: int, rate: float | None) -> list[int]:
    """Return the numbers of the frames that are taken."""
    greys: list[NDArray[np.uint8]] = [np.asarray(image) for image in read_video(file, count, rate)]
    return [round(float(grey.mean()) / 10) for grey in greys]


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi", ".webm"])
def test_frames_are_taken_at_the_wanted_rate(tmp_path: Path, suffix: str) -> None:
    file = video(tmp_path / f"a{suffix}", frames=24, rate=24)
    assert video_size(file) == (48, 64)
    assert shown(file, 5, 24.0) == [0, 1, 2, 3, 4]
    assert shown(file, 5, 8.0) == [0, 3, 6, 9, 12]
    assert shown(file, 5, 16.0) == [0, 1, 3, 4, 6], "what is on the screen at that moment"
    assert shown(file, 3, 48.0) == [0, 0, 1], "a slow video shows a frame twice"
    assert shown(file, 4, None) == [0, 7, 15, 23]
    assert shown(file, 1, 8.0) == [0]


def test_a_video_becomes_the_pixels_of_its_bucket(tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", frames=9, rate=8)
    picture = Picture("a.mp4", (str(file),), "", 48, 64, 0)
    pixels = read_pixels(picture, Bucket(32, 32, 5), rate=4.0)
    assert pixels.values.shape == (3, 5, 32, 32)
    expected = np.arange(0, 90, 20) / 127.5 - 1
    assert np.allclose(pixels.values.mean(dim=(0, 2, 3)).numpy(), expected, atol=0.04)
    assert (pixels.top, pixels.left) == (0, 5)


def test_videos_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    short = video(tmp_path / "short.mp4", frames=8, rate=8)
    with pytest.raises(ConfigError, match=r"lasts 1.00 s; 17 frames at 8 a second take 2.1") as error:
        shown(short, 17, 8.0)
    assert "data.options.fps" in str(error.value.help)
    with pytest.raises(ConfigError, match=r"has 8 frames, batch.frames is 9"):
        shown(short, 9, None)
    (tmp_path / "text.mp4").write_text("no video", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"text.mp4 cannot be read"):
        video_size(tmp_path / "text.mp4")
    torn = tmp_path / "torn.mkv"
    torn.write_bytes(video(tmp_path / "whole.mkv", frames=24, rate=24).read_bytes()[:2000])
    with pytest.raises(ConfigError, match=r"torn.mkv"):
        shown(torn, 24, 24.0)
    empty = tmp_path / "empty.mkv"
    with av.open(str(empty), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.encode(av.VideoFrame(64, 48, "yuv420p"))  # opens the codec
        for number in range(8):
            packet = av.Packet(b"\x00\x00\x01\xb6\x40")  # a picture that is not coded
            packet.stream, packet.pts, packet.dts = stream, number, number
            packet.time_base, packet.is_keyframe = stream.codec_context.time_base, True
            container.mux(packet)
    with pytest.raises(ConfigError, match=r"empty.mkv ends after 0 frames, its container lists 8"):
        shown(empty, 4, None)


@pytest.mark.slow
def test_without_pyav_a_video_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"\0")
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from pathlib import Path\n"
        "from fsdptool.training.data.videos import video_size\n"
        "try: video_size(Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error, error.help)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.mp4")], capture_output=True, text=True, check=True
    )
    assert "needs PyAV, which is not installed" in done.stdout
    assert "pip install av" in done.stdout
