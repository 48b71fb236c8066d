"""OpenCV, loaded only by what needs it."""

from __future__ import annotations

import os
from typing import Any

from remtta.errors import RemttaError


def load_opencv(purpose: str, error: type[RemttaError] = RemttaError) -> Any:
    """Import cv2.

    Args:
        purpose: What it is needed for, for the error's text.
        error: What to raise.

    Raises:
        RemttaError: If it cannot be loaded; says what to install.
    """
    # FFmpeg's and OpenCV's own chatter would interleave with the messages of the run.
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
