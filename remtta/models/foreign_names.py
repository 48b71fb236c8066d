"""Convert state dicts of torchvision and of Hugging Face's transformers to timm's names, by tables of patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Rules = Sequence[tuple[str, str]]
"""Patterns of names and their replacements, applied in sequence."""

TORCHVISION_PREPROCESSING = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""The preprocessing with which all of torchvision's weights were trained."""

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
    (r"^stage\.(\d+)\.(\d+)\.", r"layers.\1.blocks.\2."),
    (r"^between\.(\d+)\.", r"layers.\1.downsample."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.", "head.fc."),
)
_VISION_CONVNEXT: Rules = (
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
_VISION_RULES = {
    "encoder.layers.encoder_layer_0.ln_1.weight": _VISION_VIT,
    "features.1.0.attn.relative_position_bias_table": _VISION_SWIN,
    "features.1.0.layer_scale": _VISION_CONVNEXT,
}
"""A name unique to each family, and the family's rules."""

NOT_SMOOTHED = ("vit", "deit", "dinov2")
"""Models whose position embeddings are downsampled without antialiasing, unlike timm's."""

_UNUSED = re.compile(r"\.mask_token$|\.pooler\.dense\.|\.relative_position_index$")
"""Weights that its classifiers keep but never use."""

_BLOCK: Rules = (
    (r"\.attention\.(?:attention|self)\.(query|key|value)\.", r".attn.\1."),
    (r"\.attention\.q_proj\.", ".attn.query."),  # since version 5, within the program
    (r"\.attention\.k_proj\.", ".attn.key."),
    (r"\.attention\.v_proj\.", ".attn.value."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.(?:self|relative_position_bias)\.(relative_position_bias_table)$", r".attn.\1"),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
)
_VIT: Rules = (
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    *_BLOCK,
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.(?:weights_out|down_proj)\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
_SWIN: Rules = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    *((rf"^encoder\.layers\.{number}\.downsample\.", f"layers.{number + 1}.downsample.") for number in range(8)),
    (r"^encoder\.layers\.", "layers."),
    *_BLOCK,
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head.fc."),
)
_CONVNEXT: Rules = (
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^encoder\.stages\.(\d+)\.downsampling_layer\.", r"stages.\1.downsample."),
    (r"^encoder\.stages\.(\d+)\.layers\.", r"stages.\1.blocks."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.layernorm\.", ".norm."),
    (r"\.pwconv([12])\.", r".mlp.fc\1."),
    (r"\.layer_scale_parameter$", ".gamma"),
    (r"^layernorm\.", "head.norm."),
    (r"^classifier\.", "head.fc."),
)
_RULES = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers"), _VIT),
    "swin": _SWIN,
    "convnext": _CONVNEXT,
}
"""By the prefix of all names except the classifier's, which is also the model_type of config.json."""


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the weights under timm's names; None if not in torchvision's, whose ResNets have timm's names. Raise
    ValueError if two weights would have the same name.
    """
    rules = next((rules for name, rules in _VISION_RULES.items() if name in state), None)
    if rules is None:
        return None
    made = {name: tensor for name, tensor in state.items() if not name.endswith(".relative_position_index")}
    numbered = {_numbered(name): tensor for name, tensor in made.items()}
    return {
        name: tensor.flatten() if name.endswith(".gamma") else tensor
        for name, tensor in renamed(numbered, rules).items()
    }


def _numbered(name: str) -> str:
    """Mark odd features as stages and even ones as transitions, which timm counts with the following stage."""
    match = re.match(r"features\.([1-9]\d*)\.", name)
    if match is None:
        return name
    number = int(match[1])
    place = f"stage.{number // 2}." if number % 2 else f"between.{number // 2}."
    return place + name[match.end() :]


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the weights under timm's names, without unused ones; None if not in transformers'. Raise ValueError if two
    weights would have the same name; RuntimeError if weights that timm keeps in one tensor have incompatible shapes.
    """
    kind = next((kind for kind in _RULES if any(name.startswith(f"{kind}.embeddings.") for name in state)), None)
    if kind is None:
        return None
    read = {name.removeprefix(f"{kind}."): state[name] for name in state if not _UNUSED.search(name)}
    result = renamed(read, _RULES[kind])
    if "dist_token" in result and "head_dist.weight" not in result:
        result["reg_token"] = result.pop("dist_token")  # a token that no head reads is a register
    elif kind == "dinov2_with_registers":
        result = _class_token_placed(result)
    result = joined(result, ("attn.query", "attn.key", "attn.value"), "attn.qkv")
    return joined(result, ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc1")


def _class_token_placed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the class token's position to the token, as timm does for models whose registers have no position."""
    token, positions = state.get("cls_token"), state.get("pos_embed")
    if token is None or positions is None or positions.ndim != token.ndim or positions.shape[2:] != token.shape[2:]:
        return dict(state)  # reported as a mismatch
    return {**state, "cls_token": token.float() + positions[:, :1].float(), "pos_embed": positions[:, 1:]}


def renamed(state: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """Return the same tensors under the names that the rules give; raise ValueError if two would have the same name."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(f"{new} occurs more than once, under different names")
        result[new] = tensor
    return result


def joined(state: Mapping[str, Tensor], parts: Sequence[str], whole: str) -> dict[str, Tensor]:
    """Return the tensors with those of sibling layers concatenated, in the place of the first.

    If one of the parts, given in the order of their rows, is missing, nothing is joined. Raise RuntimeError if their
    shapes are incompatible.
    """
    first = re.compile(rf"(.*\.){re.escape(parts[0])}\.(weight|bias)")
    result = dict(state)
    for name in state:
        match = first.fullmatch(name)
        names = [f"{match[1]}{part}.{match[2]}" for part in parts] if match else []
        if match and all(each in state for each in names):
            result[f"{match[1]}{whole}.{match[2]}"] = torch.cat([result.pop(each) for each in names])
    return result
