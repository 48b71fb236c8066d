"""Frames of video files, and functions shared with live sources."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator

import numpy as np
from PIL import Image

from remtta.errors import FrameError, StreamError
from remtta.streams.capture import VideoCapture, cannot_open, codec_of, load_opencv, no_frame, open_capture
from remtta.streams.decoding_budget import CURRENT_SHARE
from remtta.streams.frames import Frame, Gap

_CONTAINERS = "mp4 m4v mov avi divx mkv webm mpg mpeg mpe m1v m2v mpv vob ts mts m2ts wmv asf flv f4v 3gp 3g2 ogv"
_CONTAINERS += " h264 264 h265 265 hevc dav ivf y4m mjpg mjpeg dv mxf nut rm"
VIDEO_SUFFIXES = frozenset("." + name for name in _CONTAINERS.split(" "))
_FRAME_BYTES = 7  # per pixel: as RGB array and as image
_HOLE = 8  # times the mean of the other intervals
MAX_REFUSED = 30
"""Number of consecutive reads that may fail: OpenCV fails once for each packet that its decoder rejects."""

_log = logging.getLogger(__name__)


def iter_video(source: str, *, stride: int = 1) -> Iterator[Frame]:
    """Yield every stride-th frame of a video file; raise StreamError if it cannot be opened, or has no frame."""
    cv2 = load_opencv("video", StreamError)
    capture = open_capture(source)
    try:
        if not capture.isOpened():
            raise StreamError(cannot_open(source))
        number = refused = 0
        time_s: float | None = None
        promised = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        times = array("d")  # if no duration is known, as in WebM and MKV that were recorded live
        while refused < MAX_REFUSED and (refused == 0 or number + refused <= promised):
            if not capture.grab():
                refused += 1
                continue
            for _ in range(refused):  # frames that the decoder rejected; the video goes on
                if number % stride == 0:
                    time_s = _next_position_s(capture, time_s, stride)
                    yield video_frame(source, None, number, time_s)
                number += 1
            refused = 0
            if number % stride == 0:
                decoded, pixels = capture.retrieve()
                time_s = position_s(capture, time_s, stride)
                if promised <= 0:
                    times.append(time_s)
                yield video_frame(source, pixels if decoded else None, number, time_s)
            number += 1
        if number == 0:
            raise no_frame(source, codec_of(capture))
        warn_if_cut(source, number, promised)
        _warn_of_hole(source, np.asarray(times))
    finally:
        capture.release()


def position_s(capture: VideoCapture, before_s: float | None, stride: int) -> float:
    """Return the time of the frame just read, `stride` frames after the one at `before_s`, if there was one."""
    time_s = capture.get(load_opencv("video").CAP_PROP_POS_MSEC) / 1000
    return time_s or _next_position_s(capture, before_s, stride)  # e.g. AVI: the last frames have no time


def _next_position_s(capture: VideoCapture, before_s: float | None, stride: int) -> float:
    return 0.0 if before_s is None else before_s + stride / (capture.get(load_opencv("video").CAP_PROP_FPS) or 1)


def warn_if_cut(name: str, num_frames: int, promised: int) -> None:
    """Warn that a video ended before the number of frames in its header, or that OpenCV estimates from its length."""
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
    name: str, pixels: np.ndarray | None, number: int, time_s: float, gap: Gap | None = None, read_at: str | None = None
) -> Frame:
    """Return a video frame from OpenCV's pixels, (H, W, 3) in BGR, or None if it could not be decoded."""

    def load() -> Image.Image:
        if pixels is None:
            raise FrameError("cannot be decoded")
        if share := CURRENT_SHARE.get():
            share.reserve(pixels.shape[1], pixels.shape[0], _FRAME_BYTES)
        cv2 = load_opencv("video")
        return Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))

    return Frame(name, load, number, round(max(time_s, 0.0), 6), gap, read_at)
