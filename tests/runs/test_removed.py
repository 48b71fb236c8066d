"""Runs of earlier versions that used what was removed since are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from remtta.errors import UsageError
from remtta.runs.folder import RECORD
from tests.records import record_of
from tests.runs.tiny import adapt_tiny


@pytest.mark.parametrize(
    ("group", "entries", "what"),
    [
        ("options", {"share": 0.1}, "share was 0.1, is null"),
        ("method", {"name": "tda"}, 'method.name was "tda", is "rem"'),
        ("method", {"gap_weighting": True}, "method.gap_weighting was true, is null"),
    ],
)
def test_a_run_that_used_what_was_removed_is_refused(
    group: str, entries: dict[str, Any], what: str, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / "whole", tmp_path / "run")
    record = record_of(tmp_path / "run")
    record[group] |= entries
    (tmp_path / "run" / RECORD).write_text(json.dumps(record))
    with pytest.raises(UsageError, match=f"--resume needs the settings the run began with: {what}"):
        adapt_tiny(made / "frames", tmp_path / "run", resume=True)
