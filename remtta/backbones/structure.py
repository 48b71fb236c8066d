"""Find the blocks, patch tokens and last feature map of any image classifier."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from remtta.backbones.attention import AttentionRows, gather_patches
from remtta.backbones.norms import is_norm
from remtta.models.metadata import ModelWithMetadata, Shape, Size
from remtta.models.unwrapping import UnwrappedModel, floating_weight

_PATCH = 16  # pixels
_MIN_PATCHES = 7  # on the shorter side of a small image
_MAX_PREFIX = 8  # class, register and other tokens before the patches
_MAIN = 0.8  # a part with at least this share of a level's norms is looked into
_TOLERANCE = 1e-4  # of the largest logit

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Structure:
    """The parts of a classifier that adaptation and masking refer to."""

    blocks: Sequence[str]  # module paths of its blocks, in the order of the forward pass
    stem: Sequence[str]  # module paths of the norms before the first block
    grid: Size  # rows and columns of patches in an image of the model's own size
    num_prefix_tokens: int | None = None  # tokens before the patch tokens; None if images are masked, not tokens
    attends: bool = False  # whether the first token attends to the patch tokens by a softmax
    feature_map: str | None = None  # module path of the layer that returns the last feature map, if there is one
    channel_axis: int = 1  # of this map


def infer_structure(model: UnwrappedModel, blocks: Sequence[str], stem: Sequence[str]) -> Structure:
    """Find the blocks and the norms before them, unless their module paths are given; then what can be masked, and by
    which scores.
    """
    trace, size = model.trace, model.trace.inner_size
    norms = [path for path in trace.shapes if is_norm(model.module.get_submodule(path))]
    if not blocks:
        blocks = _blocks(norms, trace.head or "")
        first = next((number for number, path in enumerate(norms) if blocks and _is_in(path, blocks[0])), 0)
        stem = [path for path in norms[:first] if not any(_is_in(path, block) for block in blocks)]
    patch_size = model.wrapped.patch_size if isinstance(model.wrapped, ModelWithMetadata) else None
    tokens = _tokens(model, blocks)
    if tokens is not None:
        num_prefix, grid = tokens
        if patch_size in (None, tuple(side // count for side, count in zip(size, grid, strict=True))):
            with torch.no_grad(), AttentionRows(num_prefix + math.prod(grid)) as attention:
                model.logits(floating_weight(model.module).new_zeros(1, 3, *size))
            return Structure(blocks, stem, grid, num_prefix, attends=num_prefix > 0 and bool(attention.rows))
    path, axis = _last_map(trace.shapes, blocks, norms, size)
    if patch_size is None and path is not None:
        grid = positions(trace.shapes[path][1], axis)
    else:
        height, width = patch_size or (min(_PATCH, max(1, min(size) // _MIN_PATCHES)),) * 2
        grid = math.ceil(size[0] / height), math.ceil(size[1] / width)
    return Structure(blocks, stem, grid, feature_map=path, channel_axis=axis)


def logits_of_kept(model: UnwrappedModel, first: nn.Module, images: Tensor, kept: Tensor, prefix: int) -> Tensor:
    """Return the logits (B, C) if only the patch tokens at the indices `kept` (B, K) enter the first block."""

    def keep(block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return gather_patches(inputs[0], kept, prefix), *inputs[1:]

    with first.register_forward_pre_hook(keep):
        return model.logits(images)


def with_input(model: UnwrappedModel, layer: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (B, C), and a layer's last input."""
    entered: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda layer, inputs: entered.append(inputs[0])):
        return model.logits(images), entered[-1]


def _blocks(norms: Sequence[str], head: str, level: str = "") -> list[str]:
    """Return the paths of the modules that hold the norms, at the first level where none holds nearly all of them.

    The module with the head does not count, unless everything is in it. Without such modules, return the norms.
    """
    parts: dict[str, list[str]] = {}
    for path in norms:
        name, _, deeper = path.removeprefix(level).partition(".")
        if deeper:
            parts.setdefault(level + name, []).append(path)
    inner = {part: paths for part, paths in parts.items() if not _is_in(head, part)} or parts
    most = _MAIN * sum(map(len, inner.values()))
    for part, paths in inner.items():
        if len(paths) >= most:
            return _blocks(paths, head, f"{part}.")
    return list(inner or norms)


def _is_in(path: str, part: str) -> bool:
    return path == part or path.startswith(f"{part}.")


@torch.no_grad()
def _tokens(model: UnwrappedModel, blocks: Sequence[str]) -> tuple[int, Size] | None:
    """Return the number of prefix tokens, and the rows and columns of patches; None if tokens cannot be masked.

    They can if blocks pass on tokens (B, P + N, D), the first and last patch token change with the corners of the
    image, and the model runs with fewer tokens.
    """
    layers, size = model.trace.shapes, model.trace.inner_size
    shapes = {shape for path in blocks for shape in layers.get(path, ((), ()))}
    weight = floating_weight(model.module)
    if len(shapes) != 1 or len(shape := shapes.pop()) != 3 or weight.is_meta:
        return None
    first = model.module.get_submodule(blocks[0])
    for prefix in range(min(_MAX_PREFIX + 1, shape[1])):
        if (grid := _grid_of(shape[1] - prefix, size)) is not None:
            images = _with_corners(size, grid).to(weight)
            plain, tokens = with_input(model, first, images)
            moved = ((tokens - tokens[:1]).abs() > _TOLERANCE).any(-1)
            if moved.sum(1).tolist() == [0, 1, 1] and moved[1, prefix] and moved[2, -1]:
                fewer = _runs_with_fewer(model, first, images, plain, prefix, math.prod(grid))
                return (prefix, grid) if fewer else None
    return None


def _with_corners(size: Size, grid: Size) -> Tensor:
    """Return an image, a copy with a changed first patch, and one with a changed last patch: (3, 3, H, W)."""
    height, width = (side // count for side, count in zip(size, grid, strict=True))
    images = torch.linspace(0, 1, 3 * size[0] * size[1]).view(1, 3, *size).repeat(3, 1, 1, 1)
    images[1, :, :height, :width] += 1
    images[2, :, -height:, -width:] += 1
    return images


@torch.no_grad()
def _runs_with_fewer(
    model: UnwrappedModel, first: nn.Module, images: Tensor, plain: Tensor, prefix: int, num_patches: int
) -> bool:
    """Return True if the model runs on some of the patch tokens, and all of them give the plain logits in any order:
    in the blocks, a token's place in the sequence must not count as its position.
    """
    kept = torch.arange(num_patches, device=images.device).flip(0).expand(len(images), -1)
    try:
        whole = logits_of_kept(model, first, images, kept, prefix)
        part = logits_of_kept(model, first, images, kept[:, ::2], prefix)
    except Exception as error:  # whatever a model raises that knows how many tokens there are
        _log.debug("%s takes all patches or none: %s", type(model.module).__name__, error)
        return False
    same = torch.allclose(whole, plain, atol=_TOLERANCE * max(1.0, float(plain.abs().max())))
    return same and bool(torch.isfinite(part).all())


def _grid_of(count: int, size: Size) -> Size | None:
    """Return the rows and columns of `count` square patches that fill an image, or None."""
    rows = round(math.sqrt(count * size[0] / size[1]))
    if rows < 2 or count % rows or size[0] % rows or size[1] % (count // rows):
        return None
    return rows, count // rows


def _last_map(
    shapes: Mapping[str, tuple[Shape, Shape]], blocks: Sequence[str], norms: Sequence[str], size: Size
) -> tuple[str | None, int]:
    """Return the path of the layer after all blocks that returns the last feature map, and its channel axis."""
    last_norm = next((path for path in reversed(norms) if blocks and _is_in(path, blocks[-1])), "")
    for path in reversed(list(shapes)):
        shape = shapes[path][1]
        if len(shape) == 4:
            wide = shape[1] * size[1] == shape[2] * size[0] and shape[2] * size[1] != shape[3] * size[0]
            axis = -1 if wide else 1
            if min(positions(shape, axis)) > 1:
                return path, axis
        if path in (*blocks[-1:], last_norm):
            break
    return None, 1


def positions(shape: Sequence[int], axis: int) -> Size:
    """Return the rows and columns of a map of this shape, whose channels are on this axis."""
    return (shape[1], shape[2]) if axis == -1 else (shape[2], shape[3])
