"""Any image classifier; a trace of one image decides whether tokens or pixels are masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.attention import AttentionRows
from remtta.backbones.backbone import Backbone, BatchNorm, Scores
from remtta.backbones.batchnorm import batch_norms
from remtta.backbones.structure import Layout, Places, infer_structure, logits_of_kept, with_input
from remtta.errors import ModelError
from remtta.models.unwrapping import UnwrappedModel

_HELD = 4  # tensors of the largest size that a layer holds at a time

_LAYOUTS: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


class AnyClassifier(Backbone):
    """A classifier with its own forward pass; hooks drop patch tokens, or patches of the image are set to zero.

    Its blocks and its stem are found, unless their places are given.
    """

    def __init__(self, inside: UnwrappedModel, places: Places | None = None) -> None:
        self.module, self._inside, self._places = inside.module, inside, places

    @property
    def _layout(self) -> Layout:
        if self._inside.given not in _LAYOUTS:
            _LAYOUTS[self._inside.given] = infer_structure(self._inside, self._places)
        return _LAYOUTS[self._inside.given]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self.module.get_submodule(place) for place in self._layout.blocks]

    def parts(self, number: int) -> Sequence[nn.Module]:
        stem = [self.module.get_submodule(place) for place in self._layout.stem] if number == 0 else []
        return [*stem, self.blocks[number]]

    @property
    def channel_axis(self) -> int:
        return self._layout.channel_axis if self._layout.prefix is None else -1

    @property
    def batch_norms(self) -> Mapping[str, BatchNorm]:
        return batch_norms(self.module)

    @property
    def num_patches(self) -> int:
        return math.prod(self._layout.grid)

    @property
    def patch_size(self) -> tuple[int, int]:
        (height, width), (rows, columns) = self._inside.trace.inner_size, self._layout.grid
        return math.ceil(height / rows), math.ceil(width / columns)

    @property
    def num_tokens(self) -> int:
        """Tokens, or positions of the feature map, after the first block."""
        shape = self._inside.trace.calls.get(self._layout.blocks[0], ((), ()))[1] if self._layout.blocks else ()
        return max(self.num_patches, math.prod(shape[1:]) // shape[self.channel_axis] if len(shape) > 2 else 0)

    @property
    def num_passing(self) -> int:
        return _HELD * max(math.prod(left) for _, left in self._inside.trace.calls.values())

    @property
    def input_size(self) -> tuple[int, int] | None:
        return None if self._layout.prefix is None else self._inside.trace.inner_size

    @property
    def num_classes(self) -> int:
        return super().num_classes if self._inside.is_timm else self._inside.trace.num_classes

    @property
    def classifiers(self) -> Mapping[str, nn.Module]:
        head = self._inside.trace.head
        return super().classifiers if head is None else {head: self.module.get_submodule(head)}

    def embed(self, images: Tensor) -> Tensor:
        return images

    def count_patches(self, embedded: Tensor) -> int:
        return math.prod(self._grid(embedded))

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is None:
            return self.forward(embedded)
        prefix = self._layout.prefix
        if prefix is None:
            return self.forward(paint_out(embedded, kept, self._grid(embedded)))
        return logits_of_kept(self._inside, self.blocks[0], embedded, kept, prefix)

    def forward(self, images: Tensor) -> Tensor:
        return self._inside.logits(images)

    def check_scores(self, kind: Scores) -> None:
        layout = self._layout
        has = {"features": layout.map is not None or layout.prefix is not None, "gradcam": layout.map is not None}
        if not {"attention": layout.attends, **has}[kind]:
            others = [each for each, there in has.items() if there]
            raise ModelError(
                f"{type(self.module).__name__} has no patch scores for --set masking={kind}; "
                f"leave it out, or choose {' or '.join([*others, 'random'])}"
            )

    def classify_with_scores(self, embedded: Tensor, kind: Scores) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and a score (B, N) of each patch.

        "attention" is that of the first token, "features" the L2 norm of the tokens entering the last block or of the
        last map's features, and "gradcam" the contribution of that map's features to the predicted class.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, "Experiments on Different Network Architectures".
        """
        layout = self._layout
        if kind == "attention":
            assert layout.prefix is not None
            with AttentionRows(layout.prefix + self.num_patches) as noted:
                logits = self.forward(embedded)
            return logits, noted.rows[-1][:, layout.prefix :]
        if kind == "gradcam":
            return self._with_gradcam(embedded)
        if layout.map is None:
            logits, tokens = with_input(self._inside, self.blocks[-1], embedded)
            return logits, tokens[:, layout.prefix :].detach().float().norm(dim=-1)
        logits, features = self._with_map(embedded)
        return logits, self._on_patches(features.detach().float().norm(dim=layout.channel_axis), embedded)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        for head in self.classifiers.values():
            logits, features = with_input(self._inside, head, images)
            return logits, features.flatten(1)
        raise ModelError(f"no linear layer makes the logits of {type(self.module).__name__}, so it has no features")

    @torch.inference_mode(False)  # the caller may be inside one
    def _with_gradcam(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and Grad-CAM (B, N) of the predicted class over the last feature map.

        Each channel is weighted by the gradient of the class's logit, averaged over all positions. Grad-CAM then clips
        negative values; that is left out, since it only creates ties in the order.

        Source: Grad-CAM, arXiv:1610.02391, Eq. 1 and 2.
        """
        wanted, axis = torch.is_grad_enabled(), self.channel_axis
        with torch.enable_grad():
            logits, features = self._with_map(images.clone() if images.is_inference() else images)
            (gradient,) = torch.autograd.grad(logits.float().amax(-1).sum(), features, retain_graph=wanted)
        weights = gradient.movedim(axis, -1).flatten(1, 2).float().mean(1)[:, None, None]  # (B, 1, 1, D)
        scores = (weights * features.detach().movedim(axis, -1).float()).sum(-1)
        return logits if wanted else logits.detach(), self._on_patches(scores, images)

    def _with_map(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and the last feature map; with gradients on, logits can be differentiated by it."""
        maps: list[Tensor] = []

        def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            needs = torch.is_grad_enabled() and not output.requires_grad
            maps.append(output.requires_grad_() if needs else output)

        assert self._layout.map is not None
        with self.module.get_submodule(self._layout.map).register_forward_hook(note):
            return self.forward(images), maps[-1]

    def _on_patches(self, scores: Tensor, images: Tensor) -> Tensor:
        """Resize scores (B, rows, columns) of a feature map to the image's patches: (B, N)."""
        grid = self._grid(images)
        if scores.shape[1:] != grid:
            scores = F.interpolate(scores.unsqueeze(1), grid, mode="bilinear", align_corners=False).squeeze(1)
        return scores.flatten(1)

    def _grid(self, images: Tensor) -> tuple[int, int]:
        (height, width), (rows, columns) = self.patch_size, images.shape[2:]
        return math.ceil(rows / height), math.ceil(columns / width)


def paint_out(images: Tensor, kept: Tensor, grid: tuple[int, int]) -> Tensor:
    """Set the patches of images (B, 3, H, W) to zero except those kept (B, K), indices on the grid in row-major order.

    The paper says that CNNs mask pixels or patches of the input, but not with what value; zero after normalisation is
    the mean colour of the preprocessing. If the grid does not divide H or W, patches differ in size by a pixel.
    """
    stays = images.new_zeros(len(kept), math.prod(grid)).scatter_(1, kept, 1.0)
    return images * F.interpolate(stays.view(-1, 1, *grid), size=images.shape[2:], mode="nearest")
