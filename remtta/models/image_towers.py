"""Convert open_clip's image towers to timm models, so that the same backbones serve both."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg, checkpoint_filter_fn
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from remtta.errors import ModelError
from remtta.models.heads import classifiers_of
from remtta.models.weight_names import renamed

_NAMES = (
    (r"^conv1\.", "patch_embed.proj."),
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^ln_pre\.", "norm_pre."),
    (r"^transformer\.resblocks\.", "blocks."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.ls_([12])\.", r".ls\1."),
)


@dataclass(frozen=True)
class ImageTower:
    """An image tower of open_clip, converted to timm."""

    model: nn.Module
    projection: nn.Module  # from pooled features to embeddings
    place: str  # path of the module that a head replaces
    names: Mapping[str, str]  # names of the timm model's weights in open_clip's tower


def timm_tower(visual: Any, name: str) -> ImageTower:
    """Convert open_clip's image tower to a timm model; raise ModelError if timm has no equivalent."""
    kind = type(visual).__name__
    if hasattr(visual, "trunk"):
        return _own_trunk(visual, name)
    if kind == "ModifiedResNet":
        return _modified_resnet(visual, name)
    if kind != "VisionTransformer":
        raise ModelError(f"{name} has an image tower that remtta cannot convert: {kind}")
    return _vision_transformer(visual, name)


def _own_trunk(visual: Any, name: str) -> ImageTower:
    trunk = visual.trunk
    if hasattr(visual.head, "pool"):
        raise ModelError(f"{name} pools its features outside of timm's model, which remtta does not read")
    place, classifier = next(iter(classifiers_of(trunk).items()), ("", None))
    if classifier is None:
        raise ModelError(f"{name} has a head that remtta cannot find in {type(trunk).__name__}")
    layers = {"": classifier, **dict(visual.head.named_children())}
    names = {each: f"trunk.{each}" for each in trunk.state_dict() if not each.startswith(f"{place}.")}
    for number, (layer, module) in enumerate(layers.items()):
        theirs = f"head.{layer}" if layer else f"trunk.{place}"
        names |= {f"{place}.projection.{number}.{each}": f"{theirs}.{each}" for each in module.state_dict()}
    return ImageTower(trunk, nn.Sequential(*layers.values()), place, names)


def _modified_resnet(visual: Any, name: str) -> ImageTower:
    """Convert OpenAI's ResNets: three convolutions in the stem, average pooling for strides, an attention pool."""
    width, stages = visual.conv3.out_channels, (visual.layer1, visual.layer2, visual.layer3, visual.layer4)
    blocks = [
        ByoBlockCfg(type="bottle", d=len(stage), c=4 * width * 2**number, s=2 if number else 1, br=0.25)
        for number, stage in enumerate(stages)
    ]
    config = ByoModelCfg(
        blocks=tuple(blocks),
        stem_chs=(width // 2, width // 2, width),
        stem_type="",
        stem_pool="avg2",
        downsample="avg",
        aa_layer="avg",
        head_type="attn_abs",
    )
    resnet: Any = ByobNet(config, num_classes=visual.output_dim, img_size=visual.image_size)
    if resnet.head.num_heads != visual.attnpool.num_heads:
        raise ModelError(f"{name} has {visual.attnpool.num_heads} heads in its pool, and timm {resnet.head.num_heads}")
    state = checkpoint_filter_fn({f"visual.{each}": tensor for each, tensor in visual.state_dict().items()}, resnet)
    resnet.load_state_dict(state)
    names = checkpoint_filter_fn({f"visual.{each}": each for each in visual.state_dict()}, resnet)
    place = "head.proj"
    ours = {each.replace(f"{place}.", f"{place}.projection."): theirs for each, theirs in names.items()}
    return ImageTower(resnet, resnet.head.proj, place, ours)


def _vision_transformer(visual: Any, name: str) -> ImageTower:
    blocks = visual.transformer.resblocks
    first = blocks[0]
    if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
        raise ModelError(f"{name} pools its tokens by attention as CoCa does, which timm's model cannot")
    if type(first).__name__ != "ResidualAttentionBlock":
        raise ModelError(f"{name} has blocks that timm's model lacks: {type(first).__name__}")
    width = visual.class_embedding.shape[0]
    scaled = not isinstance(first.ls_1, nn.Identity)
    vit: Any = VisionTransformer(
        img_size=visual.image_size,
        patch_size=visual.patch_size,
        embed_dim=width,
        depth=len(blocks),
        num_heads=first.attn.num_heads,
        mlp_ratio=first.mlp.c_fc.out_features / width,
        init_values=1.0 if scaled else None,
        global_pool="token" if visual.pool_type == "tok" else "avg",
        fc_norm=bool(visual.final_ln_after_pool),
        pre_norm=not isinstance(visual.ln_pre, nn.Identity),
        norm_layer=partial(nn.LayerNorm, eps=visual.ln_post.eps),
        act_layer=partial(deepcopy, first.mlp.gelu),
        num_classes=0,
    )
    final = "fc_norm." if visual.final_ln_after_pool else "norm."
    rules = (*_NAMES, (r"^ln_post\.", final))
    state = renamed(visual.state_dict(), rules)
    names = {each: theirs for each, theirs in zip(state, visual.state_dict(), strict=True) if each != "proj"}
    projection = state.pop("proj")
    state["cls_token"], state["pos_embed"] = state["cls_token"].view(1, 1, -1), state["pos_embed"].unsqueeze(0)
    if vit.patch_embed.proj.bias is not None:
        state["patch_embed.proj.bias"] = vit.patch_embed.proj.bias.detach().zero_()
    vit.load_state_dict(state)
    linear = nn.Linear(projection.shape[0], projection.shape[1], bias=False)
    linear.load_state_dict({"weight": projection.T})
    return ImageTower(vit, linear, "head", {**names, "head.projection.weight": "proj"})
