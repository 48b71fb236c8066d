from __future__ import annotations

from pathlib import Path

import pytest

from remtta.deltas.delta import save_delta
from tests.deltas.test_mixing import delta_of


@pytest.fixture
def deltas(tmp_path: Path) -> list[Path]:
    """Two deltas of one model."""
    paths = [tmp_path / f"{number}.safetensors" for number in (1, 2)]
    for number, path in enumerate(paths):
        save_delta(path, delta_of(norm__weight=[float(number)]))
    return paths
