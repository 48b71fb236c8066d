"""Text from the command line, and from files it names, to values."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remtta.errors import UsageError


def parse_pairs(pairs: Sequence[str] | None, option: str = "--model-kwargs") -> dict[str, Any]:
    """`img_size=32` and the like to Python values; what is no literal stays text."""
    parsed: dict[str, Any] = {}
    for pair in pairs or []:
        key, found, value = pair.partition("=")
        if option == "--set" and found and "." in key:
            raise UsageError(f"--set {pair}: there is only one method here; write {key.partition('.')[2]}={value}")
        if not found or not key.isidentifier():
            raise UsageError(f"{option} takes key=value pairs, got {pair!r}")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
            parsed[key] = value
    return parsed


def parse_size(text: str) -> int:
    """Bytes from "800M", "1.5G" or a plain number of bytes; K, M, G and T are powers of 1024.

    Raises:
        UsageError: If it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") if found else math.inf
    if math.isinf(size):
        raise UsageError(f'cannot read the size "{text[:40]}"; write it as 800M or 1.5G')
    return int(size)


def parse_mask_ratios(text: str) -> tuple[float, ...]:
    """`0,0.1,0.2` to numbers."""
    try:
        return tuple(float(ratio) for ratio in text.split(","))
    except ValueError:
        raise UsageError(f"--mask-ratios takes numbers such as 0,0.1,0.2, got {text}") from None


def parse_number(text: str, option: str) -> float:
    """`0.1` to a number."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option} takes a number or auto, got {text}") from None


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """`1,2,3` to whole numbers."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes whole numbers such as 1,2,3, got {text}") from None


def parse_names(text: str | None) -> list[str]:
    """`fog, snow` to names; none from nothing."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def read_labels(path: Path) -> list[str]:
    """Class names from the file of --labels, one per line."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UsageError(f"--labels: no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--labels: {path} cannot be read as UTF-8 text: {error}") from error
    return [line.removesuffix("\r") for line in lines]
