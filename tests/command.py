"""The command, in a process of its own or in this one."""

import functools
import io
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

import pytest
import typer

from tests.fork_server import SERVED


class Started:
    """The command in a process of its own, to be used as a `subprocess.Popen`, but there in no time.

    It is forked as `tests/fork_server.py` says.

    Args:
        args: What comes behind `remtta`.
        before: Called in the new process first; a function of a module that imports little, such as this one.
        stdout: Where standard output goes, by default to what `communicate` returns.
    """

    def __init__(self, *args: str | Path, before: Callable[[], object] = int, stdout: int | None = None) -> None:
        given, stdin = os.pipe()
        self.stdin = open(stdin, "wb", buffering=0)  # noqa: SIM115  # `__exit__` closes all three
        self._told = TemporaryFile(), TemporaryFile()  # noqa: SIM115
        out, err = (file.fileno() for file in self._told)
        ends = [Connection(os.dup(end)) for end in (given, out if stdout is None else stdout, err)]
        os.close(given)
        what = (list(map(str, args)), os.getcwd(), dict(os.environ), ends, before)
        self._process = SERVED.Process(target=_be_remtta, args=what)
        self._process.start()
        for end in ends:
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()
            self._process.join()

    def communicate(self, given: bytes = b"", timeout: float = 60) -> tuple[bytes, bytes]:
        """Give it the rest of its input, and wait for its end.

        Returns:
            What it wrote to standard output and to standard error.
        """
        with self.stdin:
            self.stdin.write(given)
        self._process.join(timeout)
        assert self.returncode is not None, "it has not ended in time"
        for file in self._told:
            file.seek(0)
        out, err = (file.read() for file in self._told)
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.stdin.close()
        for file in self._told:
            file.close()


def _be_remtta(
    args: list[str], folder: str, env: dict[str, str], ends: list[Connection], before: Callable[[], object]
) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["remtta", *args]
    # As in a new process; whoever began the server may have had them blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    before()
    from remtta.__main__ import main

    main()


def without_descriptors() -> None:
    """Be as a process that was started with its standard descriptors closed; for `Started`'s `before`."""
    for file in (sys.stdin, sys.stdout, sys.stderr):
        file.close()
    sys.stdin = sys.stdout = sys.stderr = None


def in_a_session() -> None:
    """Be the first process of a session, which a hang-up ends, though the tests may run under nohup; for `before`."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def dies_while_it_exports() -> None:
    """Be a process that is killed when half of the model is written; for `before`."""
    from remtta.formats import export

    def half(path: Path, model: object) -> None:
        path.write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)

    vars(export)["save_weights"] = half


def refusal_of(capfd: pytest.CaptureFixture[str], *args: str | Path, code: int = 2) -> str:
    """The one line in which a command refuses its input, with this exit code."""
    capfd.readouterr()  # of earlier commands
    assert remtta_here(*args) == code
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and "Usage: " not in captured.err, captured.err
    assert captured.out == ""
    return errors[0]


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make standard error a terminal of 100 columns, and return what will be written to it."""
    terminal = io.StringIO()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def remtta_here(*args: str | Path) -> int:
    """The exit code of a command run in this process: no new torch to import."""
    with pytest.raises(SystemExit) as exit_:
        command_line().main([str(arg) for arg in args])
    return int(exit_.value.code or 0)


@functools.cache
def command_line() -> Any:
    """The command line, which Typer would build anew at each call; of the Click that Typer includes."""
    from remtta.cli.application import app

    return typer.main.get_command(app)
