"""Which signals stop what; in a subprocess if the signal ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from remtta.engines.interrupts import Interrupts, Stopped

_SENDS = """
import os, signal, sys
from remtta.engines.interrupts import Interrupts
{before}
with Interrupts() as interrupts, interrupts.finishing():
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
    print("still here", interrupts.pending)
"""


def after(*names: str, before: str = "") -> tuple[int, str]:
    command = [sys.executable, "-c", _SENDS.format(before=before), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip()


def test_one_signal_is_put_off_and_a_second_ends_the_process_at_once() -> None:
    assert after("SIGTERM") == (0, "still here True")
    assert after("SIGTERM", "SIGTERM") == (-signal.SIGTERM, "")
    assert after("SIGINT", "SIGTERM") == (-signal.SIGTERM, "")


def test_an_ignored_hang_up_stays_ignored_and_an_ignored_interrupt_does_not() -> None:
    assert after("SIGHUP", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)") == (0, "still here False")
    assert after("SIGINT", before="signal.signal(signal.SIGINT, signal.SIG_IGN)") == (0, "still here True")


def test_a_wait_that_may_never_end_is_left_also_where_stops_are_held() -> None:
    with Interrupts() as interrupts, interrupts.finishing():
        interrupts.stop_now()  # nothing came in
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match="SIGTERM"):
            interrupts.stop_now()
