"""Find video frames that a model can predict but should not learn from.

Stills are not checked: the user chose them, including repeated or black ones, and their order may be meaningless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np
from torch import Tensor

from remtta.streams.prefetch import DecodedFrame

BLACK = "black frame"
DUPLICATE = "duplicate of the frame before"

_BLACK_MEAN = _BLACK_DEVIATION = 2.0  # of 255: leaves room for sensor noise and compression

_MIN_PAIRS = 3  # of neighbouring frames
_NEAR_EQUAL = 3.0  # of 255: what noise and slow motion change from frame to frame
_SLOW_VIDEO_S = 0.15  # between frames


def unlearnable_frames(frames: Sequence[DecodedFrame], before: str | None) -> dict[int, str]:
    """Find frames that are black, or equal to the previous one, as from lost signals and frozen cameras.

    Return reasons by frame index; `before` is the fingerprint of the last readable video frame before them.
    """
    reasons: dict[int, str] = {}
    for frame in frames:
        if frame.image is None or frame.number is None:
            continue
        previous, before = before, fingerprint(frame.image)
        if _is_black(frame.image):
            reasons[frame.index] = BLACK
        elif before == previous:
            reasons[frame.index] = DUPLICATE
    return reasons


def near_equal(frames: Sequence[DecodedFrame]) -> float | None:
    """Return the frames per second of a video whose frames hardly differ from one to the next, else None."""
    readable = [frame for frame in frames if frame.image is not None and frame.time_s is not None]
    pairs = [(a, b) for a, b in pairwise(readable) if a.source == b.source and b.number == (a.number or 0) + 1]
    if len(pairs) < _MIN_PAIRS:
        return None
    seconds = median((b.time_s or 0) - (a.time_s or 0) for a, b in pairs)
    if not 0 < seconds < _SLOW_VIDEO_S or median(_difference(a, b) for a, b in pairs) >= _NEAR_EQUAL:
        return None
    return 1 / seconds


def _difference(before: DecodedFrame, after: DecodedFrame) -> float:
    """Mean absolute difference of two frames, in levels of 255."""
    assert before.image is not None and after.image is not None
    return float(np.abs(before.image.numpy().astype(np.int16) - after.image.numpy()).mean())


def fingerprint(image: Tensor) -> str:
    """Return a hash of an image (3, H, W) of bytes."""
    return hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest()


def _is_black(image: Tensor) -> bool:
    levels = image.numpy()  # NumPy uses a single thread, unlike torch, whose threads the model keeps busy
    return bool(levels.mean() < _BLACK_MEAN) and bool(levels.std() < _BLACK_DEVIATION)
