"""A task in a module of its own: a worker that imports this imports no torch."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def until_stopped(folder: Path, number: int, stopped: Callable[[], int]) -> int:
    """Run until asked to stop; the first worker that does 8 dies."""
    if number == 8 and not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(1)
    (folder / str(number)).touch()
    while not stopped():
        time.sleep(0.05)
    return number
