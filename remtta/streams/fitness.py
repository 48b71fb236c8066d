"""Frames of a video that a model can answer, but should not learn from.

Stills are not looked at: somebody chose them, a repeated or a black one included, and their order may mean nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from remtta.streams.prefetch import DecodedFrame

BLACK = "black frame"
DUPLICATE = "duplicate of the frame before"

_BLACK_MEAN = 2.0  # of 255: sensor noise and compression leave a little
_BLACK_DEVIATION = 2.0


def not_to_learn_from(frames: Sequence[DecodedFrame], before: str | None) -> tuple[dict[int, str], str | None]:
    """Find frames that are black, or the same as the one before, as lost signals and frozen cameras give them.

    `before` is the fingerprint of the last readable video frame before these, which are in stream order. Returns the
    reasons by frame index, and the fingerprint for the next call.
    """
    reasons: dict[int, str] = {}
    for frame in frames:
        if frame.image is None or frame.number is None:
            continue
        earlier, before = before, fingerprint(frame.image)
        if _is_black(frame.image):
            reasons[frame.index] = BLACK
        elif before == earlier:
            reasons[frame.index] = DUPLICATE
    return reasons, before


def fingerprint(image: Tensor) -> str:
    """Return what tells an image (3, H, W) of bytes from any other."""
    return hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest()


def _is_black(image: Tensor) -> bool:
    levels = image.numpy()  # NumPy asks no other threads, which the model keeps busy
    return bool(levels.mean() < _BLACK_MEAN) and bool(levels.std() < _BLACK_DEVIATION)
