"""Open videos, cameras, network addresses and pictures at them, and find out why one did not open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from remtta.errors import FrameError, RemttaError, StreamError, UsageError, without_password
from remtta.options.run_options import OPEN_TIMEOUT_S, READ_TIMEOUT_S
from remtta.streams.images import has_suffix, image_suffixes, load_image

_PROTOCOLS = (
    "http https rtsp rtsps rtmp rtmpe rtmps rtmpt rtmpte rtmpts udp tcp tls rtp srtp srt rist mms mmsh mmst ftp"
)
PROTOCOLS = frozenset([*_PROTOCOLS.split(" "), "sftp", "file", "unix"])
"""Protocols of FFmpeg; OpenCV may be built with fewer."""

MAX_ALLOCATED_BYTES = 256 * 2**20  # frames of 8K video take 100 MB
_MAX_PICTURE_BYTES = 64 * 2**20
_PROBE_TIMEOUT_S = 3.0
_POLL_EVERY_S = 1.0
_CAPTURE_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_ANALYSE_LONG = "rtsp_transport;tcp|analyzeduration;3600000000|probesize;100000000"  # the first is OpenCV's default
_PORTS = {"rtsp": 554, "rtsps": 322, "rtmp": 1935, "rtmps": 443}


class NotServed(OSError):
    """A web server serves no picture at an address; the message says what it does."""


class VideoCapture(Protocol):
    """The part of `cv2.VideoCapture` that is used."""

    def isOpened(self) -> bool: ...
    def grab(self) -> bool: ...
    def retrieve(self) -> tuple[bool, np.ndarray | None]: ...
    def get(self, propId: int, /) -> float: ...
    def release(self) -> None: ...


def load_opencv(purpose: str, error: type[RemttaError] = RemttaError) -> ModuleType:
    """Import cv2, or raise `error` with its purpose and what to install."""
    # Keep FFmpeg's and OpenCV's own output from mixing with the run's messages.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    # Packets of other streams between two pictures: a picture every few minutes has thousands of packets of sound.
    os.environ.setdefault("OPENCV_FFMPEG_READ_ATTEMPTS", str(2**31 - 1))
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
    source: str | int, open_timeout_s: float = OPEN_TIMEOUT_S, read_timeout_s: float = READ_TIMEOUT_S
) -> VideoCapture:
    """Return a `cv2.VideoCapture` of a path, camera or URL, with FFmpeg's timeouts; it may not be open. Raise
    StreamError if OpenCV cannot be loaded, or cannot take the name.
    """
    cv2 = load_opencv("video", StreamError)
    if isinstance(source, int):
        return cv2.VideoCapture(source)
    try:
        source.encode()
    except UnicodeEncodeError as error:  # OpenCV would crash the process
        name = without_password(source)
        raise StreamError(f"{name} cannot be opened as a video: its name is not valid UTF-8; rename it") from error
    _limit_allocations(Path(cv2.__file__ or ""))
    open_ms, read_ms = round(1000 * open_timeout_s), round(1000 * read_timeout_s)
    timeouts = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_ms, cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_ms]
    if "://" not in source:
        source = os.path.join(".", source)  # else FFmpeg takes the 10 of 10:30.mp4 as a protocol
    capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, timeouts)
    if "://" not in source and capture.isOpened() and not capture.get(cv2.CAP_PROP_FRAME_WIDTH):
        # The first picture comes after more sound than FFmpeg analyses.
        before = os.environ.setdefault(_CAPTURE_OPTIONS, _ANALYSE_LONG)
        capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, timeouts)
        if before == _ANALYSE_LONG:
            os.environ.pop(_CAPTURE_OPTIONS, None)
    # Files unknown to FFmpeg (image sequences, odd builds) may open with another backend.
    return capture if capture.isOpened() or "://" in source else cv2.VideoCapture(source)


def _limit_allocations(cv2_path: Path) -> None:
    """Limit single allocations of FFmpeg to 256 MiB from now on, if its library can be found.

    Otherwise a picture of an MJPEG stream that never ends, which FFmpeg buffers, or a huge one in a video file would
    fill the memory.
    """
    for library in [cv2_path] if cv2_path.suffix == ".so" else cv2_path.parent.glob("cv2*.so"):
        with contextlib.suppress(OSError, AttributeError):  # built without FFmpeg, or with it linked statically
            limit = ctypes.CDLL(str(library)).av_max_alloc
            limit.argtypes, limit.restype = [ctypes.c_size_t], None
            limit(MAX_ALLOCATED_BYTES)


def cannot_open(source: str | int, reason: str | None = None) -> str:
    """Return the message for a source that did not open."""
    if isinstance(source, int):
        return f"camera {source} cannot be opened; check that it is connected and not in use"
    source = without_password(source)
    if "://" in source:
        because = f" ({reason})" if reason else ""
        advice = "check the address, the network, and that a video is served there"
        return f"{source} cannot be opened as a video{because}; {advice}"
    return (
        f"{source} cannot be opened as a video; it may be truncated (an MP4 without its end cannot be read), or of a "
        "format OpenCV does not read (ffmpeg -i INPUT -c:v libx264 out.mp4 converts it)"
    )


def codec_of(capture: VideoCapture) -> str:
    """Return the four-letter code of a video's codec, e.g. "AV01"; empty if it has none."""
    code = int(capture.get(load_opencv("video").CAP_PROP_FOURCC))
    letters = code.to_bytes(4, "little").decode("ascii", "replace") if 0 < code < 2**32 else ""
    return letters.strip() if letters.isascii() and letters.isprintable() else ""


def no_frame(name: str, codec: str) -> StreamError:
    """Return the error for a source that opened but gave no frame."""
    if codec:
        advice = (
            f"it is damaged, or OpenCV cannot decode {codec}: convert it (ffmpeg -i INPUT -c:v libx264 out.mp4), "
            f"or {'have the server send H.264 and allow seeking' if '://' in name else 'check that it is whole'}"
        )
    else:  # an MP4 with its index at the end needs a server that can seek
        advice = f"check that it is a video{', or download it first' if '://' in name else ''}"
    return StreamError(f"{name}: no frame could be decoded; {advice}")


def check_protocol(address: str) -> None:
    """Raise UsageError if the protocol of an address is unknown."""
    protocol = address.partition("://")[0]
    if protocol.lower() not in PROTOCOLS:
        known = "use rtsp://, http://, https://, rtmp:// or udp://"
        raise UsageError(
            f'{without_password(address)}: unknown protocol "{protocol}"; {known}; for a bucket, mount it or copy the '
            "folder"
        )


def why_not_open(address: str) -> str | None:
    """Find out why an address did not open by a plain connection attempt; None if that is inconclusive."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:
        return "it is not a valid address"
    if not host:
        return None
    try:
        if parts.scheme.lower() in ("http", "https"):
            request(address, _PROBE_TIMEOUT_S).close()
        elif port and parts.scheme.lower() in _PORTS:
            socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except NotServed as error:
        return str(error)
    except ConnectionRefusedError:
        return "the connection is refused: is the port right, and the server running?"
    except socket.gaierror:
        return "there is no host of that name"
    except (OSError, ValueError, HTTPException):  # inconclusive
        return None
    return None


def request(address: str, timeout_s: float) -> HTTPResponse:
    """Request an http address; its user and password are sent to its own host only. Raise NotServed if the server
    refuses, or sends a text; another OSError if there is no connection.
    """
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, f"{parts.scheme}://{host}/", unquote(user), unquote(password))
    opener = urllib.request.build_opener(_BasicLogin(passwords), _DigestLogin(passwords))
    try:
        url = urlunsplit(parts._replace(netloc=host, fragment=""))
        response: HTTPResponse = opener.open(url, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise NotServed(f"the server answers {error.code} {error.reason}".rstrip()) from error
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from error
    if (content_type := response.headers.get_content_type()).startswith("text/"):
        response.close()
        raise NotServed(f"the server sends no picture, but {content_type}")
    return response


class _BasicLogin(urllib.request.HTTPBasicAuthHandler):
    def http_error_401(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        with fp:  # which urllib leaves open
            return super().http_error_401(req, fp, code, msg, headers)


class _DigestLogin(urllib.request.HTTPDigestAuthHandler):
    def http_error_401(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        response = super().http_error_401(req, fp, code, msg, headers)
        if response:
            fp.close()
        return response


def polling_interval(source: str | int, every_s: float | None) -> float | None:
    """Return the seconds between requests of an address of a still image: as chosen, or 1 if it ends like one; None for
    others.
    """
    if isinstance(source, int) or not source.lower().startswith(("http://", "https://")):
        return None
    path = source.partition("#")[0].partition("?")[0]
    return every_s or (_POLL_EVERY_S if has_suffix(path, image_suffixes()) else None)


def open_polled(
    address: str, every_s: float, closed: threading.Event, open_timeout_s: float, read_timeout_s: float
) -> VideoCapture:
    """Return the images at an address, requested every `every_s` seconds until `closed`; or a video, if one is served
    there, as some cameras do. Raise OSError if there is neither.
    """
    with request(address, open_timeout_s) as response:
        is_video = response.headers.get_content_maintype() in ("multipart", "video")
    if is_video:
        return open_capture(address, open_timeout_s, read_timeout_s)
    return _PolledImage(address, every_s, closed, open_timeout_s)


class _PolledImage:
    """The images at an address as a `VideoCapture`; one that has not changed is no new frame."""

    def __init__(self, address: str, every_s: float, closed: threading.Event, timeout_s: float) -> None:
        self._address, self._every_s, self._closed, self._timeout_s = address, every_s, closed, timeout_s
        self._data = b""  # the newest image's file
        self._due = time.monotonic()

    def isOpened(self) -> bool:
        return True

    def grab(self) -> bool:
        while not self._closed.wait(max(0.0, self._due - time.monotonic())):
            self._due = time.monotonic() + self._every_s
            with request(self._address, self._timeout_s) as response:
                data = response.read(_MAX_PICTURE_BYTES)
            if data != self._data:
                self._data = data
                return True
        return False

    def retrieve(self) -> tuple[bool, np.ndarray | None]:
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "image")).write_bytes(self._data)
            try:
                return True, np.ascontiguousarray(np.asarray(load_image(path))[..., ::-1])
            except FrameError:
                return False, None

    def get(self, propId: int, /) -> float:
        return 0.0

    def release(self) -> None:
        pass
