"""The command, in a process of its own or in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REMTTA = [sys.executable, "-m", "remtta"]


def remtta(
    *args: str | Path, cwd: Path | None = None, stdin: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*REMTTA, *map(str, args)], cwd=cwd, input=stdin, capture_output=True, timeout=120, check=False
    )


def refusal_of(capfd: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    """The exit code of a command that refuses its input, and the one line in which it says so."""
    code = remtta_here(*args)
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, captured.err
    assert captured.out == ""
    return code, errors[0]


def remtta_here(*args: str | Path) -> int:
    """The exit code of a command run in this process: no new torch to import."""
    from remtta.cli import app

    with pytest.raises(SystemExit) as exit_:
        app([str(arg) for arg in args])
    return int(exit_.value.code or 0)
