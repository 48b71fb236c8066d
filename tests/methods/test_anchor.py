"""The pull towards the source weights after each step."""

from __future__ import annotations

import pytest
import torch

from remtta.methods.method import build_method
from remtta.methods.settings import method_config
from tests.conftest import random_images, tiny_vit

METHODS = ["rem", "sar", "cmf"]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_with_the_anchor_is_the_step_and_then_a_share_of_the_way_back(name: str) -> None:
    images = random_images(8)
    plain, pulled = tiny_vit(), tiny_vit()
    filters = {"entropy_margin": 5.0} if name == "sar" else {}
    for model, anchor in ((plain, 0.0), (pulled, 0.25)):
        method = build_method(name, model, method_config(name, {"lr": 0.01, "anchor": anchor, **filters}, batch_size=8))
        method(images)
        assert method.num_updates == 1
    source, moved = dict(tiny_vit().named_parameters()), 0.0
    for (key, parameter), (_, other) in zip(pulled.named_parameters(), plain.named_parameters(), strict=True):
        expected = other + 0.25 * (source[key] - other)  # theta + a (theta_0 - theta)
        assert torch.allclose(parameter, expected, atol=1e-6), key
        moved += float((parameter - source[key]).detach().abs().sum())
    assert moved > 0
