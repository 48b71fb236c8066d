"""Reading from pipes, and calls that may hang."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from remtta.streams.paths import read_paths

T = TypeVar("T")


def in_time(action: Callable[[], T], seconds: float = 10) -> T:
    """Return or raise as the action does; fail if it hangs."""
    outcome = Future[T]()

    def act() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return outcome.result(seconds)


def paths_in(data: bytes, null_separated: bool = False) -> list[str]:
    """Return what `read_paths` reads from a pipe with this content."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb"):
        with os.fdopen(write_end, "wb") as sink:
            sink.write(data)
        return in_time(lambda: list(read_paths(read_end, null_separated)))
