"""Conditions, and how a change of them is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from remtta.guard.conditions import Sight, statistics
from tests.conftest import random_images


def condition(number: int, batch: int = 0) -> Tensor:
    """Twenty images of the same brightness and contrast, which no other condition has."""
    return 0.3 * random_images(20, 100 * number + batch) + 2 * number


def test_statistics_are_brightness_spread_and_roughness() -> None:
    flat = torch.full((1, 3, 16, 16), 0.5)
    stripes = flat.clone()
    stripes[..., ::2] = 0.7  # neighbours across differ by 0.2 at the finest scale, and not at all at the next
    none = torch.tensor(1e-3).log().item()
    assert statistics(flat)[0].tolist() == pytest.approx([0.5] * 3 + [none] * 11)
    expected = [0.6] * 3 + [torch.tensor(0.1).log().item()] * 3 + [none, torch.tensor(0.2).log().item()] + [none] * 6
    assert statistics(stripes)[0].tolist() == pytest.approx(expected, abs=2e-3)


def test_frames_of_one_condition_in_any_order_are_no_change() -> None:
    sight, generator = Sight(), torch.Generator().manual_seed(0)
    key = torch.empty(0)
    for batch in range(30):
        brightness = torch.rand(20, 1, 1, 1, generator=generator)
        block = sight.take(random_images(20, batch) * (0.5 + brightness) + brightness)
        assert block is not None
        key = key.lerp(block.mean(0), 1 / (batch + 1)) if batch else block.mean(0)
        assert not batch or sight.near(key, block)
        sight.note(key, block)


def test_small_batches_are_looked_at_together() -> None:
    sight = Sight()
    blocks = [sight.take(part) for part in condition(0).split(7)]
    assert [None if block is None else len(block) for block in blocks] == [None, None, 20]
