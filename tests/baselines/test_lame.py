"""LAME, against a plain second implementation."""

import pytest
import torch
from torch import Tensor

from remtta.baselines.lame import LAME, LAMEConfig, laplacian_correction, neighbour_affinity
from remtta.errors import UsageError
from tests.conftest import random_images, tiny_vit
from tests.methods.making import pipeline_of


def test_corrected_predictions_equal_a_plain_loop() -> None:
    model, images = tiny_vit(), random_images(9)
    with torch.no_grad():
        features: Tensor = model.forward_features(images)[:, 0]
        q: Tensor = model(images).softmax(1)
    unit = features / features.norm(dim=1, keepdim=True)
    near = [[j for j in row.argsort().tolist() if j != i][:3] for i, row in enumerate(torch.cdist(unit, unit))]
    z = q.clone()
    for _ in range(100):  # every row from the same z
        z = torch.stack([q[i] * z[near[i]].sum(0).exp() for i in range(9)])
        z = z / z.sum(1, keepdim=True)
    lame = pipeline_of(LAME, tiny_vit(), LAMEConfig(neighbours=3))
    corrected = lame(images).softmax(1)
    torch.testing.assert_close(corrected, z, atol=1e-5, rtol=1e-3)
    assert (corrected - q).abs().max() > 0.05


def test_it_stops_where_one_more_step_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(178)  # a batch that takes many steps
    log_q = (2 * torch.randn(40, 10, generator=generator)).log_softmax(-1)
    affinity = neighbour_affinity(torch.randn(40, 16, generator=generator), 5)
    z = laplacian_correction(log_q, affinity).exp()
    torch.testing.assert_close((log_q + affinity @ z).softmax(-1), z, atol=5e-5, rtol=0)


def test_one_image_is_predicted_as_the_source_model_does() -> None:
    with torch.no_grad():
        expected = tiny_vit()(random_images(1)).softmax(1)
    torch.testing.assert_close(pipeline_of(LAME, tiny_vit())(random_images(1)).softmax(1), expected)


def test_nothing_is_learned_and_a_certain_prediction_stays_finite() -> None:
    lame = pipeline_of(LAME, tiny_vit())
    lame(random_images(5))
    assert (lame.method.adapts, lame.method.num_updates, lame.delta(), lame.method.passes()[0]) == (False, 0, {}, 1)
    certain = torch.tensor([[800.0, 0.0], [0.0, 800.0]]).log_softmax(-1)
    assert torch.isfinite(laplacian_correction(certain, torch.ones(2, 2))).all()


def test_no_neighbours_are_refused() -> None:
    with pytest.raises(UsageError, match="neighbours must be >= 1, got 0"):
        LAMEConfig(neighbours=0)
