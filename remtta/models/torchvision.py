"""State dicts of torchvision's ViT, Swin and ConvNeXt in timm's names; its ResNets have them already."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from remtta.models.renames import Rules, renamed

TORCHVISION_PREPROCESSING = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""What all of torchvision's weights were trained with."""

_VIT: Rules = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(?:0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(?:3|linear_2)\.", ".mlp.fc2."),
    (r"^heads\.head\.", "head."),
)
_SWIN: Rules = (
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^stage\.(\d+)\.(\d+)\.", r"layers.\1.blocks.\2."),
    (r"^between\.(\d+)\.", r"layers.\1.downsample."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.", "head.fc."),
)
_CONVNEXT: Rules = (
    (r"^features\.0\.", "stem."),
    (r"^stage\.(\d+)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"^between\.(\d+)\.", r"stages.\1.downsample."),
    (r"\.block\.0\.", ".conv_dw."),
    (r"\.block\.2\.", ".norm."),
    (r"\.block\.3\.", ".mlp.fc1."),
    (r"\.block\.5\.", ".mlp.fc2."),
    (r"\.layer_scale$", ".gamma"),
    (r"^classifier\.0\.", "head.norm."),
    (r"^classifier\.2\.", "head.fc."),
)
_RULES = {
    "encoder.layers.encoder_layer_0.ln_1.weight": _VIT,
    "features.1.0.attn.relative_position_bias_table": _SWIN,
    "features.1.0.layer_scale": _CONVNEXT,
}
"""A name that no other family has, and the family's rules."""


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The same weights in timm's names; None if they are not in torchvision's, or if these are the same.

    Raises:
        ValueError: If two weights would have the same name.
    """
    rules = next((rules for name, rules in _RULES.items() if name in state), None)
    if rules is None:
        return None
    made = {name: tensor for name, tensor in state.items() if not name.endswith(".relative_position_index")}
    numbered = {_numbered(name): tensor for name, tensor in made.items()}
    return {
        name: tensor.flatten() if name.endswith(".gamma") else tensor
        for name, tensor in renamed(numbered, rules).items()
    }


def _numbered(name: str) -> str:
    """Odd features are stages, even ones what lies between them, which timm counts with the stage that follows."""
    match = re.match(r"features\.([1-9]\d*)\.", name)
    if match is None:
        return name
    number = int(match[1])
    place = f"stage.{number // 2}." if number % 2 else f"between.{number // 2}."
    return place + name[match.end() :]
