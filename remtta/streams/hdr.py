"""Pictures of HDR videos as sRGB."""

from __future__ import annotations

import numpy as np

PQ, HLG = 16, 18
"""Transfer functions, by their numbers in H.273."""

_TO_BT709 = np.array([[1.6605, -0.5877, -0.0728], [-0.1246, 1.1330, -0.0084], [-0.0182, -0.1006, 1.1187]], np.float32)
_WHITE_HLG, _WHITE_PQ = 0.265, 203 / 10_000  # reference white (BT.2408) as a fraction of the largest light
_STEPS = 4096  # of light: one step is less than one level of sRGB


def to_srgb(pixels: np.ndarray, transfer: int) -> np.ndarray:
    """Return sRGB pixels (H, W, 3) uint8 of BT.2020 ones in PQ or HLG; light above reference white is white."""
    light = _to_light(np.arange(256, dtype=np.float32) / 255, transfer).astype(np.float32)
    linear = np.clip(light[pixels] @ _TO_BT709.T, 0, 1)
    levels = np.linspace(0, 1, _STEPS)
    levels = np.where(levels <= 0.0031308, 12.92 * levels, 1.055 * levels ** (1 / 2.4) - 0.055)
    return (255 * levels).round().astype(np.uint8)[(linear * (_STEPS - 1)).round().astype(np.uint16)]


def _to_light(signal: np.ndarray, transfer: int) -> np.ndarray:
    """Return light, 1 for reference white, of signals from 0 to 1 (BT.2100)."""
    if transfer == HLG:
        bright = (np.exp((signal - 0.55991073) / 0.17883277) + 0.28466892) / 12
        return np.where(signal <= 0.5, signal**2 / 3, bright) / _WHITE_HLG
    power = signal ** (1 / 78.84375)
    return (np.maximum(power - 0.8359375, 0) / (18.8515625 - 18.6875 * power)) ** (1 / 0.1593017578125) / _WHITE_PQ
