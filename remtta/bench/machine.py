"""What the processor is, and the energy that it has used."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CPUINFO, _POWERCAP = Path("/proc/cpuinfo"), Path("/sys/class/powercap")

_INSTRUCTIONS = {  # by Linux's names, of x86 and ARM; those that decide how fast matrix products can be
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "VNNI",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "bf16",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "asimddp": "dot products",
    "i8mm": "int8 matrices",
    "bf16": "bf16",
    "sve": "SVE",
}


def processor(cpuinfo: Path = _CPUINFO) -> dict[str, object]:
    """The CPU's model, number of cores, instruction sets for matrices as Linux tells them, and those PyTorch uses.

    Args:
        cpuinfo: Where Linux tells of it.
    """
    told = _told(cpuinfo)
    flags = (told.get("flags") or told.get("Features") or "").split()
    return {
        "cpu": told.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": list(dict.fromkeys(name for flag, name in _INSTRUCTIONS.items() if flag in flags)),
        "used_by_torch": torch.backends.cpu.get_cpu_capability(),
    }


def _told(cpuinfo: Path) -> dict[str, str]:
    """The first core's lines; none but on Linux."""
    if not cpuinfo.is_file():
        return {}
    first_core = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first_core.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def joules(powercap: Path = _POWERCAP) -> float | None:
    """Energy that the processors have used since some moment; starts over now and then. None where nothing tells.

    Args:
        powercap: Where Linux tells it (RAPL); by default to root alone.
    """
    try:
        counters = [int(file.read_text()) for file in powercap.glob("intel-rapl:[0-9]/energy_uj")]  # AMD's, too
    except (OSError, ValueError):
        return None
    return sum(counters) / 1e6 if counters else None
