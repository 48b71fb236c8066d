"""When to try a lost source again: ever more seldom, up to a deadline."""

from __future__ import annotations

import math
from collections.abc import Callable

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


class Backoff:
    """The attempts to get a source back.

    Attributes:
        patience_s: For how long they are made.
        deadline: When they end, by the clock.
        attempts: How many there have been since the loss.

    Args:
        patience_s: For how long they are made.
        clock: Seconds, from any start.
        sleep: Waits so many seconds.
        jitter: A random number in [0, 1), so that many readers of one server do not all come back at once.
    """

    def __init__(
        self,
        patience_s: float,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
        jitter: Callable[[], float],
    ) -> None:
        self.patience_s = patience_s
        self.deadline = math.inf
        self.attempts = 0
        self._delay = _FIRST_DELAY_S
        self._clock, self._sleep, self._jitter = clock, sleep, jitter

    def start(self) -> None:
        """The source is lost."""
        self.deadline = self._clock() + self.patience_s
        self._delay, self.attempts = _FIRST_DELAY_S, 0

    def wait(self) -> bool:
        """Wait for the next attempt; False where the deadline comes first."""
        self._sleep(min(self._delay * (1 + self._jitter()) / 2, max(0.0, self.deadline - self._clock())))
        if self._clock() >= self.deadline:
            return False
        self._delay, self.attempts = min(2 * self._delay, _LONGEST_DELAY_S), self.attempts + 1
        return True
