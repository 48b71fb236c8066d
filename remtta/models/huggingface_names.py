"""State dicts of image classifiers of Hugging Face's transformers in timm's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from remtta.models.renames import Rules, joined, renamed

NOT_SMOOTHED = ("vit", "deit", "dinov2")
"""Models whose positions are resampled to fewer without smoothing, unlike timm's."""

_UNUSED = re.compile(r"\.mask_token$|\.pooler\.dense\.|\.relative_position_index$")
"""What its classifiers keep and never read."""

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
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": _VIT,
    "dinov2_with_registers": _VIT,
    "swin": _SWIN,
    "convnext": _CONVNEXT,
}
"""By the prefix of all names but the classifier's, which is the model_type of config.json, too."""


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The same weights in timm's names, but those that no classifier reads; None if they are not in transformers'.

    Raises:
        ValueError: If two weights would have the same name.
        RuntimeError: If weights that timm has in one tensor do not fit one another.
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
    """With the class token's position added to it, as timm has it where registers have none."""
    token, positions = state.get("cls_token"), state.get("pos_embed")
    if token is None or positions is None or positions.ndim != token.ndim or positions.shape[2:] != token.shape[2:]:
        return dict(state)  # reported as a mismatch
    return {**state, "cls_token": token.float() + positions[:, :1].float(), "pos_embed": positions[:, 1:]}
