"""The folder of a run. Imports no torch, so that a bad folder is told at once."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from remtta.errors import OutputError, UsageError
from remtta.files import writing

PREDICTIONS = "predictions.jsonl"
DELTA = "delta.safetensors"
RECORD = "run.json"
RESERVE = ".reserve"


def default_folder(root: Path = Path("runs")) -> Path:
    """A folder name under `root` that no run has used: the time in UTC."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 1000))]
    return next(root / name for name in names if not (root / name).exists())


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a run folder that cannot be used, touching nothing.

    Raises:
        UsageError: If it holds an earlier run and may not be overwritten, or is no folder.
        OutputError: If it is not writable.
    """
    earlier = [name for name in (PREDICTIONS, DELTA, RECORD) if (folder / name).exists()]
    if earlier and not overwrite:
        raise UsageError(
            f"{folder} holds an earlier run ({', '.join(earlier)}); choose another --output or add --overwrite"
        )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UsageError(f"{nearest} is a file, so {folder} cannot be a run folder; choose another --output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{nearest} is not writable; choose another --output")


def claim_folder(folder: Path, *, overwrite: bool) -> None:
    """Make a folder ready for a new run, removing what an earlier one would leave beside it.

    Raises:
        UsageError: If it holds an earlier run and may not be overwritten.
        OutputError: If it cannot be made or written to.
    """
    check_folder(folder, overwrite=overwrite)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PREDICTIONS).touch()
        (folder / DELTA).unlink(missing_ok=True)
