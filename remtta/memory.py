"""Peak memory of a stretch of work."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def start_peak(device: torch.device) -> None:
    """Begin a new measurement where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # without it the peak is that of the whole process
        _CLEAR.write_text("5")


def resident_bytes() -> int:
    """Resident memory of the process now; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def peak_bytes(device: torch.device) -> int:
    """Most memory since `start_peak`: of the GPU's allocator, else resident memory of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
