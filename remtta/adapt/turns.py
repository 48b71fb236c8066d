"""Many runs on one model: each does its work when it is its turn, with its own weights in place."""

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
    """Work of many threads, done by one: whoever asks first comes first, and asks again only once that is done.

    So nobody waits longer than for a batch of each of the others, and whoever has nothing to do holds up nobody. That
    it is one thread keeps the model's memory and torch's threads those of a single run.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_Turn] = queue.SimpleQueue()

    def take(self, work: Callable[[], object], interrupts: Interrupts) -> None:
        """Have work done by the thread that serves, and wait for that.

        Raises:
            Stopped: If a stop comes before its turn, unless that is held off.
            BaseException: Whatever the work raises.
        """
        turn: Future[object] = Future()
        self._asked.put((turn, contextvars.copy_context(), work))
        while not wait([turn], timeout=_POLL_S).done:
            try:
                interrupts.check()
            except Stopped:
                if turn.cancel():
                    raise
        turn.result()

    def serve(self, done: Callable[[], bool]) -> None:
        """Do what is asked for, in this thread, until there will be no more."""
        while not done():
            try:
                turn, context, work = self._asked.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if turn.set_running_or_notify_cancel():
                try:
                    turn.set_result(context.run(work))
                except BaseException as error:
                    turn.set_exception(error)


class SharingAdapter(ObservedMethod):
    """A method on a model that others adapt, too; between its turns the model has its source weights.

    Args:
        alone: The same for a model of its own.
        turns: Whose turn it is.
        interrupts: Ends the wait for a turn.
    """

    def __init__(self, alone: ObservedMethod, turns: Turns, interrupts: Interrupts) -> None:
        super().__init__(alone.method, alone.observers)
        self._turns, self._interrupts = turns, interrupts

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do what needs the adapted weights in the model, when it is this run's turn.

        Raises:
            Stopped: If a stop comes before.
        """
        self._turns.take(partial(self._with_weights, work), self._interrupts)

    def _with_weights(self, work: Callable[[], None]) -> None:
        self.method.enter()
        try:
            work()
        finally:
            self.method.leave()
