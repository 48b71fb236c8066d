"""Tiny random models of every family in timm: for 64 x 64 pixels, but for the transformers."""

from typing import Any

import timm
import torch
from timm.layers import HybridEmbed
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer_hybrid import ConvStem
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


SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
STEM: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}


def conv_stem(**kwargs: Any) -> nn.Module:
    """As in MobileCLIP: convolutions with batch norms, and no projection."""
    stem = ConvStem(channels=(12, 24, 48), stride=(4, 2, 2), kernel_size=(4, 2, 2), padding=0)
    embed: nn.Module = HybridEmbed(stem, proj=False, **kwargs)
    return embed


TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "average pool": ("vit_base_patch16_gap_224", SMALL),
    "class token, average pool": ("vit_tiny_patch16_224", {**SMALL, "global_pool": "avg"}),
    "largest values": ("vit_base_patch16_gap_224", {**SMALL, "global_pool": "max"}),
    "attention pool": ("vit_base_patch16_siglip_224", SMALL),
    "registers, attention pool": ("vit_so150m_patch16_reg4_map_256", {**SMALL, "mlp_ratio": 2}),
    "pool of all tokens": ("vit_so150m_patch16_reg4_map_256", {**SMALL, "mlp_ratio": 2, "pool_include_prefix": True}),
    "refined pool": ("vit_base_patch16_gap_224", {**SMALL, "global_pool": "prr"}),
    "DINOv2 with registers": ("vit_base_patch14_reg4_dinov2", SMALL),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "gated layers": ("vit_tiny_patch16_224", {**SMALL, "qk_norm": True, "init_values": 0.3, "scale_attn_norm": True}),
    "norm before": ("vit_tiny_patch16_224", {**SMALL, "pre_norm": True, "no_embed_class": True, "qkv_bias": False}),
    "post-norm": ("vit_tiny_patch16_224", {**SMALL, "block_fn": ResPostBlock}),
    "parallel": ("vit_tiny_patch16_224", {**SMALL, "block_fn": ParallelScalingBlock}),
    "parallel, no biases": (
        "vit_tiny_patch16_224",
        {**SMALL, "block_fn": ParallelScalingBlock, "qkv_bias": False, "qk_norm": True},
    ),
    "parallel branches": ("vit_tiny_patch16_224", {**SMALL, "block_fn": ParallelThingsBlock}),
    "hybrid": ("vit_tiny_r_s16_p8_224", {**STEM, "patch_size": 2}),
    "hybrid with batch norms": ("vit_tiny_patch16_224", {**STEM, "patch_size": 1, "embed_layer": conv_stem}),
    "any size": ("vit_tiny_patch16_224", {**SMALL, "dynamic_img_size": True}),
    "EVA": ("eva_giant_patch14_224", {**SMALL, "mlp_ratio": 2}),
    "post-norm EVA": ("eva02_enormous_patch14_clip_224", {**SMALL, "mlp_ratio": 2}),
    "EVA-02": ("eva02_small_patch14_336", SMALL),
    "EVA-02, apart": ("eva02_base_patch14_448", {**SMALL, "qk_norm": True}),
    "DINOv3": ("vit_small_patch16_dinov3", SMALL),
    "DINOv3 with biases": ("vit_small_patch16_dinov3_qkvb", SMALL),
    "rotary": ("vit_small_patch16_rope_224", SMALL),
    "rotary by block": ("vit_small_patch16_rope_mixed_224", SMALL),
    "Perception Encoder": ("vit_pe_core_small_patch16_384", SMALL),
    "pool alone": ("vit_pe_core_gigantic_patch14_448", {**SMALL, "attn_pool_num_heads": 3, "mlp_ratio": 2}),
    "pool and registers": (
        "vit_pe_core_gigantic_patch14_448",
        {**SMALL, "attn_pool_num_heads": 3, "mlp_ratio": 2, "num_reg_tokens": 2},
    ),
    "shared keys": ("vit_small_patch16_rope_224", {**SMALL, "num_heads": 4, "num_kv_heads": 2, "qkv_fused": False}),
    "BEiT": ("beit_base_patch16_224", SMALL),
    "BEiT, one bias": ("beit_base_patch16_224", {**SMALL, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    "BEiT, both": ("beit_base_patch16_224", {**SMALL, "use_shared_rel_pos_bias": True, "use_abs_pos_emb": True}),
    "BEiT, class token": ("beit_base_patch16_224", {**SMALL, "global_pool": "token", "init_values": None}),
}


@copied
def transformer(name: str) -> Any:
    """A random model of a family, in every weight, so that a bias or a position that is left out shows."""
    torch.manual_seed(0)
    architecture, changes = TRANSFORMERS[name]
    model = timm.create_model(architecture, pretrained=False, num_classes=NUM_CLASSES, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *image_size(name))}
    return model.eval()


def image_size(name: str) -> tuple[int, int]:
    side: int = TRANSFORMERS[name][1]["img_size"]
    return side, side


def images_for(name: str, count: int = 3, seed: int = 1) -> Tensor:
    return random_images(count, seed, size=image_size(name)[0])
