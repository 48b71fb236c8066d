"""The differences between two deltas."""

from __future__ import annotations

import numpy as np
import pytest

from remtta.deltas.layers import layers_apart
from remtta.errors import DeltaError


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
