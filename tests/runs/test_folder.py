"""A run folder without a given name is unique, even if other runs start at the same time."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from remtta.errors import OutputError
from remtta.runs.folder import run_folder


def test_runs_begun_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with contextlib.ExitStack() as runs, ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda number: runs.enter_context(run_folder(None, root)), range(40)))
        assert len(set(folders)) == 40 and all(folder.is_dir() for folder in folders)
        (folders[7] / "predictions.jsonl").touch()
    assert list(root.iterdir()) == [folders[7]]  # the others are empty, and nobody's any more


def test_a_folder_that_was_named_stays_as_it_is_and_one_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    with run_folder(tmp_path / "named") as folder:
        assert not folder.exists()
    with run_folder(None, tmp_path / "runs"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").touch()
    with (
        pytest.raises(OutputError, match=r"runs/.* cannot be written: Not a directory"),
        run_folder(None, tmp_path / "runs"),
    ):
        pass
