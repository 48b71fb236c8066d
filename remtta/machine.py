"""Processor, cores and memory of the machine, or of the container that this process is in."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")  # on Linux only
_PROCESS_CGROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {  # of control groups of version 2 and 1
    "memory": (("memory.max",), ("memory.limit_in_bytes",)),
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}


def processor_name() -> str:
    """Return the model of the CPU, or its architecture if the model is unknown."""
    with contextlib.suppress(OSError):
        described = _PROCESSORS.read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*: (.+)", described, re.MULTILINE):
            return model[1]
    return platform.processor() or platform.machine()


def machine_bytes() -> int:
    """Return the memory of the machine or of its container, whichever is less; 0 if unknown."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(size for (size,) in _limits("memory"))])
    return 0


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of usable cores, or the container's share of their time in cores, rounded up, if that is less.

    More threads than this use up the share early in each period, and then all of them wait.
    """
    shares = [math.ceil(quota / period) for quota, period in _limits("cpu") if quota > 0]
    return min([usable_cores(), *shares])


def _limits(controller: str) -> Iterator[list[int]]:
    """Yield the limits of this process's control groups, of either version."""
    version_2, version_1 = _FILES[controller]
    with contextlib.suppress(OSError):
        for line in _PROCESS_CGROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root, files = (_CGROUPS / controller, version_1) if controllers else (_CGROUPS, version_2)
            innermost = root / name.lstrip("/")
            for folder in (innermost, *innermost.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # missing, or "max"
                        yield [int(number) for file in files for number in (folder / file).read_text().split()]
