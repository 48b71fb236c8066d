"""Find video frames that a model can predict but should not learn from.

Stills are not checked: the user chose them, including repeated or black ones, and their order may be meaningless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from remtta.streams.prefetch import DecodedFrame

BLACK = "black frame"
DUPLICATE = "duplicate of the frame before"

_BLACK_MEAN = _BLACK_DEVIATION = 2.0  # of 255: leaves room for sensor noise and compression


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


def fingerprint(image: Tensor) -> str:
    """Return a hash of an image (3, H, W) of bytes."""
    return hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest()


def _is_black(image: Tensor) -> bool:
    levels = image.numpy()  # NumPy uses a single thread, unlike torch, whose threads the model keeps busy
    return bool(levels.mean() < _BLACK_MEAN) and bool(levels.std() < _BLACK_DEVIATION)
