"""Past frames that stay diverse, with what the source and the adapted model say about them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Reservoir:
    """At most `size` frames, balanced over the classes that the source model sees.

    A parked camera fills it with one class only until others have been seen:
    a full reservoir gives up the oldest frame of its largest class.

    Args:
        size: Most frames to hold.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.images = torch.empty(0)
        self.source = torch.empty(0)
        self.adapted = torch.empty(0)
        self.updated = torch.empty(0, dtype=torch.int64)
        self.arrived = torch.empty(0, dtype=torch.int64)
        self._count = 0

    def __len__(self) -> int:
        return len(self.updated)

    def add(self, images: Tensor, source: Tensor, adapted: Tensor, now: int) -> None:
        """Take frames in, and let go of as many as there is no room for.

        Args:
            images: Shape (B, 3, H, W), preprocessed; kept in half precision.
            source: The source model's logits (B, C).
            adapted: The adapted model's logits (B, C).
            now: The time, in batches.
        """
        count = len(images)
        order = torch.arange(self._count, self._count + count)
        parts = (images.half().cpu(), source.float().cpu(), adapted.float().cpu(), torch.full((count,), now), order)
        self._count += count
        kept = (self.images, self.source, self.adapted, self.updated, self.arrived)
        if len(self):
            parts = tuple(torch.cat([old, new]) for old, new in zip(kept, parts, strict=True))  # type: ignore[assignment]
        self._set(parts)
        while len(self) > self._size:
            classes = self.source.argmax(1)
            largest = torch.bincount(classes).argmax()
            oldest = torch.where(classes == largest, self.arrived, self._count).argmin()
            self._set(tuple(part[torch.arange(len(self)) != oldest] for part in self._parts()))

    def stale(self, before: int, most: int) -> Tensor:
        """Positions of at most `most` frames whose adapted logits are from before a time, oldest first."""
        order = self.updated.argsort(stable=True)[:most]
        return order[self.updated[order] < before]

    def renew(self, positions: Tensor, adapted: Tensor, now: int) -> None:
        """Put new logits of the adapted model in place."""
        self.adapted[positions] = adapted.float().cpu()
        self.updated[positions] = now

    def back_to_source(self, now: int) -> None:
        """What the adapted model says once it is the source model again."""
        self.adapted = self.source.clone()
        self.updated.fill_(now)

    def state(self) -> dict[str, Tensor]:
        """Everything it holds."""
        return dict(zip(_NAMES, self._parts(), strict=True), count=torch.tensor(self._count))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        self._set(tuple(state[name].clone() for name in _NAMES))
        self._count = int(state["count"])

    def _parts(self) -> tuple[Tensor, ...]:
        return self.images, self.source, self.adapted, self.updated, self.arrived

    def _set(self, parts: tuple[Tensor, ...]) -> None:
        self.images, self.source, self.adapted, self.updated, self.arrived = parts


_NAMES = ("images", "source", "adapted", "updated", "arrived")
