"""Averages and shares of deltas, what differs between two, and where they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remtta import load_delta
from remtta.deltas.delta import Delta, save_delta
from remtta.deltas.layers import layers_apart
from remtta.deltas.lineage import parsed_lineage
from remtta.deltas.mixing import average, scaled
from remtta.errors import DeltaError, RemttaError, UsageError
from tests.records import record_of
from tests.runs.tiny import adapt_tiny


def delta_of(frames: int = 10, base: str = "ab", **tensors: list[float]) -> Delta:
    values: dict[str, Tensor] = {name.replace("__", "."): torch.tensor(value) for name, value in tensors.items()}
    return Delta(values, "vit", base * 32, "rem", {"lr": 0.1, "batch_size": frames}, frames=frames, updates=2)


def test_an_average_is_weighted_by_frames() -> None:
    first = delta_of(30, norm__weight=[1.0, 2.0], norm__bias=[4.0])
    second = replace(delta_of(10, norm__weight=[5.0, -2.0]), method="tent")
    mean = average([first, second])
    assert mean.tensors["norm.weight"].tolist() == [2.0, 1.0]  # 3/4 and 1/4
    assert mean.tensors["norm.bias"].tolist() == [3.0]  # the second one leaves it as it is
    assert (mean.frames, mean.updates, mean.method, mean.hyperparameters) == (40, 4, "rem+tent", {"lr": 0.1})
    assert [parent["weight"] for parent in mean.lineage["parents"]] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (delta_of(base="cd", norm__weight=[1.0]), DeltaError, "was made on other weights"),
        (replace(delta_of(norm__weight=[1.0]), preprocessing={"mean": 0}), DeltaError, "another preprocessing"),
        (delta_of(norm__weight=[1.0, 2.0]), DeltaError, "in another shape"),
        (delta_of(-10, norm__weight=[1.0]), DeltaError, "nothing to weight them by"),
        (None, UsageError, "two deltas or more"),
    ],
)
def test_what_does_not_go_together_is_refused(other: Delta | None, error: type[RemttaError], text: str) -> None:
    with pytest.raises(error, match=text):
        average([delta_of(norm__weight=[1.0]), *([other] if other else [])])


def test_a_share_of_a_delta_lies_between_source_and_adapted(tmp_path: Path) -> None:
    save_delta(tmp_path / "whole.safetensors", delta_of(norm__weight=[1.0, -3.0]))
    whole = load_delta(tmp_path / "whole.safetensors")
    save_delta(tmp_path / "half.safetensors", scaled(whole, 0.5))
    half = load_delta(tmp_path / "half.safetensors")
    assert half.tensors["norm.weight"].tolist() == [0.5, -1.5]
    assert half.lineage["factor"] == 0.5 and half.lineage["parents"][0]["file_sha256"] == whole.file_sha256
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="the factor must be > 0 and finite"):
            scaled(half, factor)
    with pytest.raises(DeltaError, match="not finite"):
        save_delta(tmp_path / "huge.safetensors", scaled(whole, 1e300))


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
        [],
        {"run": 1},
        {"parents": {}},
        {"parents": [{}]},
        {"factor": float("nan")},
        {"parents": [{"file_sha256": "", "method": "", "frames": 1, "updates": 1, "created": "", "weight": "1"}]},
    ],
)
def test_a_damaged_lineage_is_told(lineage: object) -> None:
    with pytest.raises(ValueError, match="its lineage is none"):
        parsed_lineage(json.dumps(lineage))
