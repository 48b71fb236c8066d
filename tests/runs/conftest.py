"""Runs that are made once, to be copied by the tests that look at them or go on with them."""

import shutil
from itertools import count
from pathlib import Path
from unittest import mock

import pytest

from remtta.runs.saving import Saver
from tests.conftest import draw_folder
from tests.runs.tiny import adapt_tiny, stop_after


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of `adapt_tiny` on the 12 images of its folder "frames".

    "whole" came through, "stopped" was stopped after two batches, and "killed0" to "killed3" are what a kill after
    each of the four batches would have left.
    """
    root, number = tmp_path_factory.mktemp("made"), count()
    frames, whole = draw_folder(root / "frames", range(12), "frame_{}.png"), root / "whole"
    save = Saver.after_batch

    def save_and_copy(saver: Saver) -> None:
        save(saver)
        shutil.copytree(whole, root / f"killed{next(number)}")

    with mock.patch.object(Saver, "after_batch", save_and_copy):
        adapt_tiny(frames, whole)
    stop_after(2, frames, root / "stopped")
    return root


@pytest.fixture
def frames(made: Path) -> Path:
    return made / "frames"
