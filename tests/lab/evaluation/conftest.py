from pathlib import Path

import pytest

from remtta.lab.evaluation.domains import Dataset
from tests.lab.evaluation.trees import open_tree, write_tree


@pytest.fixture
def tree(tmp_path: Path) -> Dataset:
    """Two domains of 21 images, three of each class."""
    return open_tree(write_tree(tmp_path / "c", ["gaussian_noise", "fog"]))
