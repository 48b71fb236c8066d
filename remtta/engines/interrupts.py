"""Stop at a safe moment when the process is told to."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(BaseException):
    """The run was told to stop. Not an Exception, so that no handler mistakes it for a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def name(self) -> str:
        """The signal's name, such as "SIGTERM"."""
        return signal.Signals(self.signum).name


class Interrupts:
    """Raise `Stopped` in the main thread on SIGINT, SIGTERM or SIGHUP, but never inside `held`.

    Used as a context manager it installs the handlers; unused, it never stops
    anything. A second signal ends the process at once, without clean-up.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._depth = 0
        self._previous: dict[int, Any] = {}

    def part(self) -> Interrupts:
        """The same signals for another thread, which holds them off by itself and hears of them when it checks."""
        part = Interrupts()
        part._received = self._received
        return part

    @property
    def _signum(self) -> int | None:
        return next(iter(self._received), None)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNALS:
                signum = getattr(signal, name, None)  # Windows has no SIGHUP
                # nohup asks to survive hang-ups. An ignored SIGINT is only what shells give background jobs.
                if signum is None or (name == "SIGHUP" and signal.getsignal(signum) is signal.SIG_IGN):
                    continue
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *failure: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put off stopping until the block is done, so that what it writes is whole."""
        with self.finishing():
            yield
        self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal has come in and nothing is held."""
        if self._signum is not None and self._depth == 0:
            raise Stopped(self._signum)

    def stop_now(self) -> None:
        """Raise `Stopped` if a signal has come in, also within `held`: for a wait that may never end."""
        if self._signum is not None:
            raise Stopped(self._signum)

    @property
    def pending(self) -> bool:
        """Whether a signal has come in, for work that can end early within `held`."""
        return self._signum is not None

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Like `held`, for the last clean-up: does not raise at its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._received.append(signum)
        self.check()


class Told(Interrupts):
    """Stops once a function returns a signal's number: in a worker, which another process tells to."""

    def __init__(self, stopped: Callable[[], int]) -> None:
        super().__init__()
        self._stopped = stopped

    def part(self) -> Told:
        """The same for another thread."""
        return Told(self._stopped)

    @property
    def _signum(self) -> int | None:
        return self._stopped() or None
