"""What earlier versions could do and this one cannot: a run that used it cannot go on. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from remtta.errors import UsageError

_SETTINGS: Mapping[tuple[str, str], tuple[str, Any]] = {
    ("environment", "processes"): ("batches shared over ranks (torchrun)", 1),
}
"""Entries of a record by group and name: what was removed, and the value that says that it was not used."""


def check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Refuse a run or an evaluation that used what was removed, and drop the entries of what it did not use.

    Args:
        path: The file, `run.json` or `results.json`.
        record: What it holds.

    Raises:
        UsageError: Saying what was removed.
    """
    for group, settings in _groups(record):
        for (place, name), (what, unused) in _SETTINGS.items():
            if place == group and settings.pop(name, unused) != unused:
                raise _removed(path, what)


def _groups(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings in a run's record, and those of an evaluation's methods."""
    for group in ("environment", "options", "method"):
        if isinstance(record.get(group), dict):
            yield group, record[group]


def _removed(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path.parent} was begun with {what}, which was removed from remtta; start a new run without it, in another "
        "--output or with --overwrite"
    )
