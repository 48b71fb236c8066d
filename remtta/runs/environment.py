"""The software and hardware of a run, for `run.json`."""

from __future__ import annotations

import platform
import sys
from typing import Any

import timm
import torch

from remtta._version import __version__
from remtta.errors import without_password


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, machine and command line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "remtta": __version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "command": [without_password(part) for part in sys.argv],
    }
