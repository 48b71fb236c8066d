"""Stop at a safe moment when a signal arrives."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_SAME_STOP_S = 0.5  # timeout, wrappers and closing terminals signal both a process and its group
_Handler = Callable[[int, FrameType | None], object] | int | None


class Stopped(BaseException):
    """Raised when a signal stops the run. Not an Exception, so that no handler mistakes it for a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Raises `Stopped` in the main thread on SIGINT, SIGTERM or SIGHUP, but never inside `held`.

    Handlers are installed only while it is used as a context manager. A second signal, half a second or more later,
    ends the process at once, without clean-up.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._received_at = 0.0
        self._depth = 0
        self._previous: dict[int, _Handler] = {}

    def for_thread(self) -> Interrupts:
        """Return an object for another thread: the same signals, its own `held`, and raising only in `check`."""
        other = Interrupts()
        other._received = self._received
        return other

    @property
    def _signum(self) -> int | None:
        return next(iter(self._received), None)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNALS:
                signum = getattr(signal, name, None)  # Windows has no SIGHUP
                # nohup makes a process ignore SIGHUP on purpose; shells let all background jobs ignore SIGINT.
                if signum is None or (name == "SIGHUP" and signal.getsignal(signum) is signal.SIG_IGN):
                    continue
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *failure: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer stopping until the block is done, so that its files are written completely."""
        with self.deferred():
            yield
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived, unless inside `held`."""
        if self._depth == 0:
            self.stop_now()

    def stop_now(self) -> None:
        """Raise `Stopped` if a signal has arrived, even inside `held`: for waits that may never end."""
        if self._signum is not None:
            raise Stopped(self._signum)

    @property
    def pending(self) -> bool:
        """True if a signal has arrived, so that work inside `held` can end early."""
        return self._signum is not None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Like `held` but without raising at the end, for clean-up."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:
            if time.monotonic() - self._received_at < _SAME_STOP_S:
                return
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._received_at = time.monotonic()
        self._received.append(signum)
        self.check()


class WorkerInterrupts(Interrupts):
    """Stops once a function returns a signal number: used in workers, which another process stops."""

    def __init__(self, stopped: Callable[[], int]) -> None:
        super().__init__()
        self._stopped = stopped

    def for_thread(self) -> WorkerInterrupts:
        """Return an equal object for another thread."""
        return WorkerInterrupts(self._stopped)

    @property
    def _signum(self) -> int | None:
        return self._stopped() or None
