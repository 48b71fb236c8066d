"""Rename weights of torchvision and of Hugging Face's transformers to timm's names, by tables of patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Library = Literal["torchvision", "transformers"]
Rules = Sequence[tuple[str, str]]
"""Patterns of names and their replacements, applied in sequence."""

TORCHVISION_PREPROCESSING = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""The preprocessing with which all of torchvision's weights were trained."""

NOT_SMOOTHED = ("vit", "deit", "dinov2")
"""Models whose position embeddings are downsampled without antialiasing, unlike timm's."""

COMPUTED = re.compile(r"\.(relative_position_index|relative_coords_table|attn_mask)$")
"""Buffers of earlier Swins, which timm's compute."""

_MAX_STAGES = 8
_UNUSED = re.compile(r"\.mask_token$|\.pooler\.dense\.")
"""Weights that classifiers save but never use."""


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
    *((rf"^encoder\.layers\.{n}\.downsample\.", f"layers.{n + 1}.downsample.") for n in range(_MAX_STAGES)),
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
_EARLIER_SWIN: Rules = (  # Microsoft's, and timm's before 0.9: a stage ends with the downsampling for the next
    *((rf"^layers\.{n}\.downsample\.", f"layers.{n + 1}.downsample.") for n in reversed(range(_MAX_STAGES))),
    (r"^head\.(?!fc\.)", "head.fc."),
)
_TORCHVISION = {
    "encoder.layers.encoder_layer_0.ln_1.weight": _VISION_VIT,
    "features.1.0.attn.relative_position_bias_table": _VISION_SWIN,
    "features.1.0.layer_scale": _VISION_CONVNEXT,
}
"""The rules of each family, by a name that only this family has. ResNets have timm's names."""
_TRANSFORMERS = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers"), _VIT),
    "swin": _SWIN,
    "convnext": _CONVNEXT,
}
"""By the prefix of all names except the classifier's, which is also the model_type of config.json."""

_MARKS = "|".join([*map(re.escape, _TORCHVISION), *(rf"{prefix}\.embeddings\." for prefix in _TRANSFORMERS)])
WITH_PREFIX = re.compile(rf"(.+\.)(?:{_MARKS})")
"""Matches a name of torchvision or transformers behind a prefix, its first group."""


def to_timm_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Library | None]:
    """Return the weights under timm's names, without unused ones, and the library whose names they had, if any.

    Raise ValueError if two weights would have the same name; RuntimeError if weights that timm keeps in one tensor have
    incompatible shapes.
    """
    used = {name: tensor for name, tensor in state.items() if not _UNUSED.search(name)}
    for marker, rules in _TORCHVISION.items():
        if marker in state:
            made = renamed(used, rules)
            return {name: w.flatten() if name.endswith(".gamma") else w for name, w in made.items()}, "torchvision"
    for prefix, rules in _TRANSFORMERS.items():
        if any(name.startswith(f"{prefix}.embeddings.") for name in state):
            made = renamed({name.removeprefix(f"{prefix}."): tensor for name, tensor in used.items()}, rules)
            return _with_timms_tensors(made, prefix), "transformers"
    return renamed(state, _EARLIER_SWIN if "layers.0.downsample.reduction.weight" in state else ()), None


def renamed(state: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """Return the tensors under the names that the rules give; raise ValueError if two would have the same name."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(f"{new} occurs more than once, under different names")
        result[new] = tensor
    return result


def _with_timms_tensors(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return transformers' weights with the tokens and the joined layers of timm's models."""
    if "dist_token" in state and "head_dist.weight" not in state:
        state["reg_token"] = state.pop("dist_token")  # a token that no head reads is a register
    token, positions = state.get("cls_token"), state.get("pos_embed")
    if (
        prefix == "dinov2_with_registers"  # registers have no position: timm adds the class token's to the token itself
        and token is not None
        and positions is not None
        and (positions.ndim, positions.shape[2:]) == (token.ndim, token.shape[2:])  # else reported as a mismatch
    ):
        state |= {"cls_token": token.float() + positions[:, :1].float(), "pos_embed": positions[:, 1:]}
    state = _joined(state, ("attn.query", "attn.key", "attn.value"), "attn.qkv")
    return _joined(state, ("mlp.gate_proj", "mlp.up_proj"), "mlp.fc1")


def _joined(state: Mapping[str, Tensor], parts: Sequence[str], whole: str) -> dict[str, Tensor]:
    """Return the tensors with those of the layers `parts` of each block concatenated, if the block has all of them."""
    result = dict(state)
    for name in state:
        block, _, suffix = name.rpartition(f".{parts[0]}.")
        names = [f"{block}.{part}.{suffix}" for part in parts]
        if block and all(part in state for part in names):
            result[f"{block}.{whole}.{suffix}"] = torch.cat([result.pop(part) for part in names])
    return result
