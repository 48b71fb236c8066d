"""Runs of earlier versions: they go on unless they used what was removed since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remtta.errors import UsageError
from remtta.runs.folder import RECORD
from tests.records import record_of
from tests.runs.tiny import adapt_tiny


def as_earlier(folder: Path, group: str, **entries: Any) -> None:
    """Have a run's record say what an earlier version's said."""
    record = record_of(folder)
    record[group] |= entries
    (folder / RECORD).write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("group", "entry", "unused", "used", "what"),
    [
        ("environment", "processes", 1, 2, "torchrun"),
    ],
)
def test_a_run_goes_on_unless_it_used_what_was_removed(
    group: str, entry: str, unused: Any, used: Any, what: str, frames: Path, tmp_path: Path
) -> None:
    adapt_tiny(frames, tmp_path / "run")
    as_earlier(tmp_path / "run", group, **{entry: unused})
    assert adapt_tiny(frames, tmp_path / "run", resume=True).num_resumed == 1
    as_earlier(tmp_path / "run", group, **{entry: used})
    with pytest.raises(UsageError, match=f"run was begun with .*{what}.*, which was removed .* start a new run"):
        adapt_tiny(frames, tmp_path / "run", resume=True)
