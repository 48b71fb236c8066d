"""Load OpenCV on demand."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from remtta.errors import RemttaError

_MAX_ALLOCATED = 256 * 2**20  # frames of 8K video take 100 MB


def load_opencv(purpose: str, error: type[RemttaError] = RemttaError) -> Any:
    """Import cv2, or raise `error` with its purpose and what to install."""
    # Keep FFmpeg's and OpenCV's own output from mixing with the run's messages.
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    try:
        import cv2
    except ImportError as failure:
        raise error(
            f"OpenCV, needed for {purpose}, cannot be loaded ({failure}); install its system libraries "
            "(Debian: libgl1 libglib2.0-0) or replace it: "
            "pip uninstall -y opencv-python; pip install opencv-python-headless"
        ) from failure
    return cv2


def bound_allocations(cv2: Any) -> None:
    """Limit single allocations of FFmpeg to 256 MiB from now on, if its library can be found.

    Otherwise a picture of an MJPEG stream that never ends, which FFmpeg buffers, or a huge one in a video file would
    fill the memory.
    """
    place = Path(cv2.__file__)
    for library in [place] if place.suffix == ".so" else place.parent.glob("cv2*.so"):
        with contextlib.suppress(OSError, AttributeError):  # built without FFmpeg, or with it linked statically
            limit = ctypes.CDLL(str(library)).av_max_alloc
            limit.argtypes, limit.restype = [ctypes.c_size_t], None
            limit(_MAX_ALLOCATED)
