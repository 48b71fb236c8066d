"""Open cameras, videos, network addresses and pictures at them."""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any, Protocol

from PIL import Image

from remtta.errors import RemttaError, StreamError, UsageError, without_password
from remtta.streams.frames import CannotOpen, Picture, undecodable
from remtta.streams.pyav import Video
from remtta.streams.web import PolledImage, check_host, polling_interval, serves_video

_PROTOCOLS = "http https rtsp rtsps rtmp rtmps rtmpt udp tcp tls rtp srtp srt rist mms mmsh mmst ftp sftp file unix"
PROTOCOLS = frozenset(_PROTOCOLS.split(" "))
"""Protocols of FFmpeg; it may be built with fewer."""


class Capture(Protocol):
    """An open source of pictures."""

    num_frames: int  # of a finite video, as far as it is known; 0 for a live source
    codec: str

    def read(self) -> Picture | None:
        """Return the next picture; None at the end. Raise an exception if the source is lost."""

    def close(self) -> None: ...


def load_opencv(purpose: str, error: type[RemttaError] = RemttaError) -> ModuleType:
    """Import cv2, or raise `error` with its purpose and what to install."""
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")  # its output would mix with the run's messages
    try:
        import cv2
    except ImportError as failure:
        raise error(
            f"OpenCV, needed for {purpose}, cannot be loaded ({failure}); install its system libraries "
            "(Debian: libgl1 libglib2.0-0) or replace it: "
            "pip uninstall -y opencv-python; pip install opencv-python-headless"
        ) from failure
    return cv2


def open_capture(
    source: str | int, open_timeout_s: float, read_timeout_s: float, poll: float | None, closed: threading.Event
) -> Capture:
    """Open a camera's number or device, or an address, of which a still image is requested again and again until
    `closed`. Raise OSError, as `CannotOpen` or TimeoutError, or StreamError if OpenCV cannot be loaded.
    """
    if isinstance(source, int) or "://" not in source:
        return _Camera(source)
    every_s = polling_interval(source, poll)
    if every_s is not None and not serves_video(source, open_timeout_s):
        return PolledImage(source, every_s, closed, open_timeout_s)
    try:
        return Video(source, open_timeout_s, read_timeout_s)
    except CannotOpen:
        check_host(source)
        raise


class _Camera:
    """A camera, read by OpenCV."""

    num_frames, codec = 0, ""

    def __init__(self, source: str | int) -> None:
        cv2 = load_opencv("cameras", StreamError)
        self._capture: Any = cv2.VideoCapture(source)
        if not self._capture.isOpened():
            raise CannotOpen("it cannot be opened")

    def read(self) -> Picture | None:
        if not self._capture.grab():
            return None
        decoded, pixels = self._capture.retrieve()  # (H, W, 3) uint8, BGR
        if not decoded or pixels is None or pixels.size == 0:
            return undecodable()
        return Picture(pixels.shape[1::-1], lambda: Image.fromarray(pixels[..., ::-1]))

    def close(self) -> None:
        self._capture.release()


def cannot_open(source: str | int, reason: str) -> str:
    """Return the message for a source that did not open."""
    if isinstance(source, int):
        return f"camera {source} cannot be opened; check that it is connected and not in use"
    if "://" in source:
        advice = "check the address, the network, and that a video is served there"
    else:
        advice = "it may be truncated (an MP4 without its end cannot be read), or no video"
    return f"{without_password(source)} cannot be opened as a video ({reason}); {advice}"


def no_frame(name: str, codec: str) -> StreamError:
    """Return the error for a source that opened but gave no frame."""
    return StreamError(
        f"{name}: no frame could be decoded{f' ({codec})' if codec else ''}; check that it is a whole video"
        f"{', or download it first' if '://' in name else ''}"  # an MP4's index may be at its end
    )


def check_protocol(address: str) -> None:
    """Raise UsageError if the protocol of an address is unknown."""
    protocol = address.partition("://")[0]
    if protocol.lower() not in PROTOCOLS:
        known = "use rtsp://, http://, https://, rtmp:// or udp://"
        raise UsageError(
            f'{without_password(address)}: unknown protocol "{protocol}"; {known}; for a bucket, mount it or copy the '
            "folder"
        )
