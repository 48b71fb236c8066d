"""The device that a model runs on."""

from __future__ import annotations

import torch

from remtta.errors import UsageError


def select_device(device: str | torch.device) -> torch.device:
    """A torch device by name; "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        UsageError: If there is no such device here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f'unknown device "{device}"; choose auto, cpu, cuda or mps') from error
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not usable.get(chosen.type, False):
        raise UsageError(f'device "{device}" is not available on this machine; use --device cpu')
    return chosen
