"""Share one model among many runs: each works on it in its turn, with its own weights in place."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

from remtta.engines.interrupts import Interrupts, Stopped
from remtta.guard.observed import ObservedMethod

_POLL_S = 0.1


class Turns:
    """Runs the work of many threads in one thread, first come, first served.

    A thread submits its next work only when the last is done, so it waits at most for one batch of each other thread,
    and idle threads delay nobody. With a single worker thread, the model's memory and torch's threads are those of a
    single run.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "remtta-model")

    def take(self, work: Callable[[], object], interrupts: Interrupts) -> None:
        """Run work in the worker thread, and wait for it; raise what it raises, or Stopped if a stop comes before its
        turn, unless held off.
        """
        turn = self._worker.submit(contextvars.copy_context().run, work)
        while not wait([turn], timeout=_POLL_S).done:
            try:
                interrupts.check()
            except Stopped:
                if turn.cancel():
                    raise
        turn.result()

    def close(self) -> None:
        """End the worker thread."""
        self._worker.shutdown()


class SharingAdapter(ObservedMethod):
    """An observed method on a model that is shared with others; between its turns the model has its source weights."""

    def __init__(self, alone: ObservedMethod, turns: Turns, interrupts: Interrupts) -> None:
        super().__init__(alone.method, alone.observers)
        self._turns, self._interrupts = turns, interrupts

    def in_turn(self, work: Callable[[], None]) -> None:
        """Run `work` with the adapted weights in the model in this run's turn; raise Stopped if a stop comes before."""
        self._turns.take(partial(self._with_weights, work), self._interrupts)

    def _with_weights(self, work: Callable[[], None]) -> None:
        self.method.net.weights.enter()
        try:
            work()
        finally:
            self.method.net.weights.leave()
