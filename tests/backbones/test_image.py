"""Every hierarchical and convolutional family: logits, masks, scores, and the layers that adapt."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor

from remtta import REM, REMConfig
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError
from remtta.methods.table import method_config
from tests.backbones.tiny_models import FAMILIES, FIXED_SIZE, SIZE, image_size, pictures, tiny, transformer
from tests.conftest import tiny_vit
from tests.methods.making import pipeline_of, predicted

MASKS: dict[str, Any] = {"mask_ratios": (0.0, 0.25, 0.5)}


def feature_map(model: Any, images: Tensor) -> Tensor:
    """The last feature map (B, D, rows, columns)."""
    features: Tensor = model.forward_features(images)
    return features.permute(0, 3, 1, 2) if "Swin" in type(model).__name__ else features


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_views_are_timms_on_the_image_with_its_patches_blackened(family: str) -> None:
    model, images = tiny(family), pictures(3)
    backbone, expected, features = backbone_of(model), model(images), feature_map(model, images)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    everything = torch.arange(backbone.num_patches).expand(3, -1)
    logits, scores = backbone.classify_with_scores(images, "features")
    for each in (
        logits,
        backbone.logits(images),
        backbone.classify(backbone.embed(images), everything),
        backbone.classify_with_scores(images, "gradcam")[0],
        backbone.classify_with_features(images)[0],
    ):
        torch.testing.assert_close(each, expected)
    torch.testing.assert_close(scores, features.flatten(2).norm(dim=1), atol=1e-4, rtol=1e-4)
    assert features.shape[2:] == (2, 2) and backbone.count_patches(images) == 4
    assert (backbone.num_patches, backbone.patch_size) == (4, (32, 32))
    assert backbone.num_tokens >= 16 * 16 / 4 and backbone.num_passing > 0
    assert backbone.input_size == ((SIZE, SIZE) if family in FIXED_SIZE else None) and backbone.num_classes == 7
    masked = images.clone()
    masked[0, :, :32, 32:] = 0  # position 1 of 0 1 / 2 3
    masked[1:, :, 32:, :32] = 0
    kept = torch.tensor([[0, 2, 3], [0, 1, 3], [0, 1, 3]])
    torch.testing.assert_close(backbone.classify(images, kept), model(masked))


@pytest.mark.parametrize("family", ["resnet", "convnextv2", "swinv2", "mobilevit"])
def test_gradcam_is_its_plain_reading(family: str) -> None:
    model: Any = tiny(family)
    images = pictures(3)
    with torch.no_grad():
        scores = backbone_of(model).classify_with_scores(images, "gradcam")[1]
    assert not scores.requires_grad
    for image, row in zip(images, scores, strict=True):
        kept: list[Tensor] = []
        whole = model.forward_features(image.unsqueeze(0)).detach().requires_grad_()
        logits = model.forward_head(whole)[0]
        logits[int(logits.argmax())].backward()
        for each in (whole.detach(), whole.grad):
            kept.append(each[0].permute(2, 0, 1) if "Swin" in type(model).__name__ else each[0])
        activations, gradients = kept
        total = torch.zeros(2, 2)
        for channel, gradient in zip(activations, gradients, strict=True):
            total = total + gradient.sum() / 4 * channel
        torch.testing.assert_close(row, total.flatten(), atol=1e-5, rtol=1e-4)


def test_gradcam_is_there_in_inference_mode_and_leaves_no_gradients() -> None:
    model = tiny("resnet")
    backbone, images = backbone_of(model), pictures(2)
    with torch.inference_mode():
        inside = backbone.classify_with_scores(images, "gradcam")[1]
    assert torch.equal(inside, backbone.classify_with_scores(images, "gradcam")[1])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["resnet", "mobilevit"])
def test_images_of_odd_sizes_are_masked_on_their_own_grid(family: str) -> None:
    model = tiny(family)
    backbone, images = backbone_of(model), pictures(2, size=75)
    with torch.no_grad():
        features = feature_map(model, images)
        assert backbone.count_patches(images) == features.shape[2] * features.shape[3]
        scores = backbone.classify_with_scores(images, "features")[1]
        assert scores.shape == (2, backbone.count_patches(images))
        assert torch.isfinite(backbone.classify(images, scores.topk(3).indices)).all()


LATER = {
    "resnet": {"layer4"},
    "resnext": {"layer4"},
    "resnet_gn": {"layer4"},
    "resnetv2": {"stages.3", "norm"},
    "convnext": {"stages.3", "head"},
    "convnextv2": {"stages.3", "head"},
    "swin": {"layers.3", "norm"},
    "swinv2": {"layers.3", "norm"},
    "mobilevit": {"stages.3", "stages.4", "final_conv"},
    "mobilevitv2": {"stages.3", "stages.4"},
    "efficientnet": {"blocks.3", "blocks.4", "bn2"},
    "mobilenetv2": {"blocks.5", "blocks.6", "bn2"},
    "mobilenetv3": {"blocks.4", "blocks.5"},
    "regnet": {"s4"},
}
"""What adapts only where all norms do: the last stages, and what comes behind them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_in_order_and_the_last_ones_and_the_final_norm_do_not_adapt_by_default(family: str) -> None:
    backbone = backbone_of(tiny(family))
    order: list[int] = []
    for number, stage in enumerate(backbone.blocks):
        stage.register_forward_hook(lambda *_, number=number: order.append(number))
    with torch.no_grad():
        backbone.logits(pictures(1))
    assert order == list(range(len(backbone.blocks)))
    default, everything = adapted_norms(backbone), adapted_norms(backbone, "all")
    later = set(everything) - set(default)
    assert set(default) == set(adapted_norms(backbone, f"0-{math.floor(0.75 * len(backbone.blocks)) - 1}"))
    assert default and later == {n for n in everything if any(n.startswith(f"{part}.") for part in LATER[family])}
    norms = {
        f"{name}.{part}"
        for name, module in backbone.module.named_modules()
        if "norm" in type(module).__name__.lower() and not isinstance(module, GlobalResponseNorm)
        for part, _ in module.named_parameters(recurse=False)
    }
    assert set(everything) == norms


@pytest.mark.parametrize(
    ("make", "size", "masking", "layers"),
    [
        (lambda: tiny("swinv2"), SIZE, "auto", "1,2"),
        (lambda: tiny("mobilevit"), SIZE, "gradcam", "1,2"),
        *(
            (partial(transformer, name), image_size(name)[0], "auto", "0")
            for name in ("BEiT", "hybrid", "EVA-02, apart")
        ),
    ],
)
def test_only_the_chosen_norms_get_gradients_and_change(make: Any, size: int, masking: str, layers: str) -> None:
    model = make()
    settings: dict[str, Any] = {"lr": 0.01, "adapt_layers": layers, **MASKS, "masking": masking}
    adapter = pipeline_of("rem", model, method_config("rem", settings, batch_size=4))
    source = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = predicted(adapter, pictures(4, size=size))
    assert torch.equal(adapter(pictures(4, size=size)), before)
    chosen = set(adapted_norms(backbone_of(model), layers))
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, source[name])}
    assert changed <= chosen == set(adapter.method.trained) == with_gradient and len(changed) > len(chosen) / 2
    assert all(torch.equal(source[name] + moved, model.state_dict()[name]) for name, moved in adapter.delta().items())
    assert adapter.method.num_updates == 1


@pytest.mark.parametrize(
    ("make", "masking", "told"),
    [
        (tiny_vit, "gradcam", "Grad-CAM needs a feature map"),
        (lambda: tiny("resnet"), "attention", r"masking=attention; leave it out, or choose features or gradcam"),
    ],
)
def test_masks_by_what_a_model_has_not_are_refused(make: Any, masking: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        REM(make(), REMConfig(**MASKS, masking=masking))
