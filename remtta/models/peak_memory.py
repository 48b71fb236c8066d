"""Peak memory of a stretch of work, and how the C library holds on to memory."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# glibc's mallopt: parameters and the largest threshold it takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST_MMAP_THRESHOLD = 2**31 - 1, 32 * 2**20

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def keep_freed_memory() -> bool:
    """Let this process keep the memory it frees, for the next step to use; returns whether the C library can.

    glibc hands large blocks back to the system as they are freed and fetches
    them anew, page by page, at every step: a third of the time of a small
    model's step. Afterwards the process stays at the most it ever used.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


def start_peak(device: torch.device) -> None:
    """Begin a new measurement where the system allows it."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # without it the peak is that of the whole process
        _CLEAR.write_text("5")


def resident_bytes() -> int:
    """Resident memory of the process now; 0 where the system does not tell."""
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Most memory since `start_peak`: of the GPU's allocator, else resident memory of the process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    if peak := _status_bytes("VmHWM"):
        return peak
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int:
    """A field of the process's status on Linux; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
