"""Features of earlier versions that were removed: a run that used one cannot resume. Imports no torch."""

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
    ("options", "adapt"): ("--adapt auto", "always"),
    ("method", "gap_weighting"): ("gap_weighting", False),
    ("environment", "processes"): ("batches shared over ranks (torchrun)", 1),
}
"""Entries of a record by group and name: the removed feature, and the value that means that it was not used."""

_METHODS, _ADDITIONS = ("tda", "batclip"), ("memory", "auto")
"""Names of methods, and of additions to methods in evaluations."""

_TENSORS = {"memory.": "--memory", "own.mean_gap": "gap_weighting", "own.gap_batches": "gap_weighting"}
"""Prefixes of tensor names in a state: the removed feature. All zeros mean that it was not used."""


def check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Raise if a run or evaluation used a removed feature, and drop entries of removed features that it did not use.

    Args:
        path: The file, `run.json` or `results.json`.
        record: Its content.

    Raises:
        UsageError: Naming the removed feature.
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
    """Return a state without the tensors of removed features that were not used.

    Args:
        path: The file.
        state: Its tensors by name.

    Raises:
        UsageError: Naming the removed feature, if it was used.
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
    """Yield the settings in a run's record, and those of an evaluation's methods."""
    yield from ((group, record[group]) for group in ("environment", "options", "method") if record.get(group))
    yield from (("method", settings) for settings in _evaluated(record).values())


def _evaluated(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of an evaluation's methods by name."""
    methods = (record.get("settings") or {}).get("methods") or {}
    return {name: settings for name, settings in methods.items() if isinstance(settings, dict)}


def _removed(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path.parent} was started with {what}, which remtta no longer has; choose another --output for a new run, "
        "or replace this one with --overwrite"
    )
