"""Learn from what is new, and only now and then from more of the same.

After a change every second block of frames is learned from, until updates no longer get anywhere: until the weights end
up much less far away than the way they took is long. Then one block in many is, so that a slow drift is not missed.
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
"""Why a frame is not learned from."""

_MOVING, _SETTLED = 2, 64  # one block in so many is learned from
_WINDOW, _STRAIGHT = 8, 0.7  # so many of these get the weights less far than this, of their way, once they are settled
_MOST = 64  # such blocks after which they are taken to be, as without an anchor they may never be
_SAMPLE = 10_000  # weights that are looked at
_PREFIX = "pace."


def pacing(method: Method, adapt: Adapt) -> Pace | None:
    """What leaves updates of a method out; None where every batch is to have one.

    Raises:
        UsageError: If the method keeps nothing of an update for the batches that have none.
    """
    if adapt == "always":
        return None
    if not method.lasts:
        raise UsageError(
            "--adapt auto skips updates, and this method has none that last to the next batch; leave it out, or choose "
            "another method"
        )
    return Pace(method)


@dataclass
class _Pacing:
    """Where it is, beside the condition's statistics and the weights' way.

    Attributes:
        frames: Frames since the last change.
        taught: Blocks of them that were learned from.
        waited: Blocks since the last of these.
        moving: Whether updates still get anywhere.
        path: How long the weights' way was since the mark.
        adapted_on: Frames that were learned from, in all.
        changes: Changes so far.
    """

    frames: int = 0
    taught: int = 0
    waited: int = 0
    moving: bool = True
    path: float = 0.0
    adapted_on: int = 0
    changes: int = 0


class Pace(Observer):
    """Says which frames are worth an update.

    A change is one of the images' plain statistics, against those of the frames that were learned from since the last.

    Args:
        method: The method, to which all is new at the source weights.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self._sight = Sight()
        self._key = torch.empty(0, dtype=torch.float64)  # mean statistics (D,)
        self._mark = self._last = torch.empty(0)  # some of the weights at the begin of a window, and at the last look
        self._now = _Pacing()
        self._events: list[dict[str, Any]] = []

    def before(self, images: Tensor) -> str | None:
        """Return why the next frames, preprocessed images (B, 3, H, W), are not to be learned from, if they are not."""
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
        """See what the frames since the last look have done to the weights."""
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
        """How far some of the weights are from the source's, as a vector on the CPU."""
        deltas = self._method.net.weights.committed[0].values()
        step = 1 + sum(delta.numel() for delta in deltas) // _SAMPLE
        return torch.cat([torch.empty(0), *(delta.flatten()[::step].cpu() for delta in deltas)])

    def events(self) -> list[dict[str, Any]]:
        """Changes since the last call."""
        events, self._events = self._events, []
        return events

    def record(self) -> dict[str, int]:
        """What came of it, for `run.json`."""
        return {"frames": self._sight.seen, "adapted_on": self._now.adapted_on, "changes": self._now.changes}

    def state(self) -> dict[str, Tensor]:
        """Everything its next decision depends on."""
        now = torch.tensor(astuple(self._now), dtype=torch.float64)
        own = {**self._sight.state(), "key": self._key, "mark": self._mark, "last": self._last, "now": now}
        return {_PREFIX + name: tensor.clone() for name, tensor in own.items()}  # two of them may be one

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        self._sight.load_state(own)
        self._key, self._mark, self._last = (own[name].clone() for name in ("key", "mark", "last"))
        kinds = (type(value) for value in astuple(_Pacing()))
        self._now = _Pacing(*(kind(value) for kind, value in zip(kinds, own["now"].tolist(), strict=True)))
