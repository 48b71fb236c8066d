"""The time-constrained scenario: the stream does not wait for updates."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from torch import Tensor

from remtta.evaluation.ledger import Position
from remtta.guard.observed import BETWEEN_UPDATES
from remtta.methods.method import Method
from remtta.runs.batch import BatchResult
from remtta.runs.session import OUT_OF_TIME, Policy
from remtta.streams.batches import Batch

_TIMED_BATCHES = 3  # timed per side of the measured cost ratio

_log = logging.getLogger("remtta")


class TimeConstrainedPolicy(Policy):
    """Learns from a batch, then skips the updates of as many batches as would have arrived meanwhile.

    Args:
        position: Progress of the run; stores the ratio and the number of batches still to skip.
        cost_ratio: Time of an adapting batch divided by that of a plain forward pass; measured if None.

    Source: Alfarra et al., "Evaluation of Test-Time Adaptation Under Computational Time Constraints", ICML 2024.
    """

    def __init__(self, method: Method, position: Position, cost_ratio: float | None) -> None:
        self._method, self._position, self._given = method, position, cost_ratio
        self._next: tuple[float, int] | None = None

    def excluded(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        """Return all frames of a batch that arrives while an update is still running."""
        labels = None if batch.labels is None else batch.labels.to(pixels.device)
        ratio = self._position.cost_ratio or self._given or measure_cost_ratio(self._method, pixels, labels)
        if self._position.skip:
            self._next = ratio, self._position.skip - 1
            return {frame.index: OUT_OF_TIME for frame in batch.readable}
        self._next = ratio, math.ceil(ratio) - 1
        return {}

    def finished(self, result: BatchResult) -> None:
        """Store how many batches are still to be skipped."""
        if self._next is not None:
            self._position.cost_ratio, skip = self._next
            self._position.skip = 0 if BETWEEN_UPDATES in result.excluded.values() else skip
            self._next = None


def measure_cost_ratio(method: Method, pixels: Tensor, labels: Tensor | None) -> float:
    """Measure the time of an adapting batch divided by that of a plain forward pass; the method's state is restored."""
    state = method.state()
    times: dict[str, list[float]] = {"adapt": [], "base": []}
    for _ in range(_TIMED_BATCHES):
        for name in times:
            started = time.perf_counter()
            out = method(pixels, labels) if name == "adapt" else method.predict(pixels)
            out.cpu()  # waits for the device
            times[name].append(time.perf_counter() - started)
    method.load_state(state)
    ratio = max(1.0, min(times["adapt"]) / min(times["base"]))
    _log.info("an update costs %.2f forward passes", ratio)
    return ratio
