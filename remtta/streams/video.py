"""Frames of video files, and functions shared with live sources."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterator

import numpy as np
from PIL import Image

from remtta.errors import StreamError
from remtta.streams.capture import cannot_open, no_frame
from remtta.streams.decoding_memory import CURRENT_MEMORY
from remtta.streams.frames import CannotOpen, Frame, Gap, Picture
from remtta.streams.images import has_suffix, image_suffixes
from remtta.streams.pyav import Video

_CONTAINERS = "mp4 m4v mov qt avi divx mkv webm mpg mpeg mpe m1v m2v mpv mod tod vob ts mts m2ts m2t wmv asf flv f4v"
_CONTAINERS += " 3gp 3gpp 3g2 ogv h264 264 h265 265 hevc dav ivf y4m mjpg mjpeg dv mxf nut rm insv lrv"
VIDEO_SUFFIXES = frozenset("." + name for name in _CONTAINERS.split(" "))
_FRAME_BYTES = 7  # per pixel: as RGB array and as image
_TS_PACKET = 188
_SIGNATURES = (
    b"\x1aE\xdf\xa3",
    b"\0\0\1\xba",
    b"\0\0\1\xb3",
    b"FLV",
    b"0&\xb2u\x8ef\xcf\x11",
)  # Matroska, MPEG, FLV, ASF
_IMAGE_BRANDS = b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"
_HOLE = 8  # times the mean of the other intervals

_log = logging.getLogger(__name__)


def is_video(path: str) -> bool:
    """Return True for a file with a video's suffix, or with no image's suffix and a video's first bytes."""
    if has_suffix(path, VIDEO_SUFFIXES):
        return True
    return not has_suffix(path, image_suffixes()) and os.path.isfile(path) and _begins_as_video(path)


def _begins_as_video(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(2 * _TS_PACKET)
    except OSError:  # reported when it is read
        return False
    transport_stream = any(head[first : first + _TS_PACKET + 1 : _TS_PACKET] == b"GG" for first in (0, 4))
    movie = head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide") and head[8:12] not in _IMAGE_BRANDS
    return transport_stream or movie or head.startswith(_SIGNATURES) or (head[:4], head[8:12]) == (b"RIFF", b"AVI ")


def iter_video(source: str, *, stride: int = 1) -> Iterator[Frame]:
    """Yield every stride-th frame of a video file; raise StreamError if it cannot be opened, or has no frame."""
    try:
        video = Video(source)
    except CannotOpen as error:
        raise StreamError(cannot_open(source, str(error))) from error
    number = -1
    try:
        times = array("d")  # if no duration is known, as in WebM and MKV that were recorded live
        for number, picture in enumerate(_from_first_decodable(iter(video.read, None))):
            if number % stride == 0:
                yield video_frame(source, picture, number, picture.time_s)
            if not video.num_frames:
                times.append(picture.time_s)
        if number < 0:
            raise no_frame(source, video.codec)
        warn_if_cut(source, number + 1, video.num_frames)
        _warn_of_hole(source, np.asarray(times))
    except OSError as error:
        raise StreamError(f"{source} was lost after {number + 1} frames ({error}); check the disk") from error
    finally:
        video.close()


def _from_first_decodable(pictures: Iterator[Picture]) -> Iterator[Picture]:
    """Yield the pictures, unless none of them can be decoded."""
    rejected: list[Picture] = []
    for picture in pictures:
        if picture.size is None:
            rejected.append(picture)
            continue
        yield from (*rejected, picture)
        yield from pictures


def warn_if_cut(name: str, num_frames: int, promised: int) -> None:
    """Warn that a video ended before the number of frames in its header, or that its duration means."""
    if promised > num_frames + 1:  # headers often count one frame too many
        text = "%s ended after %d of about %d frames; it may be truncated or damaged, or its frame rate may vary"
        _log.warning(text, name, num_frames, promised)


def _warn_of_hole(name: str, times: np.ndarray) -> None:
    """Warn of an interval many times as long as the others: frames may be missing there."""
    intervals = np.diff(times)
    if len(intervals) < 2:
        return
    longest = int(intervals.argmax())
    if intervals[longest] > _HOLE * np.delete(intervals, longest).mean():
        text = "%s has no frame between %.2f s and %.2f s; some may be missing"
        _log.warning(text, name, times[longest], times[longest + 1])


def video_frame(
    name: str, picture: Picture, number: int, time_s: float, gap: Gap | None = None, read_at: str | None = None
) -> Frame:
    """Return a picture as a frame of a stream, which reserves its decoding memory when it is loaded."""

    def load() -> Image.Image:
        if (memory := CURRENT_MEMORY.get()) and picture.size:
            memory.reserve(*picture.size, _FRAME_BYTES)
        return picture.load()

    return Frame(name, load, number, round(max(time_s, 0.0), 6), gap or picture.gap, read_at)
