"""Zero-shot classifiers from open_clip's models: a timm image tower with a head built from class names."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg, checkpoint_filter_fn
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from remtta.errors import CheckpointError, DownloadError, ModelError, UsageError, first_line, logging_at, needed
from remtta.models.building import reachable_or_offline
from remtta.models.checkpoints import check_fits, check_values, read_weights, without_wrappers
from remtta.models.conversion import renamed
from remtta.models.info import read_labels
from remtta.models.loading import select_device
from remtta.models.metadata import PretrainedConfig, TimmModel
from remtta.models.timm_loading import load_timm
from remtta.models.unwrapping import classifiers_of
from remtta.options import ModelOptions
from remtta.options.loaders import OnTexts
from remtta.zero_shot.classifier import ClassTexts, ZeroShotHead, classify_by_texts
from remtta.zero_shot.prompts import CLIP, DEFAULT_PROMPTS, TEMPLATES, templates_of
from remtta.zero_shot.text_tower import TextTower, Tokenizer

if TYPE_CHECKING:
    from open_clip.model import CLIP as ClipModel
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel as TimmTower
    from open_clip.transformer import VisionTransformer as ClipTransformer

_CONFIG = "open_clip_config.json"
_TAG = ("mean", "std", "interpolation", "resize_mode")
_CROP_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}

_VIT_NAMES = (
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

_log = logging.getLogger(__name__)


def load_zero_shot(
    options: ModelOptions,
    prompts: str | Sequence[str] | None,
    device: str | torch.device,
    on_texts: OnTexts | None,
) -> nn.Module:
    """Build a zero-shot classifier: a timm model with a `ZeroShotHead`.

    The name is "clip:NAME/PRETRAINED" in open_clip's terms, "clip:NAME" with a checkpoint of the whole open_clip model,
    "clip:FOLDER" of an open_clip folder, or "clip:hf-hub:..."; without labels, the classes are ImageNet's 1,000. Raise
    UsageError if the model is unknown, a label is blank, or open_clip is not installed; ModelError if its image tower
    has no equivalent in timm; DownloadError if it cannot be downloaded; CheckpointError if the checkpoint is
    unreadable, unsafe or does not fit.
    """
    name, checkpoint, labels = options.name or "", options.checkpoint, read_labels(options.labels)
    with _quiet():
        open_clip = needed("open_clip", "clip", CLIP)
    if blank := [number for number, label in enumerate(labels or ()) if not label.strip()]:
        raise UsageError(f"--labels: class {blank[0]} has a blank line instead of a name; remove it")
    clip_name, tag = _parsed(name, open_clip, checkpoint is not None)
    templates = templates_of(prompts or DEFAULT_PROMPTS)
    model, tokenizer = _built(name, clip_name, tag, open_clip, options)
    if checkpoint is not None:
        _load(model, Path(checkpoint), options.use_ema)
    if labels is None:
        _log.info("%s: no class names were given, so the classes are ImageNet's 1,000", name)
    names = tuple(labels or open_clip.IMAGENET_CLASSNAMES)
    visual = model.visual
    image = timm_tower(visual, name)
    del model.visual
    scale, bias = model.logit_scale.exp(), getattr(model, "logit_bias", None)
    text = TextTower(model.float().to(select_device(device)), tokenizer, on_texts)
    texts = ClassTexts(names, templates, text, text.texts_sha256(names, templates), image.names)
    head = ZeroShotHead(
        image.projection, text.of_classes(names, templates), scale, torch.zeros(()) if bias is None else bias, texts
    )
    image.model.set_submodule(image.head_path, head)
    by_name = prompts is None or (isinstance(prompts, str) and prompts in TEMPLATES)
    origin = {
        "labels": None if labels is None else list(labels),
        "prompts": prompts if by_name else list(templates),
    }
    config = {**_preprocessing(visual), "num_classes": len(names), "label_names": list(names), "built_from": origin}
    loaded: Any = image.model
    loaded.num_classes, loaded.pretrained_cfg = len(names), config
    return image.model


def load_image_tower(options: ModelOptions, text_embeddings: Path | str) -> nn.Module:
    """Load a timm image tower that classifies by the text embeddings in a file. Raise CheckpointError if the file is
    invalid; ModelError if the tower's embeddings have another size; and as `load_model` does.
    """
    classify = partial(classify_by_texts, name=options.name or "", path=text_embeddings)
    return load_timm(options, classify)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress open_clip's warnings, and its logging by the root logger, which it would also configure."""
    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)
    try:
        with logging_at(logging.CRITICAL + 1, root), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        root.removeHandler(silent)


def _parsed(name: str, open_clip: ModuleType, has_checkpoint: bool) -> tuple[str, str | None]:
    """Return open_clip's name of a model, and that of its weights unless included."""
    clip_name = name.removeprefix(CLIP)
    if Path(clip_name, _CONFIG).is_file():
        return f"local-dir:{clip_name}", None
    if clip_name.startswith("hf-hub:"):
        return clip_name, None
    model, found, tag = clip_name.partition("/")
    if model not in open_clip.list_models():
        raise UsageError(
            f'unknown model "{name}"; choose clip:NAME/PRETRAINED of open_clip, such as clip:ViT-B-16/openai, '
            f"or a folder with {_CONFIG}"
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    if (found and tag not in tags) or not (found or has_checkpoint):
        raise UsageError(
            f"{name} needs weights: name them (clip:NAME/WEIGHTS) or give --checkpoint; open_clip has "
            f"{', '.join(tags) or 'none'}"
        )
    return model, tag or None


def _built(
    name: str, clip_name: str, tag: str | None, open_clip: ModuleType, options: ModelOptions
) -> tuple[ClipModel, Tokenizer]:
    """Build the open_clip model and its tokenizer; with random weights if a checkpoint follows."""
    pretrained = open_clip.get_pretrained_cfg(clip_name, tag) if tag else {}
    remote = options.checkpoint is None and not clip_name.startswith("local-dir:")
    if remote:
        _log.info("loading the pretrained weights of %s (downloaded on first use)", name)
    try:
        with _quiet(), reachable_or_offline() if remote else contextlib.nullcontext():
            model = open_clip.create_model(
                clip_name,
                pretrained=tag if remote else None,
                load_weights=options.checkpoint is None,
                pretrained_text=False,
                require_pretrained=options.checkpoint is None,
                force_quick_gelu=bool(pretrained.get("quick_gelu")),
                force_image_size=options.input_size,
                force_preprocess_cfg={key: pretrained[key] for key in _TAG if key in pretrained},
            )
            text = (open_clip.get_model_config(clip_name) or {}).get("text_cfg", {})
            safe = {"trust_remote_code": False} if text.get("hf_tokenizer_name") else {}  # which the config might set
            return model, open_clip.get_tokenizer(clip_name, **safe)
    except Exception as error:  # open_clip and its download libraries share no base class
        reason = first_line(error)[:200]
        if remote and not isinstance(error, (TypeError, ImportError)):
            raise DownloadError(
                f"the weights of {name} could not be downloaded; check the network, or give --checkpoint ({reason})"
            ) from error
        raise ModelError(f"{name} could not be built: {reason}") from error


def _load(model: ClipModel, path: Path, use_ema: bool) -> None:
    """Load a checkpoint of the whole model, all or nothing."""
    from open_clip.convert import convert_state_dict
    from open_clip.model import convert_to_custom_text_state_dict, resize_pos_embed, resize_text_pos_embed

    state = without_wrappers(read_weights(path, use_ema), model, path)
    try:
        with _quiet():
            state = convert_state_dict(model, dict(state))
            if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
                state = convert_to_custom_text_state_dict(state)
            for scalar in ("logit_scale", "logit_bias"):
                if scalar in state and getattr(model, scalar, None) is not None:
                    state[scalar] = state[scalar].reshape(getattr(model, scalar).shape)
            resize_pos_embed(state, model)
            resize_text_pos_embed(state, model)
    except (KeyError, RuntimeError, ValueError, AttributeError, AssertionError) as error:
        raise CheckpointError(f"{path} holds inconsistent weights: {error}") from error
    check_values(state, model, path)
    check_fits(state, model, path)
    model.load_state_dict(state)


def _preprocessing(visual: TimmTower | ModifiedResNet | ClipTransformer) -> PretrainedConfig:
    """Return open_clip's preprocessing in the terms of timm's `pretrained_cfg`."""
    config = visual.preprocess_cfg
    size = config["size"] if isinstance(config["size"], (tuple, list)) else (config["size"],) * 2
    return {
        "input_size": (3, *size),
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
        "interpolation": config["interpolation"],
        "crop_pct": 1.0,
        "crop_mode": _CROP_MODES[config["resize_mode"]],
    }


@dataclass(frozen=True)
class ImageTower:
    """An image tower of open_clip, converted to timm."""

    model: TimmModel
    projection: nn.Module  # from pooled features to embeddings
    head_path: str  # of the module that a head replaces
    names: Mapping[str, str]  # names of the timm model's weights in open_clip's tower


def timm_tower(visual: TimmTower | ModifiedResNet | ClipTransformer, name: str) -> ImageTower:
    """Convert open_clip's image tower to a timm model; raise ModelError if timm has no equivalent."""
    if hasattr(visual, "trunk"):
        return _own_trunk(visual, name)
    convert = {"ModifiedResNet": _modified_resnet, "VisionTransformer": _vision_transformer}.get(type(visual).__name__)
    if convert is None:
        raise ModelError(f"{name} has an image tower that remtta cannot convert: {type(visual).__name__}")
    return convert(visual, name)


def _own_trunk(visual: TimmTower, name: str) -> ImageTower:
    trunk = visual.trunk
    if hasattr(visual.head, "pool"):
        raise ModelError(f"{name} pools its features outside of timm's model, which remtta does not read")
    head_path, classifier = next(iter(classifiers_of(trunk).items()), ("", None))
    if classifier is None:
        raise ModelError(f"{name} has a head that remtta cannot find in {type(trunk).__name__}")
    layers = {"": classifier, **dict(visual.head.named_children())}
    names = {key: f"trunk.{key}" for key in trunk.state_dict() if not key.startswith(f"{head_path}.")}
    for number, (layer, module) in enumerate(layers.items()):
        theirs = f"head.{layer}" if layer else f"trunk.{head_path}"
        names |= {f"{head_path}.projection.{number}.{key}": f"{theirs}.{key}" for key in module.state_dict()}
    return ImageTower(trunk, nn.Sequential(*layers.values()), head_path, names)


def _modified_resnet(visual: ModifiedResNet, name: str) -> ImageTower:
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
    resnet = ByobNet(config, num_classes=visual.output_dim, img_size=visual.image_size)
    if resnet.head.num_heads != visual.attnpool.num_heads:
        raise ModelError(f"{name} has {visual.attnpool.num_heads} heads in its pool, and timm {resnet.head.num_heads}")
    state = checkpoint_filter_fn({f"visual.{key}": tensor for key, tensor in visual.state_dict().items()}, resnet)
    resnet.load_state_dict(state)
    names = checkpoint_filter_fn({f"visual.{key}": key for key in visual.state_dict()}, resnet)
    head_path = "head.proj"
    ours = {key.replace(f"{head_path}.", f"{head_path}.projection."): theirs for key, theirs in names.items()}
    return ImageTower(resnet, resnet.head.proj, head_path, ours)


def _vision_transformer(visual: ClipTransformer, name: str) -> ImageTower:
    blocks = visual.transformer.resblocks
    first = blocks[0]
    if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
        raise ModelError(f"{name} pools its tokens by attention as CoCa does, which timm's model cannot")
    if type(first).__name__ != "ResidualAttentionBlock":
        raise ModelError(f"{name} has blocks that timm's model lacks: {type(first).__name__}")
    width = visual.class_embedding.shape[0]
    scaled = not isinstance(first.ls_1, nn.Identity)
    vit = VisionTransformer(
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
    rules = (*_VIT_NAMES, (r"^ln_post\.", final))
    state = renamed(visual.state_dict(), rules)
    names = {key: theirs for key, theirs in zip(state, visual.state_dict(), strict=True) if key != "proj"}
    projection = state.pop("proj")
    state["cls_token"], state["pos_embed"] = state["cls_token"].view(1, 1, -1), state["pos_embed"].unsqueeze(0)
    if vit.patch_embed.proj.bias is not None:
        state["patch_embed.proj.bias"] = vit.patch_embed.proj.bias.detach().zero_()
    vit.load_state_dict(state)
    linear = nn.Linear(projection.shape[0], projection.shape[1], bias=False)
    linear.load_state_dict({"weight": projection.T})
    return ImageTower(vit, linear, "head", {**names, "head.projection.weight": "proj"})
