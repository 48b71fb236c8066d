"""Random numbers that a saved generator state repeats, on any device."""

from __future__ import annotations

import torch


def spawn(generator: torch.Generator, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on a device, seeded by a draw from another; only the latter's state needs to be saved."""
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    """A number drawn evenly from [low, high)."""
    return low + (high - low) * float(torch.rand((), dtype=torch.float64, generator=generator))


def integer(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number drawn evenly from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))
