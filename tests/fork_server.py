"""Processes that are there in no time: forked from a copy of the tests' process that has run nothing.

Importing torch and timm takes seconds. `multiprocessing` has this with a public function, `set_forkserver_preload`, but
imports all of it anew in each process that tests: 10 s of processor time twice, of a suite of 130 s. So its fork server
is started here from a fork of this process, which needs private names; no other file uses any.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from remtta.engines import processes

SERVED = multiprocessing.get_context("forkserver")
_forkserver: Any = vars(forkserver)["_forkserver"]


def serve_forks() -> None:
    """Have processes that tests start, and workers, forked from a copy of this one that has run nothing.

    The copy has no other threads.
    """
    for name in ("cli.adapt", "adapt.one_stream", "deployment.many_streams", "streams.video", "backbones.families"):
        importlib.import_module(f"remtta.{name}")
    processes.START = "forkserver"
    address = vars(connection)["arbitrary_address"]("AF_UNIX")
    alive, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # xdist's thread, which Python warns of, waits in a read
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(held)  # `alive` ends with the process that tests
                gc.freeze()
                gc.enable()
                forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    vars(_forkserver).update(_forkserver_address=address, _forkserver_alive_fd=held, _forkserver_pid=pid)


def forking_workers() -> Callable[[], None]:
    """For `before`: have workers forked from where the process itself is, which takes no time; see `workers_of`."""
    forkserver.ensure_running()
    return functools.partial(_fork_workers_at, vars(_forkserver)["_forkserver_address"])


def _fork_workers_at(address: str) -> None:
    processes.START = "forkserver"
    vars(_forkserver).update(_forkserver_address=address, ensure_running=resource_tracker.ensure_running)


def workers_of(pid: int) -> list[int]:
    """The processes that work for one of `forking_workers`, the only other one that is running."""
    server = vars(_forkserver)["_forkserver_pid"]
    forked = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    return [worker for worker in forked if worker != pid]
