"""What earlier versions could do and this one cannot: a run that used it cannot go on. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remtta.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_SETTINGS: Mapping[tuple[str, str], tuple[str, Any]] = {
    ("options", "share"): ("--share", 0.0),
    ("options", "memory"): ("--memory", 0),
    ("method", "gap_weighting"): ("gap_weighting", False),
    ("environment", "processes"): ("batches shared over ranks (torchrun)", 1),
}
"""Entries of a record by group and name: what was removed, and the value that says that it was not used."""

_METHODS, _ADDITIONS = ("tda", "batclip"), ("memory", "auto")
"""Names of methods, and of what an evaluation adds to them."""

_TENSORS = {"memory.": "--memory", "own.mean_gap": "gap_weighting", "own.gap_batches": "gap_weighting"}
"""Beginnings of tensors' names in a state: what was removed. All zeros say that it was not used."""


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
    if ((record.get("options") or {}).get("guard") or {}).get("answer") == "auto":
        raise _removed(path, "--answer auto")
    for name in [str((record.get("method") or {}).get("name")), *_evaluated(record)]:
        method, *added = name.rpartition("=")[2].split("+")
        if method in _METHODS or set(added) & set(_ADDITIONS):
            raise _removed(path, name)


def kept_tensors(path: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state without the tensors of what was removed and had not been used.

    Args:
        path: The file.
        state: Its tensors by name.

    Raises:
        UsageError: Saying what was removed.
    """
    kept = dict(state)
    for name, tensor in state.items():
        what = next((what for start, what in _TENSORS.items() if name.startswith(start)), None)
        if what and tensor.any():
            raise _removed(path, what)
        if what:
            del kept[name]
    return kept


def _groups(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings in a run's record, and those of an evaluation's methods."""
    yield from ((group, record[group]) for group in ("environment", "options", "method") if record.get(group))
    yield from (("method", settings) for settings in _evaluated(record).values())


def _evaluated(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of an evaluation's methods, by the names that it gave them."""
    methods = (record.get("settings") or {}).get("methods") or {}
    return {name: settings for name, settings in methods.items() if isinstance(settings, dict)}


def _removed(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path.parent} was started with {what}, which remtta no longer has; choose another --output for a new run, "
        "or replace this one with --overwrite"
    )
