"""The pull towards the source weights after each step."""

from __future__ import annotations

import pytest
import torch

from remtta.errors import UsageError
from remtta.methods.method import build_method
from remtta.methods.settings import REMConfig, method_config
from tests.conftest import random_images, tiny_vit

METHODS = ["rem", "tent", "sar", "eta", "deyo", "cmf"]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_with_the_anchor_is_the_step_and_then_a_share_of_the_way_back(name: str) -> None:
    images = random_images(8)
    plain, pulled = tiny_vit(), tiny_vit()
    filters = {"eta": {"entropy_margin": 5.0, "max_cosine": 1.0}, "deyo": {"entropy_margin": 5.0}}.get(name, {})
    filters |= {"plpd_margin": -1.0} if name == "deyo" else {"entropy_margin": 5.0} if name == "sar" else {}
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


def test_the_pull_holds_the_weights_near_the_source_for_good() -> None:
    drifts = []
    for anchor in (0.0, 0.4):
        method = build_method("rem", tiny_vit(), REMConfig(lr=0.01, anchor=anchor))
        for seed in range(8):
            method(random_images(4, seed=seed))
        drifts.append(method.drift())
    assert drifts[1] < 0.5 * drifts[0]


@pytest.mark.parametrize("anchor", [-0.1, 1.0, float("nan")])
def test_an_invalid_share_is_refused(anchor: float) -> None:
    with pytest.raises(UsageError, match=r"anchor must be in \[0, 1\), got"):
        REMConfig(anchor=anchor)
