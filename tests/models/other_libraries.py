"""Small random classifiers of transformers and torchvision, beside which timm's are tested."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torchvision.models import ConvNeXt, ResNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck

Make = Callable[..., Any]

LABELS = list("abcdefg")
_VIT: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 8}
_SWIN: dict[str, Any] = {"patch_size": 2, "embed_dim": 12, "window_size": 4, "depths": [2, 2], "num_heads": [2, 4]}


def _maker(family: str, head: str = "ForImageClassification", **options: Any) -> Make:
    """Return a function that makes a classifier of transformers, with changes to these options."""
    config, model = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}{head}")
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {name: number for number, name in enumerate(LABELS)}}
    return lambda **changes: model(config(**{"image_size": 32, **names, **options, **changes}))


TRANSFORMERS = {
    "vit": _maker("ViT", **_VIT, intermediate_size=50),
    "vit with other sizes": _maker("ViT", **_VIT | {"image_size": (24, 40)}, qkv_bias=False, layer_norm_eps=0.1),
    "deit": _maker("DeiT", **_VIT, intermediate_size=48),
    "deit with a teacher": _maker("DeiT", "ForImageClassificationWithTeacher", **_VIT, intermediate_size=48),
    "dinov2": _maker("Dinov2", **_VIT, mlp_ratio=2),
    "dinov2 with gates": _maker(
        "Dinov2", **_VIT | {"hidden_size": 36}, use_swiglu_ffn=True, mlp_ratio=3, layer_norm_eps=0.1
    ),
    "dinov2 with registers": _maker("Dinov2WithRegisters", **_VIT, mlp_ratio=2, num_register_tokens=3),
    "swin": _maker("Swin", **_SWIN),
    "swin with other sizes": _maker(
        "Swin",
        patch_size=4,
        embed_dim=12,
        depths=[1, 2, 1],
        num_heads=[1, 2, 3],
        window_size=2,
        qkv_bias=False,
        layer_norm_eps=0.1,
    ),
    "convnext": _maker("ConvNext", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1]),
    "convnext without layer scale": _maker(
        "ConvNext", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1], layer_scale_init_value=0.0, layer_norm_eps=0.1
    ),
}
"""Functions that make a classifier, with changes to its options."""


def _vision_convnext() -> Any:
    widths = [8, 12, 16, 20]
    blocks = [CNBlockConfig(*sizes) for sizes in zip(widths, [*widths[1:], None], [1, 1, 2, 1], strict=True)]
    return ConvNeXt(blocks, num_classes=7)


TORCHVISION: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "resnet": (
        lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=7, width_per_group=8),
        "wide_resnet50_2",
        {"layers": (1, 1, 1, 1), "base_width": 8},
    ),
    "vit": (
        lambda: VisionTransformer(32, 8, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=96, num_classes=7),
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    ),
    "swin": (
        lambda: SwinTransformer([2, 2], 12, [2, 2, 2], [2, 4, 4], [4, 4], num_classes=7),
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 32,
            "patch_size": 2,
            "embed_dim": 12,
            "window_size": 4,
            "depths": (2, 2, 2),
            "num_heads": (2, 4, 4),
        },
    ),
    "convnext": (_vision_convnext, "convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20)}),
}
"""Functions that make a classifier; the name and the arguments of the same in timm."""


def randomised(model: Any, seed: int = 0) -> Any:
    """Fill a model with weights that leave nothing as it was built: no zeros, no ones, logits far from uniform."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = 0.2 * torch.randn_like(tensor) + (tensor.ndim == 1) * 0.5
                tensor.copy_(noise.abs() + 0.1 if name.endswith("running_var") else noise)
    return model.eval()


def saved(model: Any, folder: Path, processor: Any = None) -> str:
    """Save a classifier of transformers, and return its name for remtta."""
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return f"local-dir:{folder}"
