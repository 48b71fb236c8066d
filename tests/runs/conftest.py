"""Runs that are made once, to be copied by the tests that look at them or go on with them."""

import shutil
from itertools import count
from pathlib import Path

import pytest

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
    adapt_tiny(frames, whole, on_batch=lambda _: shutil.copytree(whole, root / f"killed{next(number)}"))
    stop_after(2, frames, root / "stopped")
    return root


@pytest.fixture
def frames(made: Path) -> Path:
    return made / "frames"
