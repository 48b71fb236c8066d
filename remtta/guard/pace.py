"""Learn mostly from what is new, and only occasionally from more of the same.

After a change, every second block of frames is learned from until updates make no more progress: until the weights'
displacement is much shorter than the path they took. Then one block in many is learned from, so that slow drift is not
missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.guard.conditions import Sight
from remtta.guard.observer import Observer
from remtta.methods.method import Method
from remtta.options import Adapt

NOTHING_NEW = "nothing new"
"""Reason why a frame is not learned from."""

_MOVING, _SETTLED = 2, 64  # learn from one block in this many
_WINDOW, _STRAIGHT = 8, 0.7  # settled if, over this many blocks, displacement / path is below
_MOST = 64  # learned blocks after which they count as settled, which without an anchor may otherwise never happen
_SAMPLE = 10_000  # number of weights sampled
_PREFIX = "pace."


def pacing(method: Method, adapt: Adapt) -> Pace | None:
    """Return the pace of a method, or None if every batch is learned from.

    Raises:
        UsageError: If the method's updates do not last beyond their batch.
    """
    if adapt == "always":
        return None
    if not method.lasts:
        raise UsageError(
            "--adapt auto leaves updates out, and this method has none, or none that lasts to the next batch; leave it "
            "out, or choose another method"
        )
    return Pace(method)


@dataclass
class _Pacing:
    """The pace's state, beside the condition's statistics and the weights.

    Attributes:
        frames: Frames since the last change.
        taught: Blocks learned from since then.
        waited: Blocks since the last of these.
        moving: Whether updates still make progress.
        path: Length of the weights' path since the mark.
        adapted_on: Total number of frames learned from.
        changes: Number of changes so far.
    """

    frames: int = 0
    taught: int = 0
    waited: int = 0
    moving: bool = True
    path: float = 0.0
    adapted_on: int = 0
    changes: int = 0


class Pace(Observer):
    """Decides which frames justify an update.

    A change is detected from plain image statistics, against those of the frames learned from since the last change.

    Args:
        method: The method; at the source weights everything is new.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._sight = Sight()
        self._key = torch.empty(0, dtype=torch.float64)  # mean statistics (D,)
        self._mark = self._last = torch.empty(0)  # sampled weights at the beginning of a window, and at the last block
        self._now = _Pacing()
        self._events: list[dict[str, Any]] = []

    def before(self, images: Tensor) -> str | None:
        """Return why the next frames, preprocessed images (B, 3, H, W), are excluded from learning, or None."""
        block = self._sight.take(images)
        if block is not None:
            self._look(block)
        if self._now.waited:
            return NOTHING_NEW
        self._now.adapted_on += len(images)
        return None

    def _look(self, block: Tensor) -> None:
        now = self._now
        changed = len(self._key) > 0 and not self._sight.near(self._key, block)
        if changed:
            now.changes += 1
            self._events.append({"event": "changed", "frames": now.frames})
        if changed or not len(self._key) or not self._method.num_updates:
            self._mark = self._last = self._weights()
            self._now = now = _Pacing(adapted_on=now.adapted_on, changes=now.changes)
        else:
            self._follow()
            now.waited = (now.waited + 1) % (_MOVING if now.moving else _SETTLED)
        now.frames += len(block)
        if now.waited == 0:
            now.taught += 1
            mean = block.mean(0)
            self._key = mean if now.taught == 1 else self._key.lerp(mean, 1 / now.taught)
            self._sight.note(self._key, block)

    def _follow(self) -> None:
        """Measure how far the weights moved since the last block."""
        now = self._now
        if now.waited:
            return
        here = self._weights()
        now.path += float((here - self._last).norm())
        self._last = here
        if now.taught % _WINDOW == 0:
            gets_far = float((here - self._mark).norm()) >= _STRAIGHT * now.path
            now.moving = gets_far and now.taught < _MOST
            self._mark, now.path = here, 0.0

    def _weights(self) -> Tensor:
        """Return the displacement of sampled weights from the source weights, as a vector on the CPU."""
        deltas = self._method.net.weights.committed[0].values()
        step = 1 + sum(delta.numel() for delta in deltas) // _SAMPLE
        return torch.cat([torch.empty(0), *(delta.flatten()[::step].cpu() for delta in deltas)])

    def events(self) -> list[dict[str, Any]]:
        """Return the changes since the last call."""
        events, self._events = self._events, []
        return events

    def record(self) -> dict[str, int]:
        """Return the counts for `run.json`."""
        return {"frames": self._sight.seen, "adapted_on": self._now.adapted_on, "changes": self._now.changes}

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next decision depends on."""
        now = torch.tensor(astuple(self._now), dtype=torch.float64)
        own = {**self._sight.state(), "key": self._key, "mark": self._mark, "last": self._last, "now": now}
        return {_PREFIX + name: tensor.clone() for name, tensor in own.items()}  # two of them may share memory

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        self._sight.load_state(own)
        self._key, self._mark, self._last = (own[name].clone() for name in ("key", "mark", "last"))
        kinds = (type(value) for value in astuple(_Pacing()))
        self._now = _Pacing(*(kind(value) for kind, value in zip(kinds, own["now"].tolist(), strict=True)))
