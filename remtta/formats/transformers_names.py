"""Rename weights of Hugging Face's transformers to timm's names, by tables of patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from remtta.models.conversion import Rules, renamed

_MAX_STAGES = 8
_UNUSED = re.compile(r"\.mask_token$|\.pooler\.dense\.")
"""Weights that classifiers save but never use."""

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
_TRANSFORMERS = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers"), _VIT),
    "swin": _SWIN,
    "convnext": _CONVNEXT,
}
"""By the prefix of all names except the classifier's, which is also the model_type of config.json."""


def to_timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' weights under timm's names, without unused ones; others as they are.

    Raise ValueError if two weights would have the same name; RuntimeError if weights that timm keeps in one tensor have
    incompatible shapes.
    """
    for prefix, rules in _TRANSFORMERS.items():
        if any(name.startswith(f"{prefix}.embeddings.") for name in state):
            used = {name.removeprefix(f"{prefix}."): w for name, w in state.items() if not _UNUSED.search(name)}
            return _with_timms_tensors(renamed(used, rules), prefix)
    return dict(state)


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
