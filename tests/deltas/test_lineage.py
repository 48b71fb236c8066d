"""The differences between two deltas, and the origin of one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from remtta import load_delta
from remtta.deltas.delta_files import parsed_lineage
from remtta.deltas.layers import layers_apart
from remtta.errors import DeltaError
from tests.records import record_of
from tests.runs.tiny import adapt_tiny


def test_distance_and_cosine_by_layer() -> None:
    first = {"a.weight": np.array([3.0, 4.0]), "a.bias": np.zeros(2), "b.weight": np.array([1.0])}
    second = {"a.weight": np.array([4.0, -3.0]), "a.bias": np.zeros(2), "c.weight": np.array([1e300])}
    whole, a, b, c = layers_apart(first, second)
    assert [each["layer"] for each in (whole, a, b, c)] == [None, "a", "b", "c"]
    assert a["rms"] == pytest.approx([2.5, 2.5]) and a["cosine"] == 0  # at right angles
    assert a["distance"] == pytest.approx(np.sqrt((1 + 49) / 4))
    assert b == {"layer": "b", "rms": [1.0, 0.0], "distance": 1.0, "cosine": None}
    assert c["distance"] == 1e300 and whole["cosine"] == pytest.approx(0)
    assert all(each["cosine"] in (None, pytest.approx(1)) for each in layers_apart(first, first))
    with pytest.raises(DeltaError, match="two shapes"):
        layers_apart(first, {"b.weight": np.zeros(2)})


def test_a_runs_delta_says_where_it_comes_from(frames: Path, tmp_path: Path) -> None:
    adapt_tiny(frames, tmp_path / "first", "tent")
    first = load_delta(tmp_path / "first")
    run = record_of(tmp_path / "first")["run"]
    told = {name: first.lineage[name] for name in ("made_by", "run", "source", "kind", "parents")}
    assert told == {"made_by": "adapt", "run": run, "source": str(frames), "kind": "folder", "parents": []}
    adapt_tiny(frames, tmp_path / "first", "tent", resume=True)
    assert record_of(tmp_path / "first")["run"] == run == load_delta(tmp_path / "first").lineage["run"]
    adapt_tiny(frames, tmp_path / "second", "tent", delta=first)
    [parent] = load_delta(tmp_path / "second").lineage["parents"]
    assert parent["file_sha256"] == first.file_sha256 and parent["run"] == run and parent["frames"] == 12
    adapt_tiny(frames, tmp_path / "reset", "tent", delta=first, options={"reset_every": 6})
    assert load_delta(tmp_path / "reset").lineage["parents"] == []  # the source weights have come back since


@pytest.mark.parametrize(
    "lineage",
    [
        {"run": 1},
        {"parents": {}},
        {"parents": [{}]},
        {"parents": [{"file_sha256": "", "method": "", "frames": "1", "updates": 1, "created": ""}]},
    ],
)
def test_a_damaged_lineage_is_reported(lineage: object) -> None:
    with pytest.raises(ValueError, match="its lineage is malformed"):
        parsed_lineage(json.dumps(lineage))
