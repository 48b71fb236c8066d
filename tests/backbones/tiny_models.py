"""Tiny random models of the hierarchical and convolutional families, for images of 64 x 64 pixels."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

from tests.conftest import NUM_CLASSES, copied, random_images

SIZE = 64
STAGES: dict[str, Any] = {"depths": (1, 1, 1, 1)}
WINDOWS = {"img_size": SIZE, "window_size": 4, "embed_dim": 8, "num_heads": (1, 1, 2, 2), **STAGES}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet18", {"layers": (1, 1, 1, 1), "channels": (8, 12, 16, 24)}),
    "resnext": (
        "resnext50_32x4d",
        {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8), "cardinality": 4, "base_width": 32},
    ),
    "resnet_gn": ("resnet50_gn", {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32)}),
    "resnetv2": ("resnetv2_50", {"layers": (1, 1, 1, 1), "channels": (16, 16, 16, 32), "stem_chs": 8}),
    "convnext": ("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}),
    "convnextv2": ("convnextv2_atto", {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}),
    "swin": ("swin_tiny_patch4_window7_224", WINDOWS),
    "swinv2": ("swinv2_tiny_window8_256", WINDOWS),
    "mobilevit": ("mobilevit_xxs", {}),
    "mobilevitv2": ("mobilevitv2_050", {}),
    "efficientnet": ("test_efficientnet", {}),
    "mobilenetv2": ("mobilenetv2_035", {}),
    "mobilenetv3": ("mobilenetv3_small_050", {}),
    "regnet": ("regnetx_002", {}),
}
FIXED_SIZE = ("swin", "swinv2")


@copied
def tiny(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model whose predictions differ from image to image, and whose running statistics are not at 0 and 1."""
    torch.manual_seed(seed)
    name, kwargs = FAMILIES[family]
    config = {"input_size": (3, SIZE, SIZE), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    kwargs = {**kwargs, "num_classes": NUM_CLASSES, "pretrained_cfg_overlay": config, **changes}
    model: Any = timm.create_model(name, pretrained=False, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(std=0.1).add_(float(parameter.numel() > NUM_CLASSES) * 0.5)
        _settle(model)
        head = model.eval().get_classifier()
        head.weight.normal_()
        head.weight.div_((model(pictures(8, 99)) - head.bias).std())
    torch.manual_seed(seed)
    return model


def _settle(model: nn.Module) -> None:
    """Give batch norms the statistics of some other images, so that signals neither die nor explode."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.momentum = 1.0
    if layers:
        model.train()(1.5 * pictures(8, 99) + 0.3)
    for layer in layers:
        layer.momentum = 0.1


def pictures(count: int, seed: int = 0, size: int = SIZE) -> Tensor:
    return random_images(count, seed, size)
