"""Rename weights of torchvision to timm's names, by tables of patterns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from remtta.models.conversion import Rules, renamed

_MAX_STAGES = 8


def _numbered_stages(stage: str, downsampling: str) -> Rules:
    """Return the rules for torchvision's `features`: odd ones are stages, even ones downsample for the next stage."""
    stages = [(rf"^features\.{2 * n + 1}\.(\d+)\.", rf"{stage}.{n}.blocks.\1.") for n in range(_MAX_STAGES)]
    return [*stages, *((rf"^features\.{2 * n}\.", f"{stage}.{n}.{downsampling}.") for n in range(1, _MAX_STAGES))]


_VISION_VIT: Rules = (
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
_VISION_SWIN: Rules = (
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    *_numbered_stages("layers", "downsample"),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.", "head.fc."),
)
_VISION_CONVNEXT: Rules = (
    (r"^features\.0\.", "stem."),
    *_numbered_stages("stages", "downsample"),
    (r"\.block\.0\.", ".conv_dw."),
    (r"\.block\.2\.", ".norm."),
    (r"\.block\.3\.", ".mlp.fc1."),
    (r"\.block\.5\.", ".mlp.fc2."),
    (r"\.layer_scale$", ".gamma"),
    (r"^classifier\.0\.", "head.norm."),
    (r"^classifier\.2\.", "head.fc."),
)
_TORCHVISION = {
    "encoder.layers.encoder_layer_0.ln_1.weight": _VISION_VIT,
    "features.1.0.attn.relative_position_bias_table": _VISION_SWIN,
    "features.1.0.layer_scale": _VISION_CONVNEXT,
}
"""The rules of each family, by a name that only this family has. ResNets have timm's names."""


def to_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return torchvision's weights under timm's names; raise ValueError if two would have one."""
    made = renamed(state, next(_TORCHVISION[marker] for marker in _TORCHVISION if marker in state))
    return {name: tensor.flatten() if name.endswith(".gamma") else tensor for name, tensor in made.items()}
