"""The timm models equivalent to image classifiers of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from timm.layers import SwiGLUPacked
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from remtta.formats.transformers_processors import Config, Size, pair


@dataclass(frozen=True)
class Family:
    """The classifiers of one model_type of transformers, and how timm builds them."""

    classifiers: tuple[str, ...]  # class names
    build: Callable[[Config, Size, int], nn.Module]  # from config.json, height and width, and the number of classes
    defaults: Config  # of config.json
    supported: Config = field(default_factory=dict)  # the values that timm's model supports, by option
    fixed_size: bool = False  # whether transformers rejects images of a size other than image_size


def _norm(config: Config) -> Callable[..., nn.Module]:
    return partial(nn.LayerNorm, eps=float(config["layer_norm_eps"]))


def _vit_arguments(config: Config, size: Size, num_classes: int, mlp_width: int) -> Config:
    return {
        "img_size": size,
        "patch_size": pair(config["patch_size"]),
        "in_chans": config["num_channels"],
        "num_classes": num_classes,
        "embed_dim": config["hidden_size"],
        "depth": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "mlp_ratio": (mlp_width + 0.5) / config["hidden_size"],  # timm rounds the product down
        "qkv_bias": config["qkv_bias"],
        "norm_layer": _norm(config),
    }


def _vit(config: Config, size: Size, num_classes: int) -> nn.Module:
    """Build a ViT or DeiT: with a teacher, a DeiT has two heads; else no head reads its distillation token."""
    arguments = _vit_arguments(config, size, num_classes, config["intermediate_size"])
    if (config.get("architectures") or [""])[0].endswith("WithTeacher"):
        return VisionTransformerDistilled(**arguments)
    return VisionTransformer(reg_tokens=int(config["model_type"] == "deit"), **arguments)


class ClassAndPatches(VisionTransformer):  # type: ignore[misc]
    """A ViT whose head reads the class token and the mean of the patch tokens, like DINOv2's."""

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Return both (B, 2 D) from tokens (B, P + N, D)."""
        return torch.cat([x[:, 0], x[:, self.num_prefix_tokens :].mean(dim=1)], dim=1)


def _dinov2(config: Config, size: Size, num_classes: int) -> nn.Module:
    width = config["hidden_size"]
    mlp_width, options = int(width * config["mlp_ratio"]), dict[str, Any]()
    if config["use_swiglu_ffn"]:
        mlp_width = 2 * ((int(mlp_width * 2 / 3) + 7) // 8 * 8)  # gates and values
        options |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    if config["model_type"] == "dinov2_with_registers":
        options |= {"reg_tokens": config["num_register_tokens"], "no_embed_class": True}
    model = ClassAndPatches(**_vit_arguments(config, size, num_classes, mlp_width), **options, init_values=1.0)
    model.head = nn.Linear(2 * width, num_classes)
    return model


def _swin(config: Config, size: Size, num_classes: int) -> nn.Module:
    model: Any = SwinTransformer(
        img_size=size,
        patch_size=pair(config["patch_size"]),
        in_chans=config["num_channels"],
        num_classes=num_classes,
        embed_dim=config["embed_dim"],
        depths=tuple(config["depths"]),
        num_heads=tuple(config["num_heads"]),
        window_size=config["window_size"],
        mlp_ratio=float(config["mlp_ratio"]),
        qkv_bias=config["qkv_bias"],
        norm_layer=_norm(config),
    )
    for norm in (model.patch_embed.norm, *(stage.downsample.norm for stage in model.layers[1:])):
        norm.eps = 1e-5  # whatever config.json's layer_norm_eps
    return model


def _convnext(config: Config, size: Size, num_classes: int) -> nn.Module:
    scale = config["layer_scale_init_value"]
    model: Any = ConvNeXt(
        in_chans=config["num_channels"],
        num_classes=num_classes,
        depths=tuple(config["depths"]),
        dims=tuple(config["hidden_sizes"]),
        ls_init_value=scale if scale > 0 else None,
        norm_eps=1e-6,  # whatever config.json's layer_norm_eps, which is the last norm's
    )
    model.head.norm.eps = float(config["layer_norm_eps"])
    return model


_COMMON: Config = {"image_size": 224, "num_channels": 3, "qkv_bias": True}
_VIT_SIZES: Config = {**_COMMON, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_VIT: Config = {**_VIT_SIZES, "patch_size": 16, "intermediate_size": 3072, "layer_norm_eps": 1e-12}
_DINOV2: Config = {**_VIT_SIZES, "patch_size": 14, "mlp_ratio": 4, "layer_norm_eps": 1e-6, "use_swiglu_ffn": False}
_SWIN: Config = {
    **_COMMON,
    "patch_size": 4,
    "embed_dim": 96,
    "depths": (2, 2, 6, 2),
    "num_heads": (3, 6, 12, 24),
    "window_size": 7,
    "mlp_ratio": 4.0,
    "layer_norm_eps": 1e-5,
}
_CONVNEXT: Config = {
    **_COMMON,
    "depths": (3, 3, 9, 3),
    "hidden_sizes": (96, 192, 384, 768),
    "layer_norm_eps": 1e-12,
    "layer_scale_init_value": 1e-6,
}

SUPPORTED: Config = {"hidden_act": ("gelu",), "problem_type": (None, "single_label_classification")}
"""Values that the models of all families support, by option of config.json; an option may be missing."""

FAMILIES: Mapping[str, Family] = {
    "vit": Family(("ViTForImageClassification",), _vit, _VIT, fixed_size=True),
    "deit": Family(
        ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"), _vit, _VIT, fixed_size=True
    ),
    "dinov2": Family(("Dinov2ForImageClassification",), _dinov2, _DINOV2),
    "dinov2_with_registers": Family(
        ("Dinov2WithRegistersForImageClassification",), _dinov2, {**_DINOV2, "num_register_tokens": 4}
    ),
    "swin": Family(("SwinForImageClassification",), _swin, _SWIN, {"use_absolute_embeddings": (False,)}),
    "convnext": Family(
        ("ConvNextForImageClassification",), _convnext, _CONVNEXT, {"patch_size": (4, [4, 4]), "num_stages": (4,)}
    ),
}
"""By the model_type of config.json."""
