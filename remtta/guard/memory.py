"""Conditions that come back: what each taught is kept, and goes on when it does.

The idea of one set of weights for each condition, told apart by shallow statistics, is that of DPCore (Zhang et al.,
ICML 2025) and ReservoirTTA (Vray et al., arXiv:2505.14511), which keep prompts and whole models and tell conditions
apart by features of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.guard.conditions import STEADY, Sight
from remtta.methods.gradient import GradientMethod
from remtta.methods.method import Method
from remtta.methods.settings import MethodConfig

REMEMBERED = 10
"""Conditions that an evaluation remembers."""

_PREFIX, _LEARNED = "memory.", "learned."
_NUMBERS = ("updates", "frames", "blocks", "visits", "last", "in_delta", "since_reset")


@dataclass(eq=False)
class _Condition:
    """One that was seen.

    Attributes:
        key: Mean statistics (D,) of its frames.
        learned: The delta when it was left; empty while it lasts.
        updates: Those behind it.
        frames: How many it had.
        blocks: In how many stretches they were looked at.
        visits: How often it came.
        last: When it was there last: frames seen by then.
        in_delta: Frames behind its weights.
        since_reset: Of these, since the last reset.
    """

    key: Tensor
    learned: Mapping[str, Tensor] = field(default_factory=dict)
    updates: int = 0
    frames: int = 0
    blocks: int = 0
    visits: int = 1
    last: int = 0
    in_delta: int = 0
    since_reset: int = 0

    def take_in(self, block: Tensor, seen: int) -> None:
        """Count the statistics (n, D) of more frames in."""
        self.frames, self.blocks, self.last = self.frames + len(block), self.blocks + 1, seen
        self.key = self.key.lerp(block.mean(0), min(1.0, len(block) / min(self.frames, STEADY)))

    def state(self) -> dict[str, Tensor]:
        """All of it."""
        numbers = torch.tensor([getattr(self, name) for name in _NUMBERS])
        learned = {_LEARNED + name: tensor for name, tensor in self.learned.items()}
        return {"key": self.key, "numbers": numbers, **learned}

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> _Condition:
        """What `state` returned."""
        numbers = dict(zip(_NUMBERS, state["numbers"].tolist(), strict=True))
        return cls(state["key"].clone(), _below(_LEARNED, state), **numbers)


def remembering(method: Method, most: int, config: MethodConfig) -> Memory | None:
    """A memory of so many conditions for a method; None for 0.

    Raises:
        UsageError: If there is nothing to keep, or too much.
    """
    if not most:
        return None
    lasts = isinstance(method, GradientMethod) and method.accumulates and not config.episodic
    if not (lasts and method.norms_only):
        raise UsageError(
            "a memory (--memory, +memory) keeps what norms have learned, and this method changes every weight or, as "
            "with --episodic, nothing that lasts; leave it out, or choose another method"
        )
    return Memory(method, most)


class Memory:
    """Puts in place what a condition had taught the method, when that is there again.

    A new condition goes on from the weights of the moment, a known one from its own, with a fresh optimizer. A full
    memory forgets what was away for longest.

    Args:
        method: The method, whose delta is small.
        most: Conditions that it keeps, the present one included.
    """

    def __init__(self, method: Method, most: int) -> None:
        self.most = most
        self._method = method
        self._now: _Condition | None = None
        self._away: list[_Condition] = []
        self._sight = Sight()
        self._events: list[dict[str, Any]] = []

    def look(self, pixels: Tensor, behind: tuple[int, int]) -> tuple[int, int]:
        """Take note of the next frames, and put the weights of their condition in place.

        Args:
            pixels: Shape (B, 3, H, W), preprocessed: frames that are about to be learned from.
            behind: Frames behind the weights, and of these, since the last reset.

        Returns:
            The same of the weights that are now in place.
        """
        block = self._sight.take(pixels)
        if block is None:
            return behind
        if self._now is None:
            self._now = _Condition(block.mean(0))
        elif not self._sight.near(self._now.key, block):
            behind = self._change(self._now, block, behind)
        self._now.take_in(block, self._sight.seen)
        self._sight.note(self._now.key, block)
        return behind

    def _change(self, left: _Condition, block: Tensor, behind: tuple[int, int]) -> tuple[int, int]:
        """Leave a condition for the nearest that is known, or for a new one."""
        known = min(self._away, key=lambda each: self._sight.distance(each.key, block), default=None)
        if left.blocks > 1:  # else it was one on the way to another
            left.learned, left.updates = self._method.delta(), self._method.num_updates
            left.in_delta, left.since_reset = behind
            self._away.append(left)
        if known is not None and self._sight.near(known.key, block):
            self._away.remove(known)
            self._method.load_delta(known.learned, known.updates)
            self._events.append(
                {"event": "recalled", "visits": known.visits + 1, "away": self._sight.seen - known.last}
            )
            self._now = replace(known, learned={}, visits=known.visits + 1)
            behind = known.in_delta, known.since_reset
        else:
            self._now = _Condition(block.mean(0))
        if len(self._away) == self.most:
            self._away.remove(min(self._away, key=lambda each: each.last))
        return behind

    def events(self) -> list[dict[str, Any]]:
        """What it did since the last call."""
        events, self._events = self._events, []
        return events

    def record(self) -> list[dict[str, Any]]:
        """The conditions that it knows, the present one first, for `run.json`."""
        return [
            {
                "frames": each.frames,
                "visits": each.visits,
                "away": 0 if each is self._now else self._sight.seen - each.last,
            }
            for each in self._all
        ]

    @property
    def _all(self) -> list[_Condition]:
        return [*([self._now] if self._now else []), *self._away]

    def state(self) -> dict[str, Tensor]:
        """Everything its next choice depends on."""
        tensors = self._sight.state()
        for number, condition in enumerate(self._all):
            tensors |= {f"{number}.{name}": tensor for name, tensor in condition.state().items()}
        return {_PREFIX + name: tensor for name, tensor in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        own = _below(_PREFIX, state)
        self._sight.load_state(own)
        numbers = sum(name.endswith(".key") and name.count(".") == 1 for name in own)
        conditions = [_Condition.of(_below(f"{number}.", own)) for number in range(numbers)]
        self._now, self._away = (conditions[0] if conditions else None), conditions[1:]


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
