"""Read and validate rows and records; imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from remtta.errors import RemttaError, UsageError

Row = dict[str, Any]
Shape = Mapping[str, type]
"""Types of a record's entries by dotted name; `float` accepts any number, and those with `?` may be absent or null."""

_WHEN_GOING_ON: Shape = {
    "run?": str,
    "resumed?": int,
    "timing?": dict,
    "timing.started?": str,
    "timing.latency_ms?": dict,
    "model?": dict,
    "method?": dict,
    "method.micro_batch?": int,
    "options?": dict,
    "environment?": dict,
    "settings?": dict,
    "settings.methods?": dict,
    "methods?": dict,
    "status?": str,
}
_NAMES: Mapping[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def read_rows(path: Path, check: Callable[[Row], None] = lambda row: None) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file such as `predictions.jsonl`.

    Args:
        check: Raises ValueError for an invalid row.

    Raises:
        RemttaError: If a line is damaged.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line.decode())
                if not isinstance(row, dict):
                    raise ValueError("it is not a JSON object")
                check(row)
            except (ValueError, RecursionError) as error:
                raise RemttaError(f"{path}, line {number} is damaged: {error}") from error
            yield row


def read_record(path: Path) -> dict[str, Any]:
    """Return a run's `run.json` or an evaluation's `results.json`, in order to resume it.

    Raises:
        UsageError: If it is damaged.
        RemttaError: If it cannot be read.
    """
    try:
        return checked_record(path, _WHEN_GOING_ON)
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); start again with --overwrite") from error


def checked_record(path: Path, shape: Shape) -> dict[str, Any]:
    """Return the record in a JSON file after validating some of its entries.

    Raises:
        ValueError: Naming the invalid entry.
        RemttaError: If the file cannot be read.
    """
    try:
        record = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise RemttaError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    check_entries(record, shape)
    return record


def check_entries(content: Mapping[str, Any], shape: Shape) -> None:
    """Raise ValueError, naming the entry, if one has the wrong type, or a required one is missing."""
    for entry, kind in shape.items():
        name = entry.removesuffix("?")
        value: Any = content
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not (_is(value, kind) or (value is None and entry != name)):
            raise ValueError(f"its {name} is {'missing' if value is None else f'not {_NAMES[kind]}'}")


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def aligned(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return a line for each row of cells, in columns: flush right but for those at `left`."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def printable(text: str) -> str:
    """Escape control characters and invalid bytes, which file names and labels may contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
