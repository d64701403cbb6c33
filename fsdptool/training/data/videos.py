"""Videos (MP4 and the like): how large one is, and frames of it. Decoded by PyAV, the extra ``video``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")

_LATE = 1e-4, 2e-3
"""Least and most seconds by which a frame may begin late: Matroska rounds times to milliseconds."""


def video_size(file: Path) -> tuple[int, int]:
    """Return height and width of a video as it is shown.

    Raises:
        ConfigError: It cannot be read, or PyAV is missing.
    """
    with _opened(file) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise _empty(file)
        shown = (first.height, first.width)
        return shown[::-1] if _turned(first) % 180 else shown


def read_video(file: Path, count: int, rate: float | None) -> Iterator[Image]:
    """Yield ``count`` frames of a video in order.

    Args:
        file: The video.
        count: How many.
        rate: Frames a second from the video's beginning, each the one shown at its moment; None spreads
            them evenly over all frames.

    Raises:
        ConfigError: It cannot be read, is too short, or PyAV is missing.
    """
    with _opened(file) as (container, stream):
        base = float(stream.time_base)
        packets = [item for item in container.demux(stream) if item.pts is not None]
        times = sorted(item.pts * base for item in packets)
        if not times:
            raise _empty(file)
        last = max(float(item.duration or 0) * base for item in packets)
    late = min(max(base, _LATE[0]), _LATE[1])
    frame_numbers = _moments(file, times, times[-1] - times[0] + last, count, rate, late)
    with _opened(file) as (container, stream):
        stream.thread_type = "AUTO"
        number, yielded = -1, 0
        for number, frame in enumerate(container.decode(stream)):
            if number == frame_numbers[yielded]:
                image = frame.to_image().rotate(_turned(frame), expand=True)
                while yielded < count and frame_numbers[yielded] == number:
                    yield image
                    yielded += 1
                if yielded == count:
                    return
    raise ConfigError(
        f"video {file} ends after {number + 1} frames, its container lists {len(times)}",
        help="repair it or take it out of data.path",
    )


def spread(name: str, length: int, count: int) -> list[int]:
    """Return ``count`` numbers evenly spread over a clip of ``length`` frames.

    Raises:
        ConfigError: It has too few.
    """
    if length < count:
        raise ConfigError(
            f"clip {name} has {length} frames, batch.frames is {count}",
            help="take it out of data.path, or lower batch.frames",
        )
    return [number * (length - 1) // max(count - 1, 1) for number in range(count)]


def _moments(
    file: Path, times: list[float], seconds: float, count: int, rate: float | None, late: float
) -> list[int]:
    if rate is None:
        return spread(str(file), len(times), count)
    if (count - 1) / rate > seconds - late and count > 1:
        raise ConfigError(
            f"video {file} lasts {seconds:.2f} s; {count} frames at {rate:g} a second take"
            f" {count / rate:.2f}",
            help="remove it, lower batch.frames, or set data.options.fps (spread: over the whole video)",
        )
    moments = (times[0] + number / rate for number in range(count))
    return [max(bisect_right(times, moment + late) - 1, 0) for moment in moments]


def _turned(frame: Any) -> int:
    """Degrees, counter-clockwise, a player turns a frame by: telephones write videos lying on their side."""
    return int(getattr(frame, "rotation", 0))


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"video {file} needs PyAV, which is not installed",
            help="pip install av, or unpack it: ffmpeg -i NAME.mp4 NAME/%05d.png",
        ) from error
    try:
        open_regular(file).close()
    except UnreadableError as error:
        raise ConfigError(
            f"video {file}: {error.message}", help="repair it or take it out of data.path"
        ) from error
    try:
        with av.open(str(file)) as container:
            if not container.streams.video:
                raise _empty(file)
            yield container, container.streams.video[0]
    except av.error.FFmpegError as error:
        raise ConfigError(
            f"video {file} cannot be read: {error.strerror or error}",
            help="repair it or take it out of data.path",
        ) from error


def _empty(file: Path) -> ConfigError:
    return ConfigError(f"video {file} has no pictures", help="take it out of data.path")
