"""Videos and network streams, decoded by FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from remtta.errors import FrameError, counted, without_password
from remtta.machine import num_cores
from remtta.streams.frames import CannotOpen, Gap, Picture, undecodable

if TYPE_CHECKING:
    from av import VideoFrame
    from av.filter import Graph
    from av.video.stream import VideoStream

MAX_ALLOCATED_BYTES = 256 * 2**20  # frames of 8K video take 100 MB
MAX_REFUSED = 30
"""Number of consecutive parts of a container that may be damaged before reading ends."""

_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"  # under which name users of OpenCV have set FFmpeg's options
_FILE_OPTIONS = {"probesize": "100000000", "analyzeduration": "3600000000"}  # the first picture may come late
_MAX_THREADS = 4  # each delays a live stream by one frame
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
_RESTART_S = 0.5  # times that go back by less are reordered frames
_WHOLE_FILES = re.compile(r"(https?|s?ftp|file)://", re.IGNORECASE)  # of which FFmpeg knows whether they have ended
_IN_PARTS = ("hls", "dash")  # formats whose missing parts FFmpeg skips
_ENDLESS = ("mpjpeg",)  # of cameras, which may state any length

_PQ, _HLG = 16, 18  # transfer functions, by their numbers in H.273
_TO_BT709 = np.array([[1.6605, -0.5877, -0.0728], [-0.1246, 1.1330, -0.0084], [-0.0182, -0.1006, 1.1187]], np.float32)
_WHITE_HLG, _WHITE_PQ = 0.265, 203 / 10_000  # reference white (BT.2408) as a fraction of the largest light
_STEPS = 4096  # of light: one step is less than one level of sRGB

_log = logging.getLogger(__name__)


class Video:
    """A video file or network stream that is open for reading."""

    def __init__(self, source: str, open_timeout_s: float | None = None, read_timeout_s: float | None = None) -> None:
        """Open it; raise `CannotOpen` with the reason."""
        import av  # takes 0.15 s

        _limit_allocations()
        self.name, self._read_timeout_s = without_password(source), read_timeout_s
        live = "://" in source
        try:
            self._container = av.open(
                source if live else os.path.join(".", source),  # else FFmpeg takes the 10 of 10:30.mp4 as a protocol
                options=_network_options() if live else _FILE_OPTIONS,
                timeout=(open_timeout_s, read_timeout_s),
                metadata_errors="replace",
            )
        except av.error.ExitError as error:
            raise TimeoutError(f"no answer within {open_timeout_s:g} s") from error
        except av.error.FFmpegError as error:
            raise CannotOpen(error.strerror) from error
        self._stream = self._best_track()
        codec = self._stream.codec_context.codec
        # Each frame of these is complete: in threads, frames before a damaged last one would be lost with it.
        self._stream.thread_type = "SLICE" if codec.intra_only else "AUTO"
        self._stream.thread_count = min(_MAX_THREADS, num_cores())
        self.codec = codec.name
        self._rate = float(self._stream.guessed_rate or self._stream.average_rate or 1)
        self.num_frames = self._stream.frames or self._estimated_frames()
        name = self._container.format.name
        whole = not live or (bool(_WHOLE_FILES.match(source)) and name not in _IN_PARTS)
        if live and whole and not self.num_frames and name not in _ENDLESS:
            self.num_frames = int(self._container.size > 0)  # a file of unknown duration, such as MPEG-TS by http
        self._live = live and not self.num_frames
        self._least_s = 0.0 if whole else 0.9 * (self._container.duration or 0) / 1e6 - 2 / self._rate  # if not cut
        self._pictures = self._read()

    def read(self) -> Picture | None:
        """Return the next picture; None at the end. Raise OSError, also as TimeoutError, if the stream is lost."""
        return next(self._pictures, None)

    def close(self) -> None:
        self._pictures.close()
        self._container.close()

    def _best_track(self) -> VideoStream:
        """Return the track that players show; raise CannotOpen if there is none that can be decoded."""
        from av.stream import Disposition

        tracks = [each for each in self._container.streams.video if not each.disposition & Disposition.attached_pic]
        best = self._container.streams.best("video")
        if best not in tracks:
            best = tracks[0] if tracks else None
        if best is None:
            raise CannotOpen("it has no video track")
        if best.codec_context is None:
            raise CannotOpen("FFmpeg has no decoder for it")
        if others := [_description(track) for track in tracks if track is not best]:
            text = "%s has %s: reading %s, not %s"
            _log.warning(text, self.name, counted(len(tracks), "video track"), _description(best), ", ".join(others))
        return best

    def _estimated_frames(self) -> int:
        """Return at least how many frames the duration means; 0 for a live stream, which has none."""
        return int(0.95 * (self._container.duration or 0) / 1e6 * self._rate)  # in microseconds, also of the sound

    def _read(self) -> Generator[Picture]:
        """Yield the pictures, with times that never go back."""
        offset_s = -float((self._stream.start_time or 0) * (self._stream.time_base or 0))
        before_s: float | None = None
        restarted = False
        for number, frame in enumerate(_deinterlaced(self._decode())):
            following_s = 0.0 if before_s is None else before_s + 1 / self._rate
            untimed = self._live or frame is None or frame.pts is None
            own_s = following_s if untimed or frame is None else frame.time + offset_s
            gap = None
            if before_s is not None and own_s < before_s - _RESTART_S:
                if not restarted:
                    _log.warning(
                        "%s: the times restart at frame %d; they are continued from %.2f s on",
                        self.name,
                        number,
                        following_s,
                    )
                restarted = True
                offset_s, own_s = offset_s + following_s - own_s, following_s
                gap = Gap(round(1 / self._rate, 3), "the times restart", 0)
            before_s = max(own_s, before_s or 0.0)
            if frame is None:
                yield undecodable(before_s)
            else:
                yield Picture((frame.width, frame.height), partial(_upright_rgb, frame), before_s, gap)
        if (before_s or 0.0) < self._least_s:
            raise OSError("the connection ended")

    def _decode(self) -> Iterator[VideoFrame | None]:
        """Yield the frames; None for each one that cannot be decoded, or only in part."""
        from av.error import ExitError, FFmpegError, InvalidDataError

        refused = 0
        while refused <= MAX_REFUSED:
            try:
                for packet in self._container.demux(self._stream):
                    refused = 0
                    try:
                        frames = packet.decode()
                    except FFmpegError:
                        yield None
                        continue
                    yield from (None if frame.is_corrupt else frame for frame in frames)
                return
            except InvalidDataError:
                refused += 1
            except FFmpegError as error:
                with contextlib.suppress(FFmpegError):
                    yield from self._stream.decode(None)  # what the decoder holds back
                if isinstance(error, ExitError):
                    raise TimeoutError(f"no frame within {self._read_timeout_s:g} s") from error
                if self._live and error.errno == errno.EIO:  # of a camera that hung up
                    return
                raise OSError(error.strerror) from error  # the others hold the address, and its password


def _network_options() -> dict[str, str]:
    chosen = os.environ.get(_OPTIONS, "rtsp_transport;tcp")
    return dict(option.split(";", 1) for option in chosen.split("|") if ";" in option)


def _limit_allocations() -> None:
    """Limit single allocations of FFmpeg to 256 MiB from now on, if its library can be found.

    Otherwise a picture of an MJPEG stream that never ends, which FFmpeg buffers, or a huge one in a video file would
    fill the memory.
    """
    import av._core

    with contextlib.suppress(OSError, AttributeError):  # Windows finds functions only by their own library
        limit = ctypes.CDLL(av._core.__file__).av_max_alloc
        limit.argtypes, limit.restype = [ctypes.c_size_t], None
        limit(MAX_ALLOCATED_BYTES)


def _description(track: VideoStream) -> str:
    codec = track.codec_context.name if track.codec_context else "unknown codec"
    return f"track {track.index} ({codec}, {track.width} x {track.height})"


def _deinterlaced(frames: Iterable[VideoFrame | None]) -> Iterator[VideoFrame | None]:
    """Yield the frames, interlaced ones as the picture of their first field; those after it are one frame late."""
    graph: Graph | None = None
    shape: tuple[int, int, str] | None = None
    for frame in frames:
        new = (frame.width, frame.height, frame.format.name) if frame else None
        if graph and new != shape:
            yield from _filtered(graph, None)
            graph = shape = None
        if frame and new != shape and frame.interlaced_frame:
            graph, shape = _deinterlacer(frame), new
        if frame and graph:
            yield from _filtered(graph, frame)
        else:
            yield frame
    if graph:
        yield from _filtered(graph, None)


def _deinterlacer(frame: VideoFrame) -> Graph | None:
    """Return a filter for frames like this one; None if it takes none of these, as of a few lines."""
    from av.error import FFmpegError
    from av.filter import Graph

    graph = Graph()
    nodes = (
        graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base),
        graph.add("bwdif", mode="send_frame", deint="interlaced"),
        graph.add("buffersink"),
    )
    try:
        graph.link_nodes(*nodes).configure()
    except FFmpegError as error:
        _log.warning(
            "interlaced frames of %d x %d are left as they are (%s)", frame.width, frame.height, error.strerror
        )
        return None
    return graph


def _filtered(graph: Graph, frame: VideoFrame | None) -> Iterator[VideoFrame]:
    """Push a frame, or None for the end, and yield those that are ready."""
    graph.vpush(frame)
    with contextlib.suppress(BlockingIOError, EOFError):
        while True:
            yield graph.vpull()


def _upright_rgb(frame: VideoFrame) -> Image.Image:
    """Return a frame as an upright RGB image; HDR is tone-mapped. Raise FrameError if there is no conversion."""
    from av.error import FFmpegError

    try:
        pixels = frame.reformat(format="rgb24", threads=1).to_ndarray()
    except FFmpegError as error:
        raise FrameError(f"cannot be converted to RGB ({error.strerror})") from error
    image = Image.fromarray(_to_srgb(pixels, frame.color_trc) if frame.color_trc in (_PQ, _HLG) else pixels)
    turned = _TURNS.get(frame.rotation % 360)
    return image if turned is None else image.transpose(turned)


def _to_srgb(pixels: np.ndarray, transfer: int) -> np.ndarray:
    """Return sRGB pixels (H, W, 3) uint8 of BT.2020 ones in PQ or HLG; light above reference white is white."""
    light = _to_light(np.arange(256, dtype=np.float32) / 255, transfer).astype(np.float32)
    linear = np.clip(light[pixels] @ _TO_BT709.T, 0, 1)
    levels = np.linspace(0, 1, _STEPS)
    levels = np.where(levels <= 0.0031308, 12.92 * levels, 1.055 * levels ** (1 / 2.4) - 0.055)
    return (255 * levels).round().astype(np.uint8)[(linear * (_STEPS - 1)).round().astype(np.uint16)]


def _to_light(signal: np.ndarray, transfer: int) -> np.ndarray:
    """Return light, 1 for reference white, of signals from 0 to 1 (BT.2100)."""
    if transfer == _HLG:
        bright = (np.exp((signal - 0.55991073) / 0.17883277) + 0.28466892) / 12
        return np.where(signal <= 0.5, signal**2 / 3, bright) / _WHITE_HLG
    power = signal ** (1 / 78.84375)
    return (np.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)) ** (1 / 0.1593017578125) / _WHITE_PQ
