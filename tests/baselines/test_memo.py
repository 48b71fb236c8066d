"""MEMO, against a plain second implementation."""

import dataclasses

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_tensor

from remtta.baselines.augmentations import OPERATIONS, affine, augmix
from remtta.baselines.memo import MEMO, MEMOConfig
from tests.conftest import random_images, tiny_vit
from tests.methods.making import pipeline_of, predicted

CONFIG = MEMOConfig(num_augmentations=4, lr=0.05, optimizer="sgd", momentum=0.0)


def _views(image: Tensor, generator: torch.Generator) -> Tensor:
    """Return the augmented views; the tiny model's mean and standard deviation are 0.5."""
    return torch.stack([augmix((image / 2 + 0.5).clamp(0, 1), generator) for _ in range(4)]) * 2 - 1


def _plain(image: Tensor, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
    """Take one step on one image, starting from the source model."""
    model = tiny_vit()
    views = _views(image, generator)
    mean = model(views).softmax(1).mean(0)
    loss = -(mean * mean.log()).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad)
        return model, model(image[None])[0]


def test_each_image_is_predicted_after_a_step_on_its_own_views_and_forgotten() -> None:
    memo, images = pipeline_of(MEMO, tiny_vit(), CONFIG), random_images(3)
    drawn = memo.method.model.generator.clone_state()
    expected = torch.stack([_plain(image, drawn)[1] for image in images])
    logits = memo(images)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        source = tiny_vit()(images)
    assert (logits - source).abs().max() > 0.01
    torch.testing.assert_close(predicted(memo, images), source)
    assert memo.method.num_updates == 3
    assert not any(tensor.any() for tensor in memo.delta().values())
    assert (*memo.method.passes(), memo.method.num_models) == (5, 4, 2)


def test_views_in_parts_give_the_same_update() -> None:
    whole, parts = (
        pipeline_of(MEMO, tiny_vit(), CONFIG),
        pipeline_of(MEMO, tiny_vit(), dataclasses.replace(CONFIG, micro_batch=3)),
    )
    torch.testing.assert_close(parts(random_images(2)), whole(random_images(2)), atol=1e-5, rtol=1e-4)
    assert parts.method.passes()[0] == 9  # each view twice, and the prediction


def test_steps_follow_one_another_on_one_image() -> None:
    once, twice = (
        pipeline_of(MEMO, tiny_vit(), CONFIG),
        pipeline_of(MEMO, tiny_vit(), dataclasses.replace(CONFIG, steps=2)),
    )
    assert not torch.allclose(once(random_images(1)), twice(random_images(1)), atol=1e-3)
    assert (twice.method.passes()[0], twice.method.num_updates) == (9, 1)


def test_weights_a_run_starts_from_are_those_it_goes_back_to() -> None:
    memo = pipeline_of(MEMO, tiny_vit(), CONFIG)
    delta = {"head.bias": torch.arange(7.0)}
    memo.load_delta(delta)
    memo(random_images(2))
    assert torch.equal(memo.delta()["head.bias"], delta["head.bias"])


def test_an_image_without_finite_gradients_is_predicted_and_not_adapted_to(caplog: pytest.LogCaptureFixture) -> None:
    memo = pipeline_of(MEMO, tiny_vit(), CONFIG)
    images = random_images(2)
    images[0] = torch.nan
    assert torch.isfinite(memo(images)[1]).all()
    assert memo.method.num_updates == 1
    assert "skipped an image" in caplog.text


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_every_operation_of_augmix_changes_pixels_and_keeps_their_range(number: int) -> None:
    pixels = (0.9 * random_images(1, 5)[0].sigmoid() + 0.1).clamp(0, 1)
    outs = [OPERATIONS[number](pixels, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert any(not torch.equal(out, pixels) for out in outs)
    assert all(out.shape == pixels.shape and out.min() >= 0 and out.max() <= 1 for out in outs)


def test_moved_views_are_pillows_and_show_what_it_makes_of_the_official_codes_border() -> None:
    pixels = torch.nn.functional.interpolate(random_images(1, 3).sigmoid(), (64, 64), mode="bicubic")[0].clamp(0, 1)
    image = Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).numpy())

    def sheared(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=128)

    for ours, pillows in [
        (affine(pixels, angle=-9.0), image.rotate(9, Image.Resampling.BILINEAR, fillcolor=128)),
        (affine(pixels, shift=(-7.0, 0.0)), sheared(1, 0, 7, 0, 1, 0)),
        (affine(pixels, shift=(0.0, 5.0)), sheared(1, 0, 0, 0, 1, -5)),
        (affine(pixels, shear=(0.1, 0.0)), sheared(1, 0.1, 0, 0, 1, 0)),
        (affine(pixels, shear=(0.0, -0.1)), sheared(1, 0, 0, -0.1, 1, 0)),
    ]:
        off = (ours - to_tensor(pillows)).abs().amax(0)
        assert float((off > 0.01).float().mean()) < 0.03  # the edge of the image, which ours blends
        red = torch.tensor((128 / 255, 0.0, 0.0)).view(3, 1, 1)
        assert float(((to_tensor(pillows) - red).abs().amax(0) < 0.01).float().mean()) > 0.03
