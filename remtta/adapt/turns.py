"""Share one model among many runs: each works on it in its turn, with its own weights in place."""

from __future__ import annotations

import contextvars
import queue
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

from remtta.engines.interrupts import Interrupts, Stopped
from remtta.guard.observed import ObservedMethod

_POLL_S = 0.1

_Turn = tuple["Future[object]", contextvars.Context, Callable[[], object]]


class Turns:
    """Runs the work of many threads in one thread, first come, first served.

    A thread submits its next work only when the last is done, so it waits at most for one batch of each other thread,
    and idle threads delay nobody. With a single worker thread, the model's memory and torch's threads are those of a
    single run.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Turn] = queue.SimpleQueue()

    def take(self, work: Callable[[], object], interrupts: Interrupts) -> None:
        """Run work in the serving thread, and wait for it.

        Raises:
            Stopped: If a stop comes before its turn, unless held off.
            BaseException: Any exception of the work.
        """
        turn: Future[object] = Future()
        self._queue.put((turn, contextvars.copy_context(), work))
        while not wait([turn], timeout=_POLL_S).done:
            try:
                interrupts.check()
            except Stopped:
                if turn.cancel():
                    raise
        turn.result()

    def serve(self, done: Callable[[], bool]) -> None:
        """Run submitted work in this thread until `done` returns true."""
        while not done():
            try:
                turn, context, work = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if turn.set_running_or_notify_cancel():
                try:
                    turn.set_result(context.run(work))
                except BaseException as error:
                    turn.set_exception(error)


class SharingAdapter(ObservedMethod):
    """An observed method on a model that is shared with others; between its turns the model has its source weights.

    Args:
        alone: The adapter to share the model with others.
        turns: Schedules the work.
        interrupts: Ends the wait for a turn.
    """

    def __init__(self, alone: ObservedMethod, turns: Turns, interrupts: Interrupts) -> None:
        super().__init__(alone.method, alone.observers)
        self._turns, self._interrupts = turns, interrupts

    def in_turn(self, work: Callable[[], None]) -> None:
        """Run `work` with the adapted weights in the model, when it is this run's turn.

        Raises:
            Stopped: If a stop comes before its turn.
        """
        self._turns.take(partial(self._with_weights, work), self._interrupts)

    def _with_weights(self, work: Callable[[], None]) -> None:
        self.method.net.weights.enter()
        try:
            work()
        finally:
            self.method.net.weights.leave()
