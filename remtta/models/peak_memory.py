"""Measure peak memory, and configure how the C library keeps freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# glibc's mallopt: parameters, and the largest threshold it accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST_MMAP_THRESHOLD = 2**31 - 1, 32 * 2**20

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees for the next step, if the C library supports that.

    By default glibc returns large freed blocks to the system and fetches them again, page by page, at every step: a
    third of the time of a small model's step. With this, the process stays at its peak memory.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def start_peak(device: torch.device) -> None:
    """Start a new measurement, if the system supports it."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # otherwise the peak is that of the whole process
        _CLEAR.write_text("5")


def resident_bytes() -> int:
    """Return the resident memory of the process now; 0 if unknown."""
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory since `start_peak`: of the GPU's allocator, else the resident memory of the process; 0 if
    unknown.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    if peak := _status_bytes("VmHWM"):
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int:
    """Return a field of the process's status on Linux; 0 if there is none."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
