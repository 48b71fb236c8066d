"""Read and validate rows and records; imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from remtta.errors import RemttaError, UsageError
from remtta.runs.removed import check_record

Row = dict[str, Any]
Shape = Mapping[str, type]
"""Types of a record's entries by dotted name; `float` accepts any number."""

_WHEN_GOING_ON: Shape = {
    "run": str,
    "resumed": int,
    "timing": dict,
    "timing.started": str,
    "timing.latency_ms": dict,
    "model": dict,
    "method": dict,
    "method.micro_batch": int,
    "options": dict,
    "environment": dict,
    "settings": dict,
    "settings.methods": dict,
    "methods": dict,
    "status": str,
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
        path: The file.
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
        UsageError: If it is damaged, or used a feature that was removed.
        RemttaError: If it cannot be read.
    """
    try:
        record = checked_record(path, optional=_WHEN_GOING_ON)
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); start again with --overwrite") from error
    check_record(path, record)
    return record


def checked_record(path: Path, needed: Shape | None = None, optional: Shape | None = None) -> dict[str, Any]:
    """Return a record after validating some of its entries.

    Args:
        path: The JSON file.
        needed: Required entries.
        optional: Entries that may be absent or null.

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
    check_entries(record, needed or {}, optional or {})
    return record


def check_entries(content: Mapping[str, Any], needed: Shape, optional: Shape | None = None) -> None:
    """Raise if an entry has the wrong type, or a required one is missing; optional ones may be absent or null.

    Raises:
        ValueError: Naming the invalid entry.
    """
    for name, kind in {**needed, **(optional or {})}.items():
        value: Any = content
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None and name not in needed:
            continue
        if not _is(value, kind):
            raise ValueError(f"its {name} is {'missing' if value is None else f'not {_NAMES[kind]}'}")


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def printable(text: str) -> str:
    """Escape control characters and invalid bytes, which file names and labels may contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
